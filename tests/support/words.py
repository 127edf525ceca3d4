"""Words to pack, memory that ends at an unreadable page, and the slow twin of the zero-value kernels."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from guarded import guarded
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.compression.frame import BLOCK, sections
from penstock.compression.geometry import Words

BITS = (8, 16, 32, 64)
DENSITIES = (0, 0.1, 0.5, 0.9, 1)
LENGTHS = (1, 7, 64, 1003, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17, 5 * BLOCK)


def any_words(law: Callable[..., Any]) -> Callable[..., Any]:
    """Hold a law of num_words, density and seed: of any, and at the ends of vectors and blocks."""
    for place, num_words in enumerate((0, *LENGTHS)):
        density = DENSITIES[place % len(DENSITIES)]
        law = example(num_words=num_words, density=density, seed=place)(law)
    density = st.sampled_from(DENSITIES) | st.floats(0, 1)
    return given(num_words=st.integers(0, 5 * BLOCK), density=density, seed=st.integers(0, 999))(law)


def random_words(num_words: int, bits: int, density: float, seed: int = 0) -> np.ndarray:
    """Words of any bits, among them those of -0.0, NaN and denormals; about ``density`` of them not zero."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 256, num_words * bits // 8, dtype=np.uint8).view(f"u{bits // 8}") | 1
    words[::5] = np.array(1 << (bits - 1), words.dtype)  # -0.0
    words[1::7] = np.array(1, words.dtype)  # the smallest denormal
    words[rng.random(num_words) >= density] = 0
    return words


def memory(data: np.ndarray | bytes) -> np.ndarray:
    """The same data, ending at an unreadable page."""
    data = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    copy = guarded(data.nbytes).numpy()
    copy[:] = data.view(np.uint8)
    return copy.view(data.dtype)


def at(array: np.ndarray) -> int:
    return array.ctypes.data


def words_of(array: np.ndarray, dtype: torch.dtype = torch.int64) -> Words:
    return Words(at(array), len(array), 8 * array.itemsize, dtype)


def bitmap_of(is_set: np.ndarray) -> np.ndarray:
    """One bit per word, filled up with zeros to a multiple of 64 bytes."""
    bitmap = np.packbits(is_set, bitorder="little")
    return np.pad(bitmap, (0, -len(bitmap) % 64))


def ends_of(is_set: np.ndarray) -> np.ndarray:
    """Numbers of values before the end of each block."""
    return np.array([is_set[: b + BLOCK].sum() for b in range(0, len(is_set), BLOCK)], np.uint64)


def twin(words: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The slow twin: bitmap, offsets and values."""
    is_set = words != 0
    return bitmap_of(is_set), ends_of(is_set), words[is_set]


def mask_of(is_set: np.ndarray) -> np.ndarray:
    """Bitmap and offsets as they lie in a payload."""
    ends = ends_of(is_set).view(np.uint8)
    return np.concatenate([bitmap_of(is_set), ends, np.zeros(-len(ends) % 64, np.uint8)])


def payload_of(words: np.ndarray) -> np.ndarray:
    """The whole payload, bytes."""
    payload = np.concatenate([mask_of(words != 0), words[words != 0].view(np.uint8)])
    assert len(payload) == sections(len(words)).values + np.count_nonzero(words) * words.itemsize
    return payload


def checksum_of(bitmap: np.ndarray, num_words: int) -> int:
    """The slow twin of the checksum of a bitmap, by Python's integers; bits beyond the words do not count."""
    whole, total = np.packbits(np.unpackbits(bitmap, bitorder="little")[:num_words], bitorder="little"), 0
    for place, word in enumerate(np.pad(whole, (0, -len(whole) % 8)).view("<u8").tolist(), start=1):
        mixed = (word + place * 0x9E3779B97F4A7C15) % 2**64
        mixed = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 % 2**64
        total += mixed ^ mixed >> 32
    return total % 2**64 or 1
