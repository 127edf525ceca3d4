"""Slots for saved tensors that come back: one allocation by lifetimes, each free when nothing holds it."""

from typing import Any

import pytest
import torch
import torchvision
from cases import OPTIMIZERS
from far import AwayStore
from reference import same_bits
from saving import Net, Square, forward, wait
from torch import nn

import penstock
from penstock.pipeline.data.samples import Description
from penstock.pipeline.models import gpt
from penstock.stages.memory.byte_budget import MemoryOptions, Tiers
from penstock.stages.memory.prefetch import MemoryThread, Pass
from penstock.stages.memory.slots import Slots

KIB, LIFETIMES = 1 << 10, {"a": (0, 2, 3), "b": (1, 4, 2), "c": (2, 5, 3)}  # sizes in KiB


def take(slots, name, *, larger=0):
    lower, upper, size = LIFETIMES[name]
    return slots.take(name, lower, upper, (size + larger) * KIB)


@pytest.fixture
def placed():
    """Slots after a step."""
    slots = Slots(Tiers())
    assert [take(slots, name) for name in LIFETIMES] == [None] * 3
    slots.place()
    return slots


def test_one_allocation_has_room_for_what_lives_at_once(placed):
    tiers = placed._tiers
    assert tiers.slots_bytes == tiers.slots_live_bytes == 5 * KIB + 2 * 64
    first, second = take(placed, "a").fill_(1), take(placed, "b").fill_(2)
    place = first.data_ptr()
    assert place % 64 == second.data_ptr() % 64 == 0
    del first
    third = take(placed, "c").fill_(3)
    assert third.data_ptr() == place
    assert (second == 2).all()
    placed.place()
    assert third.data_ptr() == place  # nothing was noted


def test_a_slot_whose_storage_somebody_holds_is_not_taken(placed):
    view = take(placed, "a")[64:128].fill_(7)
    assert take(placed, "c") is None
    assert (view == 7).all()
    del view
    assert take(placed, "c") is not None


def test_what_is_larger_than_noted_has_a_slot_in_the_next_step(placed):
    assert take(placed, "a", larger=4) is None
    placed.place()
    assert len(take(placed, "a", larger=4)) == 7 * KIB + 64
    assert take(placed, "a") is not None


KEPT: list[torch.Tensor] = []


