"""Devices of the stages of a process, and a batch as micro-batches there."""

import dataclasses
import types
from typing import Any

import pytest
import torch
from cases import Case, pipeline_of, plan_of
from devices import Noting, Reads
from zoo import build, cross_entropy

from penstock import ConfigError, Pipeline, PlanError, StageError
from penstock.pipeline.distributed.process_group import World
from penstock.pipeline.runtime import device_placement
from penstock.pipeline.runtime.agreement import Agreement
from penstock.pipeline.runtime.batches import Criterion, _moved, micro_batches, total_loss
from penstock.stages.device import CPU, Device, device_of
from penstock.stages.plan.plan import Asked

CASE = Case(model="mlp", cuts=2)
GIB = 1 << 30


def made(plan, **options):
    model, _ = build(CASE.model)
    return Pipeline(
        model, plan, loss=cross_entropy, optimizer=lambda n: torch.optim.SGD(n, lr=0.1), **options
    )


def on(plan, *names):
    """The plan with devices for its stages."""
    pairs = zip(plan.stages, names, strict=True)
    return dataclasses.replace(plan, stages=tuple(dataclasses.replace(s, device=n) for s, n in pairs))


@pytest.mark.parametrize("given", [None, "cpu", CPU, Device()], ids=["nothing", "name", "torch", "Device"])
def test_a_device_may_be_given_in_three_ways_and_else_is_that_of_the_model(given):
    pipe = made(plan_of(CASE)[0], device=given)
    assert pipe.world.device is (given if isinstance(given, Device) else device_of(CPU))
    stages = {stage.device for stage in pipe.stages.values()}
    assert set(pipe.devices.values()) == stages == {pipe.world.device}


