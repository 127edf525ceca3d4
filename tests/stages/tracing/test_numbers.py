"""Python numbers that cross a cut arrive as they are in that micro-batch, whatever they were when traced."""

import enum
import math
import struct
from typing import Any

import numpy
import pytest
import torch
from small_pipelines import batch, built, differences, model_of, pipeline_of
from torch import fx, nn

import penstock

NOW: list = [1]  # what the layer `told` returns
SEEN: list = []
TOO_LONG = 2**64


@fx.wrap
def told(hidden):
    return NOW[0]


@fx.wrap
def times(hidden, number):
    """Every bit of a number's value and type shows in the result."""
    SEEN.append((type(number), number))
    return hidden if isinstance(number, int) and number > TOO_LONG // 2 else hidden * number


def net():
    """A number is made on one stage, passes a second and is read on a third."""

    def forward(self, x):
        hidden = self.a(x)
        number = told(hidden)
        return self.end(times(torch.tanh(self.b(hidden)), number))

    return model_of(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 8), end=nn.Linear(8, 3))


def pipe_of(first):
    NOW[0] = first
    return pipeline_of(built(net), cuts=["told", "b"])


def run(*numbers, **settings):
    """What differs in steps with another number at each."""
    NOW[0] = numbers[0]
    changes = [lambda model, number=number: NOW.__setitem__(0, number) for number in numbers]
    options: dict[str, Any] = {"cuts": ["told", "b"]} | settings
    return differences(net, changes, **options)


NUMBERS = [(1, 0.5, True, 2**40), (True, 0.25, -3), (0.5, 1, False, 2), (0.0, -0.0, 7)]


@pytest.mark.parametrize("numbers", NUMBERS)
def test_a_number_keeps_its_type_and_value(numbers):
    assert run(*numbers) == []


def run_on_ranks():
    return run(*NUMBERS[1], cuts=["b"], ranks=2)


def test_a_number_keeps_its_type_and_value_between_ranks(ranks):
    assert ranks.run(run_on_ranks, ranks=2) == [[], []]


@pytest.mark.parametrize("first", [1, 1.0, True])
def test_every_bit_of_a_number_arrives(first):
    pipe = pipe_of(first)
    nan = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_0123))[0]
    for NOW[0] in [-0.0, nan, math.inf, 5e-324, 2**63 - 1, -(2**63) + 1, 2**53 + 1, True, 0]:
        SEEN.clear()
        pipe.step(*batch())
        assert {kind for kind, _ in SEEN} == {type(NOW[0])}
        kind = "<d" if isinstance(NOW[0], float) else "<q"
        assert {struct.pack(kind, found) for _, found in SEEN} == {struct.pack(kind, NOW[0])}


class Level(enum.IntEnum):
    HIGH = 3


def test_what_is_no_number_of_eight_bytes_is_refused_by_layer():
    pipe = pipe_of(1)
    for NOW[0] in (2**63, -(2**64), None, "a", Level.HIGH, numpy.float64(0.5), 1j):
        with pytest.raises(penstock.StageError, match=r"layer told returned .* of type .* or cut elsewhere"):
            pipe.step(*batch())


@pytest.mark.parametrize(
    ("first", "now", "kind"), [(1, torch.ones(()), "Python number"), (torch.ones(()), 1, "tensor")]
)
def test_a_tensor_and_a_number_in_the_place_of_each_other_are_refused_by_layer(first, now, kind):
    pipe = pipe_of(first)
    NOW[0] = now
    with pytest.raises(penstock.StageError, match=f"layer told returned a {kind} when it was traced"):
        pipe.step(*batch())
    NOW[0] = first
    pipe.step(*batch())


def test_a_number_too_long_to_send_is_refused_where_the_model_is_cut():
    with pytest.raises(penstock.PlanError, match="an int of more than 64 bits"):
        pipe_of(TOO_LONG)
