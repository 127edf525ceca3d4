"""Replicas that divide the update: the bits of sums on all, and each a part of the state."""

import dataclasses

import pytest
import torch
from cases import OPTIMIZERS, Case, pipeline_of, pipeline_with_batches, plan_of, refusal_of
from reference import plain_loop, same_bits
from small_pipelines import profile_of
from torch.nn.functional import linear, mse_loss
from zoo import build

import penstock
from penstock.pipeline.optimizer.flat import owners_of


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
