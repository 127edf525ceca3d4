"""What a cut, a trace or a loss would change without a word is refused, or has the same bits."""

import copy
import dataclasses
import random
import re
from typing import Any

import pytest
import torch
from cases import OPTIMIZERS
from reference import plain_loop, same_bits
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary
from zoo import cross_entropy

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


def of(forward):
    torch.manual_seed(1)
    return type("Net", (Base,), {"forward": forward})()


def batches(samples=11, steps=2):
    return [(torch.randn(samples, 6), torch.randint(3, (samples,))) for _ in range(steps)]


def every(model, micro_batches=3, **settings):
    """A pipeline cut at every layer where a cut is allowed."""
    example = (torch.randn(4, 6),)
    profile = penstock.measure(penstock.trace(model, example), example, repeats=1)
    cuts = [layer.name for i, layer in enumerate(profile.layers[:-1]) if i not in profile.refused]
    plan = penstock.partition(
        profile, cuts=cuts or None, stages=None if cuts else 1, micro_batches=micro_batches
    )
    settings = {"loss": cross_entropy, "optimizer": OPTIMIZERS["sgd"], **settings}
    return penstock.Pipeline(model, plan, **settings)


def drops_layers(self, x):
    y = self.a(x)
    return self.end(y if self.training and random.random() < 0.1 else self.b(y))


def draws(self, x):
    return self.end(self.b(self.a(x)) * torch.rand(()))


def bakes_a_buffer(self, x):
    y = self.a(x)
    torch.Tensor.copy_(self.seen, self.seen * 0.9 + y.detach().mean(0))
    return self.end(self.b(y))


def scatters(self, x):
    y = self.a(x)
    made = torch.zeros(3, 20).index_add_(0, torch.argmax(y[:, :3], 1), y.detach())
    return self.end(self.b(y) + made.sum(0))


def test_numbers_that_python_draws_are_refused():
    state = random.getstate()
    with pytest.raises(penstock.PlanError, match=r"draws random numbers from Python or NumPy"):
        penstock.trace(of(drops_layers), (torch.randn(4, 6),))
    random.setstate(state)


@pytest.mark.parametrize("forward", [bakes_a_buffer, scatters])
def test_what_would_happen_once_in_a_trace_by_proxies_happens_every_time(forward):
    model = of(forward)
    plain, pipe = copy.deepcopy(model), every(model)
    given = batches(12)
    loop = plain_loop(
        plain, given, loss=cross_entropy, optimizer=OPTIMIZERS["sgd"], micro_batches=pipe.plan.micro_batches
    )
    for batch, expected in zip(given, loop, strict=True):
        assert pipe.step(*batch).loss == expected["loss"]
    state = pipe.state_dict()["model"]
    assert all(same_bits(tensor, state[name]) for name, tensor in plain.state_dict().items())


def test_numbers_that_torch_draws_are_a_random_layer():
    assert penstock.trace(of(draws), (torch.randn(4, 6),)).train_probe.random == {"rand"}


def test_a_gradient_that_no_frame_keeps_is_refused_where_it_comes():
    def wide(self, x):
        y = torch.relu(self.a(x))
        return self.rest(torch.cat([self.one(y), self.many(y)], 1))

    model = of(wide)
    model.one, model.many, model.rest = nn.Linear(20, 1), nn.Linear(20, 300), nn.Linear(301, 3)
    example = (torch.randn(4, 6),)
    graph = penstock.trace(model, example)
    profile = penstock.measure(graph, example, repeats=1)
    unaware = dataclasses.replace(profile, refused=graph.train_probe.refused)  # of such gradients
    plan = penstock.partition(unaware, cuts=["one"], micro_batches=3)
    pipe = penstock.Pipeline(model, plan, loss=cross_entropy, optimizer=OPTIMIZERS["sgd"])
    with pytest.raises(
        penstock.StageError, match=r"the gradient of one has strides \(301, 1\).*cut elsewhere"
    ):
        pipe.step(*batches(200)[0])


