"""penstock.offload: every bit of losses and gradients, and what memory, threads and errors do meanwhile."""

import contextlib
import functools
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from far import AwayStore
from reference import same_bits
from saving import memory_threads, settle
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch_pipelines import train
from zoo import build, cross_entropy

from penstock.compression.errors import CodecError, ConfigError, PlanError, StageError
from penstock.stages.memory.offload import offload
from penstock.stages.memory.stores import STORES, Store

everything = functools.partial(offload, min_bytes=1)


def gradients(model, loss, *, more=()):
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters()), *(x.grad for x in more)]


def of_zoo(name):
    """A model of the zoo in a block, the same drawn in both."""

    def run(block):
        (model, ((x, y), *_)) = build(name)
        torch.manual_seed(3)
        with block():
            loss = cross_entropy(model(x), y)
        return [*gradients(model, loss), *model.buffers()]

    return run


def checkpointed(block):
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    with block():
        x = model[0](torch.randn(16, 20)).relu()
        loss = checkpoint(model[2], x * 2, use_reentrant=False).exp().sum()
    return gradients(model, loss)


def autocast(block):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 32), nn.Linear(32, 4)
    )
    with block(), torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(4, 3, 8, 8)).float().square().sum()
    return gradients(model, loss)


def views(block):
    x = torch.randn(6, 12, requires_grad=True)
    with block():
        y = x.exp()
        a, b, c = y.chunk(3, dim=1)
        d, e = y.t().split([5, 7])
        f = y[1:3, 4:5].expand(2, 9)
        loss = (a * b * c).sum() + (d.t() @ e[:5].expand(5, 6)).sum() + (f * f.flip(0)).sum()
        loss = loss + (y.as_strided((4, 5), (1, 3), 7) ** 3).sum() + y.unbind(1)[3].prod()
    loss.backward()
    return [loss.detach(), x.grad]


def second_derivative(block):
    x = torch.randn(30, requires_grad=True)
    with block():
        loss = (x.exp() * x.sin()).pow(3).sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        outside = first.square().sum()
    outside.backward()
    return [loss.detach(), first.detach(), x.grad]


def backwards(block):
    """One inside of the block, beside another forward; that one's three outside."""
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Sigmoid(), nn.Softmax(-1))
    with block():
        one = model(torch.randn(16, 20)).exp().sum()
        two = model(torch.randn(16, 20)).square().sum()
        one.backward()
    two.backward(retain_graph=True)
    two.backward(retain_graph=True)
    return gradients(model, two)


def same_buffer(block):
    """The network's input is one tensor that each batch is copied into: a storage with several contents."""
    model, x = nn.Linear(20, 5), torch.empty(16, 20)
    with block():
        for value in (1.0, 2.0):
            x.fill_(value)
            model(x).exp().sum().backward()
    return [p.grad for p in model.parameters()]


def kinds(block):
    x = torch.randn(50, dtype=torch.float64, requires_grad=True)
    with block():
        z = torch.fft.rfft(x)
        loss = (z * z.conj()).real.sum() + x.half().exp().sum() + x[torch.randperm(50)].cumsum(0).prod()
        loss = loss + torch.where(x > 0, x, x * 2).sum()
        loss = loss + nn.functional.embedding(torch.arange(3), x[:, None]).sum()
    loss.backward()
    return [loss.detach(), x.grad]


CASES: dict[str, Any] = {
    case.__name__: case
    for case in (checkpointed, autocast, views, second_derivative, backwards, same_buffer, kinds)
}
CASES |= {name: of_zoo(name) for name in ("residual", "residual_channels_last", "gpt_gelu_dropout", "dag0")}


SETTINGS = [
    {},
    {"tier": "away"},
    {"tier": "away", "ahead": 0, "codec": "raw"},
    {"tier": "host", "codec": "raw"},
    {"tier": "disk"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_without_it(name, settings, monkeypatch):
    monkeypatch.setitem(STORES, "away", AwayStore)
    made, expected, found = [], [], []

    def block():
        made.append(everything(**settings))
        return made[-1]

    for bits, how in ((expected, contextlib.nullcontext), (found, block)):
        torch.manual_seed(1)
        bits += CASES[name](how)
    assert len(expected) == len(found) > 1
    assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))
    if settings.get("tier") == "away":
        assert made[0].num_unpacks > 0 or name == "same_buffer"  # whose storage is never gone


def zeros_and_ones(num_elements):
    """Half of it zeros: it shrinks."""
    return (torch.arange(num_elements) % 2).float().requires_grad_()


