"""Code and models that a schedule or replicas would show something else: refused by name, or same bits."""

import collections
import contextlib
import copy
import functools
import random
import types
from typing import Any

import numpy
import pytest
import torch
from reference import plain_loop, same_bits
from small_pipelines import model_of, profile_of
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import penstock
from penstock.pipeline.runtime.replicas import check_replicated
from penstock.pipeline.runtime.running_statistics import RunningStatistics, batch_norms


class First(torch.autograd.Function):
    """Calls ``inside`` in its backward."""

    inside: Any = staticmethod(lambda: None)

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        First.inside()
        return gradient


class Net(nn.Module):
    """A cut between ``b`` and ``c`` has linear layers and a buffer that forwards write to on both sides."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 64)
        self.c, self.d = nn.Linear(64, 64), nn.Linear(64, 5)
        self.early, self.late, self.constant = (nn.Buffer(torch.ones(())) for _ in range(3))

    def forward(self, x):
        x = First.apply(torch.relu(self.b(self.a(x))))
        if self.training:
            self.early.mul_(0.9).add_(x.detach().mean())
        x = torch.relu(self.c(x * self.constant))
        if self.training:
            self.late.mul_(0.9).add_(x.detach().mean())
        return self.d(x)


def parts(
    model,
    *,
    loss=lambda model, value: value,
    backward: Any = None,
    hook: Any = None,
    update: Any = None,
    factor: Any = None,
) -> dict[str, Any]:
    """The arguments of a Pipeline of ``model`` with code at one of its doors."""
    First.inside = functools.partial(backward, model) if backward else lambda: None
    for parameter in model.parameters() if hook else ():
        hook(model, parameter)

    def optimizer(named):
        made = torch.optim.SGD(named, lr=0.1, momentum=0.9)
        if update:
            made.register_step_post_hook(lambda *_: update(model, made))
        return made

    given = {"loss": lambda x, y: loss(model, F.cross_entropy(x, y)), "optimizer": optimizer}
    return given | ({"scheduler": lambda made: LambdaLR(made, lambda _: factor(model))} if factor else {})


def pipeline(model, code, *, world=None, **how):
    x = torch.randn(4, 8)
    profile = penstock.measure(penstock.trace(model, (x,)), (x,), repeats=1)
    plan = penstock.partition(profile, micro_batches=3, **{"cuts": ["mul_1"], **how})
    memory = penstock.MemoryOptions(prefetch_layers=1, writeout_layers=1)
    return penstock.Pipeline(model, plan, world=world, memory=memory, **parts(model, **code))


def batches(number=3):
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(12) % 5
    return [(torch.randn(12, 8, generator=draw), labels) for _ in range(number)]


def write(tensor):
    with torch.no_grad():
        tensor.mul_(1.5)


def on_gradient(look):
    return lambda model, parameter: parameter.register_hook(lambda gradient: look(model, parameter, gradient))


def when_added(look):
    def hook(model, parameter):
        look(model, parameter)  # torch allows no result

    return lambda model, p: p.register_post_accumulate_grad_hook(functools.partial(hook, model))


class Counts:
    """Counts its calls; what it returns moves with them."""

    def __init__(self):
        self.calls = 0

    def __call__(self, value):
        self.calls += 1
        return value * (1 + self.calls / 100)


COUNTS: dict[nn.Module, Counts] = collections.defaultdict(Counts)


def count_together(model, parameter):
    parameter.register_hook(COUNTS[model])


AWAY = {"parameters_tier": "host"}
REFUSED = {
    "loss, buffer": ({"loss": lambda m, v: v * m.early}, {}, "loss reads early"),
    "loss, data of a buffer": ({"loss": lambda m, v: v * m.early.data}, {}, "loss reads early"),
    "loss, offloaded": ({"loss": lambda m, v: v * m.b.weight.detach().norm()}, AWAY, "loss reads b.weight"),
    "loss, offloaded data": ({"loss": lambda m, v: v + m.b.weight.data.sum()}, AWAY, "loss reads b.weight"),
    "loss writes": ({"loss": lambda m, v: (write(m.d.bias), v)[1]}, {}, "loss writes to d.bias"),
    "backward, buffer": ({"backward": lambda m: m.early + 1}, {}, "backward reads early"),
    "backward, another stage": ({"backward": lambda m: m.d.weight.sum()}, {}, "backward reads d.weight"),
    "backward writes": ({"backward": lambda m: write(m.constant)}, {}, "backward writes to constant"),
    "backward draws": ({"backward": lambda m: torch.rand(1)}, {}, "backward draws"),
    "backward draws in Python": ({"backward": lambda m: random.random()}, {}, "backward draws"),
    "backward draws in NumPy": ({"backward": lambda m: numpy.random.rand()}, {}, "backward draws"),
    "hook, another stage": ({"hook": on_gradient(lambda m, p, g: g * m.d.bias.norm())}, {}, "reads d.bias"),
    "hook, offloaded": ({"hook": on_gradient(lambda m, p, g: g + m.a.weight.mean())}, AWAY, "reads a.weight"),
    "hook draws": ({"hook": on_gradient(lambda m, p, g: g + torch.randn_like(g))}, {}, "backward draws"),
    "hooks count": ({"hook": count_together}, {}, r"counts in hooks.*calls \(\d, then \d"),
    "hook updates": ({"hook": when_added(lambda m, p: p.data.sub_(p.grad))}, {}, "backward writes to"),
    "update, another stage": ({"update": lambda m, o: [p + 1 for p in m.parameters()]}, {}, "update reads"),
    "scheduler": ({"factor": lambda m: float(m.d.bias.detach().norm())}, {}, "update reads d.bias"),
}  # fmt: skip
"""Code, how the pipeline is planned, and what its refusal names."""


@pytest.mark.parametrize(("code", "how", "named"), REFUSED.values(), ids=[*REFUSED])
def test_what_the_schedule_would_show_otherwise_is_refused_by_name(code, how, named):
    torch.manual_seed(0)
    pipe = pipeline(Net(), code, **how)
    with pytest.raises(penstock.PenstockError, match=named):
        pipe.step(*batches(1)[0])


ALLOWED = {
    "loss, own buffer": {"loss": lambda m, v: v * m.late.detach().clone()},
    "loss, constant": {"loss": lambda m, v: v * m.constant},
    "loss, parameter": {"loss": lambda m, v: v * m.a.weight.detach().norm()},
    "backward, own parameter": {"backward": lambda m: m.a.weight.sum()},
    "loss counts": {"loss": lambda m, v: COUNTS[m](v)},
    "hooks count": {"hook": lambda m, p: p.register_hook(Counts())},
    "hook scales": {"hook": on_gradient(lambda m, p, g: g * p.detach().norm())},
    "hook clamps": {"hook": when_added(lambda m, p: p.grad.clamp_(-0.01, 0.01))},
    "update clamps": {"update": lambda m, o: [p.data.clamp_(-0.2, 0.2) for p in o.param_groups[0]["params"]]},
    "scheduler": {"factor": lambda m: 0.5},
    "scheduler counts": {"factor": lambda m: COUNTS[m](0.5)},
}  # fmt: skip


HALVES = ("hooks count", "hook scales", "hook clamps")  # what a backward in halves runs otherwise
WAYS = [pytest.param(code, "1f1b", id=name) for name, code in ALLOWED.items()]
WAYS += [
    pytest.param(code, "zb_h1", id=f"{name}, halves", marks=() if name in HALVES else pytest.mark.slow)
    for name, code in ALLOWED.items()
]


@pytest.mark.parametrize(("code", "schedule"), WAYS)
def test_what_is_the_same_at_any_moment_trains_to_the_bits_of_the_plain_loop(code, schedule):
    torch.manual_seed(0)
    model, given = Net(), batches()
    plain = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = [each["loss"] for each in plain_loop(plain, given, micro_batches=3, **parts(plain, **code))]
    pipe = pipeline(model, code, schedule=schedule)
    torch.manual_seed(1)
    assert [pipe.step(*batch).loss for batch in given] == expected
    assert all(same_bits(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def step_in_threads(model, code, **how):
    """A step of two ranks, each with a copy of the model."""

    def train(world):
        with contextlib.closing(pipeline(copy.deepcopy(model), code, world=world, **how)) as pipe:
            pipe.step(*batches(1)[0])

    penstock.in_threads(train, ranks=2)


def test_a_parameter_of_another_rank_is_refused_by_name():
    with pytest.raises(penstock.PenstockError, match=r"loss reads a\.weight .* which another rank trains"):
        step_in_threads(Net(), ALLOWED["loss, parameter"])


@pytest.mark.parametrize("code", ["loss counts", "hooks count"])
def test_numbers_that_replicas_count_apart_are_refused_by_name(code):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5))
    with pytest.raises(penstock.PenstockError, match=r"calls \(\d, then \d\), and replicas do so apart"):
        step_in_threads(model, ALLOWED[code], cuts=None, stages=1, replicas=2, exact=True)


def test_a_step_is_watched_for_a_new_shape_of_a_micro_batch_and_not_for_known_ones_put_together_anew():
    reads = False
    torch.manual_seed(0)
    pipe = pipeline(Net(), {"loss": lambda m, v: v * m.early.clone() if reads else v})
    x, y = batches(1)[0]
    for samples in (12, 10):  # micro-batches of 4, and of 4, 3 and 3
        pipe.step(x[:samples], y[:samples])
    reads = True
    pipe.step(x[:9], y[:9])
    with pytest.raises(penstock.PenstockError, match="loss reads early"):
        pipe.step(x[:6], y[:6])


def test_the_first_step_of_a_replica_without_a_share_is_watched():
    guards, run = pipeline(Net(), {}).guards, {}
    step: Any = types.SimpleNamespace(micro_batches={}, number=1)
    assert guards.watched(step, run) is not run
    guards.ran()
    assert guards.watched(step, run) is run


@pytest.mark.parametrize("again", ["a load", "the hundredth step"])
def test_steps_are_watched_again_after(again):
    reads = False
    torch.manual_seed(0)
    pipe = pipeline(Net(), {"loss": lambda m, v: v * m.early.clone() if reads else v})
    x, y = batches(1)[0]
    pipe.step(x, y)
    reads = True
    pipe.step(x, y)  # nobody looks
    if again == "a load":
        pipe.load_state_dict(pipe.state_dict())
    else:
        pipe.num_steps = 100
    with pytest.raises(penstock.PenstockError, match="loss reads early"):
        pipe.step(x, y)


def own(norm, what):
    layers = {"first": nn.Linear(6, 8), "norm": norm, "what": what}
    return model_of(lambda self, x: self.what(self.norm, self.first(x)), **layers)


class Normed(nn.BatchNorm1d):
    pass


def check(model):
    plan, model, x = planned(model)
    check_replicated(plan, model, penstock.trace(model, (x[:3],)))


@pytest.mark.parametrize(
    ("norm", "what"),
    [
        (nn.BatchNorm1d, lambda norm, x: norm(x) + norm.running_mean),
        (nn.BatchNorm1d, lambda norm, x: norm(x - norm.running_mean)),
        (nn.BatchNorm1d, lambda norm, x: F.batch_norm(x, norm.running_mean, norm.running_var, training=True)),
        (Normed, lambda norm, x: norm(x)),
    ],
)
def test_statistics_that_a_forward_uses_by_itself_are_refused(norm, what):
    with pytest.raises(penstock.PlanError, match=r"a forward that uses norm\.\w+ by itself"):
        check(own(norm(8), what))


def test_statistics_that_are_only_read_where_nobody_writes_them_are_as_good_as_any_buffer():
    check(own(nn.BatchNorm1d(8).eval(), lambda norm, x: norm(x) + norm.running_mean))


@pytest.mark.parametrize("exact", [False, True])
def test_gradients_of_two_parameters_in_one_memory_are_refused(exact):
    def forward(self, x):
        return self.first(x) * (self.p.view(8) + self.q.view(8))  # autograd gives both the same gradient

    p, q = (nn.Parameter(torch.ones(shape)) for shape in ((2, 4), (4, 2)))
    with pytest.raises(penstock.StageError, match=r"gave p and q one tensor for both.*q\.clone\(\)"):
        trained(model_of(forward, first=nn.Linear(6, 8), p=p, q=q), exact=exact)


@pytest.mark.parametrize(("exact", "later"), [(False, True), (True, False)])
def test_a_parameter_that_some_replicas_froze_is_refused(exact, later):
    def freeze(rank, step, model):
        model.first.weight.requires_grad_(rank == 0 or step < later)

    with pytest.raises(penstock.PenstockError, match=r"first\.weight of stage 0 requires a gradient on some"):
        trained(own(nn.Tanh(), lambda norm, x: norm(x)), exact=exact, before=freeze)


@pytest.mark.parametrize(("exact", "sharded"), [(False, False), (False, True), (True, True)])
def test_frozen_parameters_of_eight_bits_are_left_where_they_are(exact, sharded):
    model: Any = own(nn.Tanh(), lambda norm, x: norm(x) * norm.scale.float())
    model.norm.scale = nn.Parameter(torch.rand(8).to(torch.float8_e4m3fn), requires_grad=False)
    assert trained(model, exact=exact, sharded=sharded) == [2, 2]


def test_more_replicas_than_could_ever_be_are_refused_before_they_are_listed():
    with pytest.raises(penstock.PlanError, match="found 1000000000000 replicas and micro_batches=4"):
        planned(nn.Linear(6, 8), replicas=10**12)


def planned(model, **options):
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    options = {"replicas": 2, **options}
    return penstock.partition(profile_of(model, (x[:3],)), stages=1, micro_batches=4, **options), model, x


def trained(model, *, before=lambda rank, step, model: None, **options):
    """Number of steps that each of two threads was trained."""
    plan, _, x = planned(model, **options)
    models = [copy.deepcopy(model) for _ in range(2)]

    def train(world):
        pipe = penstock.Pipeline(
            models[world.rank], plan, loss=F.mse_loss, optimizer=torch.optim.SGD, world=world, deadline=30
        )
        for step in range(2):
            before(world.rank, step, models[world.rank])
            pipe.step(x, torch.zeros(12, 8))
        pipe.close()
        return pipe.num_steps

    return penstock.in_threads(train, ranks=2, deadline=30)


# The group of a replica without others.
ALONE: Any = types.SimpleNamespace(begin_to_add_up=lambda numbers, at: None, finish=lambda *_, at: None)


def networks() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    return model, copy.deepcopy(model)


def add_up(model, plain, make_input):
    """Forwards of a model leave its statistics, and their exchange gives it those of the plain one."""
    statistics = RunningStatistics(batch_norms(dict(model.named_modules())), exact=True)
    for _ in range(10):
        batch = [make_input() for _ in range(3)]
        before = {key: value.clone() for key, value in model.state_dict().items()}
        for number, x in enumerate(batch):
            with statistics.forward(number):
                assert same_bits(model(x), plain(x))
        assert all(same_bits(value, before[key]) for key, value in model.state_dict().items())
        statistics.exchange(ALONE, 3)
        statistics.begin()
        for key, value in plain.state_dict().items():
            assert same_bits(model.state_dict()[key], value), key


SHAPES = {
    "2d": (nn.BatchNorm1d, (9, 64), torch.contiguous_format),
    "3d": (nn.BatchNorm1d, (4, 64, 5), torch.contiguous_format),
    "4d": (nn.BatchNorm2d, (3, 64, 6, 6), torch.contiguous_format),
    "channels_last": (nn.BatchNorm2d, (3, 64, 6, 6), torch.channels_last),
    "channels_last_3d": (nn.BatchNorm3d, (3, 64, 3, 2, 4), torch.channels_last_3d),
}


@pytest.mark.parametrize("momentum", [0.1, 1 / 3, None])
@pytest.mark.parametrize("of_norm", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_set_aside_adds_up_to_the_plain_statistics(momentum, of_norm, shape):
    """The rule by which torch rounds, for every kind of input that exact replicas take."""
    kind, size, layout = SHAPES[shape]
    for dtype in {of_norm, torch.bfloat16 if of_norm == torch.float32 else of_norm}:
        model = kind(64, momentum=momentum).to(of_norm)
        add_up(
            model,
            copy.deepcopy(model),
            lambda dtype=dtype: (torch.randn(size) + 0.2).to(dtype).to(memory_format=layout),
        )


@pytest.mark.parametrize("shared", [["running_mean", "running_var"], ["num_batches_tracked"]], ids="+".join)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_norms_that_share_a_buffer_add_to_it_one_after_the_other(shared, momentum):
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.BatchNorm2d(3, momentum=momentum) for _ in range(3)))
    for name in shared:
        setattr(model[2], name, getattr(model[0], name))
    add_up(model, copy.deepcopy(model), lambda: torch.randn(3, 3, 6, 6))


def test_a_frozen_norm_reads_its_own_and_is_left_alone():
    model, plain = networks()
    for one in (model, plain):
        one[2].eval()
        one[2].running_mean += 1
    statistics = RunningStatistics(batch_norms(dict(model.named_modules())))
    x = torch.randn(3, 3, 6, 6)
    with statistics.forward(0):
        assert same_bits(model(x), plain(x))
    statistics.exchange(ALONE, 1)
    assert all(same_bits(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda m: m(torch.randn(3, 6, 6, 6)[:, ::2]),
            r"how 0 adds them for an input of strides .* not known",
        ),
        (lambda m: m(torch.randn(3, 3, 6, 6).half()), r"how 0 adds .*float16"),
        (lambda m: m[0](m[0](torch.randn(3, 3, 6, 6))), "runs once in a forward, and 0 ran twice"),
    ],
)
def test_a_refused_forward_leaves_the_model_as_it_was(use, message):
    model, plain = networks()
    if "float16" in message:
        model, plain = model.half(), plain.half()
    statistics = RunningStatistics(batch_norms(dict(model.named_modules())), exact=True)
    with pytest.raises(penstock.StageError, match=message), statistics.forward(0):
        use(model)
    assert all(same_bits(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))
    assert model[0].momentum == 0.1
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


def test_a_norm_may_be_called_by_keyword_and_with_gaps_where_sums_are_not_exact():
    norm, plain, x = nn.BatchNorm1d(3), nn.BatchNorm1d(3), torch.randn(4, 6)[:, ::2] + 1
    statistics = RunningStatistics({"norm": norm})
    with statistics.forward(0):
        norm(input=x)
    statistics.exchange(ALONE, 1)
    plain(x)
    torch.testing.assert_close(norm.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    "what",
    [
        lambda norm, x: norm(x) + norm.running_mean,
        lambda norm, x: norm(x) * norm.num_batches_tracked.item(),
        lambda norm, x: nn.functional.batch_norm(x, norm.running_mean, norm.running_var, training=True),
    ],
)
def test_statistics_that_a_larger_layer_uses_by_itself_are_refused(what):
    model: Any = own(nn.BatchNorm1d(8), what)
    statistics = RunningStatistics({"layer.norm": model.norm}, inside={"layer.norm"})
    refused = pytest.raises(penstock.StageError, match=r"a layer that uses layer\.norm\.\w+ by itself")
    with statistics.forward(0), refused:
        model(torch.randn(4, 6))
    model.what = lambda norm, x: norm(x.to(norm.running_mean.dtype)).view(-1, len(norm.running_var))
    plain, x = copy.deepcopy(model), torch.randn(4, 6)
    with statistics.forward(1):
        found = model(x)
    assert same_bits(found, plain(x))
