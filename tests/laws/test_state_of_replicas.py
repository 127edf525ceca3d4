"""State of replicas: the same on all, once in a checkpoint, and usable with another number of them."""

import dataclasses
import json

import pytest
import torch
from cases import Case, pipeline_with_batches, plan_of
from law import plain_of, state_differences
from zoo import build

import penstock
from penstock.pipeline.runtime.replicas import digests

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