def test_a_loss_that_reads_a_parameter_is_refused():
    model = of(lambda self, x: self.end(self.b(self.a(x))))
    pipe = every(model, loss=lambda o, t: F.cross_entropy(o, t) + 0.1 * model.a.weight.square().sum())
    with pytest.raises(penstock.StageError, match="the loss reads a parameter of the model"):
        pipe.step(*batches()[0])


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda o, t: F.cross_entropy(o, t).detach(), "depends on trained parameters"),
        (lambda o, t: F.cross_entropy(o, t, reduction="none"), "the loss is one number"),
        (lambda o, t: 1.0, "the loss is one number"),
    ],
)
def test_a_loss_that_trains_nothing_is_refused(loss, told):
    with pytest.raises(penstock.StageError, match=told):
        every(of(lambda self, x: self.end(self.b(self.a(x)))), loss=loss).step(*batches()[0])


def test_training_without_gradients_is_refused():
    pipe = every(of(lambda self, x: self.end(self.b(self.a(x)))))
    with torch.no_grad(), pytest.raises(penstock.PlanError, match="training needs gradients"):
        pipe.step(*batches()[0])


def test_optimizers_that_are_none_of_the_stage_are_refused():
    model = of(lambda self, x: self.end(self.b(self.a(x))))
    for optimizer, told in [
        (lambda named: torch.optim.SGD(model.parameters(), lr=0.1), "parameters of its own stage"),
        (lambda named: None, "makes a torch optimizer"),
        (torch.optim.SGD(model.parameters(), lr=0.1), "optimizer is a function"),
    ]:
        with pytest.raises(penstock.PlanError, match=told):
            every(model, optimizer=optimizer)


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
    return self.end(self.b(self.a(x)) + torch.arange(20.0) + self.plain)


@pytest.mark.parametrize(
    "forward", [returns_statistics, returns_view, reads_alias, slices_shape, other_order, with_plain_tensors]
)
def test_odd_models_have_the_same_bits(forward):
    def loss(outputs, targets):
        if isinstance(outputs, tuple):
            return F.cross_entropy(outputs[0], targets) + outputs[1].sum()
        return F.cross_entropy(outputs, targets)

    model, pairs = of(forward), batches()
    plain = copy.deepcopy(model)
    pipe = every(model, loss=loss)
    loop = plain_loop(plain, pairs, loss=loss, optimizer=OPTIMIZERS["sgd"], micro_batches=3)
    for (x, y), expected in zip(pairs, loop, strict=True):
        assert pipe.step(x, y).loss == expected["loss"]
        assert all(
            same_bits(a, b)
            for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
        )
        found, wanted = pipe.evaluate(x[:5]), copy.deepcopy(plain).eval()(x[:5])
        for a, b in zip(*((o if isinstance(o, tuple) else (o,)) for o in (found, wanted)), strict=True):
            assert same_bits(a, b)


def test_autocast_is_the_plain_loop_without_its_weight_cache():
    model, pairs = of(lambda self, x: self.end(torch.relu(self.b(self.norm(self.b(self.a(x))))))), batches()
    plain = copy.deepcopy(model)

    def loss(outputs, targets):
        return F.cross_entropy(outputs, targets)

    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = plain

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                return self.inner(x)

    def cast_loss(outputs, targets):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return loss(outputs, targets)

    pipe = every(model, autocast=torch.bfloat16)
    loop = plain_loop(Cast(), pairs, loss=cast_loss, optimizer=OPTIMIZERS["sgd"], micro_batches=3)
    for (x, y), expected in zip(pairs, loop, strict=True):
        assert pipe.step(x, y).loss == expected["loss"]
        assert all(same_bits(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize(
    "scheduler", [torch.optim.lr_scheduler.StepLR, torch.optim.lr_scheduler.CosineAnnealingLR]
)
def test_a_state_carries_the_course_of_the_learning_rate(scheduler):
    def build():
        model = of(lambda self, x: self.end(self.b(self.a(x))))
        return every(model, scheduler=lambda optimizer: scheduler(optimizer, 3)), model

    pairs = batches(steps=6)
    (first, expected), (second, found) = build(), build()
    for pair in pairs:
        first.step(*pair)
    third, _ = build()
    for pair in pairs[:4]:
        third.step(*pair)
    second.load_state_dict(third.state_dict())
    for pair in pairs[4:]:
        second.step(*pair)
    assert all(same_bits(a, b) for a, b in zip(found.parameters(), expected.parameters(), strict=True))


def test_evaluating_keeps_only_what_is_still_read():
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(30)))
    example = (torch.randn(4, 256),)
    plan = penstock.partition(penstock.measure(penstock.trace(model, example), example, repeats=1), stages=1)
    pipe = penstock.Pipeline(model, plan, loss=F.mse_loss, optimizer=OPTIMIZERS["sgd"])
    alive, most = [], 0

    def watch(module, args, output):
        nonlocal most
        alive.append(WeakTensorKeyDictionary())
        alive[-1][output] = None
        most = max(most, sum(len(one) for one in alive))

    for module in model:
        module.register_forward_hook(watch)
    pipe.evaluate(torch.randn(64, 256))
    assert most <= 3


