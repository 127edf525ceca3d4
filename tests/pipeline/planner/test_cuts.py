import pytest
from profiles import NET

from penstock.compression.errors import CodecError, PlanError
from penstock.pipeline.planner.partition import partition


def test_cuts_are_layers_or_modules():
    assert partition(NET, cuts=["layer1"]).cuts == ("add",)
    assert partition(NET, cuts=["layer1.0", "layer10"]).cuts == ("layer1_0_relu", "layer10_conv")
    assert partition(NET, cuts=("conv1", "add", "flatten"), ranks=2).ranks == (0, 0, 1, 1)


def test_ranks_and_stages_stand_for_each_other():
    assert partition(NET, ranks=3).num_stages == 3
    assert partition(NET, stages=3).num_ranks == 3
    assert partition(NET, stages=2, cuts=["conv1"]).num_stages == 2
    assert partition(NET, stages=1).cuts == ()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"stages": 1000}, r"^1000 stages need at least as many layers, .* has 8; lower stages or ranks$"),
        ({"stages": 8}, r"^8 stages need 7 cuts, the model allows 6 \(two tensors of one"),
        ({"stages": 0}, "stages=0"),
        ({"ranks": 0}, "ranks=0"),
        ({"stages": 2, "micro_batches": 0}, "micro_batches=0"),
        ({"stages": 2, "extra_in_flight": -1}, "extra_in_flight=-1"),
        ({"stages": 2, "extra_in_flight": None}, r'a number or "auto", found None; leave it out'),
        ({"stages": 2, "ranks": 99}, "ranks=99 for 2 stages"),
        ({"cuts": ["conv1"], "ranks": 3}, "ranks=3 for 2 stages"),
        ({}, "say stages=2"),
        ({"stages": 4, "cuts": ["conv1"]}, "1 cuts make 2 stages, found stages=4"),
        ({"cuts": "conv1"}, r"found 'conv1'; write \['conv1'\]"),
        ({"cuts": ["layer1_0_rleu"]}, "found layer1_0_rleu; close ones are layer1_0_relu"),
        ({"cuts": ["layer1.7"]}, "found layer1.7; close ones are"),
        ({"cuts": ["zzz"]}, "found zzz; the layers run from conv1 to fc"),
        ({"cuts": [""]}, "the layers run from conv1 to fc"),
        ({"cuts": ["layer1_1_conv"]}, r"layer1_1_conv .*: two tensors .*nearest: layer1_0_relu or add"),
        ({"cuts": ["add", "conv1"]}, "found conv1 behind add"),
        ({"cuts": ["layer1", "add"]}, "cuts layer1 and add are one place, behind add"),
        ({"cuts": ["fc"]}, "found fc, which ends with the last layer fc"),
        ({"stages": 2, "link": "fast"}, "link=fast"),
        ({"stages": 2, "memory": "2GB!"}, "memory=2GB!"),
        ({"stages": 2, "memory": "1kB"}, r"memory=1kB on each of 2 .* is memory=3906 \(3.8 KiB\); raise"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused_with_the_value(arguments, sentence):
    with pytest.raises(PlanError, match=sentence) as error:
        partition(NET, **arguments)
    assert "\n" not in str(error.value)


def test_an_unknown_codec_is_refused():
    with pytest.raises(CodecError, match="zip"):
        partition(NET, stages=2, codec="zip")
