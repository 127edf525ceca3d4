"""Loss scales and autocast: the bits of the plain loop with its GradScaler, wherever an overflow is found."""

import copy
import dataclasses
import itertools

import pytest
import torch
from cases import OPTIMIZERS, Case, loud, on_ranks, parameters, plan_of
from law import differences, rank_differences
from reference import same_bits
from torch import nn
from zoo import build, cross_entropy

import penstock
from penstock.pipeline.weights.scale import Dynamic, Static, Unscaled, scale_of

UPDATING_ALL = [name for name in OPTIMIZERS if name != "no_biases"]  # what has no optimizer stays scaled
HUGE = (2.0**125, 2)  # the first step overflows, and again each time that two went well
HALF = torch.float16

CASES = [
    *(
        Case(model="mlp", cuts=stages, schedule=schedule, optimizer=optimizer, scaler=HUGE, steps=7)
        for (stages, schedule), optimizer in zip(
            itertools.product((1, 2, 3, 4), ("gpipe", "1f1b")), itertools.cycle(UPDATING_ALL)
        )
    ),
    Case(model="mlp", cuts="every", scaler=HUGE, steps=7, scheduler=True, clip=None, tier="packed"),
    Case(model="mlp", cuts=3, scaler=1024.0, scheduler=True),
    Case(model="mlp", cuts=3, scaler=2.0**127, scheduler=True),  # nothing is ever updated
    Case(model="mlp", cuts=3, autocast=HALF, scaler=(2.0**16, 1), steps=9, micro_batches=4),
    Case(model="tied", cuts="every", autocast=HALF, scaler=(2.0**16, 1), steps=4),
    Case(
        model="gated", cuts=3, autocast=torch.bfloat16, schedule="gpipe", optimizer="adamw", codec="exponent"
    ),
    Case(model="gpt_tied", cuts=3, autocast=torch.bfloat16, clip=0.1),
    Case(model="gpt_tied", cuts=4, autocast=HALF, scaler=(2.0**16, 1), steps=4, optimizer="adam"),
    Case(model="gpt_gelu_dropout", cuts=2, autocast=HALF, scaler=4096.0, extra_in_flight=1, steps=2),
    Case(model="residual", cuts=3, autocast=torch.bfloat16, steps=2),
    Case(model="dag1", cuts=4, autocast=HALF, scaler=(2.0**16, 1), steps=3),
    Case(model="dag2", cuts=4, autocast=torch.bfloat16, scaler=HUGE, steps=3),
]


@pytest.mark.parametrize("case", parameters(CASES))
def test_training_has_the_bits_of_the_plain_loop(case):
    assert differences(case) == []


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    [
        Case(model="mlp", cuts=6, ranks=3, scaler=HUGE, steps=7, scheduler=True),
        Case(model="mlp", cuts=["_0"], scaler=(2.0**127, 1), clip=None, autocast=HALF, steps=4),
        Case(model="mlp", cuts=2, scaler=2.0**127, optimizer="adam"),
    ],
    ids=str,
)
def test_ranks_skip_and_move_alike(case, ranks, tmp_path):
    assert on_ranks(ranks, rank_differences, case, tmp_path) == []


class Modulus(nn.Module):
    """From complex to real."""

    def forward(self, x):
        return x.abs()


def pipeline(scaler, **settings):
    plan, _ = plan_of(Case(model="mlp", cuts=3))
    model, batches = build("mlp")
    settings = {"loss": loud, "optimizer": OPTIMIZERS["adamw"], **settings}
    return penstock.Pipeline(model, plan, scaler=scaler, **settings), batches[0]


def test_the_scaler_that_was_given_tells_the_scale():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**125, growth_interval=2, backoff_factor=0.25)
    pipe, batch = pipeline(scaler)
    scales = []
    for _ in range(6):
        pipe.step(*batch)
        scales.append(scaler.get_scale())
    assert scales == [2.0**123, 2.0**123, 2.0**124, 2.0**124, 2.0**125, 2.0**123]


def test_a_scale_that_is_set_between_two_steps_counts():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    pipe, batch = pipeline(scaler)
    pipe.step(*batch)
    scaler.load_state_dict(scaler.state_dict() | {"scale": 64.0})
    pipe.step(*batch)
    assert scaler.get_scale() == 128.0


def test_a_skipped_update_leaves_weights_state_and_scheduler():
    pipe, batch = pipeline(2.0**127, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5))
    before = copy.deepcopy(pipe.state_dict())
    pipe.step(*batch)
    after = pipe.state_dict()
    assert pipe.update.skipped
    assert all(torch.equal(after["model"][name], tensor) for name, tensor in before["model"].items())
    assert all(kept["state"] == {} and kept["group"]["lr"] == 1e-3 for kept in after["optimizer"].values())
    assert after["step"] == 1


