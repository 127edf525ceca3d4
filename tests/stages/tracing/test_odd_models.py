"""Models of which a trace by proxies, a cut or a copy would lose something have the plain loop's bits."""

import copy
import dataclasses
import sys
from typing import Any

import pytest
import torch
from reference import same_bits
from small_pipelines import batch, built, differences, model_of, nothing, pipeline_of
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

import penstock


class Base(nn.Module):
    seen: torch.Tensor

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 20), nn.Linear(20, 20), nn.Linear(20, 20)
        self.end, self.norm = nn.Linear(20, 3), nn.BatchNorm1d(20)
        self.register_buffer("seen", torch.zeros(20))
        self.plain = torch.zeros(20)
        self.frozen = nn.Parameter(torch.zeros(20), requires_grad=False)
        self.register_buffer("alias", self.seen[:3])
        self.register_buffer("small", torch.ones(20))


def of(forward):
    """Return a factory of a model with this ``forward``."""
    return lambda: type("Net", (Base,), {"forward": forward})()


def counts_its_calls(self, x):
    self.seen += 1
    return self.end(self.a(x))


def scatters(self, x):
    y = self.a(x)
    made = torch.zeros(3, 20).index_add_(0, torch.argmax(y[:, :3], 1), y.detach())
    return self.end(self.b(y) + made.sum(0))


def returns_statistics(self, x):
    return self.end(torch.relu(self.b(self.norm(self.a(x))))), self.norm.running_mean


def returns_view(self, x):
    return self.end(torch.relu(self.b(self.a(x)))), self.b.weight.t()


def reads_alias(self, x):
    y = self.a(x)
    if self.training:
        torch.Tensor.copy_(self.seen, y.detach().mean(0))
    return self.end(torch.relu(self.b(y))) + self.alias


def slices_shape(self, x):
    shape = self.a(x).shape
    return self.end(self.b(self.a(x)).view(shape[:1] + torch.Size([20])))


def other_order(self, x):
    y = self.a(x) * 2
    z = self.b(y)
    if not self.training:
        y.add_(1)
    return self.end(z + y)


def with_plain_tensors(self, x):
    return self.end(self.b(self.a(x)) + torch.arange(20.0) * torch.tensor([2.0]) + self.plain)


