"""Law L1 on real ranks: two, three and four processes over gloo have the bits of the plain loop."""

import pytest
import torch
from cases import CUSTOM, Case, on_ranks, parameters
from law import rank_differences

RESIDUAL = ["layer1_0_conv2", "layer1_1_bn1", "layer3_0_relu"]

CASES = [
    Case(model="mlp", cuts=4, ranks=2, schedule="interleaved", micro_batches=5),
    Case(model="mlp", cuts=3, schedule="zb_h1", micro_batches=5),
    Case(model="mlp", cuts=3, ranks=2, schedule="custom", program=CUSTOM),
    Case(model="resnet18", cuts=RESIDUAL, ranks=2, schedule="zbv", steps=1),
    Case(model="gpt_tied", cuts=4, ranks=2, schedule="dualpipev", micro_batches=5, steps=2),
    Case(model="mlp", cuts=2),
    Case(model="mlp", cuts=4, codec="raw", schedule="gpipe", optimizer="adamw"),
    Case(model="mlp", cuts=3, micro_batches=11, extra_in_flight=1, scheduler=True),
    Case(model="mlp", cuts=6, ranks=2, micro_batches=5),
    Case(model="resnet18", cuts=2, steps=2),
    Case(model="resnet18", cuts=RESIDUAL, steps=2, optimizer="adamw"),
    Case(model="resnet18_channels_last", cuts=RESIDUAL, ranks=3, steps=1, schedule="gpipe"),
    Case(model="mobilenet", cuts=("random", 3, 5), steps=1),
    Case(model="densenet", cuts=["features_denseblock2_denselayer3_conv1"], steps=1),
    Case(model="gpt_gelu_dropout", cuts=3, optimizer="adamw"),
    Case(model="gpt_tied", cuts=4, extra_in_flight=1),
    Case(model="gpt_relu", cuts=2, dtype=torch.bfloat16, steps=2),
    Case(model="tied", cuts=("random", 4, 1), dtype=torch.float64),
    Case(model="gated", cuts=("random", 4, 2), schedule="gpipe"),
    Case(model="gated", cuts=3, codec="auto", tier="packed", steps=14),
    Case(model="PoolOfRelu", cuts=("random", 3, 1), codec="zero_value+exponent", tier="host"),
    Case(model="gpt_relu", cuts=3, tier="disk", steps=2),
    Case(model="gpt_relu", cuts=4, ranks=2, schedule="interleaved", tier="disk", steps=2),
    Case(model="resnet18", cuts=2, tier="disk", steps=2),
    *(
        Case(model=f"dag{i}", cuts=("random", 2 + i % 3, 10 + i), schedule=("gpipe", "1f1b")[i % 2], steps=2)
        for i in range(6)
    ),
]


@pytest.mark.ranks
@pytest.mark.parametrize("case", parameters(CASES))
def test_ranks_have_the_bits_of_the_plain_loop(case, ranks, tmp_path):
    assert on_ranks(ranks, rank_differences, case, tmp_path) == []
