"""Law L7: a rank that fails, dies or never starts ends all within the deadline, and is named."""

import builtins
import threading
import time

import pytest
import torch
import torch.distributed as dist
from small_pipelines import profile_of
from torch import nn
from zoo import cross_entropy, images

import penstock
from penstock.pipeline.distributed import process_group
from penstock.pipeline.distributed.process_group import World, init_group
from penstock.pipeline.distributed.transport import measured_rates

DEADLINE = 4.0  # seconds; less, and on a busy machine the wrong rank is late


def end(how):
    if how in ("SystemExit", "KeyboardInterrupt"):
        raise getattr(builtins, how)
    raise ValueError("the sky fell")


def train(how):
    """Two ranks; the second stage's third forward (or backward) of the first step ends in ``how``."""
    calls, backward = [0], how == "raise in backward"

    def third(*_):
        calls[0] += 1
        if dist.get_rank() == 1 and calls[0] == 3:
            end(how)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(1), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 10))
    x, y = images(8)[0]
    plan = penstock.partition(profile_of(model, (x[:3].clone(),)), cuts=["_1"], micro_batches=4)
    pipe = penstock.Pipeline(model, plan, loss=cross_entropy, optimizer=sgd, deadline=DEADLINE)
    if backward:
        model[3].register_forward_hook(lambda module, args, out: out.register_hook(third) and None)
    else:
        model[3].register_forward_pre_hook(third)
    pipe.step(x, y)


def sgd(named):
    return torch.optim.SGD(named, lr=0.1)


@pytest.mark.ranks
def test_a_rank_that_never_starts_is_named(tmp_path):
    store = dist.FileStore(str(tmp_path / "rendezvous"), 3)  # type: ignore[attr-defined]
    store.set("penstock/joined/1", "")
    begun = time.monotonic()
    with pytest.raises(penstock.PenstockError, match=r"^rank 2 of 3 did not join within 1 s"):
        init_group(store, rank=0, ranks=3, deadline=1)
    assert time.monotonic() - begun < 10


def told_by(call):
    """Message of a rank that loses the group in ``call``; the pool goes on with a new group."""
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.destroy_process_group()
    return ""


def meet_without(absent):
    """All but one rank meet; that one has left, and has not said so."""
    world = World.default()
    world.barrier()
    return told_by(lambda: None if world.rank == absent else world.barrier())


@pytest.mark.slow
def test_who_gives_no_sign_of_life_is_named_by_a_collective(ranks):
    told = ranks.run(meet_without, 2, ranks=3, deadline=5)
    for rank in (0, 1):
        said = f"TransportError: rank {rank} lost the group of ranks: rank 2 did not answer"
        assert told[rank].startswith(said)


def measure_alone():
    world = World.default()
    return told_by(lambda: measured_rates(world, [(0, 1)], deadline=2) if world.rank == 0 else None)


def test_a_link_that_cannot_be_measured_names_its_other_end(ranks):
    told, _ = ranks.run(measure_alone, ranks=2)
    assert told.startswith("TransportError: rank 0 could not measure its link with rank 1 within 2 s: ")


def step_that_ends(how):
    return told_by(lambda: train(how))


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raise", "StageError: {}forward of micro-batch 2, step 0: layer _3: ValueError: the sky fell"),
        (
            "raise in backward",
            "StageError: {}backward of micro-batch 2, step 0: backward: ValueError: the sky fell",
        ),
        ("SystemExit", "StageError: {}forward of micro-batch 2, step 0: SystemExit"),
        ("KeyboardInterrupt", "KeyboardInterrupt: "),  # which is no error of a stage
    ],
)
def test_whatever_ends_a_step_is_named_by_every_rank(how, told, ranks):
    peer, own = ranks.run(step_that_ends, how, ranks=2)
    where = "rank 1, stage 1, "
    assert own == told.format(where)
    said = told.format(where).removeprefix("StageError: ")
    assert peer.startswith("TransportError: ")
    assert (said if where in said else f"{where}forward of micro-batch 2, step 0: {how}") in peer


def test_a_store_that_does_not_answer_once_is_not_asked_again():
    begun = time.monotonic()
    answer = threading.Event()
    with pytest.raises(TimeoutError, match=r"did not answer within 0\.1 s"):
        process_group.bounded(answer.wait, seconds=0.1)
    asked = []
    with pytest.raises(TimeoutError, match="did not answer before"):
        process_group.bounded(lambda: asked.append(1), seconds=60)
    answer.set()
    assert not asked
    assert time.monotonic() - begun < 30
    while any(thread.name.startswith("penstock-store") for thread in threading.enumerate()):
        time.sleep(0.01)
    assert process_group.bounded(lambda: 5, seconds=60) == 5
