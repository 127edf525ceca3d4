"""Loss scales and autocast: the bits of the plain loop with its GradScaler, wherever an overflow is found."""

import copy
import dataclasses

import pytest
import torch
from cases import OPTIMIZERS, Case, loud, parameters, plan_of
from law import differences, thread_differences
from reference import same_bits
from small_pipelines import profile_of
from torch import nn
from zoo import build, cross_entropy

import penstock
from penstock.pipeline.optimizer.scale import Scale, Static, scale_of

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


class Modulus(nn.Module):
    """From complex to real."""

    def forward(self, x):
        return x.abs()


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
    assert isinstance(scale_of(torch.amp.GradScaler("cpu", enabled=False)), Scale)
    assert isinstance(scale_of(None), Scale)
    assert isinstance(scale_of(2.0), Static)
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
    model, example = nn.Sequential(nn.Linear(6, 8, dtype=dtype), Modulus()), (torch.ones(3, 6, dtype=dtype),)
    plan = penstock.partition(profile_of(model, example), stages=1, micro_batches=2)
    settings = {"loss": cross_entropy, "optimizer": OPTIMIZERS["sgd"], "scaler": scaler}
    with pytest.raises(penstock.PlanError, match=told):
        penstock.Pipeline(model, plan, **settings)
    penstock.Pipeline(model.requires_grad_(False), plan, **settings)
