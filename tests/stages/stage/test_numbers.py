"""Python numbers that cross a cut arrive as they are in that micro-batch, whatever they were when traced."""

import copy
import enum
import math
import struct

import numpy
import pytest
import torch
from cases import OPTIMIZERS
from reference import plain_loop, same_bits
from torch import fx, nn
from zoo import cross_entropy

import penstock

NOW: list = [1]  # what the layer `told` returns


@fx.wrap
def told(hidden):
    return NOW[0]


@fx.wrap
def times(hidden, number):
    """Every bit of a number's value and type shows in the result."""
    SEEN.append((type(number), number))
    return hidden if isinstance(number, int) and number > TOO_LONG // 2 else hidden * number


SEEN: list = []
TOO_LONG = 2**64


class Net(nn.Module):
    """A number is made on one stage, passes a second and is read on a third."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.end = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.a(x)
        number = told(hidden)
        return self.end(times(torch.tanh(self.b(hidden)), number))


def pipe_of(first, *, ranks=None):
    NOW[0] = first
    torch.manual_seed(3)
    model, example = Net(), (torch.randn(3, 6),)
    profile = penstock.measure(penstock.trace(model, example), example, repeats=1)
    cuts = ["told", "b"] if ranks is None else ["b"]
    plan = penstock.partition(profile, cuts=cuts, micro_batches=3, ranks=ranks)
    plain = copy.deepcopy(model)
    pipe = penstock.Pipeline(model, plan, loss=cross_entropy, optimizer=OPTIMIZERS["sgd"], deadline=30)
    return pipe, model, plain


def batch():
    torch.manual_seed(5)
    return torch.randn(9, 6), torch.randint(3, (9,))


def run(first, *rest, ranks=None):
    """Steps of a pipeline traced with ``first`` and of the plain loop, with other numbers at every step."""
    pipe, _, plain = pipe_of(first, ranks=ranks)
    numbers = [first, *rest]
    loop = plain_loop(
        plain, [batch()] * len(numbers), loss=cross_entropy, optimizer=OPTIMIZERS["sgd"], micro_batches=3
    )
    found = []
    for NOW[0] in numbers:
        ours, expected = pipe.step(*batch()), next(loop)
        if ours.loss != expected["loss"]:
            found.append(f"{NOW[0]}: loss {ours.loss}, {expected['loss']}")
    state = pipe.state_dict()["model"]
    if pipe.rank == 0:
        found += [name for name, tensor in plain.state_dict().items() if not same_bits(tensor, state[name])]
    outputs = pipe.evaluate(batch()[0])
    if pipe.is_last and not same_bits(outputs, plain.eval()(batch()[0]).detach()):
        found.append("outputs of evaluate")
    return found


NUMBERS = [(1, 0.5, True, 2**40), (True, 0.25, -3), (0.5, 1, False, 2), (0.0, -0.0, 7)]


@pytest.mark.parametrize("numbers", NUMBERS)
def test_a_number_keeps_its_type_and_value(numbers):
    assert run(*numbers) == []


def run_on_ranks():
    return run(*NUMBERS[1], ranks=2)


def test_a_number_keeps_its_type_and_value_between_ranks(ranks):
    assert ranks.run(run_on_ranks, ranks=2) == [[], []]


@pytest.mark.parametrize("first", [1, 1.0, True])
def test_every_bit_of_a_number_arrives(first):
    pipe, _, _ = pipe_of(first)
    nan = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_0123))[0]
    numbers = [-0.0, nan, math.inf, 5e-324, 2**63 - 1, -(2**63) + 1, 2**53 + 1, True, 0]
    for number in numbers:
        NOW[0] = number
        SEEN.clear()
        pipe.step(*batch())
        assert {kind for kind, _ in SEEN} == {type(number)}
        kind = "<d" if isinstance(number, float) else "<q"
        assert {struct.pack(kind, found) for _, found in SEEN} == {struct.pack(kind, number)}


class Level(enum.IntEnum):
    HIGH = 3


@pytest.mark.parametrize("number", [2**63, -(2**64), None, "a", Level.HIGH, numpy.float64(0.5), 1j])
def test_what_is_no_number_of_eight_bytes_is_refused_by_layer(number):
    pipe, _, _ = pipe_of(1)
    NOW[0] = number
    with pytest.raises(penstock.StageError, match=r"layer told returned .* of type .* or cut elsewhere"):
        pipe.step(*batch())


def test_a_tensor_in_the_place_of_a_number_is_refused_by_layer():
    pipe, _, _ = pipe_of(1)
    NOW[0] = torch.ones(())
    with pytest.raises(penstock.StageError, match="layer told returned a Python number when it was traced"):
        pipe.step(*batch())
    NOW[0] = 1
    pipe.step(*batch())


def test_a_number_in_the_place_of_a_tensor_is_refused_by_layer():
    pipe, _, _ = pipe_of(torch.ones(()))
    NOW[0] = 1
    with pytest.raises(penstock.StageError, match="layer told returned a tensor when it was traced, and 1"):
        pipe.step(*batch())


def test_a_number_too_long_to_send_is_refused_where_the_model_is_cut():
    with pytest.raises(penstock.PlanError, match="an int of more than 64 bits"):
        pipe_of(TOO_LONG)
