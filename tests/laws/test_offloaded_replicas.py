"""Replicas whose parameters are offloaded: what is in memory, who updates, and what is pushed to whom."""

import copy
from typing import Any

import pytest
import torch
from law import everything_leaves
from small_pipelines import profile_of
from test_mirror import BATCH, deep
from torch.nn.functional import mse_loss

import penstock
from penstock.pipeline.distributed.process_group import ReplicaGroup
from penstock.pipeline.runtime.gradient_exchange import GradientExchange

ONE = 64 * 64 * 4  # bytes of a layer's weight


@pytest.fixture(autouse=True)
def everything_moves(monkeypatch):
    everything_leaves(monkeypatch)


def planned(model: Any, *, replicas: int = 2, micro_batches: int = 4, **options: Any) -> Any:
    profile = profile_of(model, (BATCH[:2],))
    options = {"parameters_tier": "packed", "exact": True} | options
    return penstock.partition(profile, stages=1, replicas=replicas, micro_batches=micro_batches, **options)


def on_threads(look: Any, **options: Any) -> list[Any]:
    """Results of ``look`` for the pipelines of two replicas after three steps."""
    models = [deep() for _ in range(3)]
    plan = planned(models.pop(), **options)

    def train(world: Any) -> Any:
        pipe = penstock.Pipeline(
            models[world.rank], plan, loss=mse_loss, optimizer=torch.optim.AdamW, world=world
        )
        for _ in range(3):
            pipe.step(BATCH, BATCH)
        found = look(pipe)
        pipe.close()
        return found

    return penstock.in_threads(train, ranks=2)


@pytest.mark.parametrize("exact", [True, False])
def test_few_of_twelve_layers_are_in_memory_at_a_time_while_gradients_are_exchanged(exact):
    def look(pipe):
        mirror = pipe.stages[0].mirror
        buffers = [one.flat._spent for one in pipe.replicas.exchanges[0] if one.mirror]
        return mirror.peak_bytes, mirror.resident_bytes, sum(map(len, buffers))

    for most, now, buffers in on_threads(look, exact=exact):
        assert ONE <= most <= 5 * ONE + 64  # of 48: as on one rank
        assert now == buffers == 0


def test_buffers_of_gradients_are_gone_behind_a_step():
    def look(pipe):
        return [id(one) for one in pipe.replicas.exchanges[0] if one.slices.works or one.slices.taken]

    assert on_threads(look, exact=False) == [[], []]


def updates(pipe: Any) -> set[str]:
    return {pipe.update.names[id(p)] for made in pipe.update.optimizers.values() for p in made.state}


def test_each_parameter_has_one_owner_who_keeps_the_state_of_the_optimizer():
    first, second = on_threads(updates)
    assert len(first) == len(second) == 6
    assert not first & second
    first, second = on_threads(updates, owner="first")
    assert len(first) == 12
    assert not second


def test_gradients_are_pushed_to_their_owner_and_nowhere_else(monkeypatch):
    pushed, push = [], ReplicaGroup.push

    def counted(self: Any, item: torch.Tensor, *, source: int, target: int, at: str) -> None:
        if self.place == source:
            pushed.append((source, target, item.nbytes))
        push(self, item, source=source, target=target, at=at)

    monkeypatch.setattr(ReplicaGroup, "push", counted)

    def step_again(pipe: Any) -> int:
        return pipe.step(BATCH, BATCH).stages[0].exchanged_bytes

    exchanged = on_threads(step_again, owner="first")
    assert {pair[:2] for pair in pushed} == {(1, 0)}
    assert sum(num_bytes for *_, num_bytes in pushed) == 4 * 2 * 12 * ONE  # steps, micro-batches, layers
    assert exchanged == [3 * 12 * ONE] * 2  # and the new values


def test_values_that_another_replica_wrote_are_not_read_first(monkeypatch):
    read, share = {0: 0, 1: 0}, GradientExchange.share

    def counted(self: Any) -> None:
        before = self.mirror.frames.bytes_in if self.mirror else 0
        share(self)
        read[self.group.place] += (self.mirror.frames.bytes_in if self.mirror else 0) - before

    monkeypatch.setattr(GradientExchange, "share", counted)
    on_threads(lambda pipe: None, owner="first")
    assert read == {0: 3 * 12 * ONE, 1: 0}


def test_a_step_that_raises_leaves_replicas_that_give_all_back():
    models = [deep(3) for _ in range(3)]
    plan, before = planned(models.pop()), copy.deepcopy(models[0].state_dict())

    def wrong(outputs: Any, targets: Any) -> Any:
        raise RuntimeError("no loss")

    def train(world: Any) -> None:
        pipe = penstock.Pipeline(
            models[world.rank], plan, loss=wrong, optimizer=torch.optim.SGD, world=world, deadline=20
        )
        with pytest.raises(penstock.PenstockError):
            pipe.step(BATCH, BATCH)
        pipe.close()

    penstock.in_threads(train, ranks=2)
    for model in models:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
