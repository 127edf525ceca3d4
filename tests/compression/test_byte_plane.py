"""Planes of bytes: what they are, which of them pay, and that no zstd frame of another size takes memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import zstandard
from payloads import DTYPES, SIZES, check_damage, check_lossless, numbers, packed, random_bits, unpacked

from penstock.compression.byte_plane import HEAD_BYTES, BytePlane
from penstock.compression.errors import CodecError
from penstock.compression.frame import MAX_RATIO
from penstock.compression.geometry import Words
from penstock.compression.kernels import loops
from penstock.compression.kernels.jit import host_isas

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
pytestmark = pytest.mark.filterwarnings("ignore:B?Complex.* support is experimental")


@pytest.fixture(params=host_isas())
def codec(request: pytest.FixtureRequest) -> BytePlane:
    return BytePlane(request.param)


def twin(words: np.ndarray, rotate: int) -> np.ndarray:
    """The slow twin: planes of bytes of words turned left."""
    bits = np.array(8 * words.itemsize - rotate, words.dtype)
    turned = words << np.array(rotate, words.dtype) | (words >> bits if rotate else words & 0)
    return turned.view(np.uint8).reshape(-1, words.itemsize).T


@pytest.mark.parametrize("isa", host_isas())
@pytest.mark.parametrize("bits", [16, 32, 64])
def test_split_is_its_twin_and_join_undoes_it(isa: str, bits: int) -> None:
    call, rng, item = loops.build("planes", isa).call, np.random.default_rng(0), bits // 8
    for num_words in (0, 1, 63, 64, 65, 1000):
        words = rng.integers(0, 256, num_words * item, dtype=np.uint8).view(f"u{item}")
        for rotate in (0, 1):
            planes, back = np.zeros((item, num_words), np.uint8), np.zeros_like(words)
            at = np.array([planes.ctypes.data + k * num_words for k in range(item)], np.uint64)
            call[f"split{bits}"](words.ctypes.data, num_words, rotate, at.ctypes.data)
            np.testing.assert_array_equal(planes, twin(words, rotate))
            call[f"join{bits}"](at.ctypes.data, num_words, rotate, back.ctypes.data)
            np.testing.assert_array_equal(back, words)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back(dtype: torch.dtype) -> None:
    for size in SIZES:
        for density in (0, 0.5, 1):
            check_lossless(BytePlane(), {}, random_bits(dtype, size, density=density))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_exponents_of_floats_are_compressed_and_their_mantissas_stored(
    codec: BytePlane, dtype: torch.dtype
) -> None:
    normal = torch.randn(1 << 15, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    normal = torch.where(normal == 0, 1, normal).to(torch.float32).to(dtype)  # from float32: also of float64
    check_lossless(codec, {}, normal)
    lengths = numbers(packed(codec, normal)[1], dtype.itemsize)
    assert lengths[-1] < 0.75 * len(normal)
    if dtype in (torch.float32, torch.bfloat16):
        assert lengths[:-1] == [len(normal)] * (dtype.itemsize - 1)


def test_halves_of_complex_numbers_are_words_of_their_own() -> None:
    real = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0))
    number = packed(BytePlane(), real)[1]
    assert torch.equal(packed(BytePlane(), real.view(torch.complex64))[1], number)


def test_long_words_that_nothing_compresses_are_sampled_and_go_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = torch.randint(-(1 << 63), (1 << 63) - 1, (70_000,), generator=torch.Generator().manual_seed(0))
    sizes, split = set(), BytePlane._split

    def recorded(codec: BytePlane, words: Words, rotate: int) -> list[int]:
        sizes.add(words.num_words)
        return split(codec, words, rotate)

    monkeypatch.setattr(BytePlane, "_split", recorded)
    assert packed(BytePlane(), noise)[0].codec == "raw"
    assert sizes == {16384}
    noise[:35_000] &= 0xFF  # what pays is found, and the rest is stored
    assert packed(BytePlane(), noise)[0].codec == "byte_plane"


def test_a_payload_is_not_shorter_than_a_header_may_say() -> None:
    zeros = torch.zeros(1 << 20)
    found, payload = packed(BytePlane(), zeros)
    assert found == ("byte_plane", zeros.nbytes // MAX_RATIO)
    assert not payload[HEAD_BYTES + sum(numbers(payload, 4)) :].any()
    check_lossless(BytePlane(), {}, zeros)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_damage_stays_within_its_memory(codec: BytePlane, dtype: torch.dtype) -> None:
    tensor = torch.arange(5000).remainder(97).to(dtype)
    assert check_damage(codec, tensor, trials=300, first=HEAD_BYTES) > 150


@pytest.mark.parametrize(
    "plane",
    [
        zstandard.ZstdCompressor().compress(bytes(1 << 20)),  # more than the plane
        zstandard.ZstdCompressor().compress(bytes(100)),  # less
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000)),  # unknown
        zstandard.ZstdCompressor().compress(bytes(1000)) + b"!",  # and something behind it
        zstandard.ZstdCompressor().compress(bytes(1000))[:-1],
        b"\x28\xb5\x2f\xfd\xe0" + (1 << 60).to_bytes(8, "little") + b"\0" * 9,  # claims 2**60 bytes
        b"\x50\x2a\x4d\x18\x04\0\0\0skip",  # a frame to skip
        b"\x28",
        b"",
    ],
)
def test_a_zstd_frame_of_another_size_is_refused(plane: bytes) -> None:
    head = len(plane).to_bytes(8, "little").ljust(HEAD_BYTES, b"\0")
    payload = torch.frombuffer(bytearray(head + plane), dtype=torch.uint8)
    like = torch.ones(1000, dtype=torch.uint8)
    with pytest.raises(CodecError, match=r"plane|does not fit"):
        unpacked(BytePlane(), payload, like)


def test_a_frame_that_claims_another_size_is_not_decompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    plane, codec = zstandard.ZstdCompressor().compress(bytes(1 << 20)), BytePlane()
    monkeypatch.setattr(codec._zstd, "decompress", None)
    payload = bytearray(len(plane).to_bytes(8, "little").ljust(HEAD_BYTES, b"\0") + plane)
    with pytest.raises(CodecError, match="1000 bytes, found 1048576"):
        unpacked(codec, torch.frombuffer(payload, dtype=torch.uint8), torch.ones(1000, dtype=torch.uint8))


@pytest.mark.parametrize("lengths", [[500, 1001, 0, 0], [1 << 63, 1 << 63, 500, 1], [1000] * 4, [1000, 1000]])
def test_lengths_that_do_not_fill_the_payload_are_refused(lengths: list[int]) -> None:
    head = b"".join(n.to_bytes(8, "little") for n in lengths).ljust(HEAD_BYTES, b"\0")
    payload = torch.frombuffer(bytearray(head + bytes(1501)), dtype=torch.uint8)
    with pytest.raises(CodecError, match="planes that fill it"):
        unpacked(BytePlane(), payload, torch.ones(1000))
