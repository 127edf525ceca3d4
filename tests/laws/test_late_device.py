"""Law L1 where everything beside computing happens late: the streams, the sender and the slabs of a GPU."""

import dataclasses

import pytest
import torch
from cases import CUSTOM, Case, on_ranks, parameters
from law import differences, rank_differences
from traps import TRAPS

ALONE = [
    Case(model="mlp", cuts=3),
    Case(model="mlp", cuts="every", micro_batches=5, codec="raw"),
    Case(model="mlp", cuts=3, schedule="zb_h1", micro_batches=5, extra_in_flight=1),
    Case(model="mlp", cuts=4, ranks=2, schedule="interleaved", codec="zero_value+exponent"),
    Case(model="mlp", cuts=3, ranks=2, schedule="custom", program=CUSTOM, codec="zero_value+lz4"),
    Case(model="mlp", cuts=2, scaler=(2.0**120, 2), steps=4),
    Case(model="gated", cuts="every", tier="packed"),
    Case(model="tied", cuts="every", schedule="gpipe"),
    Case(model="gpt_relu", cuts=3, dtype=torch.bfloat16, codec="exponent", tier="host"),
    Case(model="gpt_relu", cuts=3, tier="disk"),
    Case(model="gpt_tied", cuts=4, ranks=2, schedule="dualpipev", micro_batches=5, steps=2),
    Case(model="resnet18", cuts=3, schedule="zb_h1", steps=2),
    Case(model="densenet", cuts=4, steps=1, codec="zero_value+byte_plane"),
    *(Case(model=name, cuts="every", steps=2) for name in TRAPS),
]

RANKS = [
    Case(model="mlp", cuts=2, late=(0, 1)),
    Case(model="mlp", cuts=2, late=(1,)),
    Case(model="mlp", cuts=4, ranks=2, schedule="interleaved", micro_batches=5, late=(0, 1), codec="raw"),
    Case(model="mlp", cuts=3, schedule="zb_h1", micro_batches=11, extra_in_flight=1, late=(0, 2)),
    Case(model="gated", cuts=3, codec="auto", tier="packed", steps=14, late=(0, 1, 2)),
    Case(model="gpt_tied", cuts=4, ranks=2, schedule="zbv", micro_batches=5, steps=2, late=(0, 1)),
    Case(model="resnet18", cuts=2, steps=2, late=(0, 1)),
]


@pytest.mark.parametrize("case", parameters([dataclasses.replace(case, late=(0,)) for case in ALONE]))
def test_a_late_device_has_the_bits_of_the_plain_loop(case):
    assert differences(case) == []


@pytest.mark.ranks
@pytest.mark.parametrize("case", parameters(RANKS))
def test_late_ranks_have_the_bits_of_the_plain_loop(case, ranks, tmp_path):
    assert on_ranks(ranks, rank_differences, case, tmp_path) == []
