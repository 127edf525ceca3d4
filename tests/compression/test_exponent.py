"""The exponent codec: any floats, any number of them, anywhere in memory, come back bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exponent_twin import BLOCK, encode
from guarded import guarded
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.compression.errors import CodecError
from penstock.compression.exponent import Exponent
from penstock.compression.geometry import Words
from penstock.compression.kernels import exponent_cpu, jit
from penstock.compression.raw import Packed
from penstock.compression.zero_value import STREAM_BYTES

BITS = {torch.float16: 16, torch.bfloat16: 16, torch.float32: 32}


@pytest.fixture(params=jit.host_isas(), scope="module")
def codec(request: pytest.FixtureRequest) -> Exponent:
    return Exponent(exponent_cpu.build(request.param))


def normal(num_words: int, dtype: torch.dtype, seed: int = 0) -> np.ndarray:
    """Normally distributed floats as integers."""
    return as_words(np.random.default_rng(seed).standard_normal(num_words, dtype=np.float32), dtype)


def as_words(floats: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The bits of float32 numbers in another dtype, cut off."""
    return (floats.view(np.uint32) >> (32 - BITS[dtype])).astype(f"u{dtype.itemsize}")


def placed(data: np.ndarray, before: int = 0) -> np.ndarray:
    """The same data, ending at an unreadable page or ``before`` bytes in front of it."""
    room = guarded(data.nbytes + before).numpy()[: data.nbytes]
    room[:] = data.view(np.uint8)
    return room


def words_at(array: np.ndarray, num_words: int, dtype: torch.dtype) -> Words:
    return Words(array.ctypes.data, num_words, BITS.get(dtype, 8 * dtype.itemsize), dtype)


def pack(
    codec: Exponent, words: np.ndarray, dtype: torch.dtype, before: int = 0
) -> tuple[Packed, np.ndarray]:
    """Pack ``words``, bytes at any address, into just the room that the codec asks for."""
    num_words = len(words) // dtype.itemsize
    room = placed(np.full(codec.max_bytes(num_words, 8 * dtype.itemsize), 255, np.uint8), before)
    packed = codec.pack(words_at(words, num_words, dtype), room.ctypes.data)
    return packed, room[: packed.num_bytes]


def unpack(
    codec: Exponent, payload: np.ndarray, num_words: int, dtype: torch.dtype, before: int = 0
) -> np.ndarray:
    back = placed(np.full(num_words * dtype.itemsize, 9, np.uint8), before)
    codec.unpack(payload.ctypes.data, len(payload), words_at(back, num_words, dtype))
    return back


def at_the_ends_of_blocks(law):
    for num_words in (0, 1, 65, 1023, 1024, 1025, 1501, BLOCK - 1, BLOCK, BLOCK + 1, 16421):
        law = example(num_words=num_words, before=num_words % 64, seed=0)(law)
    return law


@at_the_ends_of_blocks
@given(
    num_words=st.integers(0, 3 * BLOCK),
    before=st.sampled_from([0, 1, 7, 60]) | st.integers(0, 63),
    seed=st.integers(0, 99),
)
def test_any_number_of_words_anywhere(codec: Exponent, num_words: int, before: int, seed: int) -> None:
    """From and to odd addresses; the payload has the bytes of the twin under the plan that was chosen."""
    for dtype, bits in BITS.items():
        data = normal(num_words, dtype, seed)
        words = placed(data, before)
        packed, payload = pack(codec, words, dtype, before)
        if num_words < 1024:
            assert packed == Packed("raw", len(words))
            np.testing.assert_array_equal(payload, words)
            continue
        assert packed.codec == "exponent"
        assert payload.tobytes() == encode(data, payload[:64].tobytes())
        assert codec.fits(num_words, bits, packed.num_bytes)
        back = unpack(codec, placed(payload, before), num_words, dtype, before)
        np.testing.assert_array_equal(back, words)