@pytest.mark.parametrize("goes_back", [True, False])
def test_memory_goes_down_and_nothing_is_left_behind_whether_a_backward_runs_or_not(goes_back):
    settle()
    x = zeros_and_ones(1 << 18)
    with offload() as saved:
        h = x * 2
        y = h * h
    there, store = weakref.ref(h.untyped_storage()), saved._packer.store
    del h
    assert there() is None
    assert saved.bytes_raw == 1 << 20
    assert 0 < store.num_bytes <= saved.bytes_kept < 0.6 * saved.bytes_raw
    assert (saved.num_packs, saved.num_unpacks) == (1, 0)
    assert memory_threads() == []
    if goes_back:
        y.sum().backward()
        assert same_bits(x.grad, 8 * x.detach())
        assert saved.num_unpacks == 1
    del y
    assert (there(), store.num_bytes) == (None, 0)
    settle()  # the thread of a backward ends by itself


def test_what_does_not_shrink_stays_without_a_copy():
    x = torch.randn(1 << 16, requires_grad=True)
    with offload(codec="zero_value") as saved:
        h = x.exp()
        place = h.data_ptr()
        y = h.sum()
    assert saved.bytes_kept == saved.bytes_raw == h.nbytes
    assert saved.num_packs == 0
    node = h.grad_fn
    del h
    assert getattr(node, "_saved_result").data_ptr() == place  # noqa: B009
    y.backward()


class Saves(torch.autograd.Function):
    """A copy of its first tensor; saves all of them, and its gradient is what ``back`` makes of these."""

    @staticmethod
    def forward(ctx, back, *tensors):
        ctx.back = back
        ctx.save_for_backward(*tensors)
        return tensors[0] * 1

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors
        return None, ctx.back(gradient, *saved), *[None] * (len(saved) - 1)


def test_views_share_one_frame_and_lie_as_they_lay():
    def views_of(x):
        base = (x * 1).as_strided((70, 90), (90, 1), 3)  # begins at 12 mod 64
        return [base, base.t()[3:], base[::2, 5:], base[:1].expand(40, 90), base.view(-1)[::7], base[4, 4]]

    x = zeros_and_ones(70 * 90 + 200)
    expected = [(v.clone(), v.stride(), v.storage_offset(), v.data_ptr() % 64) for v in views_of(x)]
    seen = []
    with offload(min_bytes="1KiB") as saved:
        out = Saves.apply(lambda gradient, *saved: seen.append(saved) or gradient, *views_of(x))
    out.sum().backward()
    (back,) = seen
    assert (saved.num_packs, saved.num_unpacks) == (1, 1)
    assert len({v.untyped_storage().data_ptr() for v in back}) == 1
    for v, (content, stride, offset, address) in zip(back, expected, strict=True):
        assert same_bits(v, content)
        assert (v.stride(), v.data_ptr() % 64) == (stride, address)
        assert v.data_ptr() - back[0].data_ptr() == 4 * (offset - 3)


def test_memory_that_begins_anywhere():
    """Memory of others, such as numpy's, begins at any element; another address picks another kernel."""
    other = torch.from_numpy(np.ones(5003, np.float32)[3:])
    expected, address, seen = other.clone(), other.data_ptr() % 64, []
    assert address
    with offload(min_bytes=1) as saved:
        other[::3] = 0
        expected[::3] = 0
        other[1::3] = 0
        expected[1::3] = 0
        tensors = zeros_and_ones(8), other, other[7:].view(1, -1)
        out = Saves.apply(lambda gradient, *saved: seen.append(saved) or gradient, *tensors)
    del other, tensors
    out.sum().backward()
    _, back, part = seen[0]
    assert saved.num_unpacks == 1
    assert (back.data_ptr() % 64, part.data_ptr() - back.data_ptr()) == (address, 28)
    assert same_bits(back, expected)
    assert same_bits(part, expected[None, 7:])


@pytest.mark.parametrize("count", ["one count of writes", "two", "two that agree"])
def test_one_storage_with_two_contents_leaves_twice(count, monkeypatch):
    monkeypatch.setitem(STORES, "away", AwayStore)
    y, x = torch.ones(1000, requires_grad=True), torch.full((1000,), 2.0)
    if count == "two that agree":
        x.mul_(1)
    saved = offload("away", min_bytes=1)
    with saved:
        one = (x * y).sum()
    again = x if count == "one count of writes" else x.data  # whose writes torch counts apart
    again.add_(1)
    with saved:
        two = (again * y).sum()
    del x, again
    two.backward()
    assert same_bits(y.grad, torch.full((1000,), 3.0))
    assert saved.num_packs == 2
    if count == "one count of writes":
        with pytest.raises(StageError, match="must not be written to"):
            one.backward()
    else:  # torch does not see that write either; the content was kept before it
        one.backward()
        assert same_bits(y.grad, torch.full((1000,), 5.0))


