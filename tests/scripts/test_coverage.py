"""Public networks, as people use them: three stages, a step of training, every bit of the plain loop.

`python scripts/coverage` tries them all; these are a few that each hold another trap."""

import dataclasses
import importlib.util
import traceback

import language
import pytest
import torch
import vision
from examine import drawing_calls, examine, examine_lengths
from language import Network, normal, tokens
from torch import nn

FEW = {  # library -> networks that each hold another trap
    "torchvision": ("shufflenet_v2_x0_5", "squeezenet1_1"),
    "transformers": ("gpt2", "mixtral", "bert_classes", "levit"),
    "timm": ("test_efficientnet", "test_vit"),
}


AUTOCAST = pytest.mark.parametrize("autocast", [None, torch.bfloat16])


def same(network, autocast):
    row = examine(network, autocast=autocast)
    assert (row["result"], row.get("why")) == ("same", "")
    return row


@pytest.mark.slow
@pytest.mark.parametrize("network", list(vision.of_torch()), ids=lambda network: network.name)
@AUTOCAST
def test_a_network_of_torch(network, autocast):
    assert same(network, autocast)["stages"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("network", list(vision.of_torch()), ids=lambda network: network.name)
@pytest.mark.filterwarnings("ignore:the model was recorded anew")
def test_a_network_of_torch_at_a_second_length(network):
    row = examine_lengths(network)
    assert (row["result"], row["why"]) == ("same", "")


@pytest.mark.slow
@pytest.mark.parametrize(("library", "name"), [(library, name) for library in FEW for name in FEW[library]])
@AUTOCAST
def test_a_network_of_a_library(library, name, autocast):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install 'penstock[zoo]'")
    kinds = {"torchvision": vision.networks, "transformers": language.networks, "timm": vision.of_timm}
    networks = kinds[library]()
    row = same(next(network for network in networks if network.name == name), autocast)
    assert row["stages"] == 3
    assert library != "transformers" or bool(row["leaves"]) == (name == "mixtral")  # experts chosen by value


class Net(nn.Module):
    """Three linear layers, and what ``trap`` does between the first two."""

    def __init__(self, trap, prepare=None):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("n", torch.zeros(()))
        self.trap = trap
        if prepare:
            prepare(self)

    def forward(self, x):
        return self.c(torch.relu(self.b(self.trap(self, self.a(x)))))


def borrowed(net, x):
    return torch.func.functional_call(net.b, {"bias": net.a.bias * 2}, (x,))


def padded(net, x):
    words = x[:, None].repeat(1, 3, 1)
    mask = torch.zeros(len(x), 3, dtype=torch.bool, device=x.device)
    mask[:, 2] = True
    return net.encoder(words, src_key_padding_mask=mask).sum(1)


def add_encoder(net):
    net.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 12, batch_first=True), 2)


TRAPS = {"a borrowed parameter": (borrowed, None), "padding, which evaluation nests": (padded, add_encoder)}


@pytest.mark.filterwarnings("ignore")  # torch has something to say about checkpoints, nesting and compilers
@pytest.mark.parametrize(
    ("trap", "autocast"),
    # Nested padding under autocast is beyond torch: in evaluation it hands bfloat16 to a float32 kernel.
    [(trap, dtype) for trap in TRAPS for dtype in (None, torch.bfloat16) if not (dtype and "nests" in trap)],
)
def test_a_trap(trap, autocast):
    make, batch = lambda: Net(*TRAPS[trap]), lambda n: {"x": normal(n, n, 6)}
    same(Network(name=trap, library="test", make=make, batch=batch), autocast)


def caller(net, x):
    return x * (1 + any(frame.name == "plain_step" for frame in traceback.extract_stack()))


def toggled(net, x):
    net.flag = not getattr(net, "flag", False)
    return x


def under_autocast(trap):
    """A network that has a trap under autocast only."""

    def forward(net, x):
        return trap(net, x) if torch.is_autocast_enabled("cpu") else x

    make, batch = lambda: Net(forward), lambda n: {"x": normal(n, n, 6)}
    return Network(name=trap.__name__, library="test", make=make, batch=batch)


@pytest.mark.parametrize(
    ("trap", "result", "why"), [(caller, "different", "loss 0"), (toggled, "refused", "flag")]
)
def test_a_trap_under_autocast_only(trap, result, why):
    same(under_autocast(trap), None)
    row = examine(under_autocast(trap), autocast=torch.bfloat16)
    assert row["result"] == result
    assert why in row["why"]


def test_the_plain_loop_seeds_the_calls_that_draw():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.5))
    batch = {"x": normal(0, 8, 4)}
    draws = drawing_calls(model, batch, ["0", "1", "2", "3"], ["first", "second"])
    assert draws == {1: "first", 3: "second"}


class Words(nn.Module):
    """Scores of words without those that a mask hides, and what ``trap`` makes of each."""

    def __init__(self, trap, longest):
        super().__init__()
        self.words, self.dropout = nn.Embedding(97, 6), nn.Dropout(0.5)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.trap, self.longest = trap, longest

    def forward(self, input_ids, attention_mask=None):
        if input_ids.shape[1] > self.longest:
            raise ValueError("too long")
        x = self.dropout(self.a(self.words(input_ids)))
        if attention_mask is not None and not attention_mask.all():
            x = self.trap(x * attention_mask[..., None], "padding")
        return self.b(self.trap(x, input_ids.shape[1]))


def words(trap, *, longest=9, lengths=(5, 9)):
    def batch(samples, *, second=False):
        return {"input_ids": tokens(samples, samples, lengths[second])}

    return Network(name="words", library="test", make=lambda: Words(trap, longest), batch=batch)


def only(where):
    """A trap that multiplies by 2 in the plain loop, ``where`` the network is called so."""
    return lambda x, place: x * 2 if place == where and caller(None, 1) == 2 else x


def refusing(x, place):
    return x + int(1000 * x.detach().abs().sum()) if place == "padding" else x


SECOND = ("second length", "second length with a mask")
PADDING = ("first with padding", "second length with padding")


@pytest.mark.filterwarnings("ignore:the model was recorded anew")
@pytest.mark.parametrize(
    ("network", "result", "places"),
    [
        (words(only("")), "same", ()),
        (words(only(9)), "different", SECOND),
        (words(only("padding")), "different", PADDING[:1]),
        (words(refusing), "refused", PADDING),
        (words(only(9), longest=5), "same", ()),
    ],
)
def test_a_second_length_and_masks(network, result, places):
    row = examine_lengths(network)
    assert (row["result"], bool(row["why"])) == (result, bool(places))
    assert [place for place in row["tried"] if f"{place}: " in row["why"]] == [*places]


class Short(nn.Module):
    """Words of one length, without a mask."""

    def __init__(self):
        super().__init__()
        self.short = Words(only(""), 5)

    def forward(self, input_ids):
        return self.short(input_ids)


def test_a_network_that_takes_one_length_and_no_mask_is_left_out():
    network = dataclasses.replace(words(only("")), make=Short)
    assert examine_lengths(network) == {"result": "", "why": "", "tried": []}
