"""Versions of the weights: how many are kept, how long, in how many bytes, where, and what is refused."""

import contextlib
import itertools
from typing import Any

import pytest
import torch
from replay import version_of
from small_pipelines import pipeline_of
from torch import nn

from penstock import PlanError
from penstock.compression.errors import StageError
from penstock.stages.memory import activations
from penstock.stages.weight_versions import versions
from penstock.stages.weight_versions.policies import policy_named
from penstock.stages.weight_versions.versions import WeightVersions, copy_of, versions_of

NUM_STAGES, MICRO_BATCHES, BATCHES = 4, 4, 4
NUM = BATCHES * MICRO_BATCHES
STASHED = [("stashed", False), ("vertical_sync", False), ("double_buffered", False), ("stashed", True)]
ASYNCHRONOUS = [("latest", False), ("latest", True), *STASHED]  # policy and prediction


class Scaled(nn.Module):
    """A parameter that autograd saves itself, not a view of it."""

    def __init__(self, *, frozen=False):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 64), requires_grad=not frozen)

    def forward(self, x):
        return torch.relu(x * self.scale)


def model_of():
    """Four stages: a convolution in channels_last with BatchNorm, linear layers, a frozen parameter."""
    first = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last), nn.BatchNorm2d(4), nn.ReLU()
    middle = nn.Linear(64, 64), Scaled(), nn.Linear(64, 64), Scaled(frozen=True)
    return nn.Sequential(*first, nn.Flatten(), *middle, nn.Linear(64, 10))


def batches_of():
    """Batches whose last micro-batch is smaller."""
    generator, samples = torch.Generator().manual_seed(11), 5 * MICRO_BATCHES - 1
    draw = [torch.randn(samples, 3, 4, 4, generator=generator) for _ in range(BATCHES)]
    return [(x, torch.arange(samples) % 10) for x in draw]


def stream(policy, *, prediction=False, tier="device"):
    """A pipeline of the four stages, its model, and (num_live, num_bytes) behind each (stage, update)."""
    torch.manual_seed(0)
    model, live, by_batch = model_of(), {}, policy == "double_buffered"
    pipe = pipeline_of(
        model, example=(batches_of()[0][0][:5],), leaves=(Scaled,), cuts=["_3", "_5", "_7"],
        micro_batches=MICRO_BATCHES, schedule="1f1b" if by_batch else "async_1f1b", weights=policy,
        prediction=prediction, weights_tier=tier,
    )  # fmt: skip

    def noting(s, weights):
        update, numbers = weights.update, itertools.count()

        @contextlib.contextmanager
        def run():
            with update():
                yield
            live[s, next(numbers)] = weights.num_live, weights.num_bytes

        weights.update = run

    for s, weights in pipe.update.weights.items():
        noting(s, weights)
    return pipe, model, live


def train(pipe, batches=None):
    for batch in batches or batches_of():
        pipe.step(*batch)
    pipe.drain()


def versions_behind(policy, prediction, s, update):
    """The versions that live behind update number ``update`` of stage ``s``, from the order of the stream."""
    if policy == "latest":
        return {update + 1}
    if policy == "double_buffered":
        return {update + 1, update + (update == BATCHES - 1)}
    lag = NUM_STAGES - 1 - s
    following = min(NUM, update + lag + 1)  # forwards so far, see replay.py
    in_flight = range(update + 1, following)
    live = {version_of(policy, m, stage=s, num_stages=NUM_STAGES) for m in in_flight} | {update + 1}
    if prediction:
        return {("ahead", m) if m > lag else 0 for m in in_flight} | {update + 1}
    if update + 1 <= max(0, following - lag):  # it may go on: the next forward asks for one of these
        live |= set(range(version_of(policy, following, stage=s, num_stages=NUM_STAGES), update + 1))
    return live


@pytest.mark.parametrize(("policy", "prediction"), ASYNCHRONOUS)
def test_no_more_versions_live_than_micro_batches_need(policy, prediction):
    pipe, _, live = stream(policy, prediction=prediction)
    train(pipe)
    assert len(live) == NUM_STAGES * (BATCHES if policy == "double_buffered" else NUM)
    for (s, update), (num_live, num_bytes) in live.items():
        size = sum(p.nbytes for _, p in pipe.update.parameters[s] if p.requires_grad)
        expected = len(versions_behind(policy, prediction, s, update))
        assert (num_live, num_bytes) == (expected, (expected - 1) * size), (s, update)
    assert [(each.num_live, each.num_bytes) for each in pipe.update.weights.values()] == [(1, 0)] * NUM_STAGES


@pytest.mark.parametrize("tier", ["packed", "host"])
def test_idle_versions_take_fewer_bytes_packed(tier):
    (loose, _, raw_live), (packed, _, kept_live) = stream("stashed"), stream("stashed", tier=tier)
    train(loose)
    train(packed)
    (live, raw), (packed_live, kept) = raw_live[1, 8], kept_live[1, 8]
    assert live == packed_live == 3
    assert raw / kept > 1.05


@pytest.mark.parametrize(("policy", "prediction"), STASHED)
def test_a_store_keeps_no_frame_longer_than_its_version(policy, prediction):
    pipe, *_ = stream(policy, prediction=prediction, tier="packed")

    def counting(weights: Any):
        done = weights.done

        def run(micro_batch):
            done(micro_batch)
            assert weights.store.num_bytes <= weights.num_bytes

        weights.done = run

    for weights in pipe.update.weights.values():
        counting(weights)
    train(pipe)
    stores = [getattr(weights, "store") for weights in pipe.update.weights.values()]  # noqa: B009
    assert all(store.num_bytes == 0 for store in stores)


