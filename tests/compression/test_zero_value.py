"""The zero_value codec: whole payloads, what is given up, values that lie elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from guarded import guarded
from words import BITS, LENGTHS, at, mask_of, memory, payload_of, random_words

from penstock.compression.errors import CodecError
from penstock.compression.frame import BLOCK, sections
from penstock.compression.geometry import Words
from penstock.compression.kernels.cpu import Kernels, build
from penstock.compression.kernels.jit import host_isas
from penstock.compression.raw import Packed
from penstock.compression.zero_value import SLACK, STREAM_BYTES, ZeroValue


@pytest.fixture(params=host_isas())
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return build(request.param)


def words_of(array: np.ndarray) -> Words:
    return Words(at(array), len(array), 8 * array.itemsize, torch.int64)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("density", [0, 0.1, 0.5])
def test_a_payload_is_what_its_twin_writes(kernels: Kernels, bits: int, density: float) -> None:
    """With no byte read or written beyond words, payload and output, the slack behind the values aside."""
    codec = ZeroValue(kernels)
    for num_words in (0, *LENGTHS):
        words = memory(random_words(num_words, bits, density))
        out, expected = guarded(codec.max_bytes(num_words, bits)).numpy(), payload_of(words)
        out[:] = 255
        packed = codec.pack(words_of(words), at(out))
        if packed.codec == "raw":
            assert len(expected) >= words.nbytes == packed.num_bytes
            np.testing.assert_array_equal(out[: words.nbytes], words.view(np.uint8))
            continue
        np.testing.assert_array_equal(out[: packed.num_bytes], expected)
        payload, back = memory(expected), guarded(words.nbytes).numpy()
        codec.unpack(at(payload), len(payload), words_of(back.view(words.dtype)))
        np.testing.assert_array_equal(back.view(words.dtype), words)


@pytest.mark.parametrize("bits", BITS)
def test_values_may_lie_apart(kernels: Kernels, bits: int) -> None:
    codec = ZeroValue(kernels)
    for num_words in (7 * BLOCK, 7 * BLOCK + 1003):
        words = memory(random_words(num_words, bits, 0.3))
        mask, values = guarded(sections(num_words).values).numpy(), words[words != 0]
        mask[:] = 255
        room = guarded(words.nbytes + SLACK).numpy()
        assert codec.pack_apart(words_of(words), at(mask), at(room)) == len(values)
        np.testing.assert_array_equal(mask, mask_of(words != 0))
        np.testing.assert_array_equal(room[: values.nbytes], values.view(np.uint8))
        apart, back = memory(values), guarded(words.nbytes).numpy().view(words.dtype)
        codec.unpack_apart(at(mask), at(apart), len(apart), words_of(back))
        np.testing.assert_array_equal(back, words)
    assert codec.pack_apart(words_of(random_words(7 * BLOCK, bits, 1)), at(mask), at(room)) is None


@pytest.mark.parametrize("seed", range(20))
def test_damaged_payloads_stay_within_their_memory(kernels: Kernels, seed: int) -> None:
    rng, codec = np.random.default_rng(seed), ZeroValue(kernels)
    bits, num_words = int(rng.choice(BITS)), int(rng.integers(600, 9000))
    words = memory(random_words(num_words, bits, 0.4, seed))
    room = guarded(codec.max_bytes(num_words, bits)).numpy()
    packed = codec.pack(words_of(words), at(room))
    payload, back = memory(room[: packed.num_bytes]), guarded(words.nbytes).numpy()
    refused, head = 0, sections(num_words).values
    for _ in range(60):
        place = rng.integers(head)
        kept = payload.copy()
        payload[place : min(head, place + rng.integers(1, 30))] = rng.integers(0, 256, dtype=np.uint8)
        try:
            codec.unpack(at(payload), len(payload), words_of(back.view(words.dtype)))
        except CodecError:
            refused += 1
        payload[:] = kept
    assert refused > 30


def test_bits_beyond_the_last_word_are_refused(kernels: Kernels) -> None:
    codec, words = ZeroValue(kernels), np.zeros(1003, np.int32)
    words[7] = 5
    out, back = np.zeros(codec.max_bytes(1003, 32), np.uint8), np.zeros(1003, np.int32)
    length = codec.pack(words_of(words), at(out)).num_bytes
    out[1003 // 8] |= 128  # bit 7 of the last byte would be word 1007 ...
    out[0] = 0  # ... in exchange for word 7, so that the count is right
    with pytest.raises(CodecError, match="bitmap and offsets"):
        codec.unpack(at(out), length, words_of(back))


def test_streaming_stores_restore_a_large_tensor(kernels: Kernels) -> None:
    num_words = STREAM_BYTES // 4 + 1001
    words, codec = random_words(num_words, 32, 0.3), ZeroValue(kernels)
    out = np.zeros(codec.max_bytes(num_words, 32), np.uint8)
    packed = codec.pack(words_of(words), at(out))
    room = np.zeros(words.nbytes + 128, np.uint8)
    for first in (-at(room) % 64, -at(room) % 64 + 4):  # streamed, and not aligned for it
        back = room[first : first + words.nbytes]
        back[:] = 9
        codec.unpack(at(out), packed.num_bytes, words_of(back.view(np.uint32)))
        np.testing.assert_array_equal(back.view(np.uint32), words)


@pytest.mark.parametrize(("density", "codec"), [(0.5, "zero_value"), (0.95, "zero_value"), (0.99, "raw")])
def test_a_sample_of_blocks_decides_for_raw(kernels: Kernels, density: float, codec: str) -> None:
    words = random_words(70 * BLOCK, 32, density)
    out = np.zeros(ZeroValue(kernels).max_bytes(len(words), 32), np.uint8)
    assert ZeroValue(kernels).pack(words_of(words), at(out)).codec == codec


def test_a_part_that_misleads_costs_time_but_no_bytes(kernels: Kernels) -> None:
    def packed(words: np.ndarray) -> Packed:
        out = np.zeros(ZeroValue(kernels).max_bytes(len(words), 32), np.uint8)
        return ZeroValue(kernels).pack(words_of(words), at(out))

    words = random_words(80 * BLOCK, 32, 1)
    words[: 2 * BLOCK : 2] = 0  # half zeros in the part that is packed first, none behind it
    assert packed(words) == Packed("raw", words.nbytes)
    words = random_words(80 * BLOCK, 32, 1)
    words[2 * BLOCK :: 2] = 0  # and the other way round
    assert packed(words).codec == "zero_value"
