"""However a backward is cut and ordered, it leaves the bits of the whole."""

import collections
import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from cases import OPTIMIZERS
from reference import same_bits
from saving import wait
from small_pipelines import model_of, pipeline_of
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from traps import NoGradientBack

import penstock
from penstock.stages.stage.run_layers import Receive
from penstock.stages.stage.split_backward import Split, run, run_weights_first


def same(a, b):
    """True if two gradients have the same bits and strides, and conjugate neither or both; None is None."""
    if a is None or b is None:
        return a is b
    layouts = [(t.stride(), t.is_conj()) for t in (a, b)]
    return layouts[0] == layouts[1] and same_bits(a.resolve_conj(), b.resolve_conj())


class Piece:
    """A module between what it receives and what it sends, without a pipeline around it."""

    def __init__(self, module, x):
        self.module, self.anchor, self.slot = module, torch.zeros((), requires_grad=True), {}
        sent = module(Receive.apply(self.anchor, x.clone(), self.slot, 0))
        generator = torch.Generator().manual_seed(1)
        gradient = torch.randn(sent.shape, generator=generator, dtype=sent.dtype)
        self.roots = [(get_gradient_edge(sent), gradient)]

    def whole(self):
        run(self.roots)
        return self.gradients()

    def halves(self):
        split = Split(self.roots)
        split.inputs(self.anchor)
        split.weights()
        return self.gradients()

    def first(self):
        run_weights_first(self.roots, self.anchor)
        return self.gradients()

    def gradients(self):
        """Gradients of received values, then of the parameters, which lose theirs."""
        found = [self.slot.get(0), *(p.grad for p in self.module.parameters())]
        self.module.zero_grad()
        return found


def all_same(found, expected):
    return all(same(a, b) for a, b in zip(found, expected, strict=True))


def ways(self, x):
    """A weight that is computed, one used twice, one that is read by itself, and one behind a Function."""
    y = self.plain(self.twice(x) @ (self.a @ self.b.t()))
    y = y @ NoGradientBack.apply(self.c, self.a)
    return torch.addmm(self.s[0], self.twice(y), self.s) * self.s[1]


def left(self, x):
    """The weight stands on the left of what it multiplies, also of a stack of matrices."""
    return torch.bmm(self.b, (self.a @ x).expand(2, -1, -1))


def weights(*shape, names) -> dict[str, Any]:
    return {name: nn.Parameter(torch.randn(shape)) for name in names}


def chain(*layers):
    return lambda: nn.Sequential(*(make(*arguments, **named) for make, *arguments, named in layers))


class Hooked(nn.Linear):
    def __init__(self, hook):
        super().__init__(8, 8)
        self.hook = hook

    def forward(self, input):
        y = super().forward(input)
        y.register_hook(self.hook)
        return y


PIECES = {
    "ways": (
        lambda: model_of(ways, **weights(8, 8, names="abcs"), plain=nn.Linear(8, 8), twice=nn.Linear(8, 8)),
        (5, 8),
    ),
    "left": (lambda: model_of(left, **weights(4, 3, names="a"), **weights(2, 3, 4, names="b")), (3, 5)),
    "linears": (chain((nn.Linear, 8, 6, {}), (nn.Linear, 6, 4, {"bias": False}), (nn.Tanh, {})), (3, 8)),
    "hooked": (chain((Hooked, lambda g: g * 3, {}), (nn.ReLU, {}), (Hooked, lambda g: g * 5, {})), (4, 8)),
    "one_sample": (chain((nn.Linear, 8, 8, {}), (nn.LayerNorm, 8, {}), (nn.Linear, 8, 8, {})), (1, 8)),
    "sequence": (chain((nn.Linear, 8, 8, {}), (nn.GELU, {}), (nn.Linear, 8, 8, {})), (2, 5, 8)),
    "attention": (chain((nn.TransformerEncoderLayer, 8, 2, 16, {"dropout": 0.0})), (2, 5, 8)),
    "lstm": (lambda: model_of(lambda self, x: self.lstm(x)[0], lstm=nn.LSTM(8, 6, 2)), (4, 3, 8)),
    "conv1": (chain((nn.Conv1d, 4, 6, 3, {}), (nn.Conv1d, 6, 4, 3, {"dilation": 2})), (2, 4, 16)),
    "conv2": (chain((nn.Conv2d, 4, 8, 3, 2, 1, {"groups": 2}), (nn.Conv2d, 8, 8, 1, {})), (2, 4, 9, 9)),
    "dilated": (chain((nn.Conv2d, 4, 8, 3, {"dilation": 2}), (nn.Conv2d, 8, 3, 2, {})), (2, 4, 9, 9)),
    "depthwise": (chain((nn.Conv2d, 4, 4, 3, {"groups": 4}), (nn.Conv2d, 4, 8, 1, {})), (2, 4, 9, 9)),
    "transposed": (chain((nn.ConvTranspose2d, 4, 6, 3, 2, {}), (nn.Conv2d, 6, 4, 2, {})), (2, 4, 5, 5)),
    "transposed_last": (chain((nn.Conv2d, 4, 6, 2, {}), (nn.ConvTranspose2d, 6, 4, 2, {})), (2, 4, 5, 5)),
    "conv3": (chain((nn.Conv3d, 2, 4, 2, {}), (nn.Conv3d, 4, 2, 2, {"padding": 1})), (1, 2, 4, 5, 6)),
    "one_channel": (chain((nn.Conv2d, 1, 1, 3, {}), (nn.Conv2d, 1, 1, 1, {})), (2, 1, 6, 6)),
    "one_pixel": (chain((nn.Conv2d, 4, 8, 1, {}), (nn.Conv2d, 8, 4, 1, {})), (3, 4, 1, 1)),
}