def driven(parameter):
    """The weights of the middle of three stages behind a few instructions; an update adds 1."""
    policy = policy_named("vertical_sync", schedule="async_1f1b", tier="packed")
    weights = versions_of(policy, [parameter], stage=1, num_stages=3)
    for what in "F0 F1 B0 F2 B1 F3 B2".split():
        m = int(what[1:])
        with weights.forward(m, 0) if what[0] == "F" else weights.backward(m):
            pass
        if what[0] == "B":
            weights.done(m)
            with weights.update(), torch.no_grad():
                parameter += 1
    return weights


def test_a_version_is_in_memory_only_inside_a_block():
    parameter = nn.Parameter(torch.zeros(4096))
    weights = driven(parameter)
    small = weights.num_bytes
    assert 0 < small < 2 * parameter.nbytes
    for block in (weights.forward(4, 0), weights.backward(4)):
        with block:
            assert parameter.unique().tolist() == [2.0]
            assert weights.num_bytes == small + parameter.nbytes
        assert weights.num_bytes == small
    assert parameter.unique().tolist() == [3.0]


def test_a_version_is_asked_for_ahead_of_its_block(monkeypatch):
    weights, asked = driven(nn.Parameter(torch.zeros(4096))), []
    assert isinstance(weights, versions.WeightStashing)
    monkeypatch.setattr(weights.store, "fetch", asked.append)
    weights.fetch(3)
    assert len(asked) == 1


def test_what_does_not_shrink_stays():
    parameter = nn.Parameter(torch.zeros(8))
    weights = driven(parameter)
    assert (weights.num_live, weights.num_bytes) == (3, 2 * parameter.nbytes)


def test_copies_lie_as_the_parameters_did():
    pipe, model, _ = stream("stashed")
    before = {name: p.stride() for name, p in model.named_parameters()}
    train(pipe)
    assert {name: p.stride() for name, p in model.named_parameters()} == before
    assert before["0.weight"] == (27, 1, 9, 3)
    assert {p.data_ptr() % 64 for p in model.parameters()} == {0}


def test_memory_that_a_person_may_look_into_is_never_freed():
    pipe, model, _ = stream("stashed", tier="packed")
    seen = [p.detach() for p in model.parameters()]
    train(pipe, batches_of()[:2])
    seen += [p.detach() for p in model.parameters()]  # as the state after a drain
    train(pipe, batches_of()[2:])
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in seen)


def test_a_stage_alone_never_keeps_three_versions_of_double_buffered_weights(monkeypatch):
    copied = []
    monkeypatch.setattr(versions, "copy_of", lambda tensor: copied.append(0) or copy_of(tensor))
    policy = policy_named("double_buffered", schedule="1f1b")
    parameter = nn.Parameter(torch.zeros(8))
    weights = versions_of(policy, [parameter], stage=0, num_stages=1)
    live = []
    for batch in range(8):
        with weights.forward(batch, batch):
            assert parameter.unique().tolist() == [max(0, batch - 1)]
        with weights.backward(batch):
            pass
        weights.done(batch)
        weights.due()
        with weights.update(), torch.no_grad():
            parameter += 1
        live.append(weights.num_live)
    assert live == [2] * 8
    assert len(copied) == 3  # then a version has the memory of one that is gone


def test_memory_that_a_parameter_has_left_is_not_taken_for_a_parameter():
    parameter = nn.Parameter(torch.ones(64))
    weights = activations.ParameterFilter([parameter])
    number = parameter.untyped_storage()._cdata
    parameter.data = torch.zeros(64)
    made = [torch.ones(64) for _ in range(1000)]
    assert number not in {tensor.untyped_storage()._cdata for tensor in made}
    assert not any(weights.holds(tensor) for tensor in made)
    assert weights.holds(parameter)
    assert weights.holds(parameter.view(8, 8).t())


@pytest.mark.parametrize("bug", ["freed early", "update in place"])
@pytest.mark.parametrize("policy", ["stashed", "vertical_sync", "double_buffered"])
def test_a_version_that_is_gone_is_refused(policy, bug):
    pipe, *_ = stream(policy)
    weights: Any = pipe.update.weights[1]
    if bug == "update in place":
        weights._needed = lambda version, newest: False
    else:
        backward = weights.backward
        weights.backward = lambda m: (weights.done(m) if m == 6 else None, backward(m))[1]
    with pytest.raises(StageError, match=r"weights of micro-batch|runs with the weights|shorter"):
        train(pipe)


def named(policy, parameters, **settings: Any):
    value = policy_named(policy, **{"schedule": "async_1f1b", **settings})
    return versions_of(value, parameters, stage=0, num_stages=3)


def test_a_flush_needs_no_versions_and_no_parameter_has_two_places():
    assert type(named("latest", nn.Linear(2, 2).parameters(), schedule="gpipe")) is WeightVersions
    with pytest.raises(PlanError, match="2 in 1 places"):
        named("stashed", [nn.Parameter(torch.ones(2))] * 2)


@pytest.mark.parametrize("policy", ["latest", "stashed"])
def test_prediction_refuses_optimizers_that_it_does_not_know(policy):
    layer = nn.Linear(2, 2)
    weights = named(policy, layer.parameters(), prediction=True)
    for optimizer, said in (
        (torch.optim.RMSprop(layer.parameters()), "SGD, Adam, AdamW, found RMSprop"),
        (torch.optim.SGD(layer.parameters()), "momentum=0"),
    ):
        with pytest.raises(PlanError, match=said):
            weights.bind(optimizer)
    with weights.forward(0, 0):  # the first forward is on time
        pass
    with pytest.raises(StageError, match="bind one"), weights.forward(1, 0):
        pass
