"""Pipeline: what a person who writes Python sees, in one process."""

import copy
import dataclasses
from itertools import pairwise

import pytest
import torch
from cases import OPTIMIZERS, Case, pipeline_of, plan_of
from reference import plain_loop, same_bits
from torch import nn
from torch.nn import functional as F
from zoo import build, cross_entropy

import penstock


def made(name="mlp", **settings):
    case = Case(model=name, **settings)
    plan, _ = plan_of(case)
    model, batches = build(name, case.dtype)
    return pipeline_of(case, plan, model), model, batches


def small(loss=cross_entropy, model=None, example=None, **settings):
    """A pipeline of any small model, two stages."""
    model = model or nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    example = example or (torch.randn(4, 6),)
    plan = penstock.partition(
        penstock.measure(penstock.trace(model, example), example, repeats=1), stages=2, micro_batches=3
    )
    return penstock.Pipeline(model, plan, loss=loss, optimizer=OPTIMIZERS["sgd"], **settings)


def test_evaluate_is_the_plain_model_in_eval_mode_and_training_goes_on():
    pipe, model, batches = made("resnet18", cuts=3)
    plain = copy.deepcopy(model)
    loop = plain_loop(
        plain, batches, loss=cross_entropy, optimizer=OPTIMIZERS["sgd"], micro_batches=3, clip=1.0
    )
    for (x, y), _ in zip(batches, loop, strict=True):
        pipe.step(x, y)
        with torch.no_grad():
            expected = copy.deepcopy(plain).eval()(x)
        assert same_bits(pipe.evaluate(x), expected)
    assert all(
        same_bits(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
    )


def test_a_model_in_eval_mode_takes_other_ways_and_still_evaluates():
    class Ways(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            y = torch.relu(self.a(x))
            if self.training:
                y = F.dropout(y + 1, 0.5, self.training)
            return self.c(torch.relu(self.b(y)))

    model = Ways()
    pipe = small(model=model)
    x, y = torch.randn(7, 6), torch.randint(3, (7,))
    pipe.step(x, y)
    with torch.no_grad():
        assert same_bits(pipe.evaluate(x), copy.deepcopy(model).eval()(x))


def test_bytes_are_counted_with_headers_and_unpacked():
    pipe, _, batches = made("mlp", cuts=["_2"], micro_batches=1, codec="raw")
    report = pipe.step(*batches[0])
    assert report.bytes_raw == 2 * 11 * 33 * 4
    assert report.bytes_sent == 2 * (11 * 33 * 4 + penstock.header_bytes(2))
    assert (report.num_samples, report.step) == (11, 0)


def test_zero_value_frames_are_smaller_after_a_relu():
    pipe, _, batches = made("mlp", cuts=["_2"])
    first = pipe.step(*batches[0]).stages[0]
    assert first.forward_sent < first.forward_raw


def test_a_batch_smaller_than_the_micro_batches_runs_one_sample_each():
    pipe, model, _ = made("mlp", cuts=3, micro_batches=8)
    x, y = torch.randn(3, 3, 8, 8), torch.randint(10, (3,))
    plain = copy.deepcopy(model)
    expected = next(
        iter(
            plain_loop(
                plain, [(x, y)], loss=cross_entropy, optimizer=OPTIMIZERS["sgd"], micro_batches=3, clip=1.0
            )
        )
    )
    assert pipe.step(x, y).loss == expected["loss"]
    assert all(same_bits(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_one_sample_micro_batches_change_identities_and_not_the_bits():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            y = self.a(x).view(-1, 2, 3).transpose(0, 1)
            z = y.contiguous()  # does nothing for one sample
            rows = self.b(torch.tanh(z).transpose(0, 1).reshape(-1, 6))  # tied: its value gets another number
            return self.c(rows + self.b(y.transpose(0, 1).reshape(-1, 6)))

    torch.manual_seed(1)
    model = Turned()
    plain = copy.deepcopy(model)
    example = (torch.randn(2, 6),)
    profile = penstock.measure(penstock.trace(model, example), example, repeats=1)
    plan = penstock.partition(profile, cuts=["contiguous", "tanh", "b"], micro_batches=3)
    pipe = penstock.Pipeline(model, plan, loss=cross_entropy, optimizer=OPTIMIZERS["sgd"])
    batch = torch.randn(4, 6), torch.randint(3, (4,))  # 2, 1, 1
    expected = next(
        iter(plain_loop(plain, [batch], loss=cross_entropy, optimizer=OPTIMIZERS["sgd"], micro_batches=3))
    )
    assert pipe.step(*batch).loss == expected["loss"]
    assert all(same_bits(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_weight_says_over_how_much_the_loss_is_a_mean():
    def count(targets):
        return int((targets != -100).sum())

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    plain = copy.deepcopy(model)
    x, y = torch.randn(9, 6), torch.randint(3, (9,))
    y[:4] = -100
    pipe = small(model=model, weight=count)
    loop = plain_loop(
        plain, [(x, y)], loss=cross_entropy, optimizer=OPTIMIZERS["sgd"], micro_batches=3, weight=count
    )
    y[2] = 1
    assert pipe.step(x, y).loss == next(iter(loop))["loss"]
    assert all(same_bits(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_inputs_by_position_and_by_name():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 3), nn.Linear(5, 3)

        def forward(self, left, right):
            return torch.tanh(self.a(left)) + self.b(right)

    torch.manual_seed(1)
    one, other = Two(), Two()
    other.load_state_dict(one.state_dict())
    example = (torch.randn(4, 6), torch.randn(4, 5))
    left, right, y = torch.randn(7, 6), torch.randn(7, 5), torch.randint(3, (7,))
    by_position = small(model=one, example=example).step((left, right), y).loss
    by_name = small(model=other, example=example).step({"right": right, "left": left}, y).loss
    assert by_position == by_name
    with pytest.raises(
        penstock.PenstockError, match="the model takes the inputs left, right, as in its example, found left"
    ):
        small(model=one, example=example).step({"left": left}, y)


def test_state_goes_to_another_cut_and_goes_on_with_the_same_bits():
    pipe, model, batches = made("gpt_tied", cuts=2, optimizer="adamw")
    pipe.step(*batches[0])
    state = pipe.state_dict()
    assert state["step"] == 1
    assert list(state["model"]) == list(model.state_dict())
    other, second, _ = made("gpt_tied", cuts=4, optimizer="adamw")
    other.load_state_dict(state)
    assert pipe.step(*batches[1]).loss == other.step(*batches[1]).loss
    assert all(
        same_bits(a, b)
        for a, b in zip(model.state_dict().values(), second.state_dict().values(), strict=True)
    )


def test_a_state_of_another_model_is_refused_and_nothing_changes():
    pipe, model, _ = made("mlp")
    before = [p.detach().clone() for p in model.parameters()]
    state = pipe.state_dict()
    state["model"]["5.bias"] = torch.zeros(3)
    with pytest.raises(penstock.PenstockError, match=r"5\.bias"):
        pipe.load_state_dict(state)
    del state["model"]["5.bias"]
    with pytest.raises(penstock.PenstockError, match=r"5\.bias"):
        pipe.load_state_dict(state)
    assert all(same_bits(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_a_plan_for_another_model_is_refused():
    plan, _ = plan_of(Case(model="mlp"))
    with pytest.raises(penstock.PenstockError, match="a plan belongs to the model it was made for"):
        penstock.Pipeline(nn.Linear(192, 10), plan, loss=cross_entropy, optimizer=OPTIMIZERS["sgd"])


def test_an_unknown_schedule_is_refused_before_anything_runs():
    plan = dataclasses.replace(plan_of(Case(model="mlp"))[0], schedule="2f2b")
    with pytest.raises(penstock.PenstockError, match="2f2b"):
        penstock.Pipeline(build("mlp")[0], plan, loss=cross_entropy, optimizer=OPTIMIZERS["sgd"])


def test_an_optimizer_that_needs_all_parameters_at_once_is_refused():
    plan, _ = plan_of(Case(model="mlp"))
    with pytest.raises(penstock.PenstockError, match="LBFGS"):
        penstock.Pipeline(
            build("mlp")[0],
            plan,
            loss=cross_entropy,
            optimizer=lambda named: torch.optim.LBFGS([p for _, p in named]),
        )


def test_a_batch_whose_parts_disagree_is_refused():
    pipe, _, _ = made("mlp")
    with pytest.raises(penstock.PenstockError, match="same number of samples"):
        pipe.step(torch.randn(4, 3, 8, 8), torch.randint(10, (5,)))
    with pytest.raises(penstock.PenstockError, match="same number of samples"):
        pipe.step(torch.randn(0, 3, 8, 8), torch.randint(10, (0,)))


def test_a_micro_batch_that_batchnorm_cannot_take_is_refused_by_name():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    pipe = small(model=model)
    with pytest.raises(penstock.PenstockError, match=r"layer _1 does not take an input of shape \(1, 8\)"):
        pipe.step(torch.randn(4, 6), torch.randint(3, (4,)))  # 2, 1, 1


def test_a_layer_that_fails_is_named():
    class Leaf(nn.ReLU):
        def forward(self, input):
            assert input.max() < 100, "too large"
            return input.relu()

    Leaf.__module__ = "torch.nn.modules.made_up"  # a leaf of the trace
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), Leaf(), nn.Linear(6, 3))
    pipe = small(model=model)
    with pytest.raises(
        penstock.PenstockError,
        match=r"rank 0, stage \d, forward of micro-batch 0, step 0: layer _2: AssertionError: too large",
    ):
        pipe.step(torch.full((12, 6), 1e6), torch.randint(3, (12,)))


def test_sizes_that_cannot_be_told_without_running_are_refused():
    class Leaf(nn.ReLU):
        def forward(self, input):
            return input.relu() if input.max() < 100 else input

    Leaf.__module__ = "torch.nn.modules.made_up"

    class Squares(nn.Module):
        def forward(self, x):
            return x + torch.ones(len(x) ** 2).sum()

    parts = nn.Linear(6, 6), Leaf(), nn.Linear(6, 3)
    example = (torch.randn(4, 6),)
    pipe = small(model=nn.Sequential(*parts, Squares()), example=example)
    pipe.step(torch.randn(12, 6), torch.randint(3, (12,)))
    said = "^a micro-batch has shapes 6x6, the example had 4x6.*as far as can be told without running it"
    with pytest.raises(penstock.PenstockError, match=said):
        pipe.step(torch.randn(18, 6), torch.randint(3, (18,)))
    told = small(model=nn.Sequential(*parts), example=example)
    assert told.step(torch.randn(9, 6), torch.randint(3, (9,))).num_samples == 9


def test_the_timeline_has_every_instruction_in_order():
    pipe, _, batches = made("mlp", cuts=2)
    pipe.step(*batches[0])
    pipe.evaluate(batches[0][0])  # is no step
    spans = pipe.timeline()
    assert [f"{s.stage}{s.op}{'' if s.micro_batch is None else s.micro_batch}" for s in spans][-2:] == [
        "0U",
        "1U",
    ]
    assert len(spans) == 2 * (3 + 3 + 1)
    assert all(0 <= s.start <= s.end and 0 <= s.waiting <= s.end - s.start for s in spans)
    assert all(a.end <= b.start + 1e-9 for a, b in pairwise(spans))


def test_a_step_leaves_the_random_state_alone():
    pipe, _, batches = made("gpt_gelu_dropout")
    before = torch.get_rng_state()
    pipe.step(*batches[0])
    assert torch.equal(torch.get_rng_state(), before)


def test_layer_seed_is_the_documented_number():
    assert penstock.layer_seed(0, 0, 0, "dropout") == 12995183463595033382


def test_plans_of_steps_are_forgotten_in_the_end(monkeypatch):
    monkeypatch.setattr("penstock.pipeline.runtime.steps.KEPT", 2)
    monkeypatch.setattr("penstock.stages.tracing.shapes.KEPT", 2)
    pipe, _, _ = made("mlp", cuts=2)
    for samples in (6, 7, 8, 9, 6):
        pipe.step(torch.randn(samples, 3, 8, 8), torch.randint(10, (samples,)))
    assert (len(pipe.steps.known), len(pipe.steps.shapes.known)) == (2, 2)