class Two(nn.Module):
    """Two Linears, and whatever ``between`` does."""

    def __init__(self, between=torch.tanh):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.between = between

    def forward(self, x):
        return self.b(self.between(self.a(x)))


class Noisy(Two):
    def forward(self, x):
        h = self.a(x)
        return self.b(h + torch.rand(h.shape, generator=GENERATOR))


GENERATOR = torch.Generator()


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=True)


Checkpointed.__module__ = "torch.nn.modules.made_up"  # a leaf of the trace


class Segments(nn.Module):
    """Two reentrant checkpoints, a layer in both, or in one and outside of it, or in one alone."""

    def __init__(self, *names):
        super().__init__()
        self.names, self.a, self.b, self.end = names, nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        for name in self.names:
            run = getattr(self, name[0])
            x = (
                run(x)
                if len(name) == 1
                else checkpoint(lambda v, run=run: run(run(v)), x, use_reentrant=True)
            )
        return self.end(x)


def in_inference_mode():
    with torch.inference_mode():
        return Two()


def holding(module, name, item):
    setattr(module, name, item)
    return module


def sparse():
    module = nn.Identity()
    module.register_buffer("rows", torch.eye(3).to_sparse())
    return nn.Sequential(nn.Linear(6, 3), module)


def pruned():
    return nn.Sequential(nn.Linear(6, 8), prune.l1_unstructured(nn.Linear(8, 3), "weight", 0.5))


def quantised():
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    return torch.ao.quantization.quantize_dynamic(model, {"1"})


class Grows(nn.BatchNorm1d):
    def forward(self, input):
        assert self.running_mean is not None
        self.running_mean.resize_(6).zero_()
        return super().forward(input)


Grows.__module__ = Checkpointed.__module__

MODELS = {
    "lazy": (
        lambda: nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 3)),
        "0 is lazy, its weight .* run the model",
    ),
    "a generator in forward": (Noisy, "rand is given a Generator by forward; leave it out"),
    "a generator of its own": (
        lambda: holding(Two(), "own", GENERATOR),
        r"own, a torch\.Generator, .* default",
    ),
    "pruned": (pruned, r"1 holds weight, a tensor that was computed .* prune\.remove"),
    "old spectral norm": (
        lambda: nn.Sequential(nn.Linear(6, 8), torch.nn.utils.spectral_norm(nn.Linear(8, 3))),
        r"1 has the old torch\.nn\.utils\.spectral_norm, .*parametrizations",
    ),
    "scripted": (
        lambda: nn.Sequential(nn.Linear(6, 8), torch.jit.script(nn.Linear(8, 3))),
        "1 is a TorchScript",
    ),
    "quantised": (quantised, "1 is quantised and does not train"),
    "made in inference mode": (in_inference_mode, "a has a tensor made in inference mode, weight"),
    "data parallel": (lambda: nn.DataParallel(Two()), r"found it in a DataParallel; give model\.module"),
    "checkpointed anew": (
        lambda: nn.Sequential(nn.Linear(6, 6), Checkpointed(), nn.Linear(6, 3)),
        "layer _1 checkpoints with use_reentrant=True, .* use use_reentrant=False",
    ),
    "a sparse buffer": (
        sparse,
        r"1 has a tensor without strides, rows \(torch\.sparse_coo\); hold it dense",
    ),
    "checkpointed twice": (
        lambda: Segments("b", "a+", "a+"),
        r"a\.weight is used in a torch\.utils\.checkpoint with use_reentrant=True and outside of it",
    ),
    "checkpointed once": (
        lambda: Segments("a", "a+", "b"),
        r"a\.weight is used in .* take use_reentrant=False",
    ),
    "a buffer that grows": (
        lambda: nn.Sequential(nn.Linear(6, 6), holding(Grows(6), "running_mean", torch.zeros(1))),
        r"forward gives 1\.running_mean another shape, \(6,\) instead of \(1,\)",
    ),
}