class Keeping(torch.autograd.Function):
    """Squares, and its backward keeps what its forward saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        KEPT.append(x)
        return gradients[0] * 2 * x


@torch.fx.wrap
def keeping(x):
    return Keeping.apply(x)


class Keeps(nn.Module):
    def forward(self, x):
        return keeping(x)


DEPTH, SIZE = 8, 1 << 14


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("kind", [Square, Keeps])
def test_from_the_second_step_on_a_fetch_allocates_nothing(kind, ahead, saver):
    KEPT.clear()
    net = Net(nn.Sequential(*[kind() for _ in range(DEPTH)]))
    thread = MemoryThread(MemoryOptions(prefetch_layers=ahead), num_layers={0: DEPTH})
    saved = saver(net, store=AwayStore(), codec="raw", thread=thread)
    read, slots = thread.reads, thread.slots

    def waits(run, layer):
        read(run, layer)
        wait(saved)

    vars(thread)["reads"] = waits
    for step in range(3):
        x = (1 + torch.rand(SIZE) / SIZE).requires_grad_()
        thread.begin([Pass(0, 0), Pass(0, 0, reads=True)])
        thread.at(0)
        out = forward(net, saved, x.clone())
        wait(saved)
        slots.num_fetched = slots.num_allocated = 0
        thread.at(1)
        out.sum().backward()
        del out
        expected = x.detach().clone().requires_grad_()
        net.model(expected).sum().backward()
        assert same_bits(x.grad, expected.grad)
        saved.drop(0)
        thread.end()
        if kind is Keeps:
            # Of the net, then of the model, whose nobody writes to.
            assert len(KEPT) == (step + 1) * 2 * DEPTH
            for first in range(0, len(KEPT), 2 * DEPTH):
                ours, plain = KEPT[first : first + DEPTH], KEPT[first + DEPTH : first + 2 * DEPTH]
                assert all(map(same_bits, ours, plain))
        elif step:
            assert (slots.num_fetched, slots.num_allocated) == (DEPTH - ahead, 0)  # the others never left
            assert thread.tiers.slots_bytes == (ahead or 1) * (4 * SIZE + 64) + 4 * SIZE + 64
    saved.close()
    assert thread.tiers.slots_bytes == 0


def test_what_two_passes_read_has_no_slot(saver):
    thread = MemoryThread(MemoryOptions(prefetch_layers=0), num_layers={0: 1})
    passes = [Pass(0, 0), Pass(0, 0, reads=True)]
    net = Net(nn.Sequential(Square()))
    saved = saver(net, store=AwayStore(), codec="raw", thread=thread)
    for program, number in (passes, 1), ([*passes, passes[1]], 0):
        thread.begin(program)
        thread.at(0)
        out = forward(net, saved, torch.rand(SIZE).requires_grad_().clone())
        wait(saved)
        thread.at(1)
        out.sum().backward()
        saved.drop(0)
        assert len(thread.slots._lifetimes) == number


def test_the_layers_of_another_shape_are_numbered_from_the_first(saver):
    nets = [Net(nn.Sequential(*[Square() for _ in range(DEPTH)])) for _ in range(2)]
    saved = saver(nets[0], store=AwayStore(), codec="raw")
    for number, net in enumerate(nets):
        with saved.forward(number):
            out = net.run(torch.rand(SIZE).requires_grad_().clone(), saved)
        run = saved._micro_batches[number]
        assert sorted(map(run.first_read, run.alive())) == list(range(DEPTH)), out.shape


def test_a_stream_keeps_its_slots_and_another_program_does_not():
    thread, passes = MemoryThread(num_layers={0: 3}), [Pass(0, 0), Pass(0, 0, reads=True)]
    for number, program in enumerate([passes, [one._replace(micro_batch=1) for one in passes], passes * 2]):
        thread.begin(program)
        assert (thread.tiers.slots_bytes > 0) is (number == 1)
        take(thread.slots, "a")
        thread.end()


NETWORKS = ["resnet18", "resnet50", "vgg11_bn", "densenet121", "mobilenet_v3_small", "gpt"]


def network(name):
    """A network of torchvision, or ``gpt``, and a micro-batch."""
    if name == "gpt":
        text = Description(input_shape=(32,), num_classes=97, vocabulary="".join(map(chr, range(97))))
        return gpt(text, width=64), torch.randint(0, 97, (4, 32))
    return torchvision.models.get_model(name, weights=None), torch.randn(2, 3, 64, 64)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in NETWORKS])
@pytest.mark.parametrize("tier", ["packed", "disk"])
def test_the_slots_of_a_network_are_close_to_what_lives_at_once(name, tier, tmp_path):
    model, example = network(name)
    made: dict[str, Any] = {"loss": lambda out, _: out.float().pow(2).mean(), "optimizer": OPTIMIZERS["sgd"]}
    made |= {"stages": 2, "micro_batches": 2, "tier": tier, "disk": penstock.DiskOptions(path=tmp_path)}
    pipe = penstock.Pipeline.of(model, (example,), **made)
    reports = [pipe.step(torch.cat([example] * 2), torch.zeros(2 * len(example))) for _ in range(4)]
    slots, stage = pipe.engine.memory.slots, reports[-1].stages[0]
    pipe.close()
    assert 0 < stage.slots_bytes <= 1.02 * stage.slots_live_bytes
    more = stage.slots_bytes / stage.slots_live_bytes - 1
    print(
        f"{name}: {stage.slots_bytes} bytes, {more:.2%} more than live at once, {slots.num_fetched} fetched"
    )