def test_each_frame_is_decoded_once_a_pass_in_the_reverse_order():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(5)])
    x = zeros_and_ones(64 * 64).view(64, 64)
    for ahead in (0, 2):
        with offload(min_bytes=1, ahead=ahead) as saved:
            y = model(x).sum()
        packs = saved.num_packs
        assert packs == 5  # of each ReLU: saved as its result, and as the next layer's input
        for times in (1, 2, 3):
            y.backward(retain_graph=True)
            assert saved.num_unpacks == packs * times


def test_weights_casts_of_them_small_tensors_and_small_parts_stay():
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    with offload(min_bytes=1) as saved:
        y = model[2](model[0](torch.ones(1, 256)))
    assert saved.bytes_raw == 2 * 1024  # the inputs of the layers: no weight, no view of one
    with offload(min_bytes=1) as saved, torch.autocast("cpu", torch.bfloat16):
        y = model[2](model[0](torch.ones(1, 256)))
    assert saved.bytes_raw == 2 * 512
    del y
    with offload() as saved:
        model(torch.ones(4, 256)).sum().backward()
    assert saved.bytes_raw == 0
    with offload(min_bytes=1) as saved:  # nor does a small part of a large storage take that along
        y = nn.Linear(256, 4)(torch.ones(1024, 256)[:16])
    assert saved.bytes_raw == 0
    y.sum().backward()


@pytest.mark.parametrize("autocast", [False, True])
def test_frozen_weights_stay_if_the_model_is_named(autocast):
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).requires_grad_(False)
    x = torch.ones(1, 256, requires_grad=True)
    casts = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    for keep, moved in ((model, 0), (model.parameters(), 0), ((), 2 * 256 * 256 * (2 if autocast else 4))):
        with offload(min_bytes=1, keep=keep) as saved, casts:
            loss = model(x)
        assert saved.bytes_raw == moved
        del loss


@pytest.mark.parametrize("when", ["before the thread", "behind it"])
@pytest.mark.parametrize("large", [True, False])
def test_a_write_to_what_was_saved_is_found(large, when):
    x = zeros_and_ones(1 << 16 if large else 8)
    with offload(codec="zero_value") as saved:
        y = x * 2
        loss = y.exp().mul(y).sum()
        if when == "before the thread":
            y.detach().view(-1).add_(1)
    if when == "behind it":
        y.detach().view(-1).add_(1)
    assert saved.num_packs == (1 if large else 0) or when == "before the thread"
    del y
    with pytest.raises(StageError, match=r"must not be written to.*at version 1 that was saved at version 0"):
        loss.backward()


@pytest.mark.parametrize("settings", [{}, {"tier": "disk"}, {"min_bytes": "1GiB"}], ids=str)
def test_a_write_by_a_backward_is_found_by_whoever_reads_behind_it(settings):
    x = zeros_and_ones(1 << 16)
    with everything(**settings):
        loss = Saves.apply(lambda gradient, x: gradient + 0 * x.mul_(2), (x * 2).exp()).sum()
    with pytest.raises(StageError, match=r"must not be written to.*at version 1 that was saved at version 0"):
        loss.backward()


def test_what_the_thread_raises_is_raised_when_the_block_ends(monkeypatch):
    settle()

    class Full(Store):
        def put(self, key, frame):
            raise OSError("no space left")

    monkeypatch.setitem(STORES, "full", Full)
    x = zeros_and_ones(1 << 16)
    h, ys = x * 2, []
    with pytest.raises(OSError, match="no space left"), offload("full"):
        ys.append(h.square())

    def fail():
        with offload("full"):
            z = h.square()
            raise ValueError(f"not enough of {z.numel()}")

    with pytest.raises(ValueError, match="not enough"):
        fail()
    ys[0].sum().backward()  # what did not leave is still there
    assert memory_threads() == []


