"""Versions of the weights: how many are kept, for how long, in how many bytes, and in which memory."""

import pytest
import torch
from chain import ASYNCHRONOUS, BATCHES, MICRO_BATCHES, NUM_STAGES, Chain, batches_of
from replay import version_of
from torch import nn

from penstock.stages.weight_versions import versions
from penstock.stages.weight_versions.policies import policy_named
from penstock.stages.weight_versions.versions import copy_of, versions_of

NUM = BATCHES * MICRO_BATCHES


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
    chain = Chain(policy, prediction=prediction)
    chain.run(batches_of())
    for (s, update), (num_live, num_bytes) in chain.live.items():
        size = sum(p.nbytes for p in chain.model[s].parameters() if p.requires_grad)
        expected = len(versions_behind(policy, prediction, s, update))
        assert (num_live, num_bytes) == (expected, (expected - 1) * size), (s, update)
    assert [weights.num_live for weights in chain.weights] == [1] * NUM_STAGES
    assert [weights.num_bytes for weights in chain.weights] == [0] * NUM_STAGES


@pytest.mark.parametrize("tier", ["packed", "host"])
def test_idle_versions_take_fewer_bytes_packed(tier):
    loose, packed = Chain("stashed"), Chain("stashed", tier=tier)
    loose.run(batches_of())
    packed.run(batches_of())
    (live, raw), (packed_live, kept) = loose.live[1, 8], packed.live[1, 8]
    assert live == packed_live == 3
    assert raw / kept > 1.05


class Counts:
    """Weights whose store keeps no frame longer than its version."""

    def __init__(self, weights, stage):
        self.weights = weights

    def __getattr__(self, name):
        return getattr(self.weights, name)

    def done(self, micro_batch):
        self.weights.done(micro_batch)
        assert self.store.num_bytes <= self.num_bytes


@pytest.mark.parametrize(("policy", "prediction"), ASYNCHRONOUS[1:4] + ASYNCHRONOUS[5:])
def test_a_store_keeps_no_frame_longer_than_its_version(policy, prediction):
    chain = Chain(policy, prediction=prediction, tier="packed", wrap=Counts)
    chain.run(batches_of())
    assert all(weights.store.num_bytes == 0 for weights in chain.weights)


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
    chain = Chain("stashed")
    before = {name: p.stride() for name, p in chain.model.named_parameters()}
    chain.run(batches_of())
    assert {name: p.stride() for name, p in chain.model.named_parameters()} == before
    assert before["0.0.weight"] == (27, 1, 9, 3)
    assert {p.data_ptr() % 64 for p in chain.model.parameters()} == {0}


def test_memory_that_a_person_may_look_into_is_never_freed():
    chain = Chain("stashed", tier="packed")
    seen = [p.detach() for p in chain.model.parameters()]
    chain.run(batches_of()[:2])
    seen += [p.detach() for p in chain.model.parameters()]  # as the state after a drain
    chain.run(batches_of()[2:])
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
