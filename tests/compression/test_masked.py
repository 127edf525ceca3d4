"""Mask reuse: values alone, at the set bits of a bitmap that both sides have."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from guarded import guarded
from words import BITS, DENSITIES, LENGTHS, at, mask_of, memory, random_words

from penstock.compression.errors import CodecError
from penstock.compression.frame import BLOCK, sections
from penstock.compression.geometry import Words
from penstock.compression.kernels.cpu import build
from penstock.compression.kernels.jit import host_isas
from penstock.compression.zero_value import SLACK, STREAM_BYTES, ZeroValue


@pytest.fixture(params=host_isas())
def codec(request: pytest.FixtureRequest) -> ZeroValue:
    return ZeroValue(build(request.param))


def words_of(array: np.ndarray) -> Words:
    return Words(at(array), len(array), 8 * array.itemsize, torch.int64)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("density", DENSITIES)
def test_words_come_back_where_the_mask_is_set(codec: ZeroValue, bits: int, density: float) -> None:
    for num_words in (0, *LENGTHS):
        words = memory(random_words(num_words, bits, 0.7, seed=1))
        is_set = random_words(num_words, 8, density) != 0
        mask, expected = memory(mask_of(is_set)), words[is_set]
        room = guarded(expected.nbytes + SLACK).numpy()
        assert codec.num_values(at(mask), num_words) == len(expected)
        assert codec.pack_masked(words_of(words), at(mask), at(room)) == len(expected)
        np.testing.assert_array_equal(room[: expected.nbytes], expected.view(np.uint8))
        values, back = memory(expected), guarded(words.nbytes).numpy().view(words.dtype)
        back[:] = 9
        codec.unpack_masked(at(values), values.nbytes, at(mask), words_of(back))
        np.testing.assert_array_equal(back, np.where(is_set, words, 0))


def test_a_large_tensor_is_streamed(codec: ZeroValue) -> None:
    num_words = STREAM_BYTES // 4 + 1001
    words, is_set = random_words(num_words, 32, 0.7, seed=1), random_words(num_words, 8, 0.5) != 0
    mask, values = mask_of(is_set), np.zeros(num_words + SLACK, np.uint32)
    count = codec.pack_masked(words_of(words), at(mask), at(values))
    back = torch.empty(num_words + 16, dtype=torch.int32).numpy()
    back = back[-at(back) % 64 // 4 :][:num_words].view(np.uint32)
    codec.unpack_masked(at(values), 4 * count, at(mask), words_of(back))
    np.testing.assert_array_equal(back, np.where(is_set, words, 0))


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_mask_stays_within_its_memory(codec: ZeroValue, seed: int) -> None:
    """Packing and unpacking refuse it, unless bits, offsets and values still agree."""
    rng = np.random.default_rng(seed)
    bits, num_words = int(rng.choice(BITS)), int(rng.integers(600, 9000))
    words, is_set = memory(random_words(num_words, bits, 0.7, seed)), random_words(num_words, 8, 0.4) != 0
    mask, values = memory(mask_of(is_set)), memory(words[is_set])
    room, back = guarded(words.nbytes + SLACK).numpy(), guarded(words.nbytes).numpy().view(words.dtype)
    refused = {"pack": 0, "unpack": 0}
    for _ in range(60):
        kept, place = mask.copy(), rng.integers(len(mask))
        mask[place : place + rng.integers(1, 30)] = rng.integers(0, 256, dtype=np.uint8)
        try:
            codec.pack_masked(words_of(words), at(mask), at(room))
        except CodecError:
            refused["pack"] += 1
        try:
            codec.unpack_masked(at(values), values.nbytes, at(mask), words_of(back))
        except CodecError:
            refused["unpack"] += 1
        mask[:] = kept
    assert min(refused.values()) > 30


@pytest.mark.parametrize("change", [-4, 4, -1, 1])
def test_more_or_fewer_values_than_the_mask_has_are_refused(codec: ZeroValue, change: int) -> None:
    words, is_set = random_words(2 * BLOCK + 5, 32, 1), random_words(2 * BLOCK + 5, 8, 0.5) != 0
    mask, values = mask_of(is_set), memory(np.zeros(4 * is_set.sum() + change, np.uint8))
    with pytest.raises(CodecError, match="values"):
        codec.unpack_masked(at(values), len(values), at(mask), words_of(words))


def test_bits_beyond_the_last_word_are_refused(codec: ZeroValue) -> None:
    words, is_set = memory(random_words(1003, 32, 1)), np.zeros(1003, bool)
    is_set[7] = True
    mask, room = mask_of(is_set), guarded(words.nbytes + SLACK).numpy()
    mask[0], mask[1003 // 8] = 0, 128  # bit 7 of the last byte would be word 1007; the count is right
    with pytest.raises(CodecError, match="mask"):
        codec.pack_masked(words_of(words), at(mask), at(room))
    with pytest.raises(CodecError, match="bitmap and offsets"):
        codec.unpack_masked(at(room), 4, at(mask), words_of(words))


def test_the_checksum_of_a_bitmap_leaves_out_its_offsets(codec: ZeroValue) -> None:
    mask = mask_of(random_words(5000, 8, 0.5) != 0)
    before = codec.bitmap_checksum(at(mask), 5000)
    mask[sections(5000).offsets :] ^= 255
    assert codec.bitmap_checksum(at(mask), 5000) == before
    mask[0] ^= 1
    assert codec.bitmap_checksum(at(mask), 5000) != before
