"""Layers that may do what they did not do when they were traced: what they draw is seeded, what they write is
seen by whoever needs it, or refused."""

import copy

import pytest
import torch
from cases import OPTIMIZERS
from reference import plain_loop, same_bits
from torch import nn
from torch.nn import functional as F

import penstock


def batch():
    torch.manual_seed(2)
    return torch.randn(6, 8), torch.randint(3, (6,))


def pipeline(model, cuts, leaves=()):
    example = (torch.randn(3, 8),)
    profile = penstock.measure(penstock.trace(model, example, leaves=leaves), example, repeats=1)
    plan = penstock.partition(profile, cuts=cuts, micro_batches=2)
    return penstock.Pipeline(model, plan, loss=F.cross_entropy, optimizer=OPTIMIZERS["sgd"])


class Cell(nn.Module):
    """A layer of one's own, which draws where its table says so."""

    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(8, 8), {"p": 0.0}

    def forward(self, x):
        return F.dropout(self.linear(x), self.table["p"], self.training)


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.cell, self.last = nn.Linear(8, 8), Cell(), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.cell(self.first(x)))


def noisy(model, patch):
    model.cell.table["p"] = 0.5


def noisy_class(model, patch):
    patch.setattr(Cell, "forward", lambda self, x: F.dropout(self.linear(x), 0.5, self.training))


@pytest.mark.parametrize("change", [noisy, noisy_class])
@pytest.mark.parametrize("seed", [3, 4])
def test_a_layer_of_ones_own_that_begins_to_draw_is_seeded(change, seed, monkeypatch):
    model = Around()
    plain = copy.deepcopy(model)
    pipe, (x, y) = pipeline(model, ["first"], leaves=[Cell]), batch()
    runs = plain_loop(plain, [(x, y)] * 3, loss=F.cross_entropy, optimizer=OPTIMIZERS["sgd"], micro_batches=2)
    calls = iter((step, index) for step in range(3) for index in range(2))

    def seeded(module, args):
        torch.manual_seed(penstock.layer_seed(0, *next(calls), "cell"))

    plain.cell.register_forward_pre_hook(seeded)
    for step in range(3):
        torch.manual_seed(seed)
        assert pipe.step(x, y).loss == next(runs)["loss"]
        assert all(same_bits(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
        if not step:
            change(model, monkeypatch)
            change(plain, monkeypatch)
    monkeypatch.undo()
    pipe.step(x, y)
    assert not pipe.engine.flags.moved


class Viewed(nn.Module):
    """A view of a value that is used again behind it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.relu = nn.Linear(8, 8), nn.ReLU()
        self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x)
        return self.last(self.middle(self.relu(x.view(-1, 8))) + x)


def test_a_write_through_a_view_to_what_goes_on_as_it_came_is_refused():
    model = Viewed()
    pipe = pipeline(model, ["first", "middle"])
    pipe.step(*batch())
    model.relu.inplace = True
    for _ in range(2):
        with pytest.raises(penstock.StageError, match=r"layer relu wrote to the memory of first, which goes"):
            pipe.step(*batch())
    model.relu.inplace = False
    pipe.step(*batch())


@pytest.mark.parametrize("cuts", [["middle"], ["first"]])
def test_a_write_through_a_view_counts_where_every_reader_sees_it(cuts):
    model = Viewed()
    plain = copy.deepcopy(model)
    pipe, data = pipeline(model, cuts), [batch()] * 3
    runs = plain_loop(plain, data, loss=F.cross_entropy, optimizer=OPTIMIZERS["sgd"], micro_batches=2)
    for inplace in (False, True, False):
        model.relu.inplace = plain.relu.inplace = inplace
        assert pipe.step(*batch()).loss == next(runs)["loss"]
        assert all(same_bits(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


class Pooled(Viewed):
    """Zeros of a pool over a ReLU stop gradients: what is written there later might not."""

    def __init__(self):
        super().__init__()
        self.pool, self.act, self.last = nn.MaxPool1d(2), nn.Hardswish(), nn.Linear(4, 3)

    def forward(self, x):
        x = self.pool(self.relu(self.first(x)[:, None]))
        return self.last((self.act(x.view(-1, 1, 4)) + x)[:, 0])


def test_a_write_to_zeros_that_stop_gradients_is_refused():
    model = Pooled()
    pipe = pipeline(model, ["act"])
    pipe.step(*batch())
    model.act.inplace = True
    with pytest.raises(penstock.StageError, match="layer act wrote to the memory of pool, which goes on"):
        pipe.step(*batch())
