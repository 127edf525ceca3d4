"""The zero_value codec: whole payloads, what is given up, values that lie elsewhere, reused masks."""

from collections.abc import Callable

import numpy as np
import pytest
from guarded import guarded
from kernels import on
from words import BITS, any_words, at, mask_of, memory, payload_of, random_words, words_of

from penstock.compression.errors import CodecError
from penstock.compression.frame import BLOCK, sections
from penstock.compression.kernels.jit import host_isas
from penstock.compression.raw import Packed
from penstock.compression.zero_value import SLACK, ZeroValue, num_values


@pytest.fixture(params=host_isas(), scope="module")
def codec(request: pytest.FixtureRequest) -> ZeroValue:
    return on(request.param, ZeroValue())


def packed(codec: ZeroValue, words: np.ndarray) -> tuple[Packed, np.ndarray]:
    """The codec's report of a payload, and just the room that it asked for."""
    out = guarded(codec.max_bytes(len(words), 8 * words.itemsize)).numpy()
    out[:] = 255
    return codec.pack(words_of(words), at(out)), out


@any_words
def test_a_payload_is_what_its_twin_writes(codec, num_words, density, seed) -> None:
    """With no byte read or written beyond words, payload and output, the slack behind the values aside."""
    for bits in BITS:
        words = memory(random_words(num_words, bits, density, seed))
        (found, out), expected = packed(codec, words), payload_of(words)
        if found.codec == "raw":
            assert len(expected) >= words.nbytes == found.num_bytes
            np.testing.assert_array_equal(out[: words.nbytes], words.view(np.uint8))
            continue
        np.testing.assert_array_equal(out[: found.num_bytes], expected)
        payload, back = memory(expected), guarded(words.nbytes).numpy()
        codec.unpack(at(payload), len(payload), words_of(back.view(words.dtype)))
        np.testing.assert_array_equal(back.view(words.dtype), words)
        parts, room = sections(num_words), guarded(words.nbytes + -words.nbytes % 64).numpy()
        bitmap, ends, values = (at(payload) + place for place in (0, parts.offsets, parts.values))
        count = np.count_nonzero(words)
        assert codec.kernel(f"stream{bits}")(bitmap, ends, values, 0, count, num_words, at(room)) == count
        np.testing.assert_array_equal(room[: words.nbytes].view(words.dtype), words)
        assert not room[words.nbytes :].any()


@any_words
def test_words_come_back_where_a_mask_is_set(codec, num_words, density, seed) -> None:
    for bits in BITS:
        words = memory(random_words(num_words, bits, 0.7, seed=seed + 1))
        is_set = random_words(num_words, 8, density, seed) != 0
        mask, expected = memory(mask_of(is_set)), words[is_set]
        room = guarded(expected.nbytes + SLACK).numpy()
        assert num_values(at(mask) + sections(num_words).offsets, num_words) == len(expected)
        assert codec.pack_masked(words_of(words), at(mask), at(room)) == len(expected)
        np.testing.assert_array_equal(room[: expected.nbytes], expected.view(np.uint8))
        values, back = memory(expected), guarded(words.nbytes).numpy().view(words.dtype)
        back[:] = 9
        codec.unpack_masked(at(values), values.nbytes, at(mask), words_of(back))
        np.testing.assert_array_equal(back, np.where(is_set, words, 0))


def count_refused(area: np.ndarray, seed: int, call: Callable[[], object]) -> int:
    """Call 60 times, each with up to 30 bytes of ``area`` overwritten; returns how often it was refused."""
    rng, refused = np.random.default_rng(seed), 0
    for _ in range(60):
        kept, place = area.copy(), rng.integers(len(area))
        area[place : place + rng.integers(1, 30)] = rng.integers(0, 256, dtype=np.uint8)
        try:
            call()
        except CodecError:
            refused += 1
        area[:] = kept
    return refused


@pytest.mark.parametrize("seed", range(12))
def test_damage_stays_within_its_memory(codec: ZeroValue, seed: int) -> None:
    """A damaged mask is refused, unless bits and offsets still agree; of payloads ``test_laws`` says that."""
    bits, num_words = BITS[seed % 4], int(np.random.default_rng(seed).integers(600, 9000))
    words, is_set = memory(random_words(num_words, bits, 0.4, seed)), random_words(num_words, 8, 0.4) != 0
    mask, values = memory(mask_of(is_set)), memory(words[is_set])
    room, back = guarded(words.nbytes + SLACK).numpy(), guarded(words.nbytes).numpy().view(words.dtype)
    for call in (
        lambda: codec.pack_masked(words_of(words), at(mask), at(room)),
        lambda: codec.unpack_masked(at(values), values.nbytes, at(mask), words_of(back)),
    ):
        assert count_refused(mask, seed, call) > 30


@pytest.mark.parametrize("change", [-4, 4, -1, 1])
def test_more_or_fewer_values_than_the_mask_has_are_refused(codec: ZeroValue, change: int) -> None:
    words, is_set = random_words(2 * BLOCK + 5, 32, 1), random_words(2 * BLOCK + 5, 8, 0.5) != 0
    mask, values = mask_of(is_set), memory(np.zeros(4 * is_set.sum() + change, np.uint8))
    with pytest.raises(CodecError, match="values"):
        codec.unpack_masked(at(values), len(values), at(mask), words_of(words))


def test_bits_beyond_the_last_word_are_refused(codec: ZeroValue) -> None:
    words = memory(np.zeros(1003, np.int32))
    words[7] = 5
    found, out = packed(codec, words)
    mask, room = mask_of(words != 0), guarded(words.nbytes + SLACK).numpy()
    for bitmap in (out, mask):
        bitmap[1003 // 8] |= 128  # bit 7 of the last byte would be word 1007 ...
        bitmap[0] = 0  # ... in exchange for word 7, so that the count is right
    with pytest.raises(CodecError, match="bitmap and offsets"):
        codec.unpack(at(out), found.num_bytes, words_of(words))
    with pytest.raises(CodecError, match="mask"):
        codec.pack_masked(words_of(words), at(mask), at(room))
    with pytest.raises(CodecError, match="bitmap and offsets"):
        codec.unpack_masked(at(room), 4, at(mask), words_of(words))


def test_a_sample_of_blocks_decides_for_raw(codec: ZeroValue) -> None:
    for density, chosen in ((0.5, "zero_value"), (0.95, "zero_value"), (0.99, "raw")):
        assert packed(codec, random_words(70 * BLOCK, 32, density))[0].codec == chosen


def test_a_part_that_misleads_costs_time_but_no_bytes(codec: ZeroValue) -> None:
    words = random_words(80 * BLOCK, 32, 1)
    words[: 2 * BLOCK : 2] = 0  # half zeros in the part that is packed first, none behind it
    assert packed(codec, words)[0] == Packed("raw", words.nbytes)
    words = random_words(80 * BLOCK, 32, 1)
    words[2 * BLOCK :: 2] = 0  # and the other way round
    assert packed(codec, words)[0].codec == "zero_value"
