"""Models that cannot be traced, cut or trained, and wrong arguments: refused by name, with the remedy."""

import functools
import random
import types
from typing import Any

import numpy
import pytest
import torch
from cases import OPTIMIZERS
from small_pipelines import batch, model_of, pipeline_of, profile_of
from test_odd_models import Segments, sparse
from torch import nn
from torch.ao.quantization import quantize_dynamic
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, prune, spectral_norm, vector_to_parameters
from torch.utils.checkpoint import checkpoint
from traps import TRAPS

import penstock
from penstock import PlanError, StageError


class Two(nn.Module):
    """Two Linears, and whatever ``between`` does."""

    def __init__(self, between=torch.tanh):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.between = between

    def forward(self, x):
        return self.b(self.between(self.a(x)))


GENERATOR, SPARSE = torch.Generator(), nn.Buffer(torch.eye(3).to_sparse())


def noisy(h):
    return h + torch.rand(h.shape, generator=GENERATOR)


def drops_layers(h):
    return h if random.random() < 0.1 else torch.tanh(h)


class Checkpointed(nn.Linear):
    def forward(self, input):
        return checkpoint(super().forward, input, use_reentrant=True)


class Grows(nn.BatchNorm1d):
    def forward(self, input):
        assert self.running_mean is not None
        self.running_mean.resize_(8).zero_()
        return super().forward(input)


def counts_twice(reentrant):
    """Counts a batch in its forward, and again in its backward."""
    return model_of(lambda self, x: checkpoint(self.norm, x, use_reentrant=reentrant), norm=nn.BatchNorm1d(8))


Checkpointed.__module__ = Grows.__module__ = "torch.nn.modules.made_up"  # leaves of the trace


def holding(module, name, item):
    setattr(module, name, item)
    return module


def chain(*modules):
    return nn.Sequential(nn.Linear(6, 8), *modules)


def slope(forward, **parts):
    """A model with a layer of its own that takes a gradient."""
    return chain(model_of(forward, name="Slope", **parts), nn.Linear(8, 3))


def by_func(self, x):
    return torch.func.vmap(torch.func.grad(lambda row: self.b(row).pow(2).sum()))(x)


def by_autograd(self, x):
    return torch.autograd.grad(self.b(x).pow(2).sum(), x, create_graph=True)[0]


MODELS = [
    (lambda: slope(by_func, b=nn.Linear(8, 8)), r"1 takes a gradient by torch\.func .* torch\.enable_grad"),
    (lambda: slope(by_autograd, b=nn.Linear(8, 8)), r"eval mode .* in 1 \(Slope.* torch\.enable_grad\(\)"),
    (lambda: nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 3)), "0 is lazy, its weight .* run the model"),
    (lambda: Two(noisy), "rand is given a Generator by forward; leave it out"),
    (lambda: holding(Two(), "own", GENERATOR), r"own, a torch\.Generator, .* default"),
    (lambda: Two(drops_layers), "draws random numbers from Python or NumPy"),
    (
        lambda: chain(prune.l1_unstructured(nn.Linear(8, 3), "weight", 0.5)),
        r"1 holds weight, .* prune\.remove",
    ),
    (lambda: chain(spectral_norm(nn.Linear(8, 3))), r"1 has the old .*spectral_norm, .*parametrizations"),
    (lambda: chain(torch.jit.script(nn.Linear(8, 3))), "1 is a TorchScript"),
    (lambda: quantize_dynamic(chain(nn.Linear(8, 3)), {"1"}), "1 is quantised and does not train"),
    (torch.inference_mode()(lambda: Two()), "a has a tensor made in inference mode, weight"),
    (lambda: nn.DataParallel(Two()), r"found it in a DataParallel; give model\.module"),
    (lambda: nn.Sequential(nn.Embedding(9, 6, max_norm=1.0), Two()), "0 has max_norm, .*torch.renorm"),
    (lambda: chain(Checkpointed(8, 3)), "layer _1 checkpoints with .* use use_reentrant=False"),
    (lambda: chain(counts_twice(True)), r"backward writes to buffer 1\.norm\.num_.*recompute=true"),
    (lambda: chain(counts_twice(False)), r"backward writes to buffer 1\.norm\.num_.*recompute=true"),
    (lambda: Segments("b", "a+", "a+"), r"a\.weight is used in .* use_reentrant=True and outside of it"),
    (lambda: Segments("a", "a+", "b"), r"a\.weight is used in .* take use_reentrant=False"),
    (lambda: chain(holding(nn.Identity(), "rows", SPARSE)), "1 has a tensor without strides, rows .* dense"),
    (
        lambda: chain(holding(Grows(8), "running_mean", torch.zeros(1))),
        r"1\.running_mean another shape, \(8,\)",
    ),
]


