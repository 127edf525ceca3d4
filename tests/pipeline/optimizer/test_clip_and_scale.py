"""Clip and loss scale: the bits of the plain loop, whatever the dtypes and wherever the gradients lie."""

import copy
import dataclasses
import random

import pytest
import torch
from cases import OPTIMIZERS, Case, loud, parameters, plan_of
from law import differences, thread_differences
from reference import plain_loop, same_bits
from small_pipelines import model_of, profile_of
from torch import nn
from zoo import build, cross_entropy

import penstock
from penstock.pipeline.distributed.process_group import World
from penstock.pipeline.optimizer.clip import norm_together, norms
from penstock.pipeline.optimizer.scale import Scale

FLOATS = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
DTYPES = [*FLOATS, torch.complex64, torch.complex128]


def gradients_of(seed):
    """Parameters with gradients of mixed dtypes: some empty, some of one number, some missing, some not
    finite."""
    source, chosen = torch.Generator().manual_seed(seed), random.Random(seed)
    dtypes = chosen.sample(DTYPES, chosen.randint(1, 4))
    found = {}
    for i in range(chosen.randint(1, 12)):
        shape = chosen.choice([(), (0,), (1,), (7,), (33, 5)])
        parameter = nn.Parameter(torch.zeros(shape, dtype=chosen.choice(dtypes)))
        if chosen.random() < 0.85:
            parameter.grad = torch.randn(shape, generator=source, dtype=torch.float64).to(parameter.dtype)
            parameter.grad *= chosen.choice([1e-3, 1.0, 50.0])
        if parameter.numel() and parameter.grad is not None and seed % 7 == 0 and i == 2:
            parameter.grad.view(-1)[0] = chosen.choice([float("inf"), float("nan"), -float("nan")])
        found[f"p{i}"] = parameter
    return found


def clipped_otherwise(world, seeds, largest):
    """Parameters that are clipped to other bits than torch's, each rank holding its share of them."""
    bad = []
    for seed in seeds:
        ours, theirs = gradients_of(seed), gradients_of(seed)
        owner = {name: random.Random(f"{seed}{name}").randrange(world.size) for name in ours}
        mine = {name: parameter for name, parameter in ours.items() if owner[name] == world.rank}
        gradients = {name: p.grad for name, p in mine.items() if p.grad is not None}
        total = norm_together(world, norms(gradients), owner=owner, device=torch.device("cpu"))
        if total is not None:
            torch.nn.utils.clip_grads_with_norm_(mine.values(), largest, total)
        torch.nn.utils.clip_grad_norm_(theirs.values(), largest)
        bad += [(seed, name) for name, p in mine.items() if not same_bits(p.grad, theirs[name].grad)]
    return bad


@pytest.mark.parametrize("largest", [0.1, 3, 1e9])
def test_a_clip_has_the_bits_of_clip_grad_norm(largest):
    assert clipped_otherwise(World(), range(100), largest) == []


def test_ranks_clip_together_as_one_process_would():
    assert penstock.in_threads(lambda world: clipped_otherwise(world, range(60), 0.1), ranks=2) == [[], []]


class Mixed(nn.Module):
    """A body of one dtype, norms of another, and a complex layer between them."""

    def __init__(self, body, norms):
        super().__init__()
        self.dtypes = (body, norms)
        self.a, self.n = nn.Linear(24, 16).to(body), nn.LayerNorm(16).to(norms)
        self.w = nn.Parameter(torch.randn(16, 16, dtype=torch.complex64))
        self.c = nn.Linear(16, 5).to(body)

    def forward(self, x):
        body, norms = self.dtypes
        h = torch.relu(self.n(self.a(x.to(body)).to(norms)))
        h = (torch.fft.fft(h.to(torch.float32)) @ self.w).abs()
        return self.c(h.to(body)).float()


PAIRS = [((torch.bfloat16, torch.float32), 1), ((torch.bfloat16, torch.float32), 2)]
PAIRS += [((torch.float64, torch.float16), 2)]
OTHERS = zip(FLOATS[:2] + FLOATS[3:], (torch.bfloat16, torch.float64, torch.float32), strict=True)
PAIRS += [pytest.param(pair, 2, marks=pytest.mark.slow) for pair in OTHERS]


