"""The exponent codec's loops, for every instruction set, against their slow twin and at unreadable pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exponent_twin import BLOCK, decode, encode
from guarded import guarded
from hypothesis import example, given
from hypothesis import strategies as st
from words import at, memory, words_of

from penstock.compression.errors import CodecError
from penstock.compression.exponent import Exponent, layout, plan_section
from penstock.compression.kernels import exponent_cpu, jit
from penstock.compression.kernels.exponent_cpu import ExponentKernels
from penstock.compression.kernels.exponent_ir import BLOCK_TAIL_BYTES
from penstock.compression.kernels.exponent_isa import PLANS

DTYPES = {16: torch.bfloat16, 32: torch.float32}
KINDS = ("normal", "wide", "any bits", "constant", "zeros", "special", "half zeros")


@pytest.fixture(params=jit.host_isas(), scope="module")
def kernels(request: pytest.FixtureRequest) -> ExponentKernels:
    return exponent_cpu.build(request.param)


def floats(num_words: int, bits: int, kind: str, seed: int = 0) -> np.ndarray:
    """Words of a dtype, as integers; "special" has -0.0, infinities, NaN payloads and denormals."""
    rng = np.random.default_rng(seed)
    dtype, normal = f"u{bits // 8}", rng.standard_normal(num_words, dtype=np.float32)
    if kind == "any bits":
        return rng.integers(0, 256, num_words * bits // 8, dtype=np.uint8).view(dtype)
    if kind == "wide":
        normal *= np.exp(4 * rng.standard_normal(num_words, dtype=np.float32))
    elif kind == "constant":
        normal[:] = 1.5
    elif kind != "normal":
        normal[rng.random(num_words) < (0.5 if kind == "half zeros" else 1)] = 0
    words = (normal.view(np.uint32) >> (32 - bits)).astype(dtype)
    if kind == "special":
        sign, payload = rng.integers(0, 2, (2, num_words), dtype=np.uint32)
        exponent = rng.choice(np.array([0, 255, 127], np.uint32), num_words) << (bits - 9)
        words[:] = sign << (bits - 1) | exponent | payload * rng.integers(0, 1 << 7, dtype=np.uint32)
    return words


def plan_of(words: np.ndarray, plan: tuple[int, ...], rarest: bool = False) -> bytes:
    """A plan section with the exponents of ``words``, the most frequent or the rarest first."""
    bits = 8 * words.itemsize
    counts = np.bincount(words >> (bits - 9) & 255, minlength=256)
    ranked = np.argsort(counts if rarest else -counts, kind="stable").astype(np.uint8).tobytes()
    section = bytes(plan).ljust(16, b"\0")
    for k in plan:
        section, ranked = section + ranked[: (1 << k) - 1].ljust(16, b"\0"), ranked[(1 << k) - 1 :]
    return section


def pack(kernels: ExponentKernels, words: np.ndarray, section: bytes, *, stream: bool) -> np.ndarray:
    """The payload of whole groups by a kernel alone, with room to the byte in front of an unreadable page."""
    bits, plan = 8 * words.itemsize, tuple(section[:3])
    parts, twin = layout(len(words), bits, plan[0]), encode(words, section)
    room = guarded(-(-(parts.tail + BLOCK_TAIL_BYTES * -(-len(words) // BLOCK)) // 64) * 64).numpy()
    room[:64] = np.frombuffer(section, np.uint8)
    sections = (at(room) + place for place in (16, 64, parts.remainders, parts.offsets, parts.tail))
    end = kernels.pack[bits, plan, stream](at(words), len(words) // 64, *sections, 0, len(twin))
    assert end == len(twin) - parts.tail
    return room[: len(twin)]


def unpack(kernels: ExponentKernels, payload: np.ndarray, num_words: int, bits: int, *, stream: bool):
    """Undo ``pack``: the words, in front of an unreadable page."""
    plan, back = tuple(payload[:3].tolist()), guarded(num_words * bits // 8).numpy()
    parts = layout(num_words, bits, plan[0])
    sections = [at(payload) + place for place in (64, parts.remainders, parts.offsets, parts.tail)]
    count = len(payload) - parts.tail
    kernel = kernels.unpack[bits, plan, stream]
    assert kernel(*sections, 0, count, num_words // 64, at(payload) + 16, at(back)) == count
    return back.view(f"u{bits // 8}")


@pytest.mark.parametrize("kind", KINDS)
@given(num_groups=st.integers(1, 140), seed=st.integers(0, 99), rarest=st.booleans())
@example(num_groups=130, seed=0, rarest=False)
@example(num_groups=128, seed=0, rarest=True)
def test_kernels_write_what_their_twin_writes_and_read_it(
    kernels: ExponentKernels, kind: str, num_groups: int, seed: int, rarest: bool
) -> None:
    """Escapes few or all over, in cache or past it, last block whole or not; and the twin reads it back."""
    for place, (bits, plan) in enumerate((bits, plan) for bits in DTYPES for plan in PLANS):
        words = memory(floats(64 * num_groups, bits, kind, seed))
        section, stream = plan_of(words, plan, rarest), (seed + place) % 2 == 1
        twin = memory(encode(words, section))
        np.testing.assert_array_equal(pack(kernels, words, section, stream=stream), twin)
        np.testing.assert_array_equal(decode(twin, len(words), bits), words)
        np.testing.assert_array_equal(unpack(kernels, twin, len(words), bits, stream=stream), words)


@pytest.mark.parametrize("bits", DTYPES)
def test_blocks_are_packed_and_unpacked_alone(kernels: ExponentKernels, bits: int) -> None:
    """Block 2 of 4, as a second thread would do it."""
    words = floats(4 * BLOCK, bits, "normal")
    payload, parts = memory(encode(words, plan_of(words, PLANS[1]))), layout(len(words), bits, 2)
    ends = payload[parts.offsets :][:32].view(np.uint64)
    codes = at(payload) + 64 + 2 * 64 * parts.codes_per_group
    remainders = at(payload) + parts.remainders + 2 * 64 * parts.remainders_per_group
    sections = (codes, remainders, at(payload) + parts.offsets + 16, at(payload) + parts.tail)
    kernel, back = kernels.unpack[bits, PLANS[1], False], guarded(BLOCK * bits // 8).numpy()
    end = kernel(*sections, int(ends[1]), len(payload) - parts.tail, 64, at(payload) + 16, at(back))
    assert end == ends[2]
    np.testing.assert_array_equal(back.view(words.dtype), words[2 * BLOCK : 3 * BLOCK])


def test_pack_gives_up_at_its_limit(kernels: ExponentKernels) -> None:
    words = memory(floats(3 * BLOCK, 16, "any bits"))
    room, ends = guarded(64 * 1024).numpy(), np.zeros(3, np.uint64)
    kernel, plan = kernels.pack[16, PLANS[1], False], np.frombuffer(plan_of(words, PLANS[1]), np.uint8)
    sections = (at(plan[16:]), at(room), at(room[16384:]), at(ends), at(room[32768:]))
    assert kernel(at(words), 192, *sections, 0, 1 << 20) == ends[2]
    assert kernel(at(words), 192, *sections, 0, int(ends[1])) == ends[2]
    assert kernel(at(words), 192, *sections, 0, int(ends[1]) - 1) == -1


@pytest.mark.parametrize("bits", DTYPES)
def test_count_is_that_of_its_runs(kernels: ExponentKernels, bits: int) -> None:
    words = memory(floats(1001, bits, "wide"))
    counts, expected = np.zeros((2, 256), np.int64)
    kernels.count[bits](at(words), len(words) - 63, 20, at(counts))
    for run in range(20):
        place = (run * 0x9E3779B97F4A7C15 % (1 << 64)) * (len(words) - 63) >> 64
        expected += np.bincount(words[place : place + 64] >> (bits - 9) & 255, minlength=256)
    np.testing.assert_array_equal(counts, expected)


@pytest.mark.parametrize("bits", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "wide", "special"])
def test_damage_is_never_followed(kernels: ExponentKernels, bits: int, kind: str) -> None:
    """Any byte of the payload, and its length: CodecError or words, and no page beyond is touched."""
    rng, num_words = np.random.default_rng(bits), 2 * BLOCK + 1000
    words, codec = floats(num_words, bits, kind), Exponent(kernels)
    room = np.zeros(codec.max_bytes(num_words, bits), np.uint8)
    packed = codec.pack(words_of(words, DTYPES[bits]), at(room))
    assert packed.codec == "exponent"
    payload, tail = memory(room[: packed.num_bytes]), layout(num_words, bits, int(room[0])).tail
    back, refused = guarded(words.nbytes).numpy().view(words.dtype), 0
    for trial in range(300):
        kept = payload.copy()
        first = (0, 64, tail - 64, tail)[trial % 4]
        place = rng.integers(first, (64, tail, tail, len(payload))[trial % 4])
        payload[place : place + rng.integers(1, 40)] ^= rng.integers(1, 256, dtype=np.uint8)
        short = memory(payload[: rng.integers(1, len(payload))]) if trial % 7 == 0 else payload
        try:
            codec.unpack(at(short), len(short), words_of(back, DTYPES[bits]))
        except CodecError:
            refused += 1
        payload[:] = kept
    assert refused > 100
    codec.unpack(at(payload), len(payload), words_of(back, DTYPES[bits]))
    np.testing.assert_array_equal(back, words)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_tail_is_as_long_as_its_numbers_say(kernels: ExponentKernels, change: int) -> None:
    """The last block's tail, cut off by a byte at an unreadable page or with one more; its offset agrees."""
    codec, words = Exponent(kernels), floats(3000, 16, "wide")
    room = np.zeros(codec.max_bytes(3000, 16), np.uint8)
    length = codec.pack(words_of(words, torch.bfloat16), at(room)).num_bytes
    parts = layout(3000, 16, int(room[0]))
    assert room[parts.tail :][:8].view(np.uint16)[2] > 0  # plain bytes, of which one is missing
    payload, back = memory(room[: length + change]), np.zeros(3000, np.uint16)
    payload[parts.offsets :][:8].view(np.uint64)[:] = length + change - parts.tail
    with pytest.raises(CodecError, match="agree"):
        codec.unpack(at(payload), len(payload), words_of(back, torch.bfloat16))


def test_plans_are_the_cheapest() -> None:
    counts = np.zeros(256, np.int64)
    counts[[120, 121, 122]] = 5, 7, 5
    assert tuple(plan_section(counts, 16)[:3]) == (2, 2, 2)
    counts[121] = 70
    assert tuple(plan_section(counts, 16)[:3]) == (1, 2, 2)
    counts[100:130] = 9
    assert tuple(plan_section(counts, 16)[:3]) == (4, 4, 4)
    counts[:] = 1
    assert plan_section(counts, 16)[0] == 0  # none pays


def test_plans_rank_exponents_by_number_then_by_size() -> None:
    """So that every machine makes the same."""
    counts = np.random.default_rng(0).integers(0, 3, 256)
    counts[50:80] += 100
    section, ranked = plan_section(counts, 32), sorted(range(256), key=lambda e: (-counts[e], e))
    assert len(section) == 64
    for level, k in enumerate(section[:3]):
        table, ranked = ranked[: (1 << k) - 1], ranked[(1 << k) - 1 :]
        assert list(section[16 * level + 16 :][:16]) == table + [0] * (16 - len(table))