@pytest.mark.parametrize("layout", ["plain", "channels_last", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PIECES)
def test_every_kind_of_layer_has_the_bits_of_the_whole(name, dtype, layout):
    make, shape = PIECES[name]
    if layout != "plain" and len(shape) != 4:
        return  # only images have channels
    x, module = torch.randn(shape).to(dtype), make().to(dtype)
    if layout == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    if layout != "plain":
        module = module.to(memory_format=torch.channels_last)
    expected = Piece(module, x).whole()
    assert all_same(Piece(module, x).halves(), expected)
    assert all_same(Piece(module, x).first(), expected)


def convolutions():
    return nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8)


class Counted(TorchDispatchMode):
    """Counts products, norms, and the outputs that convolutions are asked for."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution_backward.default:
            self.counts += collections.Counter(
                f"convolution {i}" for i, asked in enumerate(args[-1]) if asked
            )
        elif any(word in str(func) for word in ("aten.mm", "norm_backward")):
            self.counts[str(func)] += 1
        return func(*args, **kwargs or {})


def test_nothing_is_computed_twice_and_what_can_wait_does():
    module, x = nn.Sequential(*convolutions(), nn.Linear(8, 2)), torch.randn(6, 3, 6, 6)
    counted = []
    for way in (Piece.whole, Piece.halves, Piece.first):
        piece = Piece(module, x)
        with Counted() as mode:
            way(piece)
        counted.append(mode.counts)
    assert counted[0] == counted[1] == counted[2]
    piece = Piece(module, x)
    with Counted() as mode:
        Split(piece.roots).inputs(piece.anchor)
    norms = {f"aten.native_{kind}_norm_backward.default": 1 for kind in ("layer", "batch")}
    assert mode.counts == {"aten.mm.default": 2, "convolution 0": 1, **norms}


def watched(module, x):
    """A piece, and a function that tells which of its layers' outputs are still in memory."""
    made = []

    def note(module, args, output):
        made.append(StorageWeakRef(output.untyped_storage()))

    with contextlib.ExitStack() as hooks:
        for layer in module:
            hooks.callback(layer.register_forward_hook(note).remove)
        piece = Piece(module, x)
    return piece, lambda: [index for index, storage in enumerate(made) if not storage.expired()]


def test_the_first_half_lets_go_of_what_the_second_does_not_read():
    layers = nn.Linear(8, 9), nn.GELU(), nn.Linear(9, 7), nn.LayerNorm(7), nn.Linear(7, 6), nn.Tanh()
    piece, alive = watched(nn.Sequential(*layers), torch.randn(4, 8))
    split = Split(piece.roots)
    assert alive() == [0, 1, 2, 3, 5]
    split.inputs(piece.anchor)
    assert alive() == [1, 3]  # what the Linears read
    split.weights()
    assert alive() == []


