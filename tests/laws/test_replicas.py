"""Law L1 with exact replicas on real ranks: the bits of the plain loop, on every replica."""

import pytest
import torch
from cases import Case, on_ranks, parameters
from law import rank_differences

EXACT = [
    Case(model="mlp", cuts=1, replicas=2, micro_batches=3, optimizer="adamw"),
    Case(model="mlp", cuts=2, replicas=[2, 1], micro_batches=5, scheduler=True, codec="raw"),
    Case(model="mlp", cuts=2, replicas=[1, 3], micro_batches=5, schedule="gpipe"),
    Case(model="mlp", cuts=1, replicas=2, optimizer="no_biases"),  # whose gradients stay from step to step
    Case(model="gated", cuts=("random", 2, 2), replicas=2, micro_batches=5, codec="zero_value+exponent"),
    Case(model="tied", cuts=("random", 3, 1), replicas=[1, 2, 1], micro_batches=5, dtype=torch.float64),
    Case(model="gpt_tied", cuts=2, replicas=2, micro_batches=4, steps=2),
    Case(model="gpt_relu", cuts=2, replicas=[2, 1], dtype=torch.bfloat16, steps=2, schedule="gpipe"),
    Case(model="gpt_relu", cuts=2, replicas=[1, 2], tier="packed", scaler=(2.0**14, 2), steps=3),
    Case(model="gated", cuts=2, replicas=2, recompute=True, weights_first=False),
    Case(
        model="mlp", cuts=2, replicas=[2, 1], codec="auto", micro_batches=5, steps=12, extra_in_flight="auto"
    ),
    Case(model="residual", cuts=2, replicas=2, micro_batches=4, optimizer="adamw"),
    Case(model="residual_channels_last", cuts=2, replicas=[1, 2], codec="raw", dtype=torch.float64),
    Case(model="residual", cuts=1, replicas=3, tier="packed", scaler=(2.0**14, 2)),
    Case(model="dag0", cuts=("random", 2, 3), replicas=[2, 1], micro_batches=5, schedule="gpipe", steps=2),
    Case(model="resnet18", cuts=2, replicas=2, steps=1),
    Case(model="mobilenet", cuts=2, replicas=[2, 1], steps=1),
]
# By weight: one rank has nothing to do, all shares of a stage differ, pairs of replicas meet that did not.
EXACT += [
    Case(model="mlp", cuts=1, replicas=2, shares=(29, 3), micro_batches=12, optimizer="adamw"),
    Case(model="mlp", cuts=2, replicas=2, shares=(3, 1, 1, 0), micro_batches=5, codec="raw"),
    Case(model="residual", cuts=2, replicas=2, shares=(2, 1, 1, 3), micro_batches=6, optimizer="adamw"),
    Case(model="residual", cuts=1, replicas=2, shares=(1, 0), schedule="gpipe", scaler=(2.0**14, 2)),
    Case(model="residual", cuts=2, replicas=[1, 2], shares=(1, 0, 1), micro_batches=4, tier="packed"),
    Case(
        model="tied", cuts=("random", 3, 1), replicas=[2, 2, 1], shares=(2, 1, 1, 3, 1), micro_batches=7,
        dtype=torch.float64,
    ),
    Case(
        model="tied", cuts=("random", 3, 1), replicas=[1, 3, 2], shares=(1, 1, 0, 5, 0, 1), micro_batches=7,
    ),
    Case(model="gpt_tied", cuts=2, replicas=2, shares=(1, 0, 1, 2), micro_batches=4, steps=2),
    Case(
        model="dag0", cuts=("random", 3, 3), replicas=[2, 1, 2], shares=(3, 1, 1, 1, 2), micro_batches=5,
        steps=2,
    ),
]  # fmt: skip
EXACT = [Case(**{**vars(case), "exact": True}) for case in EXACT]


@pytest.mark.ranks
@pytest.mark.parametrize("case", parameters(EXACT))
def test_exact_replicas_have_the_bits_of_the_plain_loop(case, ranks, tmp_path):
    assert on_ranks(ranks, rank_differences, case, tmp_path) == []
