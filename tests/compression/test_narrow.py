"""Integers in the fewest bits: the range decides, the bits come back, and a damaged width is refused."""

import math

import numpy as np
import pytest
import torch
from kernels import on
from payloads import DTYPES, check_lossless, packed, random_bits, unpacked, with_number

from penstock.compression.errors import CodecError
from penstock.compression.kernels.jit import host_isas
from penstock.compression.narrow import HEAD_BYTES, Narrow

INTEGERS = {
    8: (torch.uint8, torch.int8, torch.bool),
    16: (torch.uint16, torch.int16),
    32: (torch.uint32, torch.int32),
    64: (torch.uint64, torch.int64),
}
pytestmark = pytest.mark.filterwarnings("ignore:B?Complex.* support is experimental")


@pytest.fixture(params=host_isas(), scope="module")
def codec(request: pytest.FixtureRequest) -> Narrow:
    return on(request.param, Narrow())


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
    rng, item = np.random.default_rng(seed), dtype.itemsize
    words = [int(word) % (1 << width) + least for word in rng.integers(0, 1 << 63, num_words)]
    words[-1:], words[:1] = [least][:num_words], [least + (1 << width) - 1][:num_words]
    bits = np.array([word % (1 << 8 * item) for word in words], f"u{item}").view(np.uint8)
    return torch.from_numpy(bits).view(dtype)


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


def test_what_holds_no_integers_goes_raw() -> None:
    for dtype in set(DTYPES).difference(*INTEGERS.values()):
        assert packed(Narrow(), random_bits(dtype, 4096, density=0))[0].codec == "raw"


N = 1 << 16


@pytest.mark.parametrize(
    ("tensor", "width"),
    [
        (torch.arange(N) * 7 % 3136, 12),
        (torch.arange(N) % 50257, 16),
        (torch.arange(N) % 10, 4),
        (torch.arange(N) % 2 == 0, 1),
        (torch.arange(N) % 8 - 1, 3),  # ignore_index: classes and -1
        (torch.tensor([-(1 << 63), -(1 << 63) + 5] * 2000), 3),
        (torch.tensor([(1 << 63) - 6, (1 << 63) - 1] * 2000), 3),
        (torch.tensor([-3, 2] * 2000, dtype=torch.int32), 3),
        (torch.tensor([-128, -126] * 2000, dtype=torch.int8), 2),
        (torch.tensor([250, 255] * 2000, dtype=torch.uint8), 3),
        (torch.tensor([-(1 << 63), (1 << 63) - 1] * 600), None),  # all bits: raw
        (torch.tensor([-128, 127] * 600, dtype=torch.int8), None),
        (torch.tensor([-(1 << 31), 1 << 30] * 600, dtype=torch.int32), None),
    ],
)
def test_words_take_the_bits_of_their_range(codec: Narrow, tensor: torch.Tensor, width: int | None) -> None:
    found = check_lossless(codec, {}, tensor)
    if width is None:
        assert found.codec == "raw"
        return
    rows_of_words, bits = -(-len(tensor) // (64 // tensor.itemsize)), 8 * tensor.itemsize
    assert found == ("narrow", HEAD_BYTES + 64 * -(-rows_of_words * width // bits))


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
