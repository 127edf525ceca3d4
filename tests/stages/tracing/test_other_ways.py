"""Another way than in the trace, by inputs or returned numbers: the bits of the plain loop, or a refusal."""

from typing import Any

import numpy
import pytest
import torch
from small_pipelines import batch, built, differences, model_of, nothing, pipeline_of
from torch import fx, nn

import penstock
from penstock import PenstockError


class Net(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.own = nn.Linear(4, 4), nn.Linear(4, 4), forward

    def forward(self, x, *others):
        return self.b(torch.relu(self.a(self.own(x, *others))))


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def square(outputs, targets):
    return (outputs.float() ** 2).mean() * targets.mean()


def trained(forward, inputs, example):
    """Differences in a step of three micro-batches."""
    data = inputs, torch.rand(len(inputs))
    return differences(lambda: Net(forward), [nothing], data=data, example=(example,), loss=square)


X, LONG = numbers(3, 4, seed=9), numbers(3, 5, 4, seed=9)
RECORDED_ANEW = pytest.mark.filterwarnings("ignore:the model was recorded anew:UserWarning")
SAME = {
    "few samples": (lambda x: x * 2 if len(x) < 3 else x, numbers(7, 4), X),
    "many samples": (lambda x: x * 2 if len(x) > 8 else x, numbers(30, 4), X),
    "a smallest number": (lambda x: x / min(len(x), 8), numbers(30, 4), X),
    "pieces of samples": (lambda x: torch.cat([c * 2 for c in x.split(64)]), numbers(300, 4), X),
    "another length": (lambda x: x / x.shape[1], numbers(7, 6, 4), LONG),
    "a branch on a length": (lambda x: x * 3 if x.shape[1] > 5 else x, numbers(7, 6, 4), LONG),
    "half of a length": (lambda x: x[:, : x.shape[1] // 2], numbers(7, 8, 4), LONG),
    "more parts": (lambda x: sum(x.unbind(1)), numbers(7, 6, 4), LONG),
    "another dimension": (lambda x: x * x.dim(), numbers(7, 6, 4), X),
    "another dtype": (
        lambda x: x.float() * (2 if x.dtype == torch.float64 else 1),
        numbers(7, 4).double(),
        X,
    ),
    "other strides": (lambda x: x * 2 if x.is_contiguous() else x * 3, numbers(4, 7).t(), X),
    "a length that nobody reads": (lambda x: x * 2, numbers(7, 6, 4), LONG),
    "a dtype that nobody reads": (lambda x: x.float() * 2, numbers(7, 4).double(), X),
    "strides that nobody reads": (lambda x: x * 2, numbers(4, 7).t(), X),
    "samples in numbers": (lambda x: x / len(x) + torch.ones(len(x), 1), numbers(31, 4), X),
    "a text": (lambda x: x * 2 if float(f"{x.detach().max():.1f}") > 80 else x, numbers(7, 4) * 100, X),
    "an array": (lambda x: x * torch.tensor(numpy.ones(4, dtype=numpy.float32)), numbers(7, 4), X),
}


@RECORDED_ANEW
@pytest.mark.parametrize("kind", SAME)
def test_another_shape_has_the_bits_of_the_plain_loop(kind):
    forward, inputs, example = SAME[kind]
    assert trained(forward, inputs, example) == []


def test_another_way_of_another_library_is_refused_in_a_sentence():
    with pytest.raises(PenstockError, match=r"goes on from that|same calls every time"):
        trained(lambda x: x * 2 if numpy.from_dlpack(x.detach()).max() > 5 else x, numbers(7, 4), X)


@RECORDED_ANEW
def test_a_constant_may_have_another_length():
    model = Net(lambda x, table: x * table.sum() / table.shape[0])
    example = X, penstock.Constant(torch.ones(5))
    pipe = pipeline_of(model, cuts=["a"], example=example, loss=lambda outputs, targets: outputs.mean())
    pipe.step((numbers(7, 4), torch.ones(5)))
    given = numbers(7, 4), torch.arange(4.0)
    assert torch.equal(pipe.evaluate(given), model.eval()(*given).detach())
    pipe.step(given)


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
