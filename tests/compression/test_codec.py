"""Laws L3 and L9: a frame brings back bits, shape, strides and alignment; a damaged one nothing else."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence

import pytest
import torch
from frames import crafted
from hypothesis import given
from hypothesis import strategies as st
from tensors import assert_same, bits_of, decoded, expected_bits, laid_out
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.compression.buffers import Pool
from penstock.compression.codec import CODECS, buffer_bytes, decode, encode, pack_into
from penstock.compression.errors import CodecError
from penstock.compression.frame import DTYPE_NUMBERS, decoded_bytes, header_bytes, read_header
from penstock.compression.geometry import geometry
from penstock.compression.registry import codec_named

DTYPES = sorted(DTYPE_NUMBERS, key=str)
pytestmark = pytest.mark.filterwarnings("ignore:B?Complex.* support is experimental")


@st.composite
def nested(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Sizes and strides in any order, with gaps, repeated elements, and any stride where the size is 1."""
    num_dims = draw(st.integers(0, 5))
    sizes = draw(st.lists(st.integers(0, 4), min_size=num_dims, max_size=num_dims))
    strides, reach = [0] * num_dims, 1
    for d in draw(st.permutations(range(num_dims))):
        kind = draw(st.sampled_from(["dense", "dense", "gap", "repeated"]))
        strides[d] = 0 if kind == "repeated" else reach + (draw(st.integers(0, 5)) if kind == "gap" else 0)
        if sizes[d] == 1:
            strides[d] = draw(st.integers(0, 1 << 40))
        elif kind != "repeated":
            reach = max(reach, strides[d] * sizes[d])
    return sizes, strides


interleaved = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=4).map(
    lambda dims: ([size for size, _ in dims], [stride for _, stride in dims])
)


