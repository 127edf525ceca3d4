"""Networks from lists of layers: the bits of one written by hand, cuts, a sentence for every mistake."""

import re
import weakref

import pytest
import torch
from cases import OPTIMIZERS
from reference import plain_loop, same_tree
from torch import nn

import penstock
from penstock.pipeline.network_definition import network

NET = """
layers:
  - {name: conv, type: Conv2d, arguments: {in_channels: 1, out_channels: 4, kernel_size: [3, 3], padding: 1}}
  - {name: relu, type: ReLU}
  - {name: product, type: mul, reads: [conv, relu]}
  - {name: most, type: MaxPool2d, arguments: {kernel_size: 2, return_indices: true}, reads: [product]}
  - {name: rest, type: AvgPool2d, arguments: {kernel_size: 2}, reads: [relu]}
  - {name: both, type: cat, arguments: {dim: 1}, reads: [most.0, rest]}
  - {name: flat, type: Flatten}
  - {name: head, type: Linear, arguments: {in_features: 128, out_features: num_classes}}
  - {name: more, type: Linear, arguments: {in_features: 10, out_features: 10}}
  - {name: sum, type: add, reads: [head, more]}
"""


class ByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head, self.more = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(128, 10), nn.Linear(10, 10)

    def forward(self, image):
        conv = self.conv(image)
        relu = conv.relu()
        both = torch.cat([nn.functional.max_pool2d(conv * relu, 2), nn.functional.avg_pool2d(relu, 2)], dim=1)
        head = self.head(both.flatten(1))
        return head + self.more(head)


def defined(tmp_path, text=NET):
    (tmp_path / "net.yaml").write_text(text)
    torch.manual_seed(0)
    return network(file=str(tmp_path / "net.yaml"), num_classes=10)


def batches():
    draw = torch.Generator().manual_seed(1)
    drawn = (torch.randn(8, 1, 8, 8, generator=draw), torch.randint(10, (8,), generator=draw))
    return [drawn] * 3


@pytest.mark.parametrize("cuts", [["product"], ["relu", "both", "head"]], ids="-".join)
def test_a_defined_network_trains_to_the_bits_of_one_written_by_hand(tmp_path, cuts):
    model, x = defined(tmp_path), batches()[0][0]
    profile = penstock.measure(penstock.trace(model, (x[:4],)), (x[:4],))
    plan = penstock.partition(profile, cuts=cuts, micro_batches=2)
    settings = {"loss": nn.functional.cross_entropy, "optimizer": OPTIMIZERS["sgd"]}
    pipe = penstock.Pipeline(model, plan, **settings)
    torch.manual_seed(0)
    plain = ByHand()
    loop = plain_loop(plain, batches(), micro_batches=2, **settings)
    for (inputs, targets), done in zip(batches(), loop, strict=True):
        assert pipe.step(inputs, targets).loss == done["loss"]
    assert same_tree(pipe.state_dict()["model"], dict(plain.state_dict()))
    pipe.close()


def test_inputs_have_names_and_values_are_dropped_after_their_last_reader():
    layers = [
        {"name": "left", "type": "ReLU", "reads": ["a"]},
        {"name": "middle", "type": "ReLU"},
        {"name": "total", "type": "add", "reads": ["middle", "b"]},
    ]
    model, values = penstock.from_layers(layers, inputs=["a", "b"]), []
    parts = dict(model.named_children())
    parts["left"].register_forward_hook(lambda _, inputs, output: values.append(weakref.ref(output)))
    parts["total"].register_forward_pre_hook(lambda *_: values.append(values[0]()))
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2), torch.full((2,), 2.0)), torch.full((2,), 3.0))
    assert values[1] is None
    with pytest.raises(TypeError, match="inputs are a, b, found 1 values"):
        model(torch.ones(2))


FILES = {
    "layers: []": "layers is a list of layers, found []",
    "layers: {a: 1}": "layers is a list of layers, found {'a': 1}",
    "layer: []": "has the keys layers and, if you like, inputs; found ['layer']",
    "- a": "found ['a']",
    "inputs: x\nlayers: [1]": "inputs is a list of names, found 'x'",
    "inputs: [x, y]\nlayers: [{name: a, type: ReLU, reads: [x]}]": "input y is read by no layer",
    "layers: [{name: a": "is no YAML",
}
LAYERS = {
    "3": "layer 1 has a name and a type, found 3",
    "{name: a b, type: ReLU}": "has letters, digits and _, found 'a b'",
    "{name: input, type: ReLU}": "two have the name input; rename one",
    "{name: forward, type: ReLU}": "rename it",
    "{name: a, type: ReLU, read: [input]}": "no key read; known are name, type, arguments, reads",
    "{name: a, type: Relu}": "is no class of torch.nn, found Relu; did you mean ReLU?",
    "{name: a, type: Module}": "is no class of torch.nn, found Module",
    "{name: a, type: ReLU, reads: input}": "is a list of names, found 'input'; write [input]",
    "{name: a, type: ReLU, reads: [imput]}": "a reads imput, which is no input and no layer before",
    "{name: a, type: ReLU, reads: [b]}, {name: b, type: ReLU}": "a reads b, which is no input",
    "{name: a, type: ReLU}, {name: b, type: ReLU, reads: [input]}": "layer a is read by no layer",
    "{name: a, type: ReLU, arguments: [1]}": "arguments of layer a is a mapping, found [1]",
    "{name: a, type: Linear}": "Linear of layer a refuses its arguments: missing 2 required positional",
    "{name: a, type: GroupNorm, arguments: {num_groups: 2, num_channels: 3}}": "must be divisible",
    "{name: a, type: ELU, arguments: {alpha: num_classes}}": "alpha of layer a is num_classes",
    "{name: a, type: add, arguments: {dim: 1}}": "add of layer a has no argument dim; it takes none",
}
MISTAKES = FILES | {f"layers: [{layers}]": sentence for layers, sentence in LAYERS.items()}


@pytest.mark.parametrize(("text", "sentence"), MISTAKES.items(), ids=map(str, range(len(MISTAKES))))
def test_a_mistake_is_one_sentence(tmp_path, text, sentence):
    (tmp_path / "net.yaml").write_text(text)
    with pytest.raises(penstock.ConfigError, match=re.escape(sentence)) as refused:
        network(file=str(tmp_path / "net.yaml"))
    assert str(refused.value).startswith(f"model.file={tmp_path / 'net.yaml'}")
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(penstock.ConfigError, match=r"nix.yaml cannot be read \(No such file"):
        network(file=str(tmp_path / "nix.yaml"))
