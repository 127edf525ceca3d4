"""Integers on a device in the fewest bits and back: the payload of ``narrow``, its width decided there.

Pooling indices, labels, tokens and masks live on the device as well, and nothing waits for their range.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .gpu_launch import kernels, new_facts, no_error, options, pack_raw
from .kernels.narrow_ir import ROW_BYTES
from .names import CODEC_NAMES
from .narrow import _SIGNED, _UNSIGNED, HEAD_BYTES

_LOOPS = "gpu_narrow"
_NUMBER = CODEC_NAMES.index("narrow")
_TILE = 4096  # words whose range one program finds
_ROWS = 64  # of a payload for one program


def pack(words: Tensor, payload: Tensor, dtype: torch.dtype) -> Tensor:
    """Write integers in the fewest bits; raw where ``Narrow`` goes raw, decided on the device."""
    num_words, num_bytes, bits = words.numel(), words.nbytes, 8 * words.element_size()
    if dtype not in (*_SIGNED, *_UNSIGNED) or num_bytes <= HEAD_BYTES + ROW_BYTES:
        return pack_raw(words, payload)
    loops, facts = kernels(_LOOPS), new_facts(words.device)
    num_rows, num_parts = -(-num_bytes // ROW_BYTES), -(-num_words // _TILE)
    # Words are compared as signed numbers; unsigned ones have their order after the first bit is flipped.
    flip = 0 if dtype in _SIGNED else -(1 << (bits - 1))
    lows, highs = torch.empty((2, num_parts), dtype=torch.int64, device=words.device)
    signed = options(4, FLIP=flip, WORD=loops.SIGNED[bits], TILE=_TILE)
    loops.range_of_words[(num_parts,)](words, lows, highs, num_words, **signed)
    head, sizes = payload[:HEAD_BYTES].view(torch.int64), (num_parts, num_rows, num_bytes)
    constants = options(4, FLIP=flip, BITS=bits, NUMBER=_NUMBER, TILE=1024)
    loops.decide_narrow[(1,)](lows, highs, facts, head, *sizes, **constants)
    to, grid = payload[:num_bytes].view(words.dtype), (-(-num_rows // _ROWS),)
    loops.pack_rows[grid](words, head, facts, to, num_words, num_rows, **_row_options(loops, bits))
    return facts


def unpack(payload: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """Read integers back; returns int32 on the device: not 0 if the head contradicts the length."""
    loops, error, num_words, bits = kernels(_LOOPS), no_error(out.device), out.numel(), 8 * out.element_size()
    num_rows, num_packed = -(-out.nbytes // ROW_BYTES), (payload.numel() - HEAD_BYTES) // ROW_BYTES
    head, words = payload[:HEAD_BYTES].view(torch.int64), payload.view(out.dtype)
    grid, sizes = (-(-num_rows // _ROWS),), (num_packed, num_words, num_rows)
    loops.unpack_rows[grid](words, head, out, error, *sizes, **_row_options(loops, bits))
    return error


def _row_options(loops: ModuleType, bits: int) -> dict[str, Any]:
    lanes, word, wide = 8 * ROW_BYTES // bits, loops.UNSIGNED[bits], loops.WIDE[bits]
    return options(4, BITS=bits, LANES=lanes, ROWS=_ROWS, WORD=word, WIDE=wide)
