"""The compiled kernels against their slow twins, on memory that ends at unreadable pages."""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
from guarded import guarded

from penstock.compression.errors import CodecError
from penstock.compression.frame import BLOCK, sections
from penstock.compression.geometry import Words
from penstock.compression.kernels import cpu
from penstock.compression.kernels.cpu import Kernels, build, host_isa
from penstock.compression.raw import Packed
from penstock.compression.zero_value import STREAM_BYTES, ZeroValue

ISAS = sorted({host_isa(), "portable"})
BITS = (8, 16, 32, 64)
DENSITIES = (0, 0.1, 0.5, 0.9, 1)


@pytest.fixture(params=ISAS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return build(request.param)


def random_words(num_words: int, bits: int, density: float, seed: int = 0) -> np.ndarray:
    """Words of any bits, among them those of -0.0, NaN and denormals; about ``density`` of them not zero."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 256, num_words * bits // 8, dtype=np.uint8).view(f"u{bits // 8}") | 1
    words[::5] = np.array(1 << (bits - 1), words.dtype)  # -0.0
    words[1::7] = np.array(1, words.dtype)  # the smallest denormal
    words[rng.random(num_words) >= density] = 0
    return words


def memory(data: np.ndarray) -> np.ndarray:
    """The same data, ending at an unreadable page."""
    copy = guarded(data.nbytes).numpy()
    copy[:] = data.view(np.uint8)
    return copy.view(data.dtype)


def at(array: np.ndarray) -> int:
    return array.ctypes.data


def twin(words: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The slow twin: bitmap, offsets and values of whole blocks."""
    is_set = words != 0
    ends = is_set.reshape(-1, BLOCK).sum(axis=1).cumsum().astype(np.uint64)
    return np.packbits(is_set, bitorder="little"), ends, words[is_set]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("density", DENSITIES)
def test_pack_writes_what_its_twin_writes(kernels: Kernels, bits: int, density: float) -> None:
    words = memory(random_words(5 * BLOCK, bits, density))
    bitmap, ends, values = twin(words)
    got_bitmap, got_ends = guarded(bitmap.nbytes).numpy(), guarded(ends.nbytes).numpy()
    got_values = guarded(values.nbytes + 64).numpy()
    packed = kernels.pack[bits](at(words), 5, at(got_bitmap), at(got_ends), at(got_values), 0)
    assert packed == len(values)
    np.testing.assert_array_equal(got_bitmap, bitmap)
    np.testing.assert_array_equal(got_ends.view(np.uint64), ends)
    np.testing.assert_array_equal(got_values[: values.nbytes], values.view(np.uint8))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("verb", ["unpack", "stream"])
def test_unpack_restores_what_was_packed(kernels: Kernels, bits: int, density: float, verb: str) -> None:
    words = random_words(5 * BLOCK, bits, density)
    bitmap, ends, values = map(memory, twin(words))
    out, kernel = guarded(words.nbytes).numpy(), getattr(kernels, verb)[bits]
    assert kernel(at(bitmap), at(ends), at(values), 0, len(values), 5, at(out)) == len(values)
    np.testing.assert_array_equal(out.view(words.dtype), words)


@pytest.mark.parametrize("bits", BITS)
def test_blocks_are_packed_and_unpacked_alone(kernels: Kernels, bits: int) -> None:
    """Blocks 2 and 3 of 5, as a second thread would do them."""
    words = random_words(5 * BLOCK, bits, 0.5)
    bitmap, ends, values = map(memory, twin(words))
    start, part = int(ends[1]), memory(words[2 * BLOCK : 4 * BLOCK])
    out, mask, offset = guarded(part.nbytes).numpy(), at(bitmap[BLOCK // 4 :]), at(ends[2:])
    assert kernels.unpack[bits](mask, offset, at(values), start, len(values), 2, at(out)) == ends[3]
    np.testing.assert_array_equal(out.view(words.dtype), part)
    got_mask, got_ends = np.zeros(BLOCK // 4, np.uint8), np.zeros(2, np.uint64)
    got = np.zeros(len(values) + 64, words.dtype)
    kernels.pack[bits](at(part), 2, at(got_mask), at(got_ends), at(got), start)
    np.testing.assert_array_equal(got_mask, bitmap[BLOCK // 4 : BLOCK // 2])
    np.testing.assert_array_equal(got_ends, ends[2:4])
    np.testing.assert_array_equal(got[start : int(ends[3])], values[start : int(ends[3])])
    assert not got[:start].any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("density", [0.02, 0.5, 1])
@pytest.mark.parametrize("verb", ["unpack", "stream"])
def test_damage_is_found_and_never_followed(kernels: Kernels, bits: int, density: float, verb: str) -> None:
    rng, words = np.random.default_rng(1), random_words(3 * BLOCK, bits, density)
    bitmap, ends, values = map(memory, twin(words))
    out, kernel = guarded(words.nbytes).numpy(), getattr(kernels, verb)[bits]
    found = 0
    for trial in range(120):
        area = (bitmap, ends.view(np.uint8))[trial % 2]
        kept, place = area.copy(), rng.integers(len(area))
        area[place : place + rng.integers(1, 40)] ^= rng.integers(0, 256, dtype=np.uint8)
        counts = np.diff(ends, prepend=np.uint64(0))
        sound = (np.unpackbits(bitmap).reshape(3, BLOCK).sum(axis=1) == counts).all()
        sound = sound and all(a <= b for a, b in pairwise([0, *ends.tolist(), len(values)]))
        end = kernel(at(bitmap), at(ends), at(values), 0, len(values), 3, at(out))
        assert (end >= 0) == sound
        found += not sound
        area[:] = kept
    assert found > 60


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("num_words", [1, 7, 64, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
def test_last_block_may_be_partial(kernels: Kernels, bits: int, num_words: int) -> None:
    """The codec pads it, with no byte read or written beyond words, payload and output."""
    codec, parts = ZeroValue(kernels), sections(num_words)
    for density in (0, 0.1, 0.5):
        words = memory(random_words(num_words, bits, density))
        out = guarded(codec.max_bytes(num_words, bits)).numpy()
        out[:] = 255
        packed = codec.pack(Words(at(words), num_words, bits, torch.int64), at(out))
        if packed.codec == "raw":
            assert parts.values + (words != 0).sum() * bits // 8 >= words.nbytes == packed.num_bytes
            continue
        values = words[words != 0]
        expected = np.zeros(parts.values + values.nbytes, np.uint8)
        expected[: -(-num_words // 8)] = np.packbits(words != 0, bitorder="little")
        ends = [(words[: (b + 1) * BLOCK] != 0).sum() for b in range(parts.num_blocks)]
        expected[parts.offsets :][: 8 * len(ends)] = np.array(ends, np.uint64).view(np.uint8)
        expected[parts.values :] = values.view(np.uint8)
        np.testing.assert_array_equal(out[: packed.num_bytes], expected)
        payload, back = memory(expected), guarded(words.nbytes).numpy()
        codec.unpack(at(payload), len(payload), Words(at(back), num_words, bits, torch.int64))
        np.testing.assert_array_equal(back.view(words.dtype), words)


@pytest.mark.parametrize("seed", range(20))
def test_damaged_payloads_stay_within_their_memory(kernels: Kernels, seed: int) -> None:
    rng, codec = np.random.default_rng(seed), ZeroValue(kernels)
    bits, num_words = int(rng.choice(BITS)), int(rng.integers(600, 9000))
    words = memory(random_words(num_words, bits, 0.4, seed))
    room = guarded(codec.max_bytes(num_words, bits)).numpy()
    packed = codec.pack(Words(at(words), num_words, bits, torch.int64), at(room))
    payload, back = memory(room[: packed.num_bytes]), guarded(words.nbytes).numpy()
    refused, head = 0, sections(num_words).values
    for _ in range(60):
        place = rng.integers(head)
        kept = payload.copy()
        payload[place : min(head, place + rng.integers(1, 30))] = rng.integers(0, 256, dtype=np.uint8)
        try:
            codec.unpack(at(payload), len(payload), Words(at(back), num_words, bits, torch.int64))
        except CodecError:
            refused += 1
        payload[:] = kept
    assert refused > 30


def test_bits_beyond_the_last_word_are_refused(kernels: Kernels) -> None:
    codec, words = ZeroValue(kernels), np.zeros(1003, np.int32)
    words[7] = 5
    out, back = np.zeros(codec.max_bytes(1003, 32), np.uint8), np.zeros(1003, np.int32)
    length = codec.pack(Words(at(words), 1003, 32, torch.int64), at(out)).num_bytes
    out[1003 // 8] |= 128  # bit 7 of the last byte would be word 1007 ...
    out[0] = 0  # ... in exchange for word 7, so that the count is right
    with pytest.raises(CodecError, match="bitmap and offsets"):
        codec.unpack(at(out), length, Words(at(back), 1003, 32, torch.int64))


def test_streaming_stores_restore_a_large_tensor(kernels: Kernels) -> None:
    num_words = STREAM_BYTES // 4 + 1001
    words, codec = random_words(num_words, 32, 0.3), ZeroValue(kernels)
    out = np.zeros(codec.max_bytes(num_words, 32), np.uint8)
    packed = codec.pack(Words(at(words), num_words, 32, torch.int64), at(out))
    room = np.zeros(words.nbytes + 128, np.uint8)
    for first in (-at(room) % 64, -at(room) % 64 + 4):  # streamed, and not aligned for it
        back = room[first : first + words.nbytes]
        back[:] = 9
        codec.unpack(at(out), packed.num_bytes, Words(at(back), num_words, 32, torch.int64))
        np.testing.assert_array_equal(back.view(np.uint32), words)


@pytest.mark.parametrize(("density", "codec"), [(0.5, "zero_value"), (0.95, "zero_value"), (0.99, "raw")])
def test_a_sample_of_blocks_decides_for_raw(kernels: Kernels, density: float, codec: str) -> None:
    words = random_words(70 * BLOCK, 32, density)
    out = np.zeros(ZeroValue(kernels).max_bytes(len(words), 32), np.uint8)
    assert ZeroValue(kernels).pack(Words(at(words), len(words), 32, torch.int64), at(out)).codec == codec


def test_a_part_that_misleads_costs_time_but_no_bytes(kernels: Kernels) -> None:
    def packed(words: np.ndarray) -> Packed:
        out = np.zeros(ZeroValue(kernels).max_bytes(len(words), 32), np.uint8)
        return ZeroValue(kernels).pack(Words(at(words), len(words), 32, torch.int64), at(out))

    words = random_words(80 * BLOCK, 32, 1)
    words[: 2 * BLOCK : 2] = 0  # half zeros in the part that is packed first, none behind it
    assert packed(words) == Packed("raw", words.nbytes)
    words = random_words(80 * BLOCK, 32, 1)
    words[2 * BLOCK :: 2] = 0  # and the other way round
    assert packed(words).codec == "zero_value"


def test_kernels_are_built_once_for_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_built", {})
    built: list[Kernels] = []
    threads = [threading.Thread(target=lambda: built.append(build()), name=f"build {i}") for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 8
    assert all(kernels is built[0] for kernels in built)
    assert built[0].isa == host_isa()


def test_an_instruction_set_that_is_not_here_is_refused() -> None:
    with pytest.raises(CodecError, match=r"portable.*found 'mmx'"):
        build("mmx")
