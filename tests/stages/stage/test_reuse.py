"""Weights first: what is written over what, who is spared, what is unpacked again, and the memory."""

import weakref
from typing import Any

import pytest
import torch
from cases import OPTIMIZERS
from reference import same_bits
from small_pipelines import model_of, pipeline_of
from test_backward import Peak, Piece, all_same, believing
from torch import nn

import penstock
from penstock.compression.errors import StageError
from penstock.stages.stage import weights_first as reusing
from penstock.stages.stage.split_backward import run
from penstock.stages.stage.weights_first import Reuse, Spare, run_weights_first

ACTIVATIONS = {
    "relu": nn.ReLU,
    "threshold": lambda: nn.Threshold(0.1, 3.0),
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "leaky": nn.LeakyReLU,
    "relu6": nn.ReLU6,
    "softplus": nn.Softplus,
    "elu": nn.ELU,
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def reused(module, x, reuse):
    """Number of times that gradients of a piece, which are those of the whole, were written over."""
    piece, before = Piece(module, x), reuse.num_reused
    run_weights_first(piece.roots, piece.anchor, reuse)
    assert all_same(piece.gradients(), Piece(module, x).whole())
    return reuse.num_reused - before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_trials_find_what_is_exact_and_it_is(name, dtype):
    torch.manual_seed(0)
    parts = [part for _ in range(2) for part in (nn.Linear(48, 48), ACTIVATIONS[name]())]
    module, x = nn.Sequential(*parts, nn.Linear(48, 40)).to(dtype), torch.randn(300, 48, dtype=dtype)
    reuse = Reuse(least=0)
    assert reused(module, x, reuse) == 2
    assert [*reuse.verdicts.values()] == [True, True]  # of a linear layer and an activation, tried twice each
    assert reused(module, x, reuse) == 4  # the last layer has longer rows than what arrives there


@pytest.mark.parametrize("rows", [64, 100, 128, 1024, 1025, 2100])
@pytest.mark.parametrize("shape", [(64, 64), (40, 64), (10, 64), (64, 40)], ids=str)
def test_a_product_by_rows_has_the_bits_of_the_whole(rows, shape):
    into, out = shape
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(into, out), nn.Linear(out, out)), torch.randn(rows, into)
    reuse = Reuse(least=0)
    _, num_reused = [reused(module, x, reuse) for _ in range(2)]
    tried = 32 <= into <= out  # rows that are longer have no room, much shorter ones would hold too much
    assert (len(reuse.verdicts), num_reused) == (tried, tried and reuse.verdicts.popitem()[1])


def test_what_differs_is_not_written_over_again(monkeypatch):
    torch.manual_seed(0)
    layers, x = (nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh()), torch.randn(128, 64)
    module, reuse, whole = nn.Sequential(*layers), Reuse(least=0), reusing._by_rows
    by_rows = lambda *given: whole(*given) * (1 + 1e-6)  # noqa: E731, as of a library that adds otherwise
    monkeypatch.setattr(reusing, "_by_rows", by_rows)
    *_, num_reused = [reused(module, x, reuse) for _ in range(3)]
    assert sorted(reuse.verdicts.values()) == [False, True]
    assert num_reused == 1


def test_zeros_and_infinities_prove_nothing():
    reuse = Reuse(least=0)
    for gradient in (torch.zeros(64, 8), torch.full((64, 8), torch.inf), torch.eye(64)[:, :8].contiguous()):
        for _ in range(2):
            note = Spare(gradient.clone(), reuse)
            piece = torch.ops.aten.mm.default(note, torch.randn(8, 8))
            assert note.gradient is not None
            assert piece.shape == (64, 8)
    assert reuse.verdicts == {}


def test_a_gradient_that_was_written_over_is_not_read_again():
    note = Spare(torch.ones(64, 4), believing())
    torch.ops.aten.mm.default(note, torch.ones(4, 4))
    assert note.gradient is None  # only the note had it
    with pytest.raises(StageError, match="read again"):
        note.sum()


class Held(nn.Module):
    """Values that arrive at its layers are held: by a person's hooks, or by another layer that they arrive
    at too.
    """

    def __init__(self, how):
        super().__init__()
        self.how, self.seen = how, []
        self.one, self.two, self.last = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        made = self.one(x)
        active = torch.relu(made)
        if self.how == "hooks":
            for value in (made, active):
                value.register_hook(lambda gradient: self.seen.append((gradient, gradient.clone())))
        elif self.how == "nodes":
            for node in (made.grad_fn, active.grad_fn):
                assert node is not None
                node.register_hook(lambda made, arrived: self.seen.append((arrived[0], arrived[0].clone())))
        return self.last(self.two(active) + active)


