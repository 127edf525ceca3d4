"""With a guard the first NaN is refused by the name of its layer, and what is right is let through."""

import re

import pytest
import torch
from reference import same_bits
from small_pipelines import model_of, pipeline_of
from torch import nn

from penstock import PlanError, StageError

NAN, INF = float("nan"), float("inf")


BATCH = torch.randn(9, 6, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 3


def square(outputs, targets):
    return (outputs - nn.functional.one_hot(targets, 3)).square().mean()


def around_middle(self, x):
    return self.b(self.middle(torch.relu(self.a(x)) + 1))


def made(function, *, cut="add", guard=True, **settings):
    """A guarded pipeline of two stages, and its model."""
    torch.manual_seed(1)
    model = model_of(around_middle, a=nn.Linear(6, 8), b=nn.Linear(8, 3), middle=function)
    example = (BATCH[0][:3].clone(),)
    settings = {"loss": square, "optimizer": lambda named: torch.optim.SGD(named, lr=0.1)} | settings
    return pipeline_of(model, cuts=[cut], example=example, detect_anomaly=guard, **settings), model


def refusal(pipe, x=None):
    """Refusal of a step; all weights are as they were."""
    before = {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}
    with pytest.raises(StageError) as error:
        pipe.step(BATCH[0] if x is None else x, BATCH[1])
    after = pipe.state_dict()["model"]
    assert all(same_bits(before[name], after[name]) for name in before)
    return str(error.value)


def with_a_nan():
    """The batch, where one number of the second micro-batch is no number."""
    x = BATCH[0].clone()
    x[4, 2] = NAN
    return x


def too_wide(x):
    return torch.exp(x * 1000) * 0


def root_of_zero(x):
    return (x * 0).sqrt() + x


def zeros_in_place(x):
    return nn.functional.relu(x * 0, inplace=True).sqrt() + x  # behind the ReLU it is zero again


def times(number):
    return lambda outputs, targets: square(outputs, targets) * number


OFF = torch.amp.GradScaler("cpu", enabled=False)
REFUSED = [
    (too_wide, {}, "stage 1.* layer mul_1, infinite first in layer exp"),
    (too_wide, {"cut": "exp"}, "stage 1.* layer mul_1, infinite first in layer exp"),
    (torch.sin, {"loss": times(NAN)}, "stage 1, forward of micro-batch 0, step 0.* not finite, found nan"),
    (torch.sin, {"loss": times(INF)}, "a loss that is not finite, found inf"),
    (zeros_in_place, {}, "in the gradient of the output of layer relu_1"),
    (root_of_zero, {"scaler": OFF}, "in the gradient of the output of layer mul;"),
]


@pytest.mark.parametrize(("function", "settings", "said"), REFUSED)
def test_what_is_not_finite_is_refused_with_its_place(function, settings, said):
    pipe, _ = made(function, **settings)
    assert re.search(said, refusal(pipe))


def test_a_nan_of_the_data_is_said_to_be_in_them():
    told = refusal(made(torch.sin)[0], with_a_nan())
    assert "stage 0, forward of micro-batch 1, step 0" in told
    assert "found 8 of 24 elements of that of layer a, NaN first in the input x; lower" in told


OF_B = "rank 0, stage 1, forward of micro-batch 0, step 1.* NaN.* found 3 of 9 elements of that of layer b"
LATER = [
    *((lambda model: model.b.weight[1].fill_(NAN), name, OF_B) for name in ("gpipe", "1f1b", "zb_h1")),
    (lambda model: model.b.weight.fill_(3e38), "1f1b", "found inf, infinite first in layer b"),
    (
        lambda model: model.b.bias.register_hook(lambda gradient: gradient * INF),
        "1f1b",
        "stage 0, update, step 1.* of 3 elements in the gradient of parameter b.bias",
    ),
]


@pytest.mark.parametrize(("spoil", "schedule", "said"), LATER)
def test_what_goes_wrong_in_the_model_is_refused_by_step_and_name_before_an_update(spoil, schedule, said):
    pipe, model = made(torch.sin, schedule=schedule)
    pipe.step(*BATCH)
    with torch.no_grad():
        spoil(model)
    assert re.search(said, refusal(pipe))


def attention(x):
    """Its mask is of infinite values."""
    return (x.unsqueeze(1) * x.unsqueeze(2)).masked_fill(torch.eye(8) > 0, -INF).softmax(2).sum(1)


def filled(x):
    """Memory that nobody wrote to yet is no result."""
    wide = torch.empty(2, *x.shape)
    wide.fill_(NAN)  # as it may be found
    whole = wide.transpose(0, 1)
    whole.copy_(x.unsqueeze(1).expand_as(whole))
    return whole[:, 1]


def late(x):
    """A look at a view of memory written to since must not reorder additions."""
    h = x * 1.7
    view = h.view(-1, 2, 4)
    h.mul_(2)
    view = view.contiguous()  # itself, and its node is made anew when somebody asks for it
    a, b = h.tanh(), h.sin()
    return a + b + view.cos().flatten(1)


@pytest.mark.parametrize("function", [attention, filled, late])
def test_what_is_right_trains_with_the_same_bits(function):
    found = []
    for guard in (False, True):
        pipe, _ = made(function, guard=guard)
        loss = torch.tensor(pipe.step(*BATCH).loss, dtype=torch.float64)
        found.append({"loss": loss} | pipe.state_dict()["model"])
    assert all(same_bits(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize(("schedule", "first"), [("1f1b", False), ("1f1b", True), ("zb_h1", False)])
@pytest.mark.parametrize(("cut", "stage"), [("add", 1), ("sqrt", 0)])
def test_the_first_gradient_that_is_not_finite_is_named(schedule, first, cut, stage):
    pipe, _ = made(root_of_zero, cut=cut, schedule=schedule, weights_first=first)
    told = refusal(pipe)
    assert f"stage {stage}, backward" in told
    assert "of micro-batch 0, step 0: detect_anomaly=true refuses NaN and infinite gradients, found" in told
    assert "24 infinite of 24 elements in the gradient of the output of layer mul; lower" in told


@pytest.mark.parametrize("scaler", [2.0**127, torch.amp.GradScaler("cpu", init_scale=2.0**127)])
def test_a_loss_scale_may_overflow_and_outputs_are_checked_still(scaler):
    pipe, _ = made(torch.sin, loss=times(1000), scaler=scaler)
    before = pipe.state_dict()["model"]["b.weight"].clone()
    pipe.step(*BATCH)
    assert same_bits(before, pipe.state_dict()["model"]["b.weight"])  # skipped
    assert "layer a, NaN first in the input x" in refusal(pipe, with_a_nan())


def test_gradients_of_float16_may_overflow_without_a_scale_too():
    pipe, _ = made(root_of_zero, autocast=torch.float16)
    assert pipe.step(*BATCH).loss < INF
    pipe, _ = made(torch.sin, autocast=torch.float16)
    assert "layer a, NaN first in the input x" in refusal(pipe, with_a_nan())


def test_a_guard_is_true_or_false_and_without_one_nothing_is_refused():
    pipe, _ = made(torch.sin, guard=False)
    report = pipe.step(with_a_nan(), BATCH[1])
    assert report.loss != report.loss
    with pytest.raises(PlanError, match="detect_anomaly is True or False, found 'yes'"):
        made(torch.sin, guard="yes")  # pyright: ignore[reportArgumentType]
