"""Replicas: the same state on all, once in a checkpoint; divided updates, and sums that go out early."""

import contextlib
import dataclasses
import json
from typing import Any

import pytest
import torch
from cases import OPTIMIZERS, Case, parameters, pipeline_of, pipeline_with_batches, plan_of, refusal_of
from law import plain_of, state_differences
from reference import plain_loop, same_bits
from small_pipelines import profile_of
from torch.nn.functional import linear, mse_loss
from zoo import build

import penstock
from penstock.pipeline.optimizer.flat import FlatGradients, owners_of
from penstock.pipeline.runtime.gradient_exchange import Slices
from penstock.pipeline.runtime.replicas import check_replicated, digests

TWO = Case(
    model="residual", cuts=2, replicas=2, micro_batches=4, exact=True, optimizer="adamw", scheduler=True
)
ONE = dataclasses.replace(TWO, replicas=[1, 2])
SHARED = [  # by weight, and one replica fewer
    dataclasses.replace(TWO, shares=(2, 1, 1, 3)),
    dataclasses.replace(TWO, replicas=[2, 1], shares=(0, 1, 1)),
]


def saved(case, plan, folder):
    """On a rank: two steps, a checkpoint, and whether all replicas of a stage hold the same after each."""
    pipe, batches = pipeline_with_batches(case, plan)
    pipe.replicas.every = 1
    for x, y in batches[:2]:
        pipe.step(x, y)
    penstock.save(pipe, folder)
    return sum(pipe.replicas.updates.values())


def resumed(case, plan, folder, random_layers):
    """On a rank: what the step after the checkpoint has other than the plain loop's third."""
    pipe, batches = pipeline_with_batches(case, plan)
    penstock.load(pipe, folder)
    plain, _ = build(case.model)
    *_, expected = plain_of(case, plain, batches, random_layers)
    report = pipe.step(*batches[2])
    found = [] if report.loss == expected["loss"] else ["loss"]
    state = pipe.state_dict()
    return found + (state_differences(state, plain, expected["optimizer"]) if pipe.rank == 0 else [])


@pytest.mark.parametrize(
    ("before", "behind"), [pytest.param(TWO, ONE, marks=pytest.mark.slow), SHARED], ids=["even", "by weight"]
)
def test_a_checkpoint_has_every_tensor_once_and_goes_on_with_fewer_replicas(before, behind, ranks, tmp_path):
    plan, random_layers = plan_of(before)
    assert ranks.run(saved, before, plan, tmp_path, ranks=4) == [2] * 4
    parts = json.loads((tmp_path / "index.json").read_text())["parts"]
    sizes = [part["bytes"] for part in parts]
    assert min(sizes[0], sizes[2]) > 10 * max(sizes[1], sizes[3])  # only headers
    assert ranks.run(resumed, behind, plan_of(behind)[0], tmp_path, random_layers, ranks=3) == [[]] * 3


def written_to(case, plan):
    """On a rank: a step behind a weight that somebody moved on one replica."""
    pipe, batches = pipeline_with_batches(case, plan)
    if pipe.rank == 3:
        with torch.no_grad():
            next(p for p in pipe.update.named.values() if p.numel()).view(-1)[0] += 1e-3
    pipe.step(*batches[0])


def test_replicas_that_part_are_refused_by_name(ranks):
    case = Case(model="mlp", cuts=2, replicas=2, micro_batches=4, codec="raw", deadline=4)
    found = [text for text, _ in ranks.try_run(written_to, case, plan_of(case)[0], ranks=4, deadline=4)]
    assert any(
        "replicas of a stage hold the same bits" in text and "of stage 1 differs on rank 2 and rank 3" in text
        for text in found
    )


def of_outputs(case, plan):
    pipe, ((x, y), *_) = pipeline_with_batches(case, plan)
    with pytest.raises(penstock.PlanError, match="has outputs of its own micro-batches, found outputs=True"):
        pipe.step(x, y, outputs=True)
    return [str(pipe).count("ranks"), len(pipe.step(x, y).busy_seconds), pipe.step(x, y).stages[1].rank]


def test_outputs_of_replicas_are_refused_and_reports_name_their_ranks(ranks):
    case = Case(model="mlp", cuts=2, replicas=2, micro_batches=4, codec="raw")
    assert ranks.run(of_outputs, case, plan_of(case)[0], ranks=4) == [[3, 4, 2]] * 4


def test_a_digest_is_that_of_what_a_tensor_holds_however_it_is_seen():
    held = torch.tensor([1 + 2j, 3 - 4j])
    seen = [held.conj(), held.conj().imag, held.real[:0], held.real[1:], held.to(torch.complex128)]
    plain = [tensor.resolve_conj().resolve_neg().clone() for tensor in seen]
    assert torch.equal(digests(seen), digests(plain))
    assert len(set(digests([held, *seen]).tolist())) == 6