def test_a_state_brings_the_scale_along():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**125, growth_interval=3)
    pipe, batch = pipeline(scaler)
    pipe.step(*batch)
    pipe.step(*batch)
    state = copy.deepcopy(pipe.state_dict())
    assert state["scaler"]["scale"] == 2.0**124
    assert state["scaler"]["_growth_tracker"] == 1
    other = torch.amp.GradScaler("cpu", init_scale=8.0)
    resumed, _ = pipeline(other)
    resumed.load_state_dict(state)
    assert other.state_dict() == scaler.state_dict()
    assert resumed.step(*batch).loss == pipe.step(*batch).loss
    assert other.state_dict() == scaler.state_dict()


def test_a_state_without_a_scale_is_refused_where_one_moves():
    pipe, _ = pipeline(1024.0)
    state = pipe.state_dict()
    assert state["scaler"] is None
    with pytest.raises(penstock.PlanError, match="a GradScaler and the state has none"):
        pipeline(torch.amp.GradScaler("cpu"))[0].load_state_dict(state)
    pipeline(None)[0].load_state_dict(state)


def test_with_double_buffered_weights_a_batch_keeps_the_scale_it_began_with():
    """Batch t is scaled as after max(0, t - 1) updates: it begins before the batch ahead of it updates."""
    scale = Dynamic(torch.amp.GradScaler("cpu", init_scale=16.0, backoff_factor=0.5, growth_interval=1))
    one, used, divided = torch.ones(()), [], []
    for batch in range(5):
        begun = float(scale.apply(one, batch))  # ahead of the update of batch - 1
        if batch:
            divided.append(torch.ones(3))
            scale.unscale(divided[-1:])
            scale.update(overflow=batch == 2)  # of batch 1
        assert float(scale.apply(one, batch)) == begun
        used.append(begun)
    assert used == [16.0, 16.0, 32.0, 16.0, 32.0]
    assert [float(1 / g[0]) for g in divided] == used[:-1]
    scale.begin()
    assert float(scale.apply(one, 0)) == 64.0


def test_double_buffered_weights_have_a_global_clip_and_a_moving_scale():
    """A replay of the rule: batch t runs with weights and scale after max(0, t - 1) updates."""
    plan, _ = plan_of(Case(model="mlp", cuts=3, micro_batches=3))
    plan = dataclasses.replace(plan, weights="double_buffered")
    model, batches = build("mlp", steps=9)
    replayed, _ = build("mlp")
    scaler = torch.amp.GradScaler("cpu", init_scale=HUGE[0], growth_interval=HUGE[1])
    settings = {"loss": loud, "optimizer": OPTIMIZERS["nesterov"]}
    pipe = penstock.Pipeline(model, plan, clip=1.0, scaler=scaler, **settings)
    for batch in batches:
        pipe.step(*batch)
    pipe.drain()
    optimizer = settings["optimizer"](list(replayed.named_parameters()))
    after, good = [(copy.deepcopy(replayed), HUGE[0])], 0
    for number, (inputs, targets) in enumerate(batches):
        seen, scale = after[max(0, number - 1)]
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
    assert isinstance(scale_of(torch.amp.GradScaler("cpu", enabled=False)), Unscaled)
    assert isinstance(scale_of(None), Unscaled)
    assert isinstance(scale_of(2.0), Static)
    pipe, batch = pipeline(torch.amp.GradScaler("cpu", enabled=False))
    assert pipe.step(*batch).loss == pipeline(None)[0].step(*batch).loss


@pytest.mark.parametrize("scaler", [0, -1.0, float("inf"), float("nan"), True, "dynamic"])
def test_a_scale_that_is_none_is_refused(scaler):
    with pytest.raises(penstock.PlanError, match=r"scaler is a torch\.amp\.GradScaler, or a number above 0"):
        pipeline(scaler)


@pytest.mark.parametrize("scaler", [1024.0, torch.amp.GradScaler("cpu")])
def test_parameters_of_float16_are_refused_as_by_the_grad_scaler(scaler):
    plan, _ = plan_of(Case(model="mlp", cuts=3, dtype=HALF))
    model, _ = build("mlp", HALF)
    with pytest.raises(penstock.PlanError, match=r"1\.weight is float16; keep the parameters in float32"):
        penstock.Pipeline(model, plan, loss=cross_entropy, optimizer=OPTIMIZERS["sgd"], scaler=scaler)


@pytest.mark.parametrize("scaler", [1024.0, torch.amp.GradScaler("cpu")])
def test_complex_parameters_are_refused_as_the_grad_scaler_has_no_kernel_for_them(scaler):
    model, example = (
        nn.Sequential(nn.Linear(6, 8, dtype=torch.complex64), Modulus()),
        (torch.randn(3, 6) + 0j,),
    )
    profile = penstock.measure(penstock.trace(model, example), example, repeats=1)
    plan = penstock.partition(profile, stages=1, micro_batches=2)
    settings = {"loss": cross_entropy, "optimizer": OPTIMIZERS["sgd"]}
    with pytest.raises(
        penstock.PlanError, match=r"real gradients only, and 0\.weight is complex; give scaler"
    ):
        penstock.Pipeline(model, plan, scaler=scaler, **settings)
    penstock.Pipeline(model.requires_grad_(False), plan, scaler=scaler, **settings)
