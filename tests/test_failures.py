"""Law L7: a rank that fails, dies or never starts ends all within the deadline, and is named."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn
from zoo import cross_entropy, images

import penstock
from penstock.pipeline import group

DEADLINE = 3.0


def end(how):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("the sky fell")


def train(how):
    """Two ranks; the second stage's third forward (or backward) of the first step ends in ``how``."""
    calls = [0]

    def hook(module, args):
        calls[0] += 1
        if dist.is_initialized() and dist.get_rank() == 1 and calls[0] == 3 and how != "raise in backward":
            end(how)

    def backward_hook(gradient):
        calls[0] += 1
        if dist.get_rank() == 1 and calls[0] == 3:
            end("raise")
        return gradient

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(1), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 10))
    x, y = images(8)[0]
    example = (x[:3].clone(),)
    plan = penstock.partition(
        penstock.measure(penstock.trace(model, example), example), cuts=["_1"], micro_batches=4
    )
    pipe = penstock.Pipeline(model, plan, loss=cross_entropy, optimizer=sgd, deadline=DEADLINE)
    if how == "raise in backward":
        model[3].register_forward_hook(lambda module, args, out: out.register_hook(backward_hook) and None)
    else:
        model[3].register_forward_pre_hook(hook)
    pipe.step(x, y)


def sgd(named):
    return torch.optim.SGD(named, lr=0.1)


def outcome(how):
    pool = Ranks()
    try:
        pool.run(noop, ranks=2)  # so that starting the processes does not count
        begun = time.monotonic()
        results = pool.try_run(train, how, ranks=2)
        return [text for text, _ in results], time.monotonic() - begun
    finally:
        pool.close()


def noop():
    return None


@pytest.mark.ranks
@pytest.mark.parametrize(("how", "direction"), [("raise", "forward"), ("raise in backward", "backward")])
def test_an_exception_in_a_stage_is_named_by_every_rank(how, direction):
    texts, seconds = outcome(how)
    where = f"rank 1, stage 1, {direction} of micro-batch 2, step 0"
    assert "StageError" in texts[1]
    assert "ValueError: the sky fell" in texts[1]
    assert where in texts[1]
    assert "TransportError" in texts[0]
    assert where in texts[0], texts[0]
    assert seconds < DEADLINE + 30


@pytest.mark.ranks
def test_a_killed_rank_is_named_by_its_neighbour():
    texts, seconds = outcome("kill")
    assert texts[1] == "the process died"
    assert "TransportError" in texts[0]
    assert "rank 0, stage 0" in texts[0]
    assert "rank 1" in texts[0]
    assert seconds < DEADLINE + 30


@pytest.mark.ranks
def test_a_rank_that_never_starts_is_named(tmp_path):
    store = dist.FileStore(str(tmp_path / "rendezvous"), 3)  # type: ignore[attr-defined]
    store.set("penstock/joined/1", "")
    begun = time.monotonic()
    with pytest.raises(penstock.PenstockError, match=r"^rank 2 of 3 did not join within 1 s"):
        group.join(store, rank=0, ranks=3, deadline=1)
    assert time.monotonic() - begun < 10
