"""Models that replicas would train otherwise than one rank, and their running statistics, bit for bit."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference import same_bits
from small_pipelines import model_of, profile_of
from torch import nn
from torch.nn import functional as F

import penstock
from penstock.compression.errors import StageError
from penstock.pipeline.runtime.replicas import check_replicated
from penstock.pipeline.runtime.running_statistics import RunningStatistics, batch_norms


class Own(nn.Module):
    def __init__(self, norm, what):
        super().__init__()
        self.first, self.norm, self.what = nn.Linear(6, 8), norm, what

    def forward(self, x):
        return self.what(self.norm, self.first(x))


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
        check(Own(norm(8), what))


def test_statistics_that_are_only_read_where_nobody_writes_them_are_as_good_as_any_buffer():
    check(Own(nn.BatchNorm1d(8).eval(), lambda norm, x: norm(x) + norm.running_mean))


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
        trained(Own(nn.Tanh(), lambda norm, x: norm(x)), exact=exact, before=freeze)


@pytest.mark.parametrize(("exact", "sharded"), [(False, False), (False, True), (True, True)])
def test_frozen_parameters_of_eight_bits_are_left_where_they_are(exact, sharded):
    model = Own(nn.Tanh(), lambda norm, x: norm(x) * norm.scale.float())
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
ALONE: Any = SimpleNamespace(begin_to_add_up=lambda numbers, at: None, finish=lambda *_, at: None)


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
    with pytest.raises(StageError, match=message), statistics.forward(0):
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
    model: Any = Own(nn.BatchNorm1d(8), what)
    statistics = RunningStatistics({"layer.norm": model.norm}, inside={"layer.norm"})
    refused = pytest.raises(StageError, match=r"a layer that uses layer\.norm\.\w+ by itself")
    with statistics.forward(0), refused:
        model(torch.randn(4, 6))
    model.what = lambda norm, x: norm(x.to(norm.running_mean.dtype)).view(-1, len(norm.running_var))
    plain, x = copy.deepcopy(model), torch.randn(4, 6)
    with statistics.forward(1):
        found = model(x)
    assert same_bits(found, plain(x))
