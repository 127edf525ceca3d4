"""Numbers that functions return into Python are held to what they were when the model was traced."""

from typing import Any

import pytest
import torch
from small_pipelines import batch, built, differences, model_of, nothing, pipeline_of
from torch import fx, nn

import penstock

NOW: list[Any] = [1]  # what the layer `returned` returns
TOO_LONG = 2**64


@fx.wrap
def returned(hidden):
    return NOW[0]


@fx.wrap
def beside(hidden):
    return hidden * 2, {"number": [bool(NOW[0])]}


@fx.wrap
def times(hidden, number):
    return hidden if isinstance(number, int) and number > TOO_LONG // 2 else hidden * number


def net():
    """A number is made on one stage and read on a third; another stands beside a tensor."""

    def forward(self, x):
        hidden = self.a(x)
        number = returned(hidden)
        hidden, others = beside(torch.tanh(self.b(hidden)))
        return self.end(times(hidden, number) * others["number"][0])

    return model_of(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 8), end=nn.Linear(8, 3))


@pytest.mark.parametrize("number", [1, 0.25, True, -0.0, -3, float("nan"), TOO_LONG])
def test_a_number_that_stays_has_the_bits_of_the_plain_loop(number):
    NOW[0] = number
    settings: dict[str, Any] = {"optimizer": "sgd"}
    if number == number:
        assert differences(net, [nothing, nothing], cuts=["returned", "b"], **settings) == []
    else:
        pipeline_of(built(net), cuts=["returned", "b"]).step(*batch())


@pytest.mark.parametrize("first", [1, 0.0, True])
def test_another_number_is_refused_by_name_until_it_is_as_it_was(first):
    NOW[0] = first
    pipe = pipeline_of(built(net), cuts=["returned", "b"])
    pipe.step(*batch())
    for other in (2, 2.5, float(first) if first is True else -0.0, 2**63, None, "a", torch.ones(())):
        NOW[0] = other
        with pytest.raises(
            penstock.StageError, match=r"forward read .* from returned.* and now it is .*leaves="
        ):
            pipe.step(*batch())
    NOW[0] = first
    pipe.step(*batch())


def test_a_number_beside_a_tensor_is_held_too():
    NOW[0] = 1

    def forward(self, x):
        hidden, others = beside(self.a(x))
        return self.end(hidden * others["number"][0])

    pipe = pipeline_of(built(lambda: model_of(forward, a=nn.Linear(6, 8), end=nn.Linear(8, 3))))
    pipe.step(*batch())
    NOW[0] = 0
    with pytest.raises(penstock.StageError, match=r"forward read True .* and now it is False"):
        pipe.step(*batch())