@pytest.mark.parametrize("num_words", [60_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_the_ratio_is_near_the_entropy_bound(num_words: int) -> None:
    """97 % of the order-0 entropy of the exponents, narrow and wide."""
    narrow, spread = np.random.default_rng(0).standard_normal((2, num_words), dtype=np.float32)
    for dtype, bits in BITS.items():
        for floats in (narrow, narrow**3, narrow * np.exp(2 * spread), narrow.clip(0)):
            words = as_words(floats, dtype)
            share = np.bincount(words >> (bits - 9) & 255) / num_words
            share = share[share > 0]
            bound = bits / (bits - 8 - share @ np.log2(share))
            packed, _ = pack(Exponent(), placed(words), dtype)
            assert words.nbytes / packed.num_bytes > 0.97 * bound


def test_other_dtypes_travel_raw() -> None:
    for dtype in (torch.float64, torch.int32, torch.int16, torch.uint8, torch.complex64):
        data = placed(np.zeros(4096 * dtype.itemsize, np.uint8))
        assert pack(Exponent(), data, dtype)[0] == Packed("raw", len(data))


@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_what_does_not_shrink_travels_raw(codec: Exponent, dtype: torch.dtype) -> None:
    """Any bits; and bits whose sample misleads, found out on the way and within the room."""
    noise = np.random.default_rng(0).integers(0, 256, 1 << 19, dtype=np.uint8)
    assert pack(codec, placed(noise), dtype)[0] == Packed("raw", len(noise))
    words, num_words = noise.view(f"u{dtype.itemsize}"), len(noise) // dtype.itemsize
    for run in range(128):
        place = (run * 0x9E3779B97F4A7C15 % (1 << 64)) * (num_words - 63) >> 64
        words[place : place + 64] = 1
    packed, payload = pack(codec, placed(words), dtype)
    assert packed == Packed("raw", words.nbytes)
    np.testing.assert_array_equal(payload, words.view(np.uint8))


def test_large_tensors_are_streamed(codec: Exponent) -> None:
    """Aligned, so past the cache, and not."""
    dtype, num_words = torch.bfloat16, STREAM_BYTES // 2 + 1001
    words, payloads = normal(num_words, dtype), []
    for before in (0, 4):
        room = np.zeros(codec.max_bytes(num_words, 16) + 192, np.uint8)
        out = room[-room.ctypes.data % 64 + before :]
        packed = codec.pack(words_at(words, num_words, dtype), out.ctypes.data)
        room = np.zeros(words.nbytes + 192, np.uint8)
        back = room[-room.ctypes.data % 64 + before :]
        codec.unpack(out.ctypes.data, packed.num_bytes, words_at(back, num_words, dtype))
        np.testing.assert_array_equal(back[: words.nbytes].view(np.uint16), words)
        payloads.append(out[: packed.num_bytes])
    np.testing.assert_array_equal(*payloads)


def test_a_payload_that_contradicts_itself_is_refused() -> None:
    codec, num_words = Exponent(), 3000
    _, payload = pack(codec, placed(normal(num_words, torch.bfloat16)), torch.bfloat16)
    other_codes, other_plan = payload.copy(), payload.copy()
    other_codes[64] ^= 0xFF
    other_plan[0] = 5
    for subject, data, dtype in (
        (r"torch.int16 and \(2, 2, 2\)", payload, torch.int16),
        ("agree", payload[:-1], torch.bfloat16),
        ("agree", np.append(payload, np.uint8(0)), torch.bfloat16),
        ("agree", payload[:3], torch.bfloat16),
        (r"and \(2,\)", payload[:1], torch.bfloat16),
        ("agree", payload, torch.float32),
        ("agree", other_codes, torch.bfloat16),
        (r"bits, found torch.bfloat16 and \(5, 2, 2\)", other_plan, torch.bfloat16),
    ):
        with pytest.raises(CodecError, match=subject):
            unpack(codec, placed(data), num_words, dtype)


def test_payloads_are_bounded_before_memory_is_taken() -> None:
    sizes = (0, 16, 0), (1 << 40, 16, 1 << 20), (4096, 16, 8192), (4096, 64, 5000), (4096, 16, 5600)
    assert [Exponent().fits(*size) for size in sizes] == [False, False, False, False, True]


def test_half_precision_shrinks_by_its_upper_byte(codec: Exponent) -> None:
    """Five bits of exponent and three of mantissa, and every special number."""
    halves = torch.randn(1 << 16).half()
    halves[:4] = torch.tensor([-0.0, float("nan"), float("inf"), 6e-8])
    words = halves.view(torch.int16).numpy()
    packed, payload = pack(codec, placed(words), torch.float16)
    assert words.nbytes / packed.num_bytes > 1.07
    back = unpack(codec, placed(payload), len(words), torch.float16)
    np.testing.assert_array_equal(back.view(np.int16), words)
