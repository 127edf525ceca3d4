"""Codecs that lose bits: floats in one or two bytes, only for those who ask for them by name.

None of them keeps the promise of the same bits, so none is in ``CODECS`` and ``auto`` never takes one; each
says in its docstring how far a word can be off. Integers, complex numbers and what would not shrink go raw.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from .dtypes import ON_REQUEST
from .errors import CodecError
from .geometry import Words
from .raw import Packed, Raw
from .scaled import Fp8, Int8, chunks


def _integers(address: int, num_words: int, bits: int) -> np.ndarray:
    num_bytes = num_words * bits // 8
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))
    return memory.view(f"u{bits // 8}")


class Bf16:
    """Rounds float32 and float64 to bfloat16, to nearest, ties to even.

    Error: at most 2**-8 of the word where it is normal (at least 2**-126), at most 2**-134 below. From
    2**128 - 2**119 on a word becomes an infinity; infinities and zeros keep their sign, a NaN stays some NaN.
    """

    name, dtypes = "bf16", ON_REQUEST

    def max_bytes(self, num_words: int, bits: int) -> int:
        """Room that ``pack`` needs, in bytes: that of the words, should they go raw."""
        return num_words * bits // 8

    def fits(self, num_words: int, bits: int, num_bytes: int) -> bool:
        """Whether a payload of ``num_bytes`` can hold these words."""
        return bits >= 32 and num_words > 0 and num_bytes == 2 * num_words

    def pack(self, words: Words, out: int) -> Packed:
        """Round ``words`` to the address ``out``."""
        if words.dtype not in (torch.float32, torch.float64) or not words.num_words:
            return Raw().pack(words, out)
        source = _integers(words.address, words.num_words, words.bits)
        rounded = _integers(out, words.num_words, 16)
        for chunk, _ in chunks(words):
            rounded[chunk] = _rounded(_to_odd(source[chunk]) if words.bits == 64 else source[chunk])
        return Packed(self.name, 2 * words.num_words)

    def unpack(self, payload: int, num_bytes: int, out: Words) -> None:
        """Widen the words at the address ``payload`` to ``out``.

        Raises: CodecError: words of another dtype.
        """
        if out.dtype not in (torch.float32, torch.float64):
            raise CodecError(f"a bf16 frame holds float32 or float64, found {out.dtype}; it was damaged")
        source = _integers(payload, out.num_words, 16)
        target = _integers(out.address, out.num_words, out.bits)
        for chunk, _ in chunks(out):
            wide = source[chunk].astype(np.uint32) << np.uint32(16)
            if out.bits == 64:
                with np.errstate(invalid="ignore"):  # a NaN that signals
                    wide = wide.view(np.float32).astype(np.float64).view(np.uint64)
            target[chunk] = wide


def _rounded(words: np.ndarray) -> np.ndarray:
    """The bits of float32 as those of the nearest bfloat16; a NaN is made quiet, so that it stays one."""
    kept = words >> np.uint32(16)
    nearest = (words + (np.uint32(0x7FFF) + (kept & np.uint32(1)))) >> np.uint32(16)
    is_nan = (words & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, kept | np.uint32(0x40), nearest)


def _to_odd(words: np.ndarray) -> np.ndarray:
    """The bits of float64 as those of float32, cut off, the last bit set where that lost something.

    So a second rounding, to bfloat16, finds on which side of a tie it is.
    """
    exact = words.view(np.float64)
    with np.errstate(all="ignore"):
        nearest = exact.astype(np.float32)
    back = nearest.astype(np.float64)
    cut = nearest.view(np.uint32) - (np.abs(back) > np.abs(exact))
    return cut.astype(np.uint32) | (back != exact)


LOSSY_CODECS: dict[str, Bf16 | Fp8 | Int8] = {codec.name: codec for codec in (Bf16(), Fp8(), Int8())}
