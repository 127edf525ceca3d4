"""A stream by hand: its drains, losses, outputs and states, and what it refuses."""

import copy
import math
from typing import Any

import pytest
import torch
from cases import OPTIMIZERS, plan_of
from reference import same_bits
from streams import StreamCase
from zoo import build, cross_entropy

import penstock
from penstock.compression.errors import PlanError

TWO: dict[str, Any] = {"schedule": "1f1b", "weights": "double_buffered"}
SYNCHRONOUS = {"schedule": "1f1b", "weights": "latest"}


def stream(**more):
    case = StreamCase(model="mlp", **{"cuts": 3, **more})
    plan, _ = plan_of(case)
    model, batches = build("mlp", None, 6)
    return pipeline(model, plan), model, batches


def pipeline(model, plan):
    return penstock.Pipeline(model, plan, loss=cross_entropy, optimizer=OPTIMIZERS["sgd"])


def test_a_step_leaves_micro_batches_in_flight_and_a_drain_none():
    pipe, _, batches = stream()
    for batch in batches[:2]:
        pipe.step(*batch)
    assert [len(stage.running) for stage in pipe.stages.values()] == [2, 2, 0]
    assert [stage.weights.num_live for stage in pipe.stages.values()] == [3, 2, 1]
    report = pipe.drain()
    assert report is not None
    assert report.num_samples == 0
    assert not any(stage.running for stage in pipe.stages.values())
    assert [stage.weights.num_live for stage in pipe.stages.values()] == [1, 1, 1]
    assert pipe.drain() is None


def test_the_loss_of_a_step_is_the_mean_of_those_that_finished():
    pipe, _, batches = stream(cuts=4, micro_batches=1)
    assert math.isnan(pipe.step(*batches[0]).loss)  # the last stage has not seen it
    report = pipe.step(*batches[1])
    assert report.loss == float(pipe.engine.losses[0])
    pipe, _, batches = stream(cuts=2, micro_batches=4)
    report = pipe.step(*batches[0])
    assert report.loss == pytest.approx(float(torch.stack([*pipe.engine.losses.values()]).mean()))


def test_evaluation_and_state_drain_first():
    pipe, model, batches = stream()
    pipe.step(*batches[0])
    plain = copy.deepcopy(model).eval()  # of weights that have not seen all micro-batches yet
    outputs = pipe.evaluate(batches[0][0])
    assert not any(stage.running for stage in pipe.stages.values())
    assert not same_bits(outputs, plain(batches[0][0]).detach())
    assert same_bits(outputs, copy.deepcopy(model).eval()(batches[0][0]).detach())
    pipe.step(*batches[1])
    pipe.state_dict()
    assert not any(stage.running for stage in pipe.stages.values())


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ({}, {"cuts": 2}, "found schedule=async_1f1b weights=stashed cuts="),
        ({}, {"weights": "vertical_sync"}, "found schedule=async_1f1b weights=vertical_sync"),
        ({}, {"prediction": True}, "weights=stashed, prediction=true"),
        ({}, SYNCHRONOUS, "schedule, weights and cuts that it was made with, .*found a synchronous schedule"),
        (TWO, {**TWO, "error_feedback": True}, r"weights=double_buffered, error_feedback=true cuts="),
        (SYNCHRONOUS, {}, "a synchronous schedule, found schedule=async_1f1b"),
    ],
)
def test_a_state_goes_on_nowhere_else(one, other, found):
    pipe, _, batches = stream(**one)
    pipe.step(*batches[0])
    with pytest.raises(PlanError, match=found):
        stream(**other)[0].load_state_dict(pipe.state_dict())


def test_a_step_that_fails_loses_what_was_in_flight_and_no_more():
    pipe, model, batches = stream()
    pipe.step(*batches[0])
    pipe.drain()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(penstock.PenstockError, match="stage 2"):
        pipe.step(batches[1][0], batches[1][1] + 1000)  # no such class
    assert not any(stage.running for stage in pipe.stages.values())
    assert all(same_bits(p.detach(), before[name]) for name, p in model.named_parameters())
    pipe.step(*batches[1])
    pipe.drain()


def test_a_batch_with_too_few_samples_for_two_versions_is_refused():
    pipe, _, batches = stream(**TWO, micro_batches=4)
    with pytest.raises(PlanError, match=r"at least as many micro-batches .* found 2 for 3;"):
        pipe.step(batches[0][0][:2], batches[0][1][:2])
    pipe.step(*batches[0])


def test_the_newest_weights_are_not_those_of_another_stage():
    case = StreamCase(model="gpt_tied", cuts=3, weights="latest")
    plan, _ = plan_of(case)
    with pytest.raises(PlanError, match=r"weights=latest .* is shared with a later stage"):
        pipeline(build("gpt_tied")[0], plan)


def test_outputs_are_kept_on_request():
    for more in ({"schedule": "1f1b", "weights": "latest", "cuts": 2}, {"cuts": 2}):
        pipe, model, batches = stream(**more)
        plain = copy.deepcopy(model)
        assert pipe.step(*batches[0], outputs=True).outputs.shape == plain(batches[0][0]).shape
        assert pipe.step(*batches[1]).outputs is None
    pipe, _, batches = stream(cuts=4, micro_batches=4)
    whole = [pipe.step(*batch, outputs=True).outputs for batch in batches[:2]]
    drained = pipe.drain(outputs=True)
    assert drained is not None
    whole.append(drained.outputs)
    assert [len(part) for part in whole] == [9, 11, 2]  # eleven samples in 3, 3, 3, 2; the last one waits
    pipe, model, batches = stream(schedule="1f1b", weights="latest", micro_batches=1)
    expected = copy.deepcopy(model)(batches[0][0]).detach()
    assert same_bits(pipe.step(*batches[0], outputs=True).outputs, expected)