def test_two_devices_for_one_rank_are_refused():
    other = Device(torch.device("meta"))
    with pytest.raises(PlanError, match="found device=cpu and a World on meta; give one of them"):
        made(plan_of(CASE)[0], world=World(device=other), device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_where_there_is_none_is_refused():
    with pytest.raises(ConfigError, match="device=cuda needs a GPU"):
        made(plan_of(CASE)[0], device="cuda")
    with pytest.raises(PlanError, match="stage 1 of the plan: device=cuda:1 needs a GPU"):
        made(on(plan_of(CASE)[0], None, "cuda:1"))


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize(
    ("names", "base", "found"),
    [
        ((None, None), "cpu", "cpu cpu"),
        (("cpu", None), "cpu", "cpu cpu"),
        ((None, "cuda"), "cuda:1", "cuda:1 cuda:1"),  # the GPU of its rank
        (("cuda", "cuda:1"), "cpu", "cuda:0 cuda:1"),
        (("cuda:1", "cuda:0"), "cuda:0", "cuda:1 cuda:0"),
        (("cpu", "cpu"), "cuda:0", "cpu cpu"),
    ],
)
def test_what_a_plan_says_of_a_stage_counts(names, base, found, two_gpus):
    plan = on(plan_of(CASE)[0], *names)
    devices = device_placement.stage_devices(plan, World(), device_of(torch.device(base)))
    assert " ".join(str(device.torch) for device in devices.values()) == found


def test_stages_of_one_process_on_two_kinds_are_refused(two_gpus):
    with pytest.raises(PlanError, match="found stage 0 on cpu and stage 1 on cuda:0; name one kind"):
        device_placement.stage_devices(on(plan_of(CASE)[0], "cpu", "cuda"), World(), device_of(CPU))


def test_each_rank_has_the_devices_of_its_own_stages_only(two_gpus):
    world: Any = World()
    world.group, world.rank = "one of two", 1
    plan = on(plan_of(CASE)[0], "cpu", "cuda:1")
    assert device_placement.stage_devices(plan, world, device_of(CPU)) == {
        1: device_of(torch.device("cuda:1"))
    }


class Told(Agreement):
    """Rank ``rank`` of several of which it is known what each says in the exchange."""

    def __init__(self, rank, *rows):
        self.world, self.rows = types.SimpleNamespace(rank=rank, size=len(rows)), [list(row) for row in rows]

    def exchange(self, at, item, *, refusal=""):
        assert item == self.rows[self.world.rank]
        return self.rows


def gpu_plan(**more):
    """Two stages of 3 GiB."""
    plan = plan_of(CASE)[0]
    stages = tuple(dataclasses.replace(s, memory_bytes=3 * GIB, frame_bytes=0) for s in plan.stages)
    return dataclasses.replace(plan, stages=stages, **more)


def room(needed, which, free, ours=0):
    """Report of a rank on the GPU ``which`` that it calls cuda:0, in GiB."""
    return "cuda", [["cuda:0", needed * GIB, which, free * GIB, ours * GIB]]


@pytest.fixture
def gpu(monkeypatch):
    """cuda:0 with so much of its memory free, and so much ours."""

    def have(free, ours=0):
        monkeypatch.setattr(device_placement, "memory_on", lambda gpu: ["one", free * GIB, ours * GIB])
        return device_of(torch.device("cuda:0"))

    return have


def test_a_gpu_with_room_is_taken_and_one_that_is_too_small_named_with_what_would_do(gpu):
    other = room(3, "other", 3)
    device_placement.check_devices(Told(0, room(3, "one", 2, ours=1), other), gpu_plan(), {0: gpu(2, ours=1)})
    with pytest.raises(PlanError) as refused:
        device_placement.check_devices(Told(0, room(3, "one", 2), other), gpu_plan(), {0: gpu(2)})
    said = str(refused.value)
    assert "cuda:0 with 2 GiB free for rank 0, whose stages take 3 GiB" in said
    assert "memory=2048MiB, more ranks, or tier=host" in said


def test_ranks_that_share_a_gpu_need_room_together_and_rank_0_says_so(gpu):
    rows = [room(3, "one", 6)] * 2
    with pytest.warns(UserWarning, match="more ranks than GPUs, which are shared: cuda:0 by ranks 0, 1"):
        device_placement.check_devices(Told(0, *rows), gpu_plan(), {0: gpu(6)})
    device_placement.check_devices(Told(1, *rows), gpu_plan(), {1: gpu(6)})  # once
    with pytest.raises(PlanError, match="5 GiB free for rank 0, 1, whose stages take 6 GiB"):
        device_placement.check_devices(Told(0, *[room(3, "one", 5)] * 2), gpu_plan(), {0: gpu(5)})


def test_a_plan_for_several_ranks_may_be_tried_in_one_process(gpu):
    device = gpu(1)
    device_placement.check_devices(Told(0, room(6, "one", 1)), gpu_plan(), {0: device, 1: device})


def test_ranks_on_two_kinds_of_device_take_cuts_by_hand():
    told = Told(0, ("cpu", []), room(3, "one", 6))
    by_hand = gpu_plan(asked=Asked(stages=2, ranks=2, cuts=("relu",)))
    device_placement.check_devices(told, by_hand, {0: device_of(CPU)})
    with pytest.raises(PlanError, match="found ranks on cpu, cuda and no cuts; plan with cuts="):
        device_placement.check_devices(
            told, gpu_plan(asked=Asked(stages=2, ranks=2, cuts=None)), {0: device_of(CPU)}
        )


def test_a_batch_goes_to_a_gpu_from_pinned_memory_laid_out_as_a_clone():
    far = Noting(torch.device("meta"))  # has no memory: what went there is what was pinned
    for tensor in (
        torch.randn(4, 3, 5),
        torch.randn(4, 3, 5, 2).contiguous(memory_format=torch.channels_last),
        torch.randn(6, 4)[:, :3],
        torch.arange(5),
        torch.tensor([True, False]),
        torch.zeros(0, 3),
    ):
        moved, clone = _moved(tensor, far), tensor.clone()
        assert (moved.shape, moved.stride(), moved.dtype) == (clone.shape, clone.stride(), clone.dtype)
        assert far.asked.pop() == f"pinned {tensor.nbytes}"
        pinned = far.kept.pop().view(tensor.dtype).as_strided(clone.shape, clone.stride())
        assert torch.equal(pinned, tensor)


def test_inputs_go_to_the_first_stage_and_targets_to_the_last():
    far, near, batch = Noting(torch.device("meta")), Device(), ((torch.randn(4, 3),), torch.arange(4))
    for ends, expected in (
        ({"first": far, "last": near}, (True, False)),
        ({"first": near, "last": far}, (False, True)),
        ({}, (False, False)),
    ):
        parts = micro_batches(*batch, 2, None, **ends)
        assert [(part.inputs[0].is_meta, part.targets.is_meta) for part in parts] == [expected] * 2


def test_the_host_asks_once_for_the_loss_of_a_step():
    losses = {index: torch.tensor(0.1 * index, dtype=torch.float16) for index in range(5)}
    with Reads() as reads:
        total_loss(losses, dict.fromkeys(losses, 0.2), mean=False)
    assert reads.count == 1


SAID = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4.00 GiB of which 1.00 "
    "GiB is free. See documentation for Memory Management (https://pytorch.org)"
)