@pytest.mark.filterwarnings("ignore")  # torch calls some of these deprecated
@pytest.mark.parametrize("name", MODELS)
def test_what_cannot_be_traced_or_trained_is_refused_by_path(name):
    made, told = MODELS[name]
    with pytest.raises(penstock.PlanError, match=told):
        every(made())


@pytest.mark.filterwarnings("ignore")  # torch says where it has no gradient
def test_a_reentrant_checkpoint_of_its_own_layers_has_the_bits():
    torch.manual_seed(0)
    run_beside_plain(Segments("b", "a+"), torch.randn(9, 6), torch.randint(3, (9,)), ["b"])


def test_a_parameter_of_one_element_may_have_any_stride(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3), nn.PReLU(init=0.5), nn.Linear(3, 3))
    model[1].weight = nn.Parameter(torch.randn(4)[::3][:1])
    pipe = run_beside_plain(model, torch.randn(9, 6), torch.randint(3, (9,)), ["_0"])
    penstock.save(pipe, tmp_path / "kept")
    penstock.load(pipe, tmp_path / "kept")


def test_max_norm_is_refused_with_a_remedy_that_works():
    class Renormed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.end = nn.Embedding(9, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.end(F.embedding(x, torch.renorm(self.rows.weight, 2, 0, 1.0)))

    example = (torch.randint(9, (4,)),)
    with pytest.raises(penstock.PlanError, match=r"0 has max_norm, .* F\.embedding\(x, torch\.renorm"):
        penstock.trace(nn.Sequential(nn.Embedding(9, 8, max_norm=1.0), nn.Linear(8, 3)), example)
    assert penstock.trace(Renormed(), example).layers[-1] == "end"


def run_beside_plain(model, x, y, cuts, *, loss=cross_entropy, optimizer="plain", **settings):
    plain, example = copy.deepcopy(model), (x.tensor_split(3)[0].clone(),)
    profile = penstock.measure(penstock.trace(model, example), example, repeats=1)
    plan = penstock.partition(profile, cuts=cuts, micro_batches=3)
    settings |= {"loss": loss, "optimizer": OPTIMIZERS[optimizer]}
    pipe = penstock.Pipeline(model, plan, **settings)
    loop = plain_loop(plain, [(x, y)] * 2, loss=loss, optimizer=OPTIMIZERS[optimizer], micro_batches=3)
    for expected in loop:
        assert pipe.step(x, y).loss == expected["loss"]
    for ours, theirs in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert same_bits(ours, theirs)
    return pipe


@pytest.mark.parametrize("tied", [False, True])
def test_sparse_gradients_have_the_same_bits(tied):
    model = nn.Sequential(nn.Embedding(9, 8, sparse=True), nn.Linear(8, 8), nn.Linear(8, 9, bias=False))
    if tied:
        model[2].weight = model[0].weight
    x, y = torch.randint(9, (11,)), torch.randint(9, (11,))
    run_beside_plain(model, x, y, ["_0", "_1"])
    run_beside_plain(model, x, y, ["_1"], optimizer="sgd") if tied else None
    with pytest.raises(penstock.PlanError, match="0 gives sparse ones; make it with sparse=False"):
        run_beside_plain(model, x, y, ["_0"], scaler=8.0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_crosses_a_cut(dtype):
    model = of(lambda self, x: self.end(self.b(self.a(x)).to(self.dtype).float() + self.small.float()))
    model.dtype = dtype
    model.register_buffer("small", torch.ones(20).to(dtype))
    run_beside_plain(model, *batches(9, 1)[0], ["to"])


def test_a_dataclass_of_outputs_is_seen_by_the_loss():
    @dataclasses.dataclass
    class Answer:
        scores: torch.Tensor

    model = of(lambda self, x: Answer(self.end(self.b(self.a(x)))))
    run_beside_plain(model, *batches(9, 1)[0], ["a"], loss=lambda o, t: F.cross_entropy(o.scores, t))


def test_a_layer_that_detaches_at_times_is_refused():
    model = of(lambda self, x: self.end(detaching(self.a(x))))
    pipe = every(model)
    pipe.step(*batches()[0])
    DETACHES[0] = False
    try:
        with pytest.raises(
            penstock.StageError, match="layer detaching returned a tensor that requires a grad"
        ):
            pipe.step(*batches()[0])
    finally:
        DETACHES[0] = True


DETACHES = [True]


@fx.wrap
def detaching(h):
    return h.detach() * 1 if DETACHES[0] else h * 1


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (
            lambda o, t: F.cross_entropy(o, t) * (1 + 1j),
            "a floating-point number, found one of torch.complex64",
        ),
        (lambda o, t: F.cross_entropy(o, t).long(), "a floating-point number, found one of torch.int64"),
    ],
)
def test_a_loss_that_is_no_real_number_is_refused(loss, told):
    with pytest.raises(penstock.StageError, match=told):
        every(Two(), loss=loss).step(*batches()[0])


