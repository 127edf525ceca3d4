"""Law L1 in one process: however a model is cut, scheduled and packed, training has the same bits."""

import pytest
import torch
from cases import CUSTOM, Case, parameters
from law import differences
from traps import TRAPS

RESIDUAL = ["layer1_0_conv2", "layer1_1_bn1", "layer3_0_relu"]  # inside residual blocks: two values on a cut
DENSE = ["features_denseblock1_denselayer3_conv1", "features_denseblock3_denselayer9_norm2"]

CASES = [
    Case(model="mlp", cuts=4, ranks=2, schedule="interleaved"),
    Case(model="mlp", cuts=3, schedule="zb_h1", micro_batches=5, extra_in_flight=1),
    Case(model="mlp", cuts=4, ranks=2, schedule="zbv", micro_batches=1, optimizer="adamw"),
    Case(model="mlp", cuts=4, ranks=2, schedule="dualpipev", micro_batches=5, scheduler=True),
    Case(model="mlp", cuts=3, ranks=2, schedule="custom", program=CUSTOM),
    Case(model="mlp", cuts=2, weights_first=True),
    Case(model="gpt_relu", cuts=2, weights_first=True, tier="packed", steps=2),
    Case(model="resnet18", cuts=RESIDUAL, schedule="zb_h1", steps=2),
    Case(model="resnet18", cuts=RESIDUAL, ranks=2, schedule="zbv", tier="packed", steps=1),
    Case(model="resnet18_channels_last", cuts=3, weights_first=True, steps=1),
    Case(model="densenet", cuts=DENSE, schedule="zb_h1", steps=1),
    Case(model="gpt_gelu_dropout", cuts=4, ranks=2, schedule="interleaved", optimizer="adamw", steps=2),
    Case(model="gpt_tied", cuts=4, ranks=2, schedule="dualpipev", micro_batches=5, steps=2),
    Case(model="gpt_tied", cuts="every", schedule="zb_h1", steps=1),
    Case(model="gpt_relu", cuts=2, schedule="zb_h1", dtype=torch.bfloat16, weights_first=True, steps=2),
    Case(model="tied", cuts=("random", 4, 1), ranks=2, schedule="zbv", steps=2),
    Case(model="gated", cuts="every", schedule="zb_h1", tier="packed", steps=2),
    *(
        Case(model=f"dag{i}", cuts=("random", 4, i), ranks=2, schedule=schedule, steps=2)
        for i, schedule in enumerate(("interleaved", "zbv", "dualpipev"))
    ),
    Case(model="mlp", cuts=1),
    Case(model="mlp", cuts=3, schedule="gpipe", codec="raw", optimizer="adamw"),
    Case(model="mlp", cuts="every", micro_batches=5, extra_in_flight=1),
    Case(model="mlp", cuts=4, ranks=2, micro_batches=16, scheduler=True),
    Case(model="mlp", cuts=2, dtype=torch.float64),
    Case(model="gated", cuts="every"),
    Case(model="gated", cuts=3, schedule="gpipe", dtype=torch.bfloat16),
    Case(model="tied", cuts="every", schedule="gpipe"),
    Case(model="tied", cuts=("random", 4, 1), optimizer="adamw"),
    Case(model="resnet18", cuts=2),
    Case(model="resnet18", cuts=RESIDUAL, schedule="gpipe", optimizer="adamw", steps=2),
    Case(model="resnet18", cuts="every", steps=1),
    Case(model="resnet18_channels_last", cuts=RESIDUAL, steps=2),
    Case(model="resnet18_channels_last", cuts=3, codec="raw", schedule="gpipe", steps=2),
    Case(model="mobilenet", cuts=("random", 4, 2), steps=2),
    Case(model="mobilenet", cuts="every", steps=1, codec="raw"),
    Case(model="densenet", cuts=DENSE, steps=2),
    Case(model="densenet", cuts=4, schedule="gpipe", steps=1, optimizer="adamw"),
    Case(model="gpt_gelu_dropout", cuts=3, optimizer="adamw"),
    Case(model="gpt_gelu_dropout", cuts="every", schedule="gpipe"),
    Case(model="gpt_relu", cuts=("random", 3, 3)),
    Case(model="gpt_relu", cuts=2, dtype=torch.bfloat16, clip=None),
    Case(model="gpt_tied", cuts=4, extra_in_flight=1),
    Case(model="gpt_tied", cuts="every", optimizer="adamw", steps=2),
    *(
        Case(model=f"dag{i}", cuts=("random", 2 + i % 3, i), schedule=("1f1b", "gpipe")[i % 2], steps=2)
        for i in range(6)
    ),
    *(Case(model=f"dag{i}", cuts="every", steps=2) for i in range(6)),
    *(Case(model=name, cuts="every", steps=2) for name in TRAPS),
    *(Case(model=name, cuts="every", steps=2, tier="packed", micro_batches=2) for name in TRAPS),
    Case(model="ParameterCalledRelu", cuts="every", micro_batches=1),
    Case(model="OneLayoutOfMany", cuts=4, schedule="zb_h1", micro_batches=4, steps=2),
    Case(model="OneLayoutOfMany", cuts=4, ranks=2, schedule="zbv", micro_batches=4, steps=2),
    Case(model="Conjugate", cuts=["conj"], schedule="gpipe", tier="packed"),
    Case(model="SmallMasks", cuts=["a"], tier="packed", codec="raw"),
    Case(model="Freed", cuts=["sub"], tier="packed", codec="raw"),
    Case(model="resnet18", cuts=RESIDUAL, tier="packed", steps=2),
    Case(model="resnet18_channels_last", cuts=3, tier="host", steps=2, codec="zero_value+byte_plane"),
    Case(model="gpt_gelu_dropout", cuts=3, tier="packed", codec="exponent", extra_in_flight=1),
    Case(model="gpt_tied", cuts="every", tier="packed", codec="zero_value+exponent", dtype=torch.bfloat16),
    Case(model="densenet", cuts=DENSE, tier="packed", codec="zero_value+lz4", steps=1),
    Case(model="squeezenet", cuts=3, tier="packed", codec="byte_plane", steps=2),
    Case(model="gpt_relu", cuts=3, tier="disk"),
    Case(model="gpt_relu", cuts=4, ranks=2, schedule="dualpipev", micro_batches=5, tier="disk", steps=2),
    Case(model="gpt_relu", cuts=3, schedule="zb_h1", micro_batches=5, tier="disk", codec="raw", steps=2),
    Case(model="gpt_relu", cuts="every", schedule="gpipe", tier="disk", micro_batches=2, steps=2),
    *(Case(model=name, cuts="every", steps=2, tier="disk", micro_batches=2) for name in TRAPS),
    Case(model="resnet18", cuts=RESIDUAL, schedule="zb_h1", tier="disk", steps=2),
    Case(model="resnet18_channels_last", cuts=3, schedule="gpipe", tier="disk", steps=1),
    Case(model="gpt_gelu_dropout", cuts=4, ranks=2, schedule="interleaved", tier="disk", steps=2),
    Case(model="gpt_tied", cuts="every", tier="disk", dtype=torch.bfloat16, steps=2),
]


@pytest.mark.parametrize("case", parameters(CASES))
def test_training_has_the_bits_of_the_plain_loop(case):
    assert differences(case) == []