@pytest.mark.filterwarnings("ignore")  # torch calls some of these deprecated
@pytest.mark.parametrize(("make", "subject"), MODELS)
def test_what_cannot_be_traced_or_trained_is_refused_by_path(make, subject):
    state = random.getstate()
    try:
        with pytest.raises(PlanError, match=subject):
            pipeline_of(make())
    finally:
        random.setstate(state)


class Doing(Two):
    """Calls ``does`` with itself and what goes on between the two."""

    def __init__(self, does):
        super().__init__()
        self.does = does

    def forward(self, x):
        hidden = torch.tanh(self.a(x))
        out = self.does(self, hidden)
        return self.b(out if isinstance(out, torch.Tensor) and out.shape == hidden.shape else hidden)


foreach_mul = getattr(torch, "_foreach_mul_")  # noqa: B009


def without_gradient(write):
    return lambda m, h: torch.no_grad()(write)(m.b.weight)


def of_vector(m, h):
    vector_to_parameters(parameters_to_vector(m.b.parameters()).detach() * 0.9, m.b.parameters())


WRITES = {
    "data": lambda m, h: m.b.weight.data.mul_(0.9),
    "data in train mode": lambda m, h: m.b.weight.data.mul_(0.9) if m.training else None,
    "data in eval mode": lambda m, h: None if m.training else m.b.weight.data.mul_(0.9),
    "other data": lambda m, h: setattr(m.b.weight, "data", m.b.weight.data * 0.9),
    "detach": lambda m, h: m.b.weight.detach().clamp_(-0.05, 0.05),
    "no_grad": without_gradient(lambda weight: weight.mul_(0.9)),
    "set_": without_gradient(lambda weight: weight.set_(weight * 0.9)),
    "foreach": lambda m, h: foreach_mul([m.b.weight.data], 0.9),
    "numpy": lambda m, h: numpy.multiply(m.b.weight.detach(), 0.9, out=m.b.weight.detach().numpy()),
    "vector_to_parameters": of_vector,
}


@pytest.mark.parametrize("does", WRITES.values(), ids=[*WRITES])
def test_a_write_of_forward_to_a_parameter_that_trains_is_refused_by_place(does):
    with pytest.raises(PlanError, match=r"writes to b\.weight in forward of Doing \(.*refusals\.py:\d+\)"):
        pipeline_of(Doing(does))


class Handed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, item):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * 2, None


handed = Handed.apply


@torch.fx.wrap
def wrapped(x, item):
    return x


def made_in_forward(m, h):
    class Made(Handed):
        @staticmethod
        def forward(ctx, x, item):
            return x * m.b.weight.detach().sum()

    return Made.apply(h, 1)


HIDDEN = [
    lambda m: m.b,
    lambda m: m,
    lambda m: m.b.forward,
    lambda m: lambda: m.b.weight,
    lambda m: functools.partial(F.linear, weight=m.b.weight),
    lambda m: types.SimpleNamespace(layer=m.b),
    lambda m: {"layer": m.b},
    lambda m: {m.b},
]
CALLED = [  # by names that are looked up as they are called
    lambda h, item: Handed.apply(h, item),
    lambda h, item: handed(h, item),
    lambda h, item: wrapped(h, item),
]
HIDES: list[Any] = [made_in_forward]
HIDES += [lambda m, h, call=call, i=i: call(h, i(m)) for call in CALLED for i in HIDDEN]


@pytest.mark.parametrize("does", HIDES)
def test_what_hides_tensors_of_the_model_from_the_trace_is_refused_by_name(does):
    with pytest.raises(PlanError, match=r"is handed [ab]\.weight of the model inside of a"):
        pipeline_of(Doing(does))


class Scaled(nn.Module):
    """Writes to its buffer, as ``how`` says, and multiplies by it."""

    def __init__(self, how):
        super().__init__()
        self.how, self.scale = how, nn.Buffer(torch.ones(8))

    def forward(self, h):
        self.how(self.scale)
        return h * self.scale


UNCOUNTED = {
    "data": lambda scale: scale.data.mul_(0.9),
    "numpy": lambda scale: numpy.multiply(scale.numpy(), 0.9, out=scale.numpy()),
    "foreach": lambda scale: foreach_mul([scale.data], 0.9),
}