@pytest.mark.parametrize("how", ["hooks", "nodes", "layers"])
def test_what_others_hold_keeps_its_values(how):
    torch.manual_seed(0)
    module, x = Held(how), torch.randn(128, 64)
    expected = Piece(module, x).whole()
    whole, module.seen = module.seen, []
    piece, reuse = Piece(module, x), believing()
    given = piece.roots[0][1].clone()
    run_weights_first(piece.roots, piece.anchor, reuse)
    assert all_same(piece.gradients(), expected)
    assert same_bits(piece.roots[0][1], given)
    assert all(same_bits(kept, then) for kept, then in module.seen)
    bits = [{then.numpy().tobytes() for _, then in seen} for seen in (module.seen, whole)]
    assert bits[0] == bits[1]  # a linear layer runs in two halves, so some are seen twice
    assert reuse.num_reused == {"hooks": 0, "nodes": 0, "layers": 2}[how]


def test_a_frozen_layer_is_reused_and_one_with_a_shared_weight_is_not():
    torch.manual_seed(0)
    shared = nn.Linear(64, 64)
    x = torch.randn(128, 64)
    for frozen, module, expected_count in (
        (True, nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), 1),
        (False, nn.Sequential(shared, shared), 0),
    ):
        if frozen:
            module.requires_grad_(False)
        assert reused(module, x, believing()) == expected_count


def test_a_product_that_is_read_for_two_gradients_keeps_what_arrives():
    torch.manual_seed(0)
    bias = nn.Parameter(torch.randn(64))
    module, x = model_of(lambda self, x: torch.addmm(self.bias, x, x * 2) * 3, bias=bias), torch.randn(64, 64)
    reused(module, x, believing())


def peak(way, module, x, *, away):
    """The most bytes of a backward; ``away``: what was saved is elsewhere until it is read."""
    copies = torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone)
    if away:
        with copies:
            piece = Piece(module, x)
        with Peak() as mode:
            return way(piece), mode.peak
    with Peak() as mode:
        return way(Piece(module, x)), mode.peak


@pytest.mark.parametrize(("away", "depth", "less"), [(True, 12, 0.15), (False, 12, 0.05), (False, 4, 0.12)])
def test_a_deep_network_needs_less(away, depth, less):
    torch.manual_seed(0)
    parts = [part for _ in range(depth) for part in (nn.Linear(64, 64), nn.ReLU())]
    module, x = nn.Sequential(*parts, nn.Linear(64, 10)), torch.randn(2048, 64)
    expected, most = peak(Piece.whole, module, x, away=away)
    found, ours = peak(Piece.first, module, x, away=away)
    assert all_same(found, expected)
    assert ours <= (1 - less) * most


def trained(*, weights_first):
    torch.manual_seed(0)
    layers = []
    for _ in range(3):  # what a linear layer saves is shared with nobody, and half of it is zero
        layers += nn.Linear(256, 256), nn.ReLU(), model_of(lambda self, x: x * 2)
    model = nn.Sequential(*layers, nn.Linear(256, 10))
    x, y = torch.randn(256, 256), torch.randint(0, 10, (256,))
    options: Any = {"optimizer": OPTIMIZERS["plain"], "memory": penstock.MemoryOptions(prefetch_layers=0)}
    options |= {"stages": 1, "micro_batches": 2, "weights_first": weights_first, "tier": "packed"}
    pipe = pipeline_of(model, example=(x[:128],), **options)
    saved: Any = pipe.engine.stages[0].saved
    forward = saved.offload
    saved.offload = lambda *given: (forward(*given), saved.wait())  # all that is to leave has left
    pipe.step(x, y)
    pipe.close()
    return saved.counts.num_packs, saved.counts.num_unpacks, [p.grad for p in model.parameters()]


def test_what_is_given_up_is_not_unpacked_again():
    packs, unpacks, expected = trained(weights_first=False)
    assert packs >= unpacks >= 8
    found = trained(weights_first=True)
    assert abs(found[0] - packs) <= 1
    assert found[1] <= found[0]  # once each; how many were on their way when they were read is chance
    assert all(same_bits(a, b) for a, b in zip(found[2], expected, strict=True))


@pytest.mark.parametrize("way", [run, run_weights_first], ids=["whole", "first"])
def test_a_gradient_ends_with_the_layer_that_read_it(way):
    anchor = torch.zeros((), requires_grad=True)
    x, gone, most = torch.randn(8, 16) + anchor, [], []
    for _ in range(6):
        product = nn.Linear(16, 16)(x)
        x = torch.tanh(product)

        def arrived(gradients):
            gone.append(weakref.ref(gradients[0]))
            most.append(len({id(found) for reference in gone if (found := reference()) is not None}))

        for made in (x, product):
            made.grad_fn.register_prehook(arrived)  # pyright: ignore[reportOptionalMemberAccess]
    loss = x.sum()
    way([(loss, None)], *([anchor, Reuse()] if way is run_weights_first else []))
    assert len(most) == (12 if way is run else 18)  # a linear layer runs in two halves
    assert max(most) <= 2
