"""Writes of a layer that autograd does not count: no cut comes before them."""

import copy

import pytest
import torch
from cases import OPTIMIZERS
from reference import plain_loop, same_bits
from saving import wait
from small_pipelines import pipeline_of
from torch import nn
from zoo import cross_entropy

import penstock
from penstock.stages.meta_watch import Contents
from penstock.stages.stage import stage


def through_data(x):
    x.data.mul_(2)


def through_numpy(x):
    x.detach().numpy()[-1] += 1


def counted(x):
    x.detach().mul_(2)


@torch.fx.wrap
def layer(x, write):
    WRITES[write](x)
    return x + 0


WRITES = {
    "data": through_data,
    "numpy": through_numpy,
    "counted": counted,
    "uneven": lambda x: through_data(x) if len(x) == 3 else None,
    "hidden": lambda x: through_data(x) if len(x) == 3 and not x.is_meta else None,
    "freed": lambda x: x.untyped_storage().resize_(0),
    "nothing": lambda x: None,
}


class Net(nn.Module):
    def __init__(self, write, side):
        super().__init__()
        self.write, self.side = write, side
        self.first, self.end = nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, x):
        y = self.first(x).exp()
        z = y.view(7, -1) if self.side == "view" else y
        if self.write == "traced":
            z.data.mul_(2)
        else:
            z = layer(z, self.write)
        return self.end(z.reshape(-1, 7).cos())


@pytest.mark.parametrize("side", ["itself", "view"])
@pytest.mark.parametrize("write", ["data", "numpy", "traced"])
def test_no_cut_comes_between_a_value_and_what_writes_to_it_unseen(write, side):
    x = torch.randn(4, 6)
    graph = penstock.trace(Net(write, side), (x,))
    names = [layer.name for layer in graph.train.layers]
    last = names.index("layer" if write != "traced" else "mul")
    refused = {names[cut] for cut in graph.train_probe.refused}
    assert set(names[names.index("exp") : last]) <= refused
    assert not {"first", *names[last:]} & refused
    profile = penstock.measure(graph, (x,), repeats=1)
    with pytest.raises(penstock.PlanError, match=r"autograd counts no write \(through .data or NumPy\)"):
        penstock.partition(profile, cuts=["exp"], micro_batches=1)


@pytest.mark.parametrize("write", ["counted", "freed", "nothing"])
def test_what_autograd_counts_and_what_is_freed_is_no_unseen_write(write):
    class Read(Net):
        def forward(self, x):
            y = self.first(x)
            return self.end(layer(y, self.write) if write != "freed" else y + layer_of_none(y.detach() - 1))

    graph = penstock.trace(Read(write, "itself"), (torch.randn(4, 6),))
    assert graph.train_probe.refused == {}


@torch.fx.wrap
def layer_of_none(x):
    total = x.sum()
    WRITES["freed"](x)
    return total


def test_contents_see_every_byte_and_skip_what_has_none():
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in (0, 1, 7, 8, 9, 63)]
    for t in tensors[1:]:
        for place in {0, len(t) // 2, len(t) - 1}:
            contents = Contents([*tensors, torch.empty(3, device="meta"), torch.eye(3).to_sparse()])
            assert contents.changed() == set()
            t.numpy()[place] ^= 1
            assert contents.changed() == {t.untyped_storage()._cdata}


def is_equal(model, cut, monkeypatch, *, unseen=lambda outputs: None):
    """True if a step with everything packed has the gradients of the plain loop; 4 samples, 3 and 3.

    ``unseen``: the loss's operation on the outputs, when all that was to leave before has left."""
    monkeypatch.setattr(stage, "LEAST_SAVED", 1)
    pipes = []

    def loss(outputs, targets):
        wait(pipes[0].stages[1].saved)
        unseen(outputs)
        return cross_entropy(outputs, targets)

    plain, example = copy.deepcopy(model), (torch.randn(4, 6),)
    batch = torch.randn(10, 6), torch.randint(3, (10,))
    pipes.append(pipeline_of(model, cuts=[cut], example=example, tier="packed", schedule="gpipe", loss=loss))
    pipes[0].step(*batch)
    (wanted,) = plain_loop(plain, [batch], loss=loss, optimizer=OPTIMIZERS["sgd"], micro_batches=3)
    pipes[0].close()
    return all(same_bits(p.grad, wanted["gradients"][name]) for name, p in model.named_parameters())


def test_a_cut_ahead_of_a_write_that_only_another_size_shows_is_refused_at_its_step():
    pipe = pipeline_of(Net("uneven", "itself"), cuts=["exp"], example=(torch.randn(4, 6),))
    pipe.step(torch.randn(12, 6), torch.randint(3, (12,)))
    with pytest.raises(penstock.PlanError, match="not be cut behind layer exp: a layer behind it writes"):
        pipe.step(torch.randn(9, 6), torch.randint(3, (9,)))


class Fades(nn.Module):
    """A leaf whose parameter changes at one size only."""

    def __init__(self, fade):
        super().__init__()
        self.fade, self.weight = fade, nn.Parameter(torch.ones(7))

    def forward(self, x):
        if len(x) == 3:
            self.fade(self.weight)
        return x * self.weight


def exchanged(weight):
    weight.data = weight.data / 2


@pytest.mark.parametrize("fade", [through_data, counted, exchanged])
def test_a_trained_parameter_that_a_layer_writes_to_at_another_size_is_refused_at_its_step(fade):
    model = nn.Sequential(nn.Linear(6, 7), Fades(fade), nn.Linear(7, 3))
    pipe = pipeline_of(model, cuts=["0"], example=(torch.randn(4, 6),), leaves=(Fades,))
    pipe.step(torch.randn(12, 6), torch.randint(3, (12,)))
    with pytest.raises(penstock.PlanError, match=r"it writes to 1\.weight in forward of Fades"):
        pipe.step(torch.randn(9, 6), torch.randint(3, (9,)))


def test_what_came_is_saved_as_it_is_by_then(monkeypatch):
    """Nothing tells of the write to what comes in: there is none at the example's size, or without values."""

    class Read(Net):
        def forward(self, x):
            y = self.first(x) + 1
            return self.end(layer(y, self.write) * 0 + y.cos())

    assert is_equal(Read("hidden", "itself"), "add", monkeypatch)


def test_a_loss_may_write_to_what_the_last_layer_saved(monkeypatch):
    model = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 300), nn.ReLU(), nn.Tanh())
    assert is_equal(model, "_1", monkeypatch, unseen=lambda outputs: outputs.data.mul_(0.5))