def casts_inside(self, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = self.b(self.a(x))
    return self.end(y.float())


@dataclasses.dataclass
class Answer:
    scores: torch.Tensor


def float8(dtype):
    def forward(self, x):
        return self.end(self.b(self.a(x)).to(dtype).float() + self.small.float())

    def make():
        model = of(forward)()
        model.small = torch.ones(20).to(dtype)
        return model

    return make


class Segments(nn.Module):
    """Two reentrant checkpoints, a layer in both, or in one and outside of it, or in one alone."""

    def __init__(self, *names):
        super().__init__()
        self.names, self.a, self.b, self.end = names, nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        for name in self.names:
            run = getattr(self, name[0])
            if len(name) == 1:
                x = run(x)
            else:
                x = checkpoint(lambda v, run=run: run(run(v)), x, use_reentrant=True)
        return self.end(x)


def strided_number():
    model = nn.Sequential(nn.Linear(6, 3), nn.PReLU(init=0.5), nn.Linear(3, 3))
    model[1].weight = nn.Parameter(torch.randn(4)[::3][:1])
    return model


def sparse(tied):
    model = nn.Sequential(nn.Embedding(9, 8, sparse=True), nn.Linear(8, 8), nn.Linear(8, 9, bias=False))
    if tied:
        model[2].weight = model[0].weight
    return model


def loss_of_scores(outputs, targets):
    return F.cross_entropy(outputs.scores, targets)


def first_of_two(outputs, targets):
    return F.cross_entropy(outputs[0], targets) + outputs[1].sum()


WORDS = torch.randint(9, (2, 11), generator=torch.Generator().manual_seed(0)).unbind()
FORWARDS = [scatters, reads_alias, slices_shape, other_order]
FORWARDS += [with_plain_tensors, casts_inside]
ODD = {forward.__name__: (of(forward), {}) for forward in FORWARDS} | {
    "counts_its_calls": (of(counts_its_calls), {"evaluates": False}),  # an evaluation would count, too
    "returns_statistics": (of(returns_statistics), {"loss": first_of_two}),
    "returns_view": (of(returns_view), {"loss": first_of_two}),
    "returns_a_dataclass": (of(lambda self, x: Answer(self.end(self.a(x)))), {"loss": loss_of_scores}),
    "float8_e4m3fn": (float8(torch.float8_e4m3fn), {"cuts": ["to"]}),
    "float8_e5m2": (float8(torch.float8_e5m2), {"cuts": ["to"]}),
    "a reentrant checkpoint": (lambda: Segments("b", "a+"), {"cuts": ["b"]}),
    "a parameter of one element": (strided_number, {"cuts": ["_0"]}),
    "sparse": (lambda: sparse(False), {"data": WORDS, "cuts": ["_0", "_1"], "optimizer": "plain"}),
    "tied sparse": (lambda: sparse(True), {"data": WORDS, "cuts": ["_1"], "optimizer": "sgd"}),
}


@pytest.mark.filterwarnings("ignore")  # torch says where a checkpoint has no gradient
@pytest.mark.parametrize("name", ODD)
def test_an_odd_model_has_the_bits_of_the_plain_loop(name):
    make, settings = ODD[name]
    options: dict[str, Any] = {"data": batch(11)} | settings
    assert differences(make, [nothing, nothing], **options) == []


def test_a_parameter_of_one_element_is_saved_whatever_its_stride(tmp_path):
    pipe = pipeline_of(strided_number(), cuts=["_0"])
    penstock.save(pipe, tmp_path / "kept")
    penstock.load(pipe, tmp_path / "kept")


def test_numbers_that_torch_draws_are_a_random_layer():
    model = of(lambda self, x: self.end(self.b(self.a(x)) * torch.rand(())))()
    assert penstock.trace(model, (torch.randn(4, 6),)).train_probe.random == {"rand"}


DETACHES = {"now": True}


@fx.wrap
def detaching(h):
    return h.detach() * 1 if DETACHES["now"] else h * 1


def test_a_layer_that_detaches_at_times_is_refused(monkeypatch):
    pipe = pipeline_of(of(lambda self, x: self.end(detaching(self.a(x))))())
    pipe.step(*batch())
    monkeypatch.setitem(DETACHES, "now", False)
    with pytest.raises(penstock.StageError, match="detaching returned a tensor that requires a grad"):
        pipe.step(*batch())


def test_evaluating_keeps_only_what_is_still_read():
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(30)))
    pipe = pipeline_of(model, cuts=[], example=(torch.randn(4, 256),), loss=F.mse_loss)
    alive, counts = WeakTensorKeyDictionary(), []

    def watch(module, args, output):
        alive[output] = None
        counts.append(len(alive))

    for module in model:
        module.register_forward_hook(watch)
    pipe.evaluate(torch.randn(64, 256))
    assert len(counts) >= 30
    assert max(counts) <= 3


def test_inference_mode_is_left_or_refused():
    model, (x, y) = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), batch()
    with torch.inference_mode(), pytest.raises(penstock.PlanError, match=r"inside torch\.inference_mode"):
        penstock.trace(model, (x[:3],))
    pipe = pipeline_of(model)
    wanted = copy.deepcopy(model).eval()(x).detach()
    with torch.inference_mode():
        found, inputs = pipe.evaluate(x + 0), torch.randn(9, 6)
    assert same_bits(found, wanted)
    pipe.step(inputs, y)


def by_seed(where):
    scaled = lambda self, x: x * (1 + sys.modules[self.where].initial_seed() % 7)  # noqa: E731
    return model_of(scaled, name="BySeed", where=where)


@pytest.mark.parametrize("where", ["torch", "torch.random"])
def test_a_module_that_reads_the_seed_is_one_layer_with_a_seed_of_its_own(where):
    losses = set()
    for cuts in (["_0"], ["_1"], ["_0", "_1"]):
        torch.manual_seed(len(cuts))
        model = built(lambda: nn.Sequential(nn.Linear(6, 6), by_seed(where), nn.Linear(6, 3)))
        pipe = pipeline_of(model, example=(batch()[0][:3],), cuts=cuts)
        losses.add(tuple(pipe.step(*batch()).loss for _ in range(2)))
    assert len(losses) == 1
    with pytest.raises(penstock.PlanError, match=r"BySeed .* reads torch\.initial_seed"):
        penstock.trace(by_seed(where), (batch()[0],))