def test_the_budget_bounds_the_frames():
    x = zeros_and_ones(1 << 16)
    with offload(budget="400KiB") as saved:
        hs = [x * n for n in range(1, 6)]
        y = torch.stack([(h * h).sum() for h in hs]).sum()
        del hs
    assert saved.bytes_raw == 5 << 18
    assert 2 * saved._packer.store.num_bytes > 400 * 1024 / 2
    assert saved._packer.store.num_bytes <= 400 * 1024
    y.backward()
    assert same_bits(x.grad, 2 * 55 * x.detach())


def test_what_is_no_plain_tensor_passes_through():
    values = zeros_and_ones(600)
    sparse = torch.eye(600).to_sparse()
    with offload(min_bytes=1) as saved:
        y = torch.sparse.mm(sparse, values[:, None]).sum()
        nested = torch.nested.nested_tensor([values[:100], values[100:]], layout=torch.jagged)
        z = (nested * nested).values().sum()
        w = torch.view_as_complex(values.view(300, 2)).conj().exp().abs().sum()
    assert saved.bytes_raw < 20_000
    (y + z + w).backward()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch itself
def test_dual_numbers_have_zeros_without_memory_which_pass_through():
    x, weight = torch.randn(40, 50), torch.randn(50, 60, requires_grad=True)
    found = []
    for block in (contextlib.nullcontext, everything):
        with forward_ad.dual_level(), block():
            y, tangent = forward_ad.unpack_dual((forward_ad.make_dual(x, torch.ones_like(x)) @ weight).tanh())
            assert tangent is not None
            loss = (y * tangent).sum()
        found.append(torch.autograd.grad(loss, weight)[0])
    assert same_bits(*found)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"tier": "tape"}, ConfigError, "tier is one of packed, host, disk, found 'tape'"),
        ({"tier": []}, ConfigError, r"tier .* found \[\]"),
        ({"codec": "zip"}, CodecError, "codec is one of auto, raw, zero_value"),
        ({"codec": ["raw"]}, CodecError, r"codec .* found \['raw'\]"),
        ({"codec": "bf16"}, CodecError, "codec .* found 'bf16'.* bit for bit"),
        ({"ahead": -1}, ConfigError, "ahead .* found -1"),
        ({"ahead": "2"}, ConfigError, "ahead .* found '2'"),
        ({"keep": None}, ConfigError, "keep .* found a NoneType"),
        ({"keep": {"weight": 3}}, ConfigError, "keep .* found a str among them"),
        ({"min_bytes": "much"}, PlanError, "min_bytes=much"),
        ({"budget": "-1"}, PlanError, "budget=-1"),
        ({"tier": "disk", "path": "/nowhere"}, ConfigError, "found /nowhere"),
    ],
)
def test_wrong_settings_are_refused(settings, error, words):
    with pytest.raises(error, match=words):
        offload(**settings)


def test_a_block_inside_itself_is_refused_another_one_is_not():
    x = zeros_and_ones(1 << 16)
    with offload() as outer, offload() as inner:
        y = (x * 2).square()
        with pytest.raises(StageError, match="entered once at a time"):
            outer.__enter__()
    y.sum().backward()
    assert (outer.num_packs, inner.num_packs) == (0, 1)
    with outer:
        y = (x * 2).square()
    assert outer.num_packs == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("codec", ["raw", "zero_value"])
@pytest.mark.parametrize("tier", ["packed", "host"])
def test_on_a_gpu(tier, codec):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(6)]).cuda()
    x, found = torch.randn(512, 512, device="cuda"), []
    for block in (contextlib.nullcontext(), offload(tier, codec=codec)):
        for _ in range(3):
            model.zero_grad()
            with block:
                loss = model(x).square().sum()
            loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


def example():
    (plain, _), (packed, saved) = train(), train("saved tensors")
    assert all(map(same_bits, plain, packed))
    return saved.bytes_raw, saved.bytes_kept


@pytest.mark.slow
def test_the_example_with_torch_s_own_pipeline(ranks):
    for raw, kept in ranks.run(example, ranks=2):
        assert raw > kept > 0


def test_a_bool_that_is_a_view_of_other_bytes_comes_back_as_it_was():
    x, odd = torch.ones(1 << 12, requires_grad=True), (torch.arange(1 << 12) % 7).to(torch.uint8)
    with offload(min_bytes=1) as saved:
        y = Saves.apply(lambda _, x, bools: x * bools.view(torch.uint8), x, odd.clone().view(torch.bool))
    y.sum().backward()
    assert saved.bytes_kept < saved.bytes_raw
    assert same_bits(x.grad, odd.float())