@pytest.mark.parametrize(("pair", "ranks"), PAIRS, ids=str)
def test_a_model_of_three_dtypes_trains_like_the_plain_loop(pair, ranks):
    plain = Mixed(*pair)
    models = [copy.deepcopy(plain) for _ in range(ranks)]
    profile = profile_of(plain, (torch.randn(3, 24),))
    plan = penstock.partition(profile, cuts=["n"], micro_batches=3, ranks=ranks)
    batches = [(torch.randn(9, 24), torch.randint(5, (9,))) for _ in range(3)]
    settings = {"loss": cross_entropy, "optimizer": OPTIMIZERS["sgd"], "clip": 0.1}

    def train(world):
        pipe = penstock.Pipeline(models[world.rank], plan, deadline=20, world=world, **settings)
        for x, y in batches:
            pipe.step(x, y)
        return pipe.update.named

    trained = penstock.in_threads(train, ranks=ranks)
    *_, _ = plain_loop(plain, batches, micro_batches=3, **settings)
    theirs = dict(plain.named_parameters())
    assert sum(map(len, trained)) == len(theirs)
    assert [n for own in trained for n, p in own.items() if not same_bits(p, theirs[n])] == []


HUGE = (2.0**125, 2)  # the first step overflows, and again each time that two went well
DRAINED = 5  # steps of nine
HALF = torch.float16

# What the sampled product has not: half precision, many steps, and a scale at which nothing is ever updated.
CASES = [
    Case(model="mlp", cuts="every", scaler=HUGE, steps=7, scheduler=True, clip=None, tier="packed"),
    Case(model="mlp", cuts=3, scaler=2.0**127, scheduler=True),
    # The state of a fused optimizer begins in an update that is skipped.
    Case(model="mlp", cuts=3, scaler=HUGE, optimizer="fused", steps=1),
    Case(model="mlp", cuts=3, scaler=HUGE, optimizer="fused", steps=1, parameters_tier="packed", clip=None),
    Case(model="mlp", cuts=3, scaler=HUGE, optimizer="fused", steps=1, parameters_tier="packed"),
    Case(model="mlp", cuts=3, autocast=HALF, scaler=(2.0**16, 1), steps=9, micro_batches=4),
    Case(model="gpt_tied", cuts=4, autocast=HALF, scaler=(2.0**16, 1), steps=4, optimizer="adam"),
    Case(model="gpt_gelu_dropout", cuts=2, autocast=HALF, scaler=4096.0, extra_in_flight=1, steps=2),
    Case(model="dag1", cuts=4, autocast=HALF, scaler=(2.0**16, 1), steps=3),
]
ON_RANKS = [Case(model="mlp", cuts=["_0"], scaler=(2.0**127, 1), clip=None, autocast=HALF, steps=4)]


@pytest.mark.parametrize("case", parameters(CASES))
def test_training_has_the_bits_of_the_plain_loop(case):
    assert differences(case) == []


@pytest.mark.parametrize("case", ON_RANKS, ids=str)
def test_ranks_skip_and_move_alike(case, tmp_path):
    assert thread_differences(case, tmp_path) == []


def pipeline(scaler, **settings):
    plan, _ = plan_of(Case(model="mlp", cuts=3))
    model, batches = build("mlp")
    settings = {"loss": loud, "optimizer": OPTIMIZERS["adamw"], **settings}
    return penstock.Pipeline(model, plan, scaler=scaler, **settings), batches[0]


def test_the_scaler_that_was_given_tells_the_scale_and_may_be_set_between_steps():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**125, growth_interval=2, backoff_factor=0.25)
    pipe, batch = pipeline(scaler)
    scales = []
    for _ in range(6):
        pipe.step(*batch)
        scales.append(scaler.get_scale())
    assert scales == [2.0**123, 2.0**123, 2.0**124, 2.0**124, 2.0**125, 2.0**123]
    scaler.load_state_dict(scaler.state_dict() | {"scale": 64.0, "_growth_tracker": 1})
    pipe.step(*batch)
    assert scaler.get_scale() == 128.0


