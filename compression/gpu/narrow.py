"""The loops of ``narrow`` in Triton: the range of integers, and integers in the fewest bits; the CPU's bytes.

A lane of all rows of 64 bytes is a stream of bits of its own (``narrow_ir``), so every word of either side is
put together on its own: from the few words whose bits it holds, or from the two that hold its bits. The width
is known on the device alone, hence loops and shifts of a length that is read there.

Source: Lemire and Boytsov, Decoding billions of integers per second through vectorization, 2015.
"""

# Triton's compiler reads these functions; to Python their numbers are of no type.
# pyright: reportOperatorIssue=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.narrow_ir import ROW_BYTES
from ..names import CODEC_NAMES
from ..narrow import _SIGNED, _UNSIGNED, HEAD_BYTES
from .payloads import new_facts, no_error, options, pack_raw

# How the words of a payload are computed with, by their bits: as they are stored, and as they are shifted.
SIGNED = {8: tl.int8, 16: tl.int16, 32: tl.int32, 64: tl.int64}
UNSIGNED = {8: tl.uint8, 16: tl.uint16, 32: tl.uint32, 64: tl.uint64}
WIDE = {8: tl.uint32, 16: tl.uint32, 32: tl.uint32, 64: tl.uint64}


@triton.jit
def range_of_words(
    words, lows, highs, num_words, FLIP: tl.constexpr, WORD: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The least and the largest word of a tile, compared as signed numbers after ``FLIP`` was xor-ed."""
    program = tl.program_id(0).to(tl.int64)
    i = program * TILE + tl.arange(0, TILE)
    key = tl.load(words + i, mask=i < num_words, other=0).to(WORD, bitcast=True).to(tl.int64) ^ FLIP
    first = tl.load(words + program * TILE).to(WORD, bitcast=True).to(tl.int64) ^ FLIP
    key = tl.where(i < num_words, key, first)
    tl.store(lows + program, tl.min(key, axis=0))
    tl.store(highs + program, tl.max(key, axis=0))


@triton.jit
def decide_narrow(
    lows, highs, facts, head, num_parts, num_rows, num_bytes,
    FLIP: tl.constexpr, BITS: tl.constexpr, NUMBER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the head of a payload, width and least word, and the facts: raw where it would not be shorter."""
    i = tl.arange(0, TILE)
    low = tl.load(lows + tl.zeros_like(i))
    high = tl.load(highs + tl.zeros_like(i))
    for start in range(0, num_parts, TILE):
        inside = start + i < num_parts
        low = tl.minimum(low, tl.load(lows + start + i, mask=inside, other=0x7FFFFFFFFFFFFFFF))
        high = tl.maximum(high, tl.load(highs + start + i, mask=inside, other=-0x8000000000000000))
    least, most = tl.min(low, axis=0), tl.max(high, axis=0)
    spread = (most - least).to(tl.uint64, bitcast=True)
    above = (spread >> tl.arange(0, 64).to(tl.uint64)) != 0
    width = tl.maximum(tl.sum(above.to(tl.int64), axis=0), 1)
    packed = 64 + 64 * ((num_rows * width + BITS - 1) // BITS)
    raw = (width == BITS) | (packed >= num_bytes)
    tl.store(facts, tl.where(raw, num_bytes, packed))
    tl.store(facts + 1, tl.where(raw, 0, NUMBER))
    least ^= FLIP
    if BITS < 64:
        least &= (1 << BITS) - 1
    j = tl.arange(0, 8)
    tl.store(head + j, tl.where(j == 0, width, tl.where(j == 1, least, 0)))


@triton.jit
def pack_rows(
    words, head, facts, payload, num_words, num_rows,
    BITS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, WORD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write ``ROWS`` rows of a payload, or of the words as they are if ``facts`` say raw."""
    start = tl.program_id(0).to(tl.int64) * ROWS
    row, lane = start + tl.arange(0, ROWS)[:, None], tl.arange(0, LANES)[None, :]
    at = row * LANES + lane
    if tl.load(facts + 1) == 0:
        tl.store(payload + at, tl.load(words + at, mask=at < num_words, other=0), mask=at < num_words)
    else:
        width, least = tl.load(head), tl.load(head + 1).to(WIDE)
        num_packed = (num_rows * width + BITS - 1) // BITS
        if start < num_packed:  # the grid is one for words that do not shrink
            source = row * BITS // width
            packed = tl.zeros([ROWS, LANES], WIDE)
            for _ in range((BITS + width - 1) // width + 1):
                shift = source * width - row * BITS  # where it begins in the row; below 0: in one before
                i = source * LANES + lane
                inside = (i < num_words) & (shift < BITS)
                word = tl.load(words + i, mask=inside, other=0).to(WORD, bitcast=True).to(WIDE)
                value = tl.where(inside, word - least, tl.zeros_like(packed))
                if BITS < 32:
                    value &= (1 << BITS) - 1
                up = tl.minimum(tl.maximum(shift, 0), BITS - 1).to(WIDE)
                down = tl.minimum(tl.maximum(-shift, 0), BITS - 1).to(WIDE)
                packed |= (value << up) >> down
                source += 1
            packed = packed.to(WORD).to(payload.dtype.element_ty, bitcast=True)
            tl.store(payload + LANES + at, packed, mask=at < num_packed * LANES)


@triton.jit
def unpack_rows(
    payload, head, out, error, num_packed, num_words, num_rows,
    BITS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, WORD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Read ``ROWS`` rows of words back; where the head does not suit them, nothing, and set ``error``."""
    j = tl.arange(0, 8)
    padding = tl.load(head + j, mask=j > 1, other=0)
    width, least = tl.load(head), tl.load(head + 1)
    sound = (width > 0) & (width < BITS) & (tl.max((padding != 0).to(tl.int32), axis=0) == 0)
    if BITS < 64:
        sound = sound & ((least.to(tl.uint64, bitcast=True) >> BITS) == 0)
    width = tl.where(sound, width, 1)
    sound = sound & ((num_rows * width + BITS - 1) // BITS == num_packed)
    num_read = tl.where(sound, num_packed, 0)
    start = tl.program_id(0).to(tl.int64) * ROWS
    row, lane = start + tl.arange(0, ROWS)[:, None], tl.arange(0, LANES)[None, :]
    source, used = row * width // BITS, (row * width % BITS).to(WIDE)
    at = (1 + source) * LANES + lane  # the head is one row
    low = tl.load(payload + at, mask=(source < num_read) & (lane >= 0), other=0)
    high = tl.load(payload + LANES + at, mask=(source + 1 < num_read) & (lane >= 0), other=0)
    low, high = low.to(WORD, bitcast=True).to(WIDE), high.to(WORD, bitcast=True).to(WIDE)
    value = (low >> used) | ((high << 1) << (BITS - 1 - used))
    mask = ((tl.full([1, 1], 1, tl.uint64) << width.to(tl.uint64)) - 1).to(WIDE)
    word = ((value & mask) + least.to(WIDE)).to(WORD).to(out.dtype.element_ty, bitcast=True)
    i = row * LANES + lane
    tl.store(out + i, word, mask=i < num_words)
    tl.store(error, 1, mask=sound == 0)


_NUMBER = CODEC_NAMES.index("narrow")
_TILE = 4096  # words whose range one program finds
_ROWS = 64  # of a payload for one program


def pack(words: Tensor, payload: Tensor, dtype: torch.dtype) -> Tensor:
    """Write integers in the fewest bits; raw where ``Narrow`` goes raw, decided on the device."""
    num_words, num_bytes, bits = words.numel(), words.nbytes, 8 * words.element_size()
    if dtype not in (*_SIGNED, *_UNSIGNED) or num_bytes <= HEAD_BYTES + ROW_BYTES:
        return pack_raw(words, payload)
    facts = new_facts(words.device)
    num_rows, num_parts = -(-num_bytes // ROW_BYTES), -(-num_words // _TILE)
    # Words are compared as signed numbers; unsigned ones have their order after the first bit is flipped.
    flip = 0 if dtype in _SIGNED else -(1 << (bits - 1))
    lows, highs = torch.empty((2, num_parts), dtype=torch.int64, device=words.device)
    signed = options(4, FLIP=flip, WORD=SIGNED[bits], TILE=_TILE)
    range_of_words[(num_parts,)](words, lows, highs, num_words, **signed)
    head, sizes = payload[:HEAD_BYTES].view(torch.int64), (num_parts, num_rows, num_bytes)
    constants = options(4, FLIP=flip, BITS=bits, NUMBER=_NUMBER, TILE=1024)
    decide_narrow[(1,)](lows, highs, facts, head, *sizes, **constants)
    to, grid = payload[:num_bytes].view(words.dtype), (-(-num_rows // _ROWS),)
    pack_rows[grid](words, head, facts, to, num_words, num_rows, **_row_options(bits))
    return facts


def unpack(payload: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """Read integers back; returns int32 on the device: not 0 if the head contradicts the length."""
    error, num_words, bits = no_error(out.device), out.numel(), 8 * out.element_size()
    num_rows, num_packed = -(-out.nbytes // ROW_BYTES), (payload.numel() - HEAD_BYTES) // ROW_BYTES
    head, words = payload[:HEAD_BYTES].view(torch.int64), payload.view(out.dtype)
    grid, sizes = (-(-num_rows // _ROWS),), (num_packed, num_words, num_rows)
    unpack_rows[grid](words, head, out, error, *sizes, **_row_options(bits))
    return error


def _row_options(bits: int) -> dict[str, Any]:
    lanes, word, wide = 8 * ROW_BYTES // bits, UNSIGNED[bits], WIDE[bits]
    return options(4, BITS=bits, LANES=lanes, ROWS=_ROWS, WORD=word, WIDE=wide)
