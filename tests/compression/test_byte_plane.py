"""Planes of bytes: what they are, which of them pay, and that no zstd frame of another size takes memory."""

import numpy as np
import pytest
import torch
import zstandard
from payloads import check_lossless, numbers, packed, unpacked
from words import any_words, at, random_words

from penstock.compression.byte_plane import HEAD_BYTES, BytePlane
from penstock.compression.errors import CodecError
from penstock.compression.frame import MAX_RATIO
from penstock.compression.geometry import Words
from penstock.compression.kernels.jit import _build, host_isas


def twin(words: np.ndarray, rotate: int) -> np.ndarray:
    """The slow twin: planes of bytes of words turned left."""
    bits = np.array(8 * words.itemsize - rotate, words.dtype)
    turned = words << np.array(rotate, words.dtype) | (words >> bits if rotate else words & 0)
    return turned.view(np.uint8).reshape(-1, words.itemsize).T


@pytest.mark.parametrize("isa", host_isas())
@any_words
def test_split_is_its_twin_and_join_undoes_it(isa: str, num_words: int, density: float, seed: int) -> None:
    call = _build("byte_plane", isa)
    for bits in (16, 32, 64):
        words = random_words(num_words, bits, density, seed)
        for rotate in (0, 1):
            planes, back = np.zeros((bits // 8, num_words), np.uint8), np.zeros_like(words)
            addresses = np.array([at(planes) + k * num_words for k in range(bits // 8)], np.uint64)
            call[f"split{bits}"](at(words), num_words, rotate, at(addresses))
            np.testing.assert_array_equal(planes, twin(words, rotate))
            call[f"join{bits}"](at(addresses), num_words, rotate, at(back))
            np.testing.assert_array_equal(back, words)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_exponents_of_floats_are_compressed_and_their_mantissas_stored(dtype: torch.dtype) -> None:
    normal = torch.randn(1 << 15, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    normal = torch.where(normal == 0, 1, normal).to(torch.float32).to(dtype)  # from float32: also of float64
    check_lossless(BytePlane(), {}, normal)
    lengths = numbers(packed(BytePlane(), normal)[1], dtype.itemsize)
    assert lengths[-1] < 0.75 * len(normal)
    if dtype in (torch.float32, torch.bfloat16):
        assert lengths[:-1] == [len(normal)] * (dtype.itemsize - 1)


def test_halves_of_complex_numbers_are_words_of_their_own() -> None:
    real = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0))
    payload = packed(BytePlane(), real)[1]
    assert torch.equal(packed(BytePlane(), real.view(torch.complex64))[1], payload)


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


def payload_of(lengths: list[int], planes: bytes) -> torch.Tensor:
    head = b"".join(length.to_bytes(8, "little") for length in lengths).ljust(HEAD_BYTES, b"\0")
    return torch.frombuffer(bytearray(head + planes), dtype=torch.uint8)


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
    with pytest.raises(CodecError, match=r"plane|does not fit"):
        unpacked(BytePlane(), payload_of([len(plane)], plane), torch.ones(1000, dtype=torch.uint8))


def test_a_frame_that_claims_another_size_is_not_decompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    plane, codec = zstandard.ZstdCompressor().compress(bytes(1 << 20)), BytePlane()
    monkeypatch.setattr(codec._zstd, "decompress", None)
    with pytest.raises(CodecError, match="1000 bytes, found 1048576"):
        unpacked(codec, payload_of([len(plane)], plane), torch.ones(1000, dtype=torch.uint8))


@pytest.mark.parametrize("lengths", [[500, 1001, 0, 0], [1 << 63, 1 << 63, 500, 1], [1000] * 4, [1000, 1000]])
def test_lengths_that_do_not_fill_the_payload_are_refused(lengths: list[int]) -> None:
    with pytest.raises(CodecError, match="planes that fill it"):
        unpacked(BytePlane(), payload_of(lengths, bytes(1501)), torch.ones(1000))