def test_a_state_with_a_scale_loads_where_there_is_none():
    pipeline(None)[0].load_state_dict(pipeline(torch.amp.GradScaler("cpu"))[0].state_dict())


def test_double_buffered_weights_have_a_global_clip_and_a_moving_scale():
    """A replay of the rule: batch t since a drain runs with weights and scale after max(0, t - 1) updates."""
    plan, _ = plan_of(Case(model="mlp", cuts=3, micro_batches=3))
    plan = dataclasses.replace(plan, weights="double_buffered")
    model, batches = build("mlp", steps=9)
    replayed, _ = build("mlp")
    scaler = torch.amp.GradScaler("cpu", init_scale=HUGE[0], growth_interval=HUGE[1])
    settings = {"loss": loud, "optimizer": OPTIMIZERS["nesterov"]}
    pipe = penstock.Pipeline(model, plan, clip=1.0, scaler=scaler, **settings)
    for number, batch in enumerate(batches, start=1):
        pipe.step(*batch)
        if number in (DRAINED, len(batches)):
            pipe.drain()
    optimizer = settings["optimizer"](list(replayed.named_parameters()))
    after, good = [(copy.deepcopy(replayed), HUGE[0])], 0
    for number, (inputs, targets) in enumerate(batches):
        seen, scale = after[max(DRAINED if number >= DRAINED else 0, number - 1)]
        seen.zero_grad()
        for x, y in zip(inputs.tensor_split(3), targets.tensor_split(3), strict=True):
            (loud(seen(x.clone()), y) * (len(y) / len(targets)) * torch.tensor(scale)).backward()
        for ours, theirs in zip(replayed.parameters(), seen.parameters(), strict=True):
            ours.grad = theirs.grad / scale
        overflow = not all(p.grad.isfinite().all() for p in replayed.parameters())
        good, newest = 0 if overflow else good + 1, after[-1][1]
        if not overflow:
            torch.nn.utils.clip_grad_norm_(replayed.parameters(), 1.0)
            optimizer.step()
        newest *= 0.5 if overflow else 2.0 ** (good == HUGE[1])
        good %= HUGE[1]
        after.append((copy.deepcopy(replayed), newest))
    assert scaler.get_scale() == after[-1][1]
    assert len({scale for _, scale in after}) > 2
    for name, tensor in pipe.state_dict()["model"].items():
        assert same_bits(tensor, replayed.state_dict()[name]), name


def test_a_scaler_that_is_switched_off_is_none():
    assert not Scale(torch.amp.GradScaler("cpu", enabled=False)).checks
    assert not Scale(None).checks
    assert Scale(2.0).checks
    pipe, batch = pipeline(torch.amp.GradScaler("cpu", enabled=False))
    assert pipe.step(*batch).loss == pipeline(None)[0].step(*batch).loss


@pytest.mark.parametrize("scaler", [0, -1.0, float("inf"), float("nan"), True, "dynamic"])
def test_a_scale_that_is_none_is_refused(scaler):
    with pytest.raises(penstock.PlanError, match=r"scaler is a torch\.amp\.GradScaler, or a number above 0"):
        pipeline(scaler)


@pytest.mark.parametrize("scaler", [1024.0, torch.amp.GradScaler("cpu")])
@pytest.mark.parametrize(
    ("dtype", "told"),
    [
        (HALF, r"0\.weight is float16; keep the parameters in float32"),
        (torch.complex64, r"real gradients only, and 0\.weight is complex"),
    ],
    ids=str,
)
def test_parameters_that_a_grad_scaler_has_no_kernel_for_are_refused_unless_frozen(dtype, told, scaler):
    modulus, example = model_of(lambda self, x: x.abs()), (torch.ones(3, 6, dtype=dtype),)
    model = nn.Sequential(nn.Linear(6, 8, dtype=dtype), modulus)
    plan = penstock.partition(profile_of(model, example), stages=1, micro_batches=2)
    settings = {"loss": cross_entropy, "optimizer": OPTIMIZERS["sgd"], "scaler": scaler}
    with pytest.raises(penstock.PlanError, match=told):
        penstock.Pipeline(model, plan, **settings)
    penstock.Pipeline(model.requires_grad_(False), plan, **settings)
