"""Savings from the graph: one-bit ReLUs, dropout masks; the same gradients."""

import pytest
import torch
import torch.nn.functional as F
from reference import same_bits
from saving import Net, Square, gradients
from torch import nn

from penstock.stages.memory.packer import LayerAwareCompressor, two_words
from penstock.stages.memory.saved_storage import no_space, view_of


class Planted(nn.Module):
    """Multiplies by a weight per element, so that every NaN and zero of its input meets the next layer."""

    def __init__(self, *shape):
        super().__init__()
        weight = torch.randn(shape)
        flat = weight.view(-1)
        for k, value in enumerate((0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-42, -1e-42)):
            flat[k::29] = value
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return x * self.weight


def bn_net():
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.4), nn.Flatten()),
        *(nn.Linear(8 * 16, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 5)),
    )


def planted_net():
    return nn.Sequential(
        *(Planted(3, 18, 18), nn.ReLU(), nn.MaxPool2d(2, 2), Planted(3, 9, 9), nn.ReLU(), Planted(3, 9, 9)),
        nn.MaxPool2d((2, 3), (1, 2), (1, 0), (2, 1), ceil_mode=True),
        *(nn.ReLU(), nn.Flatten()),
    )


class Functions(nn.Module):
    """The same layers called as functions and methods; a ReLU whose result has another reader."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        x = torch.relu(self.conv(x))
        x = F.max_pool2d(x, kernel_size=2, stride=1)
        y = x.relu()
        x = F.dropout(F.relu(y * 2), 0.5, True)
        return torch.max_pool2d(x, 3) + F.avg_pool2d(y, 3, padding=1)[..., :4, :4]


def hooked_net():
    """A layer with a hook proves nothing."""

    def squared(_, args, y):
        return torch.square(y)

    model = nn.Sequential(Planted(3, 16, 16), nn.ReLU())
    model[1].register_forward_hook(squared)
    return model


NETS = {"bn": (bn_net, 16), "planted": (planted_net, 18)}
NETS |= {"functions": (Functions, 16), "hooked": (hooked_net, 16)}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("setting", ["plain", "channels_last", "bfloat16"])
def test_the_gradients_are_the_same(name, setting):
    make, side = NETS[name]
    x = torch.randn(4, 3, side, side)
    model = make()
    if setting == "channels_last":
        x, model = x.to(memory_format=torch.channels_last), model.to(memory_format=torch.channels_last)
    if setting == "bfloat16":
        x, model = x.bfloat16(), model.bfloat16()
    expected, _ = gradients(Net(model), x, None)
    for knows in (True, False):
        found, saved = gradients(Net(model), x, {}, knows=knows)
        assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))
        assert saved.counts.num_unpacks > 0


@pytest.mark.parametrize(
    ("model", "most"),
    [
        ([nn.ReLU()], 1 / 32),
        ([nn.ReLU(), nn.MaxPool2d(2)], 1 / 32 + 12 / 32 / 4),
        ([nn.MaxPool2d(2)], 12 / 32 / 4),
        ([nn.MaxPool2d(3, 1, 1)], 12 / 32),
        ([nn.Dropout(0.5)], 1 / 32),
    ],
    ids=str,
)
def test_what_each_form_keeps(model, most):
    """Of the float32 input of 4,096 x 16 bytes each, headers of 128 bytes aside."""
    net = Net(nn.Sequential(Planted(1, 64, 64), *model))
    _, saved = gradients(net, torch.randn(16, 1, 64, 64), {})
    first = 16 * 64 * 64 * 4  # the input itself, saved for the weight
    assert saved.counts.bytes_kept - first <= most * first + 5 * 192


def test_nothing_is_known_where_another_layer_reads():
    _, alone = gradients(Net(nn.Sequential(Planted(64, 64), nn.ReLU())), torch.ones(4, 64, 64), {})
    _, read = gradients(Net(nn.Sequential(Planted(64, 64), nn.ReLU(), Square())), torch.ones(4, 64, 64), {})
    assert read.counts.bytes_kept > alone.counts.bytes_kept + 4 * 64 * 64


def test_two_words_come_back_and_three_are_not_taken():
    for a, b, dtype in ((0.0, 2.5, torch.float32), (-0.0, 0.0, torch.float64), (1.0, 1.0, torch.bfloat16)):
        flat = torch.where(torch.randn(77) > 0, a, b).to(dtype)
        compact = two_words(flat)
        assert compact is not None
        assert same_bits(view_of(flat).over(compact.expand(compact.tensor, no_space)), flat)
    assert two_words(torch.tensor([0.0, 1.0, 2.0])) is None
    assert two_words(torch.tensor([0.0, -0.0, 1.0])) is None


def test_layers_are_known_however_they_are_called():
    net = Net(Functions())
    proven = LayerAwareCompressor(net.parts.modules)
    kinds = [proven.kind(layer) for layer in net.layers]
    assert [kind for kind in kinds if kind] == ["relu", "pool", "relu", "relu", "dropout", "pool"]
