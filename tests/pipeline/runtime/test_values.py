"""Where a model on the meta device gets its values from: what does not suit is refused by name."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from valueless import pipeline_of, plan_of
from valueless import without_values as bare

import penstock

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(6, dtype=torch.int64)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.register_buffer("shift", torch.ones(4), persistent=False)
        self.register_buffer("idle", torch.ones(2))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.b(self.norm(self.a(x)) + self.shift)


def filled(name, tensor):
    tensor.fill_(0.5)


@pytest.fixture
def job(tmp_path):
    torch.manual_seed(0)
    whole = Net()
    model = bare(whole)
    plan, _ = plan_of(model, [(X, Y)], stages=2)
    path = tmp_path / "net.safetensors"

    def made(change=lambda state: None, **options):
        state = whole.state_dict()
        change(state)
        save_file(state, path)
        options = {"load_weights": path, "init_weights": filled} | options
        return pipeline_of(bare(whole), plan, optimizer=lambda n: torch.optim.SGD(n, lr=0.1), **options)

    vars(made).update(whole=whole, plan=plan)
    return made


def test_all_that_the_model_has_gets_values_read_by_a_layer_or_not(job):
    asked = []
    pipe = job(init_weights=lambda name, tensor: (asked.append(name), tensor.fill_(1.0))[1])
    state = pipe.state_dict()["model"]
    assert asked == ["shift"]
    assert all(torch.equal(state[name], tensor) for name, tensor in job.whole.state_dict().items())
    assert list(state) == list(job.whole.state_dict())
    pipe.close()


def test_without_a_file_all_are_asked_for_once_by_their_first_names(job):
    asked = []
    pipe = job(
        load_weights=None, init_weights=lambda name, tensor: asked.append(name) or filled(name, tensor)
    )
    names = {name for name, _ in (*job.whole.named_parameters(), *job.whole.named_buffers())}
    assert len(asked) == len(names)
    assert set(asked) == names
    pipe.close()


def test_a_parameter_in_the_file_counts_though_the_model_has_values_for_it(job):
    model = bare(job.whole)
    model.a.weight = nn.Parameter(torch.zeros(4, 4))
    kept = model.a.weight
    pipe = job()
    pipe.close()
    pipe = pipeline_of(model, job.plan, load_weights=pipe.values.file.path, init_weights=filled)
    assert model.a.weight is kept
    assert torch.equal(kept, job.whole.a.weight)
    pipe.close()


REFUSED = {
    "neither": (
        {"load_weights": None, "init_weights": None},
        None,
        r"found unused there; give Pipeline load_weights=FILE\.safetensors, or init_weights=a function",
    ),
    "no function": ({"init_weights": 3}, None, r"init_weights is a function of \(name, tensor\), found 3"),
    "another dtype": (
        {},
        lambda s: s.update({"a.bias": s["a.bias"].double()}),
        r"a\.bias is float64 \(4,\) in .*net\.safetensors and float32 \(4,\) in the model; convert the file",
    ),
    "another shape": (
        {},
        lambda s: s.update({"a.bias": torch.zeros(5)}),
        r"a\.bias is float32 \(5,\) in .* and float32 \(4,\) in the model",
    ),
    "a name missing": (
        {},
        lambda s: s.pop("norm.running_var"),
        r"state_dict\(\) its values, and has no norm\.running_var; give a file that has it",
    ),
    "names too many": (
        {},
        lambda s: s.update({"c.bias": torch.zeros(5), "d": torch.zeros(1)}),
        r"2 of its tensors are none of the model's, the first is c\.bias; give a file of this model's",
    ),
    "a buffer that no file has": (
        {"init_weights": None},
        None,
        r"shift is a buffer that no state_dict has, so .*net\.safetensors does not give .* add init_weights=",
    ),
    "left as it was": (
        {"init_weights": lambda name, tensor: None},
        None,
        r"left shift \(4,\) as it was; write into it, or load it from a file",
    ),
    "another tensor": (
        {"init_weights": lambda name, tensor: torch.zeros(4)},
        None,
        r"returned another for shift; write tensor\.copy_\(values\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_suit_is_refused_by_name(name, job):
    options, change, told = REFUSED[name]
    with pytest.raises(penstock.PlanError, match=told):
        job(change or (lambda state: None), **options)


def test_a_write_that_autograd_does_not_count_is_a_write(job):
    def unseen(name, tensor):
        tensor.data.zero_()

    job(init_weights=unseen).close()


def test_a_model_that_has_values_is_given_none(job):
    with pytest.raises(
        penstock.PlanError, match=r"^init_weights gives values to .* model\.load_state_dict\(\)"
    ):
        pipeline_of(job.whole, job.plan, init_weights=filled)


def test_a_second_pipeline_finds_the_values_of_the_first(job):
    model = bare(job.whole)
    pipe = pipeline_of(model, job.plan, init_weights=filled)
    loss = pipe.step(X, Y).loss
    pipe.close()
    again = pipeline_of(model, job.plan)
    assert again.step(X, Y).loss != loss
    again.close()
