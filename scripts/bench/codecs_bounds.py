"""What a codec can reach at best on a tensor: the bound that stands beside its ratio.

A ratio alone says nothing about the codec; one of 1.17 may be all there is to gain.

Source: Shannon, A Mathematical Theory of Communication (1948), for symbols taken one by one (order 0).
"""

from __future__ import annotations

from math import inf

import numpy as np
import torch
from torch import Tensor

from ...compression.frame import sections

_CHUNK = 1 << 20
_EXPONENT_BITS = 8  # of float32 and bfloat16, the dtypes that the codec ``exponent`` is for


def bound(codec: str, words: np.ndarray, dtype: torch.dtype, chosen: np.ndarray | None = None) -> float:
    """The best ratio (before / after) that the format of ``codec`` could have on ``words``.

    Args:    words: unsigned integers, the bits of a tensor of ``dtype``.
             chosen: which words travel, where a mask that both sides have says so; then no bitmap does.
    Returns: zero_value: bitmap, offsets and the words that are not zero; exponent: sign and mantissa as they
             are, exponents at their entropy; byte_plane: every plane of bytes at its entropy; narrow: the
             bits of the range; both together for a combination, or its second codec alone, and what is behind
             lz4 as it is. inf: nothing has to travel.
    """
    first, _, then = codec.partition("+")
    if first != "zero_value":
        num_bytes = _packed_bytes(first, words, dtype)
    elif chosen is not None:
        num_bytes = _packed_bytes(then, words[chosen], dtype)
    else:
        behind = sections(len(words)).values + _packed_bytes(then, words[words != 0], dtype)
        num_bytes = min(behind, _packed_bytes(then, words, dtype))
    return words.nbytes / num_bytes if num_bytes else inf


def _packed_bytes(codec: str, words: np.ndarray, dtype: torch.dtype) -> float:
    """The fewest bytes of ``words``; those that ``codec`` is not for stay as they are."""
    num, bits = len(words), 8 * words.itemsize
    if codec == "exponent" and num:
        return num * (bits - _EXPONENT_BITS + entropy(_planes(words, dtype)[-1])) / 8
    if codec == "byte_plane":
        return sum(num * entropy(plane) / 8 for plane in _planes(words, dtype)) if num else 0.0
    if codec == "narrow" and num:
        signed = words.view(words.dtype.str.replace("u", "i")) if dtype.is_signed else words
        return num * max(1, (int(signed.max()) - int(signed.min())).bit_length()) / 8
    return float(words.nbytes)


def entropy(symbols: np.ndarray) -> float:
    """Bits per symbol of bytes, each coded by itself."""
    counts = np.zeros(256, np.int64)
    for start in range(0, len(symbols), _CHUNK):
        counts += np.bincount(symbols[start : start + _CHUNK], minlength=256)
    shares = counts[counts > 0] / max(1, len(symbols))
    return float(-(shares * np.log2(shares)).sum())


def _planes(words: np.ndarray, dtype: torch.dtype) -> list[np.ndarray]:
    """Bytes of the words, least significant first; of floats turned left by a bit: exponents are whole."""
    bits = 8 * words.itemsize
    if dtype.is_floating_point:
        words = (words << 1) | (words >> (bits - 1))
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), words.itemsize)
    return [octets[:, k] for k in range(words.itemsize)]


def words_of(tensor: Tensor) -> np.ndarray:
    """The bits of a contiguous tensor as unsigned integers."""
    octets = tensor.reshape(-1).view(torch.uint8).numpy()
    return octets.view(f"u{min(8, tensor.dtype.itemsize)}")
