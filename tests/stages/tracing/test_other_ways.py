"""Inputs with which a model goes another way than in its trace: the bits of the plain loop, or a refusal."""

import numpy
import pytest
import torch
from reference import same_bits
from torch import fx, nn

import penstock
from penstock import PenstockError


@fx.wrap
def count(x):
    return int((x.detach() > 0.5).sum())


@fx.wrap
def largest(x):
    return float(x.detach().abs().max())


def unless_none(x):
    number = count(x)
    return x if number == 0 else x * 3


def above(x):
    number = largest(x)
    x = x * number
    return x * 3 if number > 100.0 else x


class Net(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.own = nn.Linear(4, 4), nn.Linear(4, 4), forward

    def forward(self, x, *others):
        return self.b(torch.relu(self.a(self.own(x, *others))))


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def trained(forward, inputs, example):
    """A step in three micro-batches: whether the loss and gradients are those of the plain loop."""
    torch.manual_seed(0)
    model, plain = Net(forward), Net(forward)
    plain.load_state_dict(model.state_dict())
    profile = penstock.measure(penstock.trace(model, example), example, repeats=1)
    plan = penstock.partition(profile, stages=2, micro_batches=3)
    pipe = penstock.Pipeline(
        model,
        plan,
        loss=lambda outputs, targets: (outputs.float() ** 2).mean() * targets.mean(),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )
    targets = torch.rand(len(inputs[0]))
    pipe.step(inputs, targets)
    parts = [x.tensor_split(3) for x in inputs]
    for i, target in enumerate(targets.tensor_split(3)):
        loss = (plain(*(part[i].clone() for part in parts)).float() ** 2).mean() * target.mean()
        (loss * (len(target) / len(targets))).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return all(same_bits(ours.grad, theirs.grad) for ours, theirs in pairs)


X, LONG = numbers(3, 4, seed=9), numbers(3, 5, 4, seed=9)
REFUSED = {
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
    "a number that is compared": (unless_none, numbers(7, 4) - 10, X),
    "a number above another": (above, numbers(7, 4) * 100, X),
    "a text": (lambda x: x * 2 if float(f"{x.detach().max():.1f}") > 5 else x, numbers(7, 4) * 100, X),
    "another library": (lambda x: x * 2 if numpy.from_dlpack(x.detach()).max() > 5 else x, numbers(7, 4), X),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_another_way_is_refused_in_a_sentence(kind):
    forward, inputs, example = REFUSED[kind]
    with pytest.raises(
        PenstockError, match=r"does not go the same way|goes on from that|same calls every time"
    ):
        trained(forward, (inputs,), (example,))


SAME = {
    "a length that nobody reads": (lambda x: x * 2, numbers(7, 6, 4), LONG),
    "a dtype that nobody reads": (lambda x: x.float() * 2, numbers(7, 4).double(), X),
    "strides that nobody reads": (lambda x: x * 2, numbers(4, 7).t(), X),
    "many samples": (lambda x: x / len(x) + torch.ones(len(x), 1), numbers(31, 4), X),
    "a number that is handed on": (lambda x: x * largest(x), numbers(7, 4) * 100, X),
    "an array": (lambda x: x * torch.tensor(numpy.ones(4, dtype=numpy.float32)), numbers(7, 4), X),
}


@pytest.mark.parametrize("kind", SAME)
def test_the_same_way_has_the_bits_of_the_plain_loop(kind):
    forward, inputs, example = SAME[kind]
    assert trained(forward, (inputs,), (example,))


def test_a_constant_of_another_length_is_refused():
    example = X, penstock.Constant(torch.ones(5))
    model = Net(lambda x, table: x * table.sum() / table.shape[0])
    profile = penstock.measure(penstock.trace(model, example), example, repeats=1)
    pipe = penstock.Pipeline(
        model,
        penstock.partition(profile, stages=2, micro_batches=3),
        loss=lambda outputs, targets: outputs.mean(),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )
    pipe.step((numbers(7, 4), torch.ones(5)))
    with pytest.raises(PenstockError, match="does not go the same way"):
        pipe.step((numbers(7, 4), torch.ones(4)))