def test_a_loss_that_runs_backward_itself_is_refused():
    def loss(outputs, targets):
        found = F.cross_entropy(outputs, targets)
        found.backward(retain_graph=True)
        return found

    with pytest.raises(penstock.StageError, match="a backward ran inside the forward or the loss"):
        every(Two(), loss=loss).step(*batches()[0])


SETTINGS = [
    ({"loss": "mse"}, "loss is a function"),
    ({"loss": nn.CrossEntropyLoss}, r"the class CrossEntropyLoss; give torch\.nn\.CrossEntropyLoss\(\)"),
    (
        {"optimizer": lambda named: named + 1},
        "optimizer of a stage cannot be made: TypeE",
    ),
    ({"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, "without arguments, found ReduceLROnPlateau"),
    ({"scheduler": lambda optimizer: None}, "without arguments, found NoneType"),
    ({"scheduler": torch.optim.lr_scheduler.StepLR}, "the scheduler of a stage cannot be made: TypeError"),
    ({"scheduler": 0.1}, "scheduler is a function of an optimizer"),
    ({"weight": "x"}, "weight is a function of targets"),
    ({"seed": "abc"}, "seed is an integer, found 'abc'"),
    ({"deadline": "60"}, "deadline is a number of seconds"),
]


@pytest.mark.parametrize(("settings", "told"), SETTINGS)
def test_a_wrong_argument_is_refused_at_construction(settings, told):
    with pytest.raises(penstock.PlanError, match=told):
        every(Two(), **settings)


X, Y = torch.zeros(9, 6), torch.zeros(9, dtype=torch.long)

BATCHES = {
    "an array": ((X.numpy(), Y), r"found 1 \(ndarray\); give a tensor"),
    "lists": ((X.tolist(), Y), r"found 9 \(list, list, \.\.\.\); give"),
    "a generator": (((x for x in X), Y), r"found 1 \(generator\); give"),
    "nothing": ((None, Y), r"found 1 \(NoneType\); give"),
    "targets in an array": ((X, Y.numpy()), r"found an array; give torch\.as_tensor"),
    "targets in a list": ((X, Y.tolist()), r"found a list of numbers; give torch\.as_tensor"),
    "sparse": ((X.to_sparse(), Y), r"dense tensors on the CPU or a GPU, found a torch\.sparse_coo one"),
    "without memory": (
        (X.to("meta"), Y),
        r"the inputs of a batch .* ask pipe\.reads_inputs",
    ),
    "targets without memory": (
        (X, Y.to("meta")),
        r"the targets of a batch .* ask pipe\.reads_targets",
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_that_cannot_be_split_is_refused(name):
    batch, told = BATCHES[name]
    with pytest.raises(penstock.PlanError, match=told):
        every(Two()).step(*batch)


def test_a_weight_that_is_no_number_is_refused():
    with pytest.raises(penstock.PlanError, match=r"weight says of targets .* found None"):
        every(Two(), weight=lambda targets: None).step(X, Y)


def test_inference_mode_is_left_or_refused():
    model = Two()
    with torch.inference_mode(), pytest.raises(penstock.PlanError, match=r"inside torch\.inference_mode"):
        penstock.trace(model, (X[:3],))
    pipe = every(model)
    wanted = copy.deepcopy(model).eval()(X).detach()
    with torch.inference_mode():
        found, inputs = pipe.evaluate(X + 0), torch.randn(9, 6)
    assert same_bits(found, wanted)
    pipe.step(inputs, Y)


ANY: Any = penstock
CALLS = [
    (lambda: ANY.measure(Two(), (X,)), "measure takes what trace"),
    (lambda: ANY.measure(ANY.trace(Two(), (X,)), (X,), repeats=0), "repeats=1 or more"),
    (lambda: ANY.partition(ANY.trace(Two(), (X,)), stages=2), "partition takes what measure"),
    (lambda: ANY.trace(Two(), (X,), autocast="bf16"), "autocast is a dtype"),
    (lambda: ANY.trace(Two(), (X.to_sparse(),)), "inputs are dense tensors"),
]


@pytest.mark.parametrize(("call", "told"), CALLS)
def test_a_wrong_argument_before_the_pipeline_is_refused(call, told):
    with pytest.raises(penstock.PlanError, match=told):
        call()


@pytest.mark.parametrize(
    "wrong", [{"micro_batches": "3"}, {"micro_batches": 2.5}, {"stages": "2"}, {"ranks": "2"}]
)
def test_a_count_that_is_no_integer_is_refused(wrong):
    profile = penstock.measure(penstock.trace(Two(), (X,)), (X,), repeats=1)
    with pytest.raises(penstock.PlanError, match="counts from 1, found"):
        penstock.partition(profile, **{"stages": 2, **wrong})


def test_a_parameter_that_only_training_shares_is_there_when_evaluating():
    class Auxiliary(Base):
        def forward(self, x):
            y = self.a(x)
            if self.training:
                return self.end(self.b(y)) + self.end(torch.tanh(y))
            return self.end(self.b(y))

    model = Auxiliary()
    pipe = every(model)
    pipe.step(*batches()[0])
    assert same_bits(pipe.evaluate(X), copy.deepcopy(model).eval()(X).detach())


class Column(nn.Module):
    """The gradient of ``first`` is one column in a hundred of a wide one."""

    def __init__(self):
        super().__init__()
        self.first, self.others, self.head = nn.Linear(6, 4), nn.Linear(6, 400), nn.Linear(404, 3)

    def forward(self, x):
        column = self.first(x).unsqueeze(1)
        return self.head(torch.cat([column, self.others(x).view(-1, 100, 4)], 1).flatten(1))


def test_a_cut_that_such_a_gradient_would_cross_is_refused_ahead():
    torch.manual_seed(0)
    model, example = Column(), (torch.randn(4, 6),)
    profile = penstock.measure(penstock.trace(model, example), example, repeats=1)
    names = [layer.name for layer in profile.layers]
    said = "the gradient of (first|unsqueeze), whose elements lie far apart, would cross it"
    assert list(profile.refused) == list(range(names.index("cat")))
    assert all(re.fullmatch(said, reason) for reason in profile.refused.values())
    with pytest.raises(penstock.PlanError, match=said):
        penstock.partition(profile, cuts=["others"], micro_batches=2)
    plan = penstock.partition(profile, cuts=["cat"], micro_batches=2)
    assert plan.cuts == ("cat",)
