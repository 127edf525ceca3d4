"""The exponent codec and its loops, for every instruction set, against their slow twin."""

import numpy as np
import pytest
import torch
from guarded import guarded
from hypothesis import example, given
from hypothesis import strategies as st
from kernels import Kernels, on
from payloads import packed, unpacked
from words import at, memory, words_of

from penstock.compression.errors import CodecError
from penstock.compression.exponent import Exponent, layout, plan_section
from penstock.compression.kernels import jit
from penstock.compression.kernels.exponent_ir import BLOCK_TAIL_BYTES, PLANS, kernel_name
from penstock.compression.raw import Packed

DTYPES = {16: torch.bfloat16, 32: torch.float32}
BITS = {torch.float16: 16, torch.bfloat16: 16, torch.float32: 32}
KINDS = ("normal", "wide", "any bits", "constant", "zeros", "special", "half zeros")
BLOCK, GROUP = 4096, 64


def to_bits(codes: np.ndarray, k: int) -> bytes:
    return np.packbits((codes[:, None] >> np.arange(k)) & 1, bitorder="little").tobytes()


def zeros_to(num_bytes: int, section: bytes) -> bytes:
    return section + b"\0" * (-(num_bytes + len(section)) % 64)


def coded(exponents: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes, padded to whole groups, and the escapes."""
    codes = np.full(256, len(table), np.uint8)
    codes[table] = np.arange(len(table))
    found = codes[exponents]
    return np.pad(found, (0, -len(found) % GROUP)), exponents[found == len(table)]


def encode(words: np.ndarray, plan: bytes) -> bytes:
    """The slow twin: the payload of ``words`` (u16 or u32) under a plan section, a block at a time."""
    bits = 8 * words.itemsize
    tables = [np.frombuffer(plan[16 * i + 16 :][: (1 << plan[i]) - 1], np.uint8) for i in range(3)]
    padding = np.full(-len(words) % GROUP, int(tables[0][0]) << (bits - 9), words.dtype)
    words = np.concatenate([words, padding])
    turned = (words << 1) | (words >> (bits - 1))
    exponents = (turned >> (bits - 8)).astype(np.uint8)
    upper, lower = (turned >> (bits - 16) & 255).astype(np.uint8), turned.astype(np.uint16)
    rest = b"".join(
        (lower[i : i + GROUP].tobytes() if bits == 32 else b"") + upper[i : i + GROUP].tobytes()
        for i in range(0, len(words), GROUP)
    )
    codes, ends, tail = b"", [], b""
    for first in range(0, len(words), BLOCK):
        found, left = coded(exponents[first : first + BLOCK], tables[0])
        codes, counts, body = codes + to_bits(found, plan[0]), [len(left)], b""
        for table, k in zip(tables[1:], plan[1:3], strict=True):
            found, left = coded(left, table)
            counts, body = [*counts, len(left)], body + to_bits(found, k)
        tail += np.array([*counts, 0], "<u2").tobytes() + body + left.tobytes()
        ends.append(len(tail))
    text = b""
    for section in (plan, codes, rest, np.array(ends, "<u8").tobytes()):
        text += zeros_to(len(text), section)
    return text + tail


@pytest.fixture(params=jit.host_isas(), scope="module")
def isa(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def kernels(isa: str) -> Kernels:
    return jit._build("exponent", isa)


@pytest.fixture(scope="module")
def codec(isa: str) -> Exponent:
    return on(isa, Exponent())


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


def pack_words(kernels: Kernels, words: np.ndarray, section: bytes, *, stream: bool) -> np.ndarray:
    """The payload of whole groups by a kernel alone, with room to the byte in front of an unreadable page."""
    bits, plan = 8 * words.itemsize, tuple(section[:3])
    parts, twin = layout(len(words), bits, plan[0]), encode(words, section)
    room = guarded(-(-(parts.tail + BLOCK_TAIL_BYTES * -(-len(words) // BLOCK)) // 64) * 64).numpy()
    room[:64] = np.frombuffer(section, np.uint8)
    sections = (at(room) + place for place in (16, 64, parts.remainders, parts.offsets, parts.tail))
    end = kernels[kernel_name("pack", bits, plan, stream=stream)](
        at(words), len(words) // 64, *sections, 0, len(twin)
    )
    assert end == len(twin) - parts.tail
    return room[: len(twin)]


def unpack_words(kernels: Kernels, payload: np.ndarray, num_words: int, bits: int, *, stream: bool):
    """Undo ``pack_words``: the words, in front of an unreadable page."""
    plan, back = tuple(payload[:3].tolist()), guarded(num_words * bits // 8).numpy()
    parts = layout(num_words, bits, plan[0])
    sections = [at(payload) + place for place in (64, parts.remainders, parts.offsets, parts.tail)]
    count = len(payload) - parts.tail
    kernel = kernels[kernel_name("unpack", bits, plan, stream=stream)]
    assert kernel(*sections, 0, count, num_words // 64, at(payload) + 16, at(back)) == count
    return back.view(f"u{bits // 8}")


def of_every_kind(law):
    for place, kind in enumerate(KINDS):
        law = example(kind=kind, num_groups=130, seed=place, rarest=False)(law)
        law = example(kind=kind, num_groups=128, seed=place + 1, rarest=True)(law)
    return law


@of_every_kind
@given(
    kind=st.sampled_from(KINDS), num_groups=st.integers(1, 140), seed=st.integers(0, 99), rarest=st.booleans()
)
def test_kernels_write_what_their_twin_writes_and_read_it(kernels, kind, num_groups, seed, rarest) -> None:
    """Escapes few or all over, in cache or past it, last block whole or not."""
    for place, (bits, plan) in enumerate((bits, plan) for bits in DTYPES for plan in PLANS):
        words = memory(floats(64 * num_groups, bits, kind, seed))
        section, stream = plan_of(words, plan, rarest), (seed + place) % 2 == 1
        twin = memory(encode(words, section))
        np.testing.assert_array_equal(pack_words(kernels, words, section, stream=stream), twin)
        np.testing.assert_array_equal(unpack_words(kernels, twin, len(words), bits, stream=stream), words)


@pytest.mark.parametrize("bits", DTYPES)
def test_count_is_that_of_its_runs(kernels: Kernels, bits: int) -> None:
    words = memory(floats(1001, bits, "wide"))
    counts, expected = np.zeros((2, 256), np.int64)
    kernels[f"count{bits}"](at(words), len(words) - 63, 20, at(counts))
    for run in range(20):
        place = (run * 0x9E3779B97F4A7C15 % (1 << 64)) * (len(words) - 63) >> 64
        expected += np.bincount(words[place : place + 64] >> (bits - 9) & 255, minlength=256)
    np.testing.assert_array_equal(counts, expected)


@pytest.mark.parametrize("bits", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "wide", "special"])
def test_damage_is_never_followed(isa: str, bits: int, kind: str) -> None:
    """Any byte of the payload, and its length: CodecError or words, and no page beyond is touched."""
    rng, num_words = np.random.default_rng(bits), 2 * BLOCK + 1000
    words, codec = floats(num_words, bits, kind), on(isa, Exponent())
    room = np.zeros(codec.max_bytes(num_words, bits), np.uint8)
    found = codec.pack(words_of(words, DTYPES[bits]), at(room))
    assert found.codec == "exponent"
    payload, tail = memory(room[: found.num_bytes]), layout(num_words, bits, int(room[0])).tail
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
def test_a_tail_is_as_long_as_its_numbers_say(isa: str, change: int) -> None:
    """The last block's tail, cut off by a byte at an unreadable page or with one more; its offset agrees."""
    codec, words = on(isa, Exponent()), floats(3000, 16, "wide")
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


def tensor_of(words: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(words.view(np.uint8)).view(dtype)


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
        words = floats(num_words, bits, "normal", seed)
        tensor = tensor_of(words, dtype)
        found, payload = packed(codec, tensor, before)
        if num_words < 1024:
            assert found == Packed("raw", words.nbytes)
            continue
        assert found.codec == "exponent"
        assert payload.numpy().tobytes() == encode(words, payload[:64].numpy().tobytes())
        assert codec.fits(num_words, bits, found.num_bytes)
        back = unpacked(codec, payload, tensor, before)
        assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("num_words", [60_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_the_ratio_is_near_the_entropy_bound(num_words: int) -> None:
    """97 % of the order-0 entropy of the exponents, narrow and wide."""
    narrow, spread = np.random.default_rng(0).standard_normal((2, num_words), dtype=np.float32)
    for dtype, bits in BITS.items():
        for values in (narrow, narrow**3, narrow * np.exp(2 * spread), narrow.clip(0)):
            words = (values.view(np.uint32) >> (32 - bits)).astype(f"u{bits // 8}")
            share = np.bincount(words >> (bits - 9) & 255) / num_words
            share = share[share > 0]
            bound = bits / (bits - 8 - share @ np.log2(share))
            found, _ = packed(Exponent(), tensor_of(words, dtype))
            assert words.nbytes / found.num_bytes > 0.97 * bound


@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_what_does_not_shrink_travels_raw(codec: Exponent, dtype: torch.dtype) -> None:
    """Any bits; and bits whose sample misleads, found out on the way and within the room."""
    noise = np.random.default_rng(0).integers(0, 256, 1 << 19, dtype=np.uint8)
    assert packed(codec, tensor_of(noise, dtype))[0] == Packed("raw", len(noise))
    words, num_words = noise.view(f"u{dtype.itemsize}"), len(noise) // dtype.itemsize
    for run in range(128):
        place = (run * 0x9E3779B97F4A7C15 % (1 << 64)) * (num_words - 63) >> 64
        words[place : place + 64] = 1
    found, payload = packed(codec, tensor_of(words, dtype))
    assert found == Packed("raw", words.nbytes)
    np.testing.assert_array_equal(payload.numpy(), words.view(np.uint8))


def test_a_payload_that_contradicts_itself_is_refused() -> None:
    codec, like = Exponent(), tensor_of(floats(3000, 16, "normal"), torch.bfloat16)
    payload = packed(codec, like)[1]
    other_codes, other_plan = payload.clone(), payload.clone()
    other_codes[64] ^= 0xFF
    other_plan[0] = 5
    for subject, data, dtype in (
        (r"torch.int16 and \(2, 2, 2\)", payload, torch.int16),
        ("agree", payload[:-1], torch.bfloat16),
        ("agree", torch.cat([payload, payload[:1]]), torch.bfloat16),
        ("agree", payload[:3], torch.bfloat16),
        (r"and \(2,\)", payload[:1], torch.bfloat16),
        ("agree", payload, torch.float32),
        ("agree", other_codes, torch.bfloat16),
        (r"bits, found torch.bfloat16 and \(5, 2, 2\)", other_plan, torch.bfloat16),
    ):
        data, back = memory(data.numpy()), memory(np.zeros(3000, f"u{dtype.itemsize}"))
        with pytest.raises(CodecError, match=subject):
            codec.unpack(at(data), len(data), words_of(back, dtype))


def test_payloads_are_bounded_before_memory_is_taken() -> None:
    sizes = (0, 16, 0), (1 << 40, 16, 1 << 20), (4096, 16, 8192), (4096, 64, 5000), (4096, 16, 5600)
    assert [Exponent().fits(*size) for size in sizes] == [False, False, False, False, True]
