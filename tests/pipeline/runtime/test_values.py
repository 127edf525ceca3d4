"""Sources of the values of a model on the meta device: unsuitable ones are refused by name."""

from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_pipelines import model_of
from torch import nn
from valueless import pipeline_of, plan_of
from valueless import without_values as bare

import penstock

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(6, dtype=torch.int64)


def filled(name, tensor):
    tensor.fill_(0.5)


PARTS = {"a": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4), "b": nn.Linear(4, 3)}
PARTS |= {"shift": nn.Buffer(torch.ones(4), persistent=False), "idle": nn.Buffer(torch.ones(2))}
PARTS |= {"unused": nn.Parameter(torch.ones(2))}
WHOLE: Any = model_of(lambda self, x: self.b(self.norm(self.a(x)) + self.shift), **PARTS)


@pytest.fixture(scope="module")
def plan():
    return plan_of(bare(WHOLE), [(X, Y)], stages=2)[0]


@pytest.fixture
def job(tmp_path, plan):
    """Makes a pipeline of a model without values, from a file that ``change`` was done to."""
    path = tmp_path / "net.safetensors"

    def make(change=lambda state: None, *, model=None, **options):
        state = WHOLE.state_dict()
        change(state)
        save_file(state, path)
        options = {"load_weights": path, "init_weights": filled} | options
        return pipeline_of(
            model or bare(WHOLE), plan, optimizer=lambda n: torch.optim.SGD(n, lr=0.1), **options
        )

    return make


def test_all_that_the_model_has_gets_values_read_by_a_layer_or_not(job):
    asked = []
    pipe = job(init_weights=lambda name, tensor: (asked.append(name), tensor.fill_(1.0))[1])
    state = pipe.state_dict()["model"]
    assert asked == ["shift"]
    assert all(torch.equal(state[name], tensor) for name, tensor in WHOLE.state_dict().items())
    assert list(state) == list(WHOLE.state_dict())
    pipe.close()


def test_without_a_file_all_are_asked_for_once_by_their_first_names(job):
    asked = []
    job(load_weights=None, init_weights=lambda *given: asked.append(given[0]) or filled(*given)).close()
    assert sorted(asked) == sorted(name for name, _ in (*WHOLE.named_parameters(), *WHOLE.named_buffers()))


def test_a_parameter_in_the_file_counts_though_the_model_has_values_for_it(job):
    model: Any = bare(WHOLE)
    kept = model.a.weight = nn.Parameter(torch.zeros(4, 4))
    job(model=model).close()
    assert model.a.weight is kept
    assert torch.equal(kept, WHOLE.a.weight)


# What is given otherwise, what is done to the file, and what is named.
REFUSED = [
    ({"load_weights": None, "init_weights": None}, None, "unused there; give Pipeline load_weights="),
    ({"init_weights": 3}, None, r"init_weights is a function of \(name, tensor\), found 3"),
    ({}, ("a.bias", torch.zeros(4).double()), r"a\.bias is float64 \(4,\) in .*net\.safetensors and float32"),
    ({}, ("a.bias", torch.zeros(5)), r"a\.bias is float32 \(5,\) in .* and float32 \(4,\) in the model"),
    ({}, ("norm.running_var", None), r"has no norm\.running_var; give a file that has it"),
    ({}, ("c.bias", torch.zeros(5)), r"1 of its tensors are none of the model's, the first is c\.bias"),
    ({"init_weights": None}, None, "shift is a buffer that no state_dict has, .* add init_weights="),
    ({"init_weights": lambda name, tensor: None}, None, r"left shift \(4,\) as it was; write into it"),
    ({"init_weights": lambda name, tensor: torch.zeros(4)}, None, "returned another for shift; write"),
]


@pytest.mark.parametrize(("options", "change", "told"), REFUSED, ids=[told for *_, told in REFUSED])
def test_what_does_not_suit_is_refused_by_name(options, change, told, job):
    def write(state):
        name, tensor = change or ("a.bias", state["a.bias"])
        state[name] = tensor
        if tensor is None:
            del state[name]

    with pytest.raises(penstock.PlanError, match=told):
        job(write, **options)


def test_a_write_that_autograd_does_not_count_is_a_write(job):
    job(init_weights=lambda name, tensor: (tensor.data.zero_(), None)[1]).close()


def test_a_model_that_has_values_is_given_none(plan):
    with pytest.raises(penstock.PlanError, match=r"^init_weights gives .* model\.load_state_dict\(\)"):
        pipeline_of(WHOLE, plan, init_weights=filled)


def test_a_second_pipeline_finds_the_values_of_the_first(plan):
    model = bare(WHOLE)
    pipe = pipeline_of(model, plan, init_weights=filled)
    loss = pipe.step(X, Y).loss
    pipe.close()
    again = pipeline_of(model, plan)
    assert again.step(X, Y).loss != loss
    again.close()