@pytest.mark.parametrize("way", [Piece.halves, Piece.first])
def test_nothing_holds_itself_when_a_backward_is_over_or_has_failed(way):
    gc.collect()
    gc.disable()
    try:
        layers = Hooked(lambda g: g), nn.GELU(), nn.Linear(8, 8)
        piece, alive = watched(nn.Sequential(*layers), torch.randn(4, 8))
        way(piece)
        del piece
        assert alive() == []
        layers[0].hook = lambda g: 1 / 0
        piece, alive = watched(nn.Sequential(*layers), torch.randn(4, 8))
        with pytest.raises(ZeroDivisionError):
            way(piece)
        del piece
        assert alive() == []
    finally:
        gc.enable()


class Peak(TorchDispatchMode):
    """The most bytes that were alive at once, of storages made inside."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        tensors = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.alive[storage._cdata] = StorageWeakRef(storage)
        found_again = {k: torch.UntypedStorage._new_with_weak_ptr(r.cdata) for k, r in self.alive.items()}
        self.alive = {key: ref for key, ref in self.alive.items() if found_again[key] is not None}
        self.peak = max(self.peak, sum(s.nbytes() for s in found_again.values() if s is not None))
        return found


WIDE = {
    "linears": (lambda: [nn.Linear(16, 512), nn.Linear(512, 16, bias=False)], (256, 16), 256 * 512 * 4),
    "convolutions": (
        lambda: [nn.Conv2d(4, 64, 1), nn.Conv2d(64, 4, 3)],
        (4, 4, 16, 16),
        4 * 64 * 12 * 12 * 4,
    ),
}


@pytest.mark.parametrize("name", WIDE)
def test_weights_first_makes_room_for_the_gradient_of_the_feature_map(name):
    make, shape, wide_bytes = WIDE[name]
    module, x = nn.Sequential(*(layer for _ in range(3) for layer in make())), torch.randn(shape)
    peaks = []
    for way in (Piece.whole, Piece.first):
        with Peak() as mode:
            way(Piece(module, x))
        peaks.append(mode.peak)
    assert peaks[0] - peaks[1] > 0.8 * wide_bytes


def test_a_feature_map_that_others_hold_stays():
    module, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8)
    expected = Piece(module, x).whole()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        pieces = [Piece(module, x) for _ in range(2)]
    assert all_same(pieces[0].first(), expected)
    assert all_same(pieces[1].halves(), expected)


class Twice(torch.autograd.Function):
    """A weight that a Function of a person's own makes; counts how often it is asked for a gradient."""

    asked = 0

    @staticmethod
    def forward(ctx, weight):
        return weight * 2

    @staticmethod
    def backward(ctx, *gradients):
        Twice.asked += 1
        return gradients[0] * 2


def test_a_function_of_a_person_s_own_runs_whole_in_the_first_half():
    torch.manual_seed(0)
    received, weight = torch.randn(3, 4, requires_grad=True), torch.nn.Parameter(torch.randn(4, 5))
    (received @ Twice.apply(weight)).sum().backward()
    expected, weight.grad, received.grad, Twice.asked = weight.grad, None, None, 0
    split = Split([((received @ Twice.apply(weight)).sum(), None)])
    split.inputs(received)
    assert Twice.asked == 1  # what it makes of no gradient, only its whole backward knows
    split.weights()
    assert Twice.asked == 1
    assert same_bits(weight.grad, expected)


def test_a_product_that_is_read_for_two_gradients_keeps_what_arrives():
    torch.manual_seed(0)
    bias = nn.Parameter(torch.randn(64))
    module, x = model_of(lambda self, x: torch.addmm(self.bias, x, x * 2) * 3, bias=bias), torch.randn(64, 64)
    assert all_same(Piece(module, x).first(), Piece(module, x).whole())


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
    saved.offload = lambda *given: (forward(*given), wait(saved))  # all that is to leave has left
    pipe.step(x, y)
    pipe.close()
    return saved.counts.num_packs, saved.counts.num_unpacks, [p.grad for p in model.parameters()]


def test_what_is_given_up_is_not_unpacked_again():
    packs, unpacks, expected = trained(weights_first=False)
    assert packs + 1 >= unpacks >= 8  # a thread that lags may bring one that has just been read
    found = trained(weights_first=True)
    assert abs(found[0] - packs) <= 1
    assert found[1] <= found[0] + 1  # once each; how many were on their way when they were read is chance
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
    way([(loss, None)], *([anchor] if way is run_weights_first else []))
    assert len(most) == (12 if way is run else 18)  # a linear layer runs in two halves
    assert max(most) <= 2