@pytest.mark.parametrize("how", UNCOUNTED.values(), ids=[*UNCOUNTED])
def test_a_buffer_that_a_layer_writes_to_uncounted_and_keeps_is_refused_by_path(how):
    model = chain(Scaled(how), nn.Linear(8, 3))
    with pytest.raises(PlanError, match=r"layer _1 writes to 1\.scale past what torch counts"):
        penstock.trace(model, (torch.randn(4, 6),), leaves=(Scaled,))


@pytest.mark.parametrize("how", [{"recompute": True}, {"schedule": "async_1f1b"}], ids=str)
def test_a_frozen_parameter_to_which_forwards_write_has_one_version_and_one_forward(how):
    with pytest.raises(PlanError, match="a forward writes to weight, "):
        pipeline_of(TRAPS["Teacher"](), example=(torch.randn(3, 192),), **how)


def test_the_remedy_for_max_norm_works():
    def renormed(self, x):
        return self.end(F.embedding(x, torch.renorm(self.rows.weight, 2, 0, 1.0)))

    model = model_of(renormed, rows=nn.Embedding(9, 8), end=nn.Linear(8, 3))
    assert penstock.trace(model, (torch.randint(9, (4,)),)).layers[-1] == "end"


def test_a_cut_that_such_a_gradient_would_cross_is_refused_ahead():
    def column(self, x):  # the gradient of `first` is one column in a hundred of a wide one
        one, others = self.first(x).unsqueeze(1), self.others(x).view(-1, 100, 4)
        return self.head(torch.cat([one, others], 1).flatten(1))

    layers: dict[str, Any] = {
        "first": nn.Linear(6, 4),
        "others": nn.Linear(6, 400),
        "head": nn.Linear(404, 3),
    }
    profile = profile_of(model_of(column, **layers), (torch.randn(4, 6),))
    names = [layer.name for layer in profile.layers]
    said = "the gradient of (first|unsqueeze), whose elements lie far apart, would cross it"
    assert list(profile.refused) == list(range(names.index("cat")))
    with pytest.raises(PlanError, match=said):
        penstock.partition(profile, cuts=["others"], micro_batches=2)
    assert penstock.partition(profile, cuts=["cat"], micro_batches=2).cuts == ("cat",)


ALONE = Two()


def backward_inside(outputs, targets):
    found = F.cross_entropy(outputs, targets)
    found.backward(retain_graph=True)
    return found


LOSSES = [
    (lambda o, t: F.cross_entropy(o, t).detach(), "depends on trained parameters"),
    (lambda o, t: F.cross_entropy(o, t, reduction="none"), "the loss is one number"),
    (lambda o, t: 1.0, "the loss is one number"),
    (lambda o, t: F.cross_entropy(o, t) * (1 + 1j), "floating-point number, .* torch.complex64"),
    (lambda o, t: F.cross_entropy(o, t).long(), "floating-point number, .* torch.int64"),
    (lambda o, t: F.cross_entropy(o, t) + ALONE.a.weight.sum(), "the loss reads a parameter of the model"),
    (backward_inside, "a backward ran inside the forward or the loss"),
]


@pytest.mark.parametrize(("loss", "subject"), LOSSES)
def test_a_loss_that_is_none_is_refused(loss, subject):
    with pytest.raises(StageError, match=subject):
        pipeline_of(ALONE, loss=loss).step(*batch())


def test_training_without_gradients_is_refused():
    pipe = pipeline_of(Two())
    with torch.no_grad(), pytest.raises(PlanError, match="training needs gradients"):
        pipe.step(*batch())


schedulers = torch.optim.lr_scheduler
SETTINGS = [
    ({"loss": "mse"}, "loss is a function"),
    ({"loss": nn.CrossEntropyLoss}, r"the class CrossEntropyLoss; give torch\.nn\.CrossEntropyLoss\(\)"),
    ({"optimizer": lambda named: named + 1}, "optimizer of a stage cannot be made: TypeE"),
    ({"optimizer": lambda named: torch.optim.SGD(ALONE.parameters())}, "parameters of its own stage"),
    ({"optimizer": lambda named: None}, "makes a torch optimizer"),
    ({"optimizer": torch.optim.SGD(ALONE.parameters())}, "optimizer is a function"),
    ({"scheduler": schedulers.ReduceLROnPlateau}, "without arguments, found ReduceLROnPlateau"),
    ({"scheduler": lambda optimizer: None}, "without arguments, found NoneType"),
    ({"scheduler": schedulers.StepLR}, "the scheduler of a stage cannot be made: TypeError"),
    ({"scheduler": 0.1}, "scheduler is a function of an optimizer"),
    ({"weight": "x"}, "weight is a function of targets"),
    ({"seed": "abc"}, "seed is an integer, found 'abc'"),
    ({"deadline": "60"}, "deadline is a number of seconds"),
]