def both(case, plan):
    """On a rank: whether sums at owners train like sums on all, and what its optimizer has in each."""
    batches, found, kept = build(case.model, case.dtype, 2)[1], [], []
    for sharded in (True, False):
        changed = dataclasses.replace(plan, sharded=sharded)
        pipe = pipeline_of(case, changed, build(case.model, case.dtype)[0])
        for x, y in batches:
            pipe.step(x, y)
        found.append({name: p.detach().clone() for name, p in pipe.update.named.items()})
        kept.append(sum(t.numel() for made in pipe.update.optimizers.values() for p in made.state.values()
                        for t in p.values() if isinstance(t, torch.Tensor)))  # fmt: skip
        missing = [n for n, p in pipe.update.named.items() if p.grad is None]
        assert bool(missing) == sharded
    return all(same_bits(found[0][n], found[1][n]) for n in found[0]), kept


def test_each_replica_keeps_a_part_of_the_state(ranks):
    case = Case(model="mlp", cuts=1, replicas=2, optimizer="adamw", codec="raw", sharded=True, clip=None)
    found = ranks.run(both, case, plan_of(case)[0], ranks=2)
    assert [alike for alike, _ in found] == [True, True]
    parts, wholes = zip(*(kept for _, kept in found), strict=True)
    assert sum(parts) == wholes[0] == wholes[1]
    assert max(parts) < 0.9 * wholes[0]


@pytest.mark.parametrize(
    ("sizes", "replicas", "expected"),
    [
        ([1, 1, 1, 1], 2, [0, 0, 1, 1]),
        ([6, 1, 1], 2, [0, 1, 1]),
        ([1, 1, 6], 3, [0, 0, 1]),
        ([0, 0], 2, [0, 0]),
        ([], 2, []),
        ([5], 3, [1]),
    ],
)
def test_parameters_are_divided_evenly_and_neighbours_stay_together(sizes, replicas, expected):
    assert owners_of(sizes, replicas=replicas) == expected


def test_a_clip_by_stage_is_refused():
    case = Case(model="mlp", cuts=1, replicas=2, sharded=True, clip_scope="stage")
    plan, _ = plan_of(case)
    with pytest.raises(penstock.PlanError, match="take clip_scope=global, or sharded=False"):
        pipeline_of(case, plan, build("mlp")[0])


def test_a_plan_counts_a_part_of_the_state(tmp_path):
    whole, part = (
        plan_of(Case(model="mlp", cuts=1, replicas=2, sharded=sharded))[0] for sharded in (False, True)
    )
    assert part.stages[0].memory_bytes < whole.stages[0].memory_bytes
    assert "the optimizer's state divided among them" in str(part)
    part.save(tmp_path / "plan.json")
    assert penstock.Plan.load(tmp_path / "plan.json") == part


def test_a_parameter_that_no_optimizer_has_is_refused_by_name(ranks):
    case = Case(model="mlp", cuts=1, replicas=2, sharded=True, optimizer="no_biases")
    found = ranks.run(refusal_of, pipeline_with_batches, case, plan_of(case)[0], ranks=2)
    assert all(
        "bias is in none; set requires_grad=False for it, or take sharded=False" in one for one in found
    )


class OneMemory(torch.nn.Module):
    """The second parameter lies in the memory of the first."""

    def __init__(self):
        super().__init__()
        drawn = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
        self.first, self.second = torch.nn.Parameter(drawn), torch.nn.Parameter(drawn[:2])

    def forward(self, x):
        return linear(torch.relu(linear(x, self.first)), self.second)


def test_parameters_in_one_memory_are_updated_by_one_replica():
    models, x, y = [OneMemory() for _ in range(3)], torch.ones(4, 8), torch.ones(4, 2)
    profile = profile_of(models[2], (x[:2],))
    plan = penstock.partition(profile, stages=1, replicas=2, micro_batches=2, exact=True, sharded=True)

    def train(world):
        pipe = penstock.Pipeline(
            models[world.rank], plan, loss=mse_loss, optimizer=OPTIMIZERS["sgd"], world=world
        )
        pipe.step(x, y)
        pipe.close()

    penstock.in_threads(train, ranks=2)
    [*_] = plain_loop(models[2], [(x, y)], loss=mse_loss, optimizer=OPTIMIZERS["sgd"], micro_batches=2)
    for one in models[:2]:
        assert all(same_bits(a, b) for a, b in zip(one.parameters(), models[2].parameters(), strict=True))


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
