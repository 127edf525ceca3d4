"""Sums of gradients that go out while the backward runs have the bits of sums behind it, and do go out."""

import contextlib
from typing import Any

import pytest
import torch
from cases import Case, parameters, pipeline_of, pipeline_with_batches, plan_of, refusal_of
from reference import same_bits
from zoo import build

import penstock
from penstock.pipeline.optimizer.flat import FlatGradients
from penstock.pipeline.runtime.gradient_buckets import Slices
from penstock.pipeline.runtime.replicas import check_replicated

CASES = [
    Case(model="mlp", cuts=1, replicas=2, codec="raw"),
    Case(model="mlp", cuts=2, replicas=[2, 1], micro_batches=5, weights_first=True, optimizer="adamw"),
    Case(model="mlp", cuts=1, replicas=3, micro_batches=4, scaler=(2.0**14, 2)),
    Case(model="gpt_relu", cuts=2, replicas=2, dtype=torch.bfloat16, weights_first=True),
    Case(model="gated", cuts=2, replicas=2, recompute=True),
]


def trained(case, plan, *, early, slice_bytes):
    """The state after training, and how many slices of how many were out when a last backward ended."""
    pipe = pipeline_of(case, plan, build(case.model, case.dtype)[0])
    replicas, out = pipe.replicas, []
    for stage, (exchange,) in replicas.exchanges.items():
        exchange.flat = flat = FlatGradients(
            exchange.named, pieces=plan.replicas[stage], slice_bytes=slice_bytes
        )
        slices = exchange.slices = Slices(flat, replicas.groups[stage])
        whole = slices.finals if early else contextlib.nullcontext
        slices.finals = counting(slices, whole, out)
    for x, y in build(case.model, case.dtype, case.steps)[1]:
        pipe.step(x, y)
    return {k: v.clone() for k, v in pipe.update.named.items()}, out, pipe.world


def counting(slices, whole, out):
    @contextlib.contextmanager
    def finals():
        with whole():
            yield
        out.append((len(slices.works), len(slices.missing)))

    return finals


def compared(case, plan):
    """On a rank: whether both ways end alike, and how many slices each had out early."""
    (ours, out, world), (theirs, late, _) = (
        trained(case, plan, early=early, slice_bytes=300) for early in (True, False)
    )
    assert sum(begun for begun, _ in late) == 0
    world.barrier()
    return all(same_bits(ours[name], theirs[name]) for name in theirs), out


@pytest.mark.parametrize("case", [*parameters(CASES[:3]), *parameters(CASES[3:], slow=True)])
def test_slices_that_go_out_early_sum_up_to_the_same_bits(case, ranks):
    plan, _ = plan_of(case)
    found = ranks.run(compared, case, plan, ranks=plan.num_ranks)
    assert all(alike for alike, _ in found)
    out = [pair for _, pairs in found for pair in pairs]
    assert len(out) == case.steps * sum(number for number in plan.replicas if number > 1)
    assert sum(begun for begun, _ in out) > 0.5 * sum(number for _, number in out)


def halve(parameter):
    parameter.grad.mul_(0.5)


def written_behind(backward, parameter) -> Any:
    def run(*given):
        found = backward(*given)
        halve(parameter)
        return found

    return run


def meddling(case, plan, when):
    """On a rank: what is said of somebody who writes to a gradient by hooks, or behind its backward."""
    pipe, batches = pipeline_with_batches(case, plan)
    parameter = next(iter(pipe.update.named.values()))
    if when == "in a hook":
        parameter.register_post_accumulate_grad_hook(halve)
    else:
        pipe.engine.stages[0].backward = written_behind(pipe.engine.stages[0].backward, parameter)
    return refusal_of(pipe.step, *batches[0])


def test_a_gradient_that_changes_behind_its_last_backward_is_refused_by_name(ranks):
    case = Case(model="mlp", cuts=1, replicas=2, micro_batches=2, codec="raw")
    job = meddling, case, plan_of(case)[0]
    said = ranks.run(*job, "in a hook", ranks=2)
    assert all("a hook that sees it behind each backward" in one for one in said)
    said = ranks.run(*job, "behind it", ranks=2)
    assert all("was summed up over replicas when its last backward had ended it" in one for one in said)


def test_a_model_with_hooks_behind_the_backward_is_refused_where_stages_have_replicas():
    (plan, _), (model, _) = plan_of(Case(model="mlp", cuts=1, replicas=2)), build("mlp")
    graph = penstock.trace(model, (torch.randn(4, 3, 8, 8),))
    next(model.parameters()).register_post_accumulate_grad_hook(halve)
    with pytest.raises(penstock.PlanError, match="take a hook of the optimizer's step, or one rank a stage"):
        check_replicated(plan, model, graph)