def full(*_):
    raise torch.OutOfMemoryError(SAID)


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_memory_that_runs_out_is_told_in_one_sentence_with_what_helps(way):
    case = Case(model="mlp", cuts=2)
    model, batches = build(case.model)
    pipe = pipeline_of(case, plan_of(case)[0], model)
    expected = pipe.step(*batches[0]).loss
    layer, seen = model[5], []

    def hook(module, args, out):
        seen.append(1)
        if len(seen) == 2:
            full() if way == "forward" else out.register_hook(full)

    handle = layer.register_forward_hook(hook)
    with pytest.raises(StageError) as refused:
        pipe.step(*batches[1])
    told = str(refused.value)
    assert told.startswith(f"rank 0, stage 1, {way} of micro-batch 1, step 1: a stage computes in the memory")
    assert "CUDA out of memory, tried to allocate 2.00 GiB; raise micro_batches=" in told
    assert "Memory Management" not in told
    handle.remove()
    assert pipe.step(*batches[0]).loss != expected  # the weights have moved, and it goes on


def test_micro_batches_lie_in_fresh_aligned_memory_as_the_batch_does():
    batch = torch.randn(10, 3, 7, 7)  # views of it are misaligned
    assert {x.data_ptr() % 64 for x in batch.tensor_split(3)} != {0}
    parts = micro_batches((batch,), torch.zeros(10), 3, None)
    assert {part.inputs[0].data_ptr() % 64 for part in parts} == {0}
    last = torch.channels_last
    parts = micro_batches((batch.contiguous(memory_format=last),), torch.zeros(10), 3, None)
    assert all(part.inputs[0].is_contiguous(memory_format=last) for part in parts)
    kept = batch.clone()
    for number in (3, 1):  # a layer may write to its input
        micro_batches((batch,), torch.zeros(10), number, None)[0].inputs[0].zero_()
    assert torch.equal(batch, kept)


def test_targets_may_be_a_tuple_or_a_dict():
    targets = {"label": torch.arange(4), "box": (torch.arange(8).view(4, 2), "note")}
    parts = micro_batches((torch.zeros(4),), targets, 2, None)
    assert parts[1].targets["label"].tolist() == [2, 3]
    assert parts[1].targets["box"][0].tolist() == [[4, 5], [6, 7]]
    assert parts[1].targets["box"][1] == "note"


def test_a_constant_goes_whole_to_every_micro_batch():
    mask = torch.eye(3)
    parts = micro_batches((mask, torch.arange(4.0)), None, 2, None, whole=(True, False))
    assert [part.inputs[1].tolist() for part in parts] == [[0.0, 1.0], [2.0, 3.0]]
    assert all(torch.equal(part.inputs[0], mask) for part in parts)
    assert parts[0].inputs[0].data_ptr() != parts[1].inputs[0].data_ptr()
    with pytest.raises(PlanError, match=r"traced as penstock.Constant\(tensor\)"):
        micro_batches((mask, torch.arange(4.0)), None, 2, None)


WANTS = torch.ones(4, requires_grad=True)


@pytest.mark.parametrize(
    ("inputs", "targets", "weight", "told"),
    [
        (torch.ones(4), torch.zeros(5), None, "same number of samples"),
        (torch.ones(0, 3), torch.zeros(0), None, "same number of samples"),
        (WANTS, torch.zeros(4), None, "gradients of parameters, not of a batch.*detach"),
        (torch.ones(4), WANTS, None, "gradients of parameters, not of a batch.*detach"),
        (torch.ones(4), torch.zeros(4), lambda targets: 0, "sum to more than zero, found 0"),
    ],
)
def test_a_batch_that_cannot_be_shared_out_is_refused(inputs, targets, weight, told):
    with pytest.raises(PlanError, match=told):
        micro_batches((inputs,), targets, 2, weight)


def test_a_loss_that_fails_says_what_it_was_given():
    fails = Criterion(torch.nn.functional.cross_entropy, None, ())
    outputs = torch.zeros(4, 3, requires_grad=True)
    with pytest.raises(StageError, match=r"outputs: \(4, 3\) float32, targets: \(4,\) float32; give it"):
        fails(outputs, torch.zeros(4))
    with pytest.raises(StageError, match=r"out of bounds; it was .* targets: \(4,\) int64 from 0 to 9"):
        fails(outputs, torch.tensor([0, 9, 1, 2]))
    with pytest.raises(StageError, match=r"outputs: \(dict, \(2,\) float32\), targets: NoneType"):
        fails(({}, torch.zeros(2)), None)