def spread(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Slow twin: whether the elements overlap or span more than 64 times their number, stride 0 left out."""
    moving = [(n, s) for n, s in zip(sizes, strides, strict=True) if n != 1 and s]
    places = [sum(p) for p in itertools.product(*([i * s for i in range(n)] for n, s in moving))]
    if not math.prod(sizes):
        return False
    return len(set(places)) < len(places) or max(places) + 1 > 64 * len(places)


@given(
    layout=nested() | interleaved,
    first=st.integers(0, 20),
    density=st.sampled_from([0, 0.3, 0.6, 1]),
    seed=st.integers(0, 99),
)
def test_every_geometry_comes_back_unless_it_overlaps(layout, first, density, seed) -> None:
    """Of every dtype, and by every codec in turn."""
    codecs, overlaps = sorted(CODECS), spread(*layout)
    for place, dtype in enumerate(DTYPES):
        tensor, codec = (
            laid_out(dtype, *layout, first=first, density=density, seed=seed),
            codecs[(place + seed) % 8],
        )
        frame = encode(tensor, codec)
        assert frame.numel() <= tensor.nbytes + header_bytes(tensor.dim())
        back = decoded(frame)
        if overlaps:
            assert back.stride() == torch.empty(tensor.shape).stride()
            assert torch.equal(bits_of(back), expected_bits(tensor))
        else:
            assert_same(back, tensor)
        assert torch.equal(encode(tensor, codec), frame)


def test_a_raw_bool_is_zero_or_one() -> None:
    frame = crafted(dtype=DTYPE_NUMBERS[torch.bool], sizes=(3,), payload=3)
    frame[-3:] = torch.tensor([2, 0, 255])
    assert decoded(frame).view(torch.uint8).tolist() == [1, 0, 1]


def test_memory_order_is_the_order_of_the_payload() -> None:
    """Offsets 0 3 2 5 4 7: the elements travel as they lie, and the gaps come back as zeros."""
    tensor = laid_out(torch.int32, [3, 2], [2, 3], density=1)
    frame = encode(tensor, "raw")
    flat = tensor.as_strided((8,), (1,))
    assert frame[header_bytes(2) :].view(torch.int32).tolist() == flat[[0, 2, 3, 4, 5, 7]].tolist()
    back = decoded(frame)
    assert back.as_strided((8,), (1,))[[1, 6]].tolist() == [0, 0]


def test_the_cheapest_walk_through_memory_is_found() -> None:
    orders = {
        ((4, 6), (6, 1)): "dense",
        ((4, 1, 6), (1, 99, 4)): "dense",
        ((4, 0, 6), (6, 6, 1)): "dense",
        ((9, 4, 6), (0, 1, 4)): "dense",
        ((4, 6), (7, 1)): "gaps",
        ((3, 2), (2, 3)): "scattered",
        ((3, 4), (2, 1)): "overlapping",
        ((2,), (128,)): "spread",
    }
    assert {key: geometry(*key, 4).order for key in orders} == orders
    assert geometry((2,), (127,), 4).travels


def test_lazy_conjugates_and_negations_are_carried_out() -> None:
    z = torch.randn(4, 6, dtype=torch.complex64)
    whole_and_parts = z, z.to(torch.complex128), z.t(), z[:, ::2], z[:, :1].expand(4, 6)
    for whole in (*whole_and_parts, z.flatten().unfold(0, 3, 1)):
        lazy = whole.conj()
        plain = torch.complex(whole.real.clone(), -whole.imag.clone())
        back = decoded(encode(lazy))
        assert not back.is_conj()
        assert torch.equal(torch.view_as_real(back.contiguous()), torch.view_as_real(plain))
        if not spread(whole.shape, whole.stride()):
            assert (back.stride(), back.data_ptr() % 64) == (whole.stride(), whole.data_ptr() % 64)
        negated = lazy.imag
        assert negated.is_neg()
        back = decoded(encode(negated))
        assert torch.equal(back, plain.imag)
        assert not back.is_neg()


def test_the_bytes_of_a_packed_frame_are_those_of_the_format() -> None:
    """Written out once by hand: what a GPU or another release has to produce."""
    tensor = torch.zeros(5000)
    tensor[[0, 9, 4095, 4096, 4999]] = torch.tensor([1.0, -0.0, 2.0, 3.0, math.nan])
    payload = bytearray(640 + 64 + 20)
    payload[0], payload[1], payload[511], payload[512], payload[624] = 1, 2, 128, 1, 128
    payload[640:656] = struct.pack("<2Q", 3, 5)
    payload[704:] = struct.pack("<5f", 1.0, -0.0, 2.0, 3.0, math.nan)
    assert bytes(encode(tensor)[64:].tolist()) == bytes(payload)


def test_requires_grad_travels_in_the_header_only() -> None:
    tensor = torch.ones(3, requires_grad=True)
    frame = encode(tensor)
    back = decoded(frame)
    assert (read_header(frame).requires_grad, back.requires_grad) == (True, False)
    assert not read_header(encode(tensor.detach())).requires_grad
    buffer = Pool().take(1000)
    pack_into(tensor.detach(), buffer, requires_grad=True)
    assert read_header(buffer).requires_grad


def test_none_is_a_frame_of_its_own() -> None:
    frame = encode(None)
    assert frame.numel() == header_bytes(0) == 64
    assert decode(frame) is None
    assert encode(torch.zeros(())).tolist() != frame.tolist()
    assert pack_into(None, Pool().take(64)) == 64


def test_a_decoded_tensor_owns_its_memory() -> None:
    tensor = torch.randn(100)
    frame = encode(tensor, "raw")
    back = decode(frame)
    frame.zero_()
    assert_same(back, tensor)


def test_decode_uses_the_memory_it_is_given() -> None:
    pool, x = Pool(), torch.relu(torch.randn(6, 50, 2))
    for tensor in (x, x[1:, 3:], x[:, :, 1], x[:, :1].expand(6, 50, 2)):
        frame = encode(tensor)
        buffer = pool.take(decoded_bytes(read_header(frame))).fill_(255)
        back = decoded(frame, buffer=buffer)
        assert_same(back, tensor)
        assert back.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        for wrong in (buffer[:100], buffer[4:], buffer.view(torch.int8)):
            with pytest.raises(CodecError):
                decode(frame, wrong)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_not_dense_is_refused() -> None:
    for tensor in (
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        torch.empty(3, device="meta"),
        torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    ):
        with pytest.raises(CodecError, match="dense tensor on the CPU, found a"):
            encode(tensor)


def freed(tensor: torch.Tensor, num_bytes: int) -> torch.Tensor:
    tensor.untyped_storage().resize_(num_bytes)
    return tensor


def fake(tensor: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(tensor)


@pytest.mark.parametrize(
    "make",
    [
        fake,
        torch._to_functional_tensor,  # pyright: ignore[reportPrivateImportUsage]
        lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),  # pyright: ignore[reportPrivateImportUsage]
        lambda t: freed(t, 0),
        lambda t: freed(t, t.nbytes - 1),
    ],
    ids=["fake", "functional", "zeros", "freed", "shrunk"],
)
def test_a_tensor_without_its_memory_is_refused(make) -> None:
    with pytest.raises(CodecError, match="memory of its own, found a"):
        encode(make(torch.ones(200)))
    frame = encode(torch.ones(200))
    for read in (lambda f: decode(f), lambda f: encode(torch.ones(200), mask=f), lambda f: decode(frame, f)):
        with pytest.raises(CodecError, match="memory of its own, found a"):
            read(make(frame.clone()))


@pytest.mark.parametrize("size", [200, 200_000])
@pytest.mark.parametrize("default", [lambda: torch.device("meta"), FakeTensorMode], ids=["meta", "fake"])
def test_memory_is_taken_where_it_is_whatever_torch_makes_by_default(default, size) -> None:
    """The bits, or a CodecError: never an address that is none."""
    tensor = torch.arange(float(size))
    frame = encode(tensor)
    with default():
        try:
            found = decoded(frame)
        except CodecError:
            return
    assert found.equal(tensor)


@pytest.mark.parametrize("other", ["abc", b"abc", 3, [1.0], torch.ones(3).numpy()], ids=str)
def test_what_is_no_tensor_is_refused(other) -> None:
    frame = encode(torch.ones(200))
    for call in (
        lambda: encode(other),
        lambda: decode(other),
        lambda: decode(frame, other),
        lambda: encode(torch.ones(200), mask=other),
        lambda: pack_into(torch.ones(3), other),
    ):
        with pytest.raises(CodecError, match=f"found a {type(other).__name__}; convert"):
            call()


def test_names_and_buffers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(CodecError, match="lossy: bf16, fp8, int8, found 'zip'"):
        codec_named("zip")
    with pytest.raises(CodecError, match="found 'auto'"):
        encode(torch.ones(3), "auto")
    with pytest.raises(CodecError, match=r"found \['raw'\]; choose"):
        encode(torch.ones(3), ["raw"])  # pyright: ignore[reportArgumentType]
    tensor = torch.ones(1000)
    needed = buffer_bytes(tensor.shape, tensor.dtype, "zero_value")
    with pytest.raises(CodecError, match=f"{needed} bytes, found {needed - 1}"):
        pack_into(tensor, torch.empty(needed - 1, dtype=torch.uint8))
    with pytest.raises(CodecError, match="needs a buffer of 64 bytes, found 63"):
        pack_into(None, torch.empty(63, dtype=torch.uint8))
    with pytest.raises(CodecError, match="at most 64 dimensions"):
        encode(torch.ones([1] * 65))
    assert not geometry((1 << 30, 1 << 30), (1, 1), 1).travels  # told without a look at 2 ** 60 elements
