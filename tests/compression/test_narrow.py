"""Integers in the fewest bits: the range decides, the bits come back, and a damaged width is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from payloads import (
    DTYPES,
    SIZES,
    check_damage,
    check_lossless,
    packed,
    random_bits,
    unpacked,
    with_number,
)

from penstock.compression import narrow
from penstock.compression.errors import CodecError
from penstock.compression.geometry import Words
from penstock.compression.kernels.jit import host_isas
from penstock.compression.narrow import HEAD_BYTES, Narrow

INTEGERS = {
    8: (torch.uint8, torch.int8, torch.bool),
    16: (torch.uint16, torch.int16),
    32: (torch.uint32, torch.int32),
    64: (torch.uint64, torch.int64),
}
pytestmark = pytest.mark.filterwarnings("ignore:B?Complex.* support is experimental")


@pytest.fixture(params=host_isas())
def codec(request: pytest.FixtureRequest) -> Narrow:
    return Narrow(request.param)


def twin(words: np.ndarray, width: int, least: int) -> np.ndarray:
    """The slow twin of the rows: every lane a long integer of its own."""
    item, lanes = words.itemsize, 64 // words.itemsize
    num_rows = math.ceil(math.ceil(len(words) / lanes) * width / (8 * item))
    values = [word - least for word in words.tolist()]
    streams = [sum(value << i * width for i, value in enumerate(values[n::lanes])) for n in range(lanes)]
    streams = b"".join(stream.to_bytes(num_rows * item, "little") for stream in streams)
    return np.frombuffer(streams, np.uint8).reshape(lanes, num_rows, item).transpose(1, 0, 2).reshape(-1)


def integers(dtype: torch.dtype, num_words: int, width: int, least: int, seed: int = 0) -> torch.Tensor:
    """Words of exactly ``width`` bits above ``least``."""
    rng = np.random.default_rng(seed)
    words = [int(word) % (1 << width) + least for word in rng.integers(0, 1 << 63, num_words)]
    words[-1:], words[:1] = [least][:num_words], [least + (1 << width) - 1][:num_words]
    item = dtype.itemsize
    return torch.from_numpy(
        np.array([word % (1 << 8 * item) for word in words], f"u{item}").view(np.uint8)
    ).view(dtype)


@pytest.mark.parametrize("bits", INTEGERS)
def test_every_width_is_packed_as_its_twin_packs_it(codec: Narrow, bits: int) -> None:
    lanes, rng = 512 // bits, np.random.default_rng(bits)
    for width in range(1, bits):
        dtype = INTEGERS[bits][width % 2]
        least = int(rng.integers(0, 1 << min(62, bits - width))) - (width % 2 << (bits - 1))
        tensor = integers(dtype, 512 + int(rng.integers(lanes, 520)), width, least, width)
        found, payload = packed(codec, tensor)
        if found.codec == "raw":
            assert width > 0.8 * bits
            continue
        words = tensor.view(torch.uint8).numpy().view(f"u{bits // 8}" if least >= 0 else f"i{bits // 8}")
        np.testing.assert_array_equal(payload[HEAD_BYTES:].numpy(), twin(words, width, least))
        back = unpacked(codec, payload, tensor)
        assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back(dtype: torch.dtype) -> None:
    for size in SIZES:
        for tensor in (random_bits(dtype, size, density=0.5), random_bits(dtype, size, density=0)):
            found = check_lossless(Narrow(), {}, tensor)
            assert found.codec == "raw" or dtype in sum(INTEGERS.values(), ())


@given(
    bits=st.sampled_from(sorted(INTEGERS)),
    num_words=st.integers(0, 1200),
    data=st.data(),
    seed=st.integers(0, 9),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_every_range_comes_back(bits: int, num_words: int, data: st.DataObject, seed: int) -> None:
    """On every instruction set, and from one and the same payload."""
    dtype, width = data.draw(st.sampled_from(INTEGERS[bits])), data.draw(st.integers(1, bits))
    low = -(1 << bits - 1) if dtype.is_signed else 0
    least = data.draw(st.integers(low, low + (1 << bits) - (1 << width)))
    tensor = integers(dtype, num_words, width, least, seed)
    assert len({check_lossless(Narrow(isa), {}, tensor) for isa in host_isas()}) == 1


def test_what_training_makes_takes_the_bits_that_it_holds() -> None:
    codec, n = Narrow(), 1 << 16
    generator = torch.Generator().manual_seed(0)
    for high, dtype, width in ((3136, torch.int64, 12), (50257, torch.int64, 16), (10, torch.int64, 4)):
        tensor = torch.randint(0, high, (n,), generator=generator).to(dtype)
        assert check_lossless(codec, {}, tensor) == ("narrow", HEAD_BYTES + n * width // 8)
    mask = torch.rand(n, generator=generator) < 0.5
    assert check_lossless(codec, {}, mask) == ("narrow", HEAD_BYTES + n // 8)
    ignored = torch.randint(-1, 7, (n,), generator=generator)  # ignore_index: 9 values with -1
    assert check_lossless(codec, {}, ignored) == ("narrow", HEAD_BYTES + n * 3 // 8)


@pytest.mark.parametrize(
    ("dtype", "least", "most"),
    [
        (torch.int64, -(1 << 63), -(1 << 63) + 5),
        (torch.int64, (1 << 63) - 6, (1 << 63) - 1),
        (torch.int32, -3, 2),
        (torch.int8, -128, -126),
        (torch.uint8, 250, 255),
    ],
)
def test_ends_of_a_range_are_those_of_the_dtype(
    codec: Narrow, dtype: torch.dtype, least: int, most: int
) -> None:
    tensor = torch.tensor([least, most] * 2000, dtype=dtype)
    width = (most - least).bit_length()
    lanes = 64 // dtype.itemsize
    num_rows = -(-(4000 // lanes) * width // (8 * dtype.itemsize))
    assert check_lossless(codec, {}, tensor) == ("narrow", HEAD_BYTES + 64 * num_rows)


def test_a_range_of_all_bits_goes_raw() -> None:
    for tensor in (
        torch.tensor([-(1 << 63), (1 << 63) - 1] * 600),
        torch.tensor([-128, 127] * 600, dtype=torch.int8),
        torch.tensor([-(1 << 31), 1 << 30] * 600, dtype=torch.int32),
    ):
        assert check_lossless(Narrow(), {}, tensor).codec == "raw"


def test_all_instruction_sets_write_the_same_bytes() -> None:
    for bits, dtypes in INTEGERS.items():
        tensor = integers(dtypes[0], 3001, bits // 2, 0)
        payloads = [packed(Narrow(isa), tensor)[1] for isa in host_isas()]
        assert all(torch.equal(payload, payloads[0]) for payload in payloads)


def test_streaming_stores_restore_a_large_tensor(codec: Narrow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "_STREAM_BYTES", 1 << 16)
    tensor = integers(torch.int64, 20_011, 13, -7)
    payload = packed(codec, tensor)[1]
    room = torch.zeros(tensor.nbytes + 128, dtype=torch.uint8)
    for first in (-room.data_ptr() % 64, -room.data_ptr() % 64 + 8):  # streamed, and not aligned for it
        back = room[first : first + tensor.nbytes].fill_(9)
        codec.unpack(payload.data_ptr(), len(payload), Words(back.data_ptr(), 20_011, 64, torch.int64))
        assert torch.equal(back, tensor.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint16, torch.bool], ids=str)
def test_damage_stays_within_its_memory(codec: Narrow, dtype: torch.dtype) -> None:
    tensor = integers(dtype, 1300, 1, 0)
    assert check_damage(codec, tensor, trials=200, first=HEAD_BYTES) > 80


def test_a_payload_has_the_one_length_of_its_width(codec: Narrow) -> None:
    """``fits`` takes exactly the lengths that some width has, ``unpack`` the one of its own."""
    tensor = torch.zeros(1000, dtype=torch.int64)
    lengths = {HEAD_BYTES + 64 * -(-125 * width // 64) for width in range(1, 64)}
    fitting = {n for n in range(9000) if codec.fits(1000, 64, n)}
    assert fitting == {n for n in lengths if n < 8000}
    payload = packed(codec, tensor)[1]
    for bad in (0, 3, 64, 1 << 40):
        with pytest.raises(CodecError, match="length of its width"):
            unpacked(codec, with_number(payload, 0, bad), tensor)


def test_a_least_word_that_no_word_can_be_is_refused(codec: Narrow) -> None:
    tensor = torch.zeros(1000, dtype=torch.int16)
    payload = packed(codec, tensor)[1]
    with pytest.raises(CodecError, match="was damaged"):
        unpacked(codec, with_number(payload, 8, 1 << 16), tensor)
