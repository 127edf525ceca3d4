"""Networks: the shapes they promise, traced by torch.fx at any batch size, refused where they do not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx
from omegaconf import OmegaConf

import penstock.conf
from penstock import ConfigError
from penstock.pipeline.data import Description
from penstock.pipeline.models import ACTIVATIONS, GPT, MODELS, Attention

IMAGES = Description(num_classes=10, input_shape=(3, 32, 32))
GREY = Description(num_classes=10, input_shape=(1, 32, 32))
TEXT = Description(num_classes=7, input_shape=(12,), vocabulary="abcdefg")

SMALL: list[tuple[str, Description, dict[str, Any]]] = [
    ("mlp", IMAGES, {}),
    ("mlp", IMAGES, {"hidden": [32, 16], "activation": "relu2"}),
    ("mlp", Description(num_classes=3, input_shape=(5,)), {"hidden": []}),
    ("gpt", TEXT, {"width": 16, "layers": 2, "heads": 2}),
    ("gpt", TEXT, {"width": 12, "layers": 1, "heads": 3, "activation": "relu", "dropout": 0.1}),
    ("gpt", TEXT, {"width": 16, "heads": 1, "activation": "relu2", "dropout": 0.1, "tied": True}),
]
LARGE: list[tuple[str, Description, dict[str, Any]]] = [
    ("resnet18", IMAGES, {}),
    ("torchvision", IMAGES, {"name": "mobilenet_v3_small"}),
    ("torchvision", IMAGES, {"name": "googlenet"}),
]


def inputs_of(describe: Description, batch_size: int) -> torch.Tensor:
    if describe.vocabulary:
        return torch.randint(describe.num_classes, (batch_size, *describe.input_shape))
    return torch.randn(batch_size, *describe.input_shape)


@pytest.mark.parametrize(
    ("name", "describe", "options"),
    [*SMALL, *(pytest.param(*case, marks=pytest.mark.slow) for case in LARGE)],
)
def test_a_model_traces_takes_any_batch_size_and_trains_all_of_its_seeded_weights(name, describe, options):
    torch.manual_seed(5)
    model = MODELS[name](describe, **options)
    torch.manual_seed(5)
    again = MODELS[name](describe, **options)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert model.training
    model(inputs_of(describe, 3)).square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    for mode in (True, False):
        traced = torch.fx.symbolic_trace(model.train(mode))
        for batch_size in (2, 5):
            inputs = inputs_of(describe, batch_size)
            torch.manual_seed(1)
            expected = model(inputs)
            torch.manual_seed(1)
            assert torch.equal(traced(inputs), expected)
            text = describe.input_shape if describe.vocabulary else ()
            assert expected.shape == (batch_size, *text, describe.num_classes)
            assert expected.dtype == torch.float32


def test_resnet18_is_torchvisions() -> None:
    import torchvision

    torch.manual_seed(3)
    plain = torchvision.models.resnet18(num_classes=10)
    torch.manual_seed(3)
    ours = MODELS["resnet18"](IMAGES)
    state = ours.state_dict()
    assert list(plain.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())


def gpt(**options: Any) -> GPT:
    model = MODELS["gpt"](TEXT, **{"width": 16, "layers": 2, "heads": 2, **options})
    assert isinstance(model, GPT)
    return model


def test_a_gpt_sees_the_past_only_and_knows_where_it_is() -> None:
    model = gpt()
    tokens = inputs_of(TEXT, 1)
    changed = tokens.clone()
    changed[0, 6] = (changed[0, 6] + 1) % 7
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :6], after[0, :6])
    assert (before[0, 6:] != after[0, 6:]).any(dim=1).all()
    alike = model(torch.zeros(1, 12, dtype=torch.int64))
    assert not torch.equal(alike[0, 0], alike[0, 1])


def test_dropout_works_in_train_mode_alone() -> None:
    attention = Attention(width=12, heads=3, dropout=0.5)
    for model, inputs in ((gpt(dropout=0.5), inputs_of(TEXT, 2)), (attention, torch.randn(1, 5, 12))):
        assert not torch.equal(model(inputs), model(inputs))
        model.eval()
        assert torch.equal(model(inputs), model(inputs))
    model, inputs = gpt(dropout=0.0), inputs_of(TEXT, 2)
    assert torch.equal(model(inputs), model(inputs))


def test_attention_is_softmax_of_scaled_products() -> None:
    attention, inputs = Attention(width=12, heads=3, dropout=0.0), torch.randn(2, 5, 12)
    query, key, value = (part.unflatten(2, (3, 4)) for part in attention.project_in(inputs).chunk(3, dim=2))
    scores = torch.einsum("bqhw,bkhw->bhqk", query, key) / 2
    weights = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf).softmax(3)
    mixed = torch.einsum("bhqk,bkhw->bqhw", weights, value).flatten(2)
    assert torch.allclose(attention(inputs), attention.project_out(mixed), atol=1e-6)


def test_activations() -> None:
    table = {"relu": [0.0, 0.0, 2.0], "relu2": [0.0, 0.0, 4.0], "gelu": [-0.1587, 0.0, 1.9545]}
    for activation, expected in table.items():
        outputs = ACTIVATIONS[activation]()(torch.tensor([-1.0, 0.0, 2.0]))
        assert outputs.tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "describe", "options", "words"),
    [
        ("torchvision", IMAGES, {"name": "resnt18"}, r"model.name=resnt18 .*resnet18"),
        ("torchvision", IMAGES, {"name": "zzz"}, r"model.name=zzz .*close ones"),
        ("torchvision", IMAGES, {"name": "alexnet"}, r"model.name=alexnet .*\[3, 32, 32\].*data.size"),
        ("resnet18", GREY, {}, r"model=resnet18 .*\[1, 32, 32\].*channels"),
        ("mlp", TEXT, {}, r"mlp.*text"),
        ("gpt", IMAGES, {}, r"gpt.*text"),
        ("mlp", IMAGES, {"activation": "tanh"}, r"model.activation=tanh .*gelu, relu, relu2"),
        ("mlp", IMAGES, {"hidden": [8, 0]}, r"model.hidden=0 "),
        ("gpt", TEXT, {"width": 10, "heads": 3}, r"model.width=10 .*model.heads=3"),
        ("gpt", TEXT, {"layers": 0}, r"model.layers=0"),
        ("gpt", TEXT, {"dropout": 1.0}, r"model.dropout=1.0"),
        ("gpt", TEXT, {"width": "wide"}, r"model.width=wide .*whole number"),
        ("gpt", TEXT, {"dropout": "some"}, r"model.dropout=some "),
        ("gpt", TEXT, {"tied": "maybe"}, r"model.tied=maybe .*True, False"),
        ("mlp", IMAGES, {"hidden": 512}, r"model.hidden=512 .*list"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(
    name: str, describe: Description, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        MODELS[name](describe, **options)
    assert "\n" not in str(raised.value)


def test_every_model_is_tested_and_a_choice_of_the_command_line() -> None:
    assert {name for name, _, _ in SMALL + LARGE} == set(MODELS)
    folder = Path(penstock.conf.__path__[0], "model")
    files = [file for file in folder.glob("*.yaml") if file.stem not in ("own", "layers")]
    chosen = {file.stem: OmegaConf.select(OmegaConf.load(file), "_target_") for file in files}
    assert chosen == {name: f"penstock.pipeline.models.{make.__name__}" for name, make in MODELS.items()}