@pytest.mark.parametrize(("settings", "subject"), SETTINGS)
def test_a_wrong_argument_is_refused_at_construction(settings, subject):
    with pytest.raises(PlanError, match=subject):
        pipeline_of(Two(), **settings)


@pytest.mark.parametrize("more", [{"optimizer": "plain", "scaler": 8.0}, {"optimizer": "sgd"}], ids=str)
def test_a_loss_scale_and_a_momentum_are_refused_where_gradients_are_sparse(more):
    settings = more | {"optimizer": OPTIMIZERS[more["optimizer"]], "example": (torch.randint(9, (3,)),)}
    with pytest.raises(PlanError, match="0 gives sparse ones; make it with sparse=False"):
        pipeline_of(sparse(False), cuts=["_0"], **settings)


X, Y = torch.zeros(9, 6), torch.zeros(9, dtype=torch.long)
BATCHES = {
    "an array": ((X.numpy(), Y), r"found 1 \(ndarray\); give a tensor"),
    "lists": ((X.tolist(), Y), r"found 9 \(list, list, \.\.\.\); give"),
    "a generator": (((x for x in X), Y), r"found 1 \(generator\); give"),
    "nothing": ((None, Y), r"found 1 \(NoneType\); give"),
    "targets in an array": ((X, Y.numpy()), r"found an array; give torch\.as_tensor"),
    "targets in a list": ((X, Y.tolist()), r"found a list of numbers; give torch\.as_tensor"),
    "sparse": ((X.to_sparse(), Y), r"dense tensors on the CPU or a GPU, found a torch\.sparse_coo one"),
    "without memory": ((X.to("meta"), Y), r"the inputs of a batch .* ask pipe\.reads_inputs"),
    "targets without memory": ((X, Y.to("meta")), r"the targets of a batch .* ask pipe\.reads_targets"),
}


def test_a_batch_that_cannot_be_split_is_refused():
    pipe = pipeline_of(Two())
    for given, subject in BATCHES.values():
        with pytest.raises(PlanError, match=subject):
            pipe.step(*given)


def test_a_weight_that_is_no_number_is_refused():
    with pytest.raises(PlanError, match=r"weight says of targets .* found None"):
        pipeline_of(Two(), weight=lambda targets: None).step(X, Y)


ANY: Any = penstock
CALLS = [
    (lambda: ANY.measure(Two(), (X,)), "measure takes what trace"),
    (lambda: ANY.measure(ANY.trace(Two(), (X,)), (X,), repeats=0), "repeats=1 or more"),
    (lambda: ANY.partition(ANY.trace(Two(), (X,)), stages=2), "partition takes what measure"),
    (lambda: ANY.trace(Two(), (X,), autocast="bf16"), "autocast is a dtype"),
    (lambda: ANY.trace(Two(), (X.to_sparse(),)), "inputs are dense tensors"),
    (lambda: ANY.trace(Two(), X), "example_inputs is a tuple .* or a dict .*found a Tensor; wrap it"),
    (lambda: ANY.trace(nn.Bilinear(6, 6, 6), (X,)), r"does not run on inputs of shape \(9, 6\): .*missing"),
]


@pytest.mark.parametrize(("call", "subject"), CALLS)
def test_a_wrong_argument_before_the_pipeline_is_refused(call, subject):
    with pytest.raises(PlanError, match=subject):
        call()


def test_a_count_that_is_no_integer_is_refused():
    profile = profile_of(Two())
    for wrong in ({"micro_batches": "3"}, {"micro_batches": 2.5}, {"stages": "2"}, {"ranks": "2"}):
        with pytest.raises(PlanError, match="counts from 1, found"):
            penstock.partition(profile, **{"stages": 2, **wrong})


def test_an_example_without_samples_is_refused():
    with pytest.raises(PlanError, match=r"one sample at least, found inputs of shape \(0, 6\)"):
        penstock.trace(Two(), (torch.zeros(0, 6),))


def test_a_loss_with_a_parameter_of_its_own_is_warned_of():
    scale = nn.Parameter(torch.ones(3))
    pipe = pipeline_of(Two(), stages=2, loss=lambda o, t: F.cross_entropy(o * scale, t))
    with pytest.warns(UserWarning, match=r"parameter of its own, of shape \(3,\), which no optimizer"):
        pipe.step(*batch())
