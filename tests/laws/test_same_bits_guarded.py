"""A guard changes no bit: it reads what layers return and what gradients arrive, and keeps none of it."""

import dataclasses

import pytest
import torch
from cases import Case, on_ranks, parameters
from law import differences, rank_differences

CASES = [
    *(Case(model="dag0", cuts=("random", 3, 1), schedule=how, steps=2) for how in ("gpipe", "1f1b", "zb_h1")),
    *(Case(model="residual", cuts=3, schedule=how, steps=2) for how in ("gpipe", "1f1b", "zb_h1")),
    Case(model="gpt_relu", cuts=2, weights_first=True, steps=2),  # its masks are infinite
    Case(model="gpt_gelu_dropout", cuts=3, schedule="zb_h1", tier="packed", steps=2),
    Case(model="gated", cuts="every", schedule="zb_h1", dtype=torch.bfloat16, steps=2),
    Case(model="tied", cuts=4, ranks=2, schedule="zbv", tier="packed", steps=2),
    Case(model="residual", cuts=2, scaler=(2.0**127, 2), steps=3),  # its gradients overflow
    Case(model="penalized", cuts=2, steps=2),
]

GUARDED = [dataclasses.replace(case, guard=True) for case in CASES]


@pytest.mark.parametrize("case", parameters(GUARDED))
def test_a_guarded_training_has_the_bits_of_the_plain_loop(case):
    assert differences(case) == []


@pytest.mark.slow
@pytest.mark.ranks
def test_guarded_ranks_have_the_bits_of_the_plain_loop(ranks, tmp_path):
    case = Case(model="residual", cuts=2, schedule="zb_h1", steps=2, guard=True)
    assert on_ranks(ranks, rank_differences, case, tmp_path) == []
