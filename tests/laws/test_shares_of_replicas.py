"""Shares by measured speed on real ranks: who slows down gets less, exact sums have the bits."""

import hashlib
import time

import pytest
import torch
import torch.distributed as dist
from cases import refusal_of
from small_pipelines import profile_of
from torch import nn

import penstock
from penstock.stages.plan.plan_stage import counts_of

ROWS, STEPS, SLOW_FROM = 24, 14, 4


class Throttle(nn.Module):
    """Passes on what it is given, late."""

    seconds = 0.0

    def forward(self, x):
        time.sleep(self.seconds)
        return x


def build():
    torch.manual_seed(0)
    layers = nn.Linear(12, 16), nn.ReLU(), Throttle(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5)
    return nn.Sequential(*layers)


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.randn(ROWS, 12, generator=generator), torch.randint(0, 5, (ROWS,), generator=generator)


def plan_of(replicas, micro_batches=6, **options):
    model, (x, _) = build(), next(batches())
    profile = profile_of(model, (x[: ROWS // micro_batches],), leaves=[Throttle])
    return penstock.partition(
        profile, cuts=["_1"] if len(replicas) > 1 else None, stages=len(replicas), replicas=replicas,
        micro_batches=micro_batches, codec="raw", **options,
    )  # fmt: skip


def pipeline(plan, shares=None):
    return penstock.Pipeline(
        build(),
        plan,
        loss=nn.functional.cross_entropy,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
        shares=shares,
    )


def learned(pipe):
    """A digest of everything that was trained, on rank 0."""
    state = pipe.state_dict()
    kept = [one["state"]["momentum_buffer"] for _, one in sorted(state["optimizer"].items())]
    tensors = [*state["model"].values(), *kept] if pipe.rank == 0 else []
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def trained(plan, shares, slow_rank):
    """On a rank: the shares from step to step, and what was learned; ``slow_rank`` slows down on its way."""
    pipe = pipeline(plan, shares)
    found = [[0, pipe.plan.shares]]
    for step, (x, y) in enumerate(batches()):
        slow = step >= SLOW_FROM and dist.get_rank() == slow_rank
        Throttle.seconds = 0.04 if slow else 0.004
        pipe.step(x, y)
        found.append([pipe.num_steps, pipe.plan.shares])
    Throttle.seconds = 0.0
    return found, learned(pipe)


@pytest.mark.parametrize("replicas", [[2], pytest.param([1, 2], marks=pytest.mark.slow)], ids=str)
def test_a_rank_that_slows_down_gets_less_and_exact_sums_have_the_same_bits(replicas, ranks):
    plan = plan_of(replicas, exact=True)
    last, number = plan.num_stages - 1, plan.num_ranks
    rows = ranks.run(trained, plan, "measured", number - 1, ranks=number)
    course = rows[0][0]
    assert all(found == course for found, _ in rows)  # decided alike everywhere
    of_slow = [counts_of(shares[last], 6)[-1] for _, shares in course]
    assert of_slow[SLOW_FROM] > of_slow[SLOW_FROM + 10] == of_slow[-1] == 1
    even = ranks.run(trained, plan, None, -1, ranks=number)
    assert even[0][1] == rows[0][1]  # no sample is lost or counted twice where shares change


def disagreeing(plan):
    """On a rank: the refusal where rank 0 asks for shares that there are not, and rank 1 for none."""
    return refusal_of(pipeline, plan, "fast" if dist.get_rank() == 0 else None)


def test_rank_0_decides_and_is_refused_for_all(ranks):
    found = ranks.run(disagreeing, plan_of([2]), ranks=2)
    assert all("found 'fast'" in said for said in found)
