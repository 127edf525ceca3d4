"""Exponent payloads on a device, alone and of the values that zero_value leaves, the plan chosen there.

How many values there are, which plan suits them and whether it pays is known on the device alone; so launches
are for the most there may be, kernels read what there is, and nothing waits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import gpu_zero_value
from .errors import CodecError
from .exponent import _DTYPES, _LEAST_PERCENT, _RUNS, _SHORTEST
from .frame import BLOCK, sections
from .gpu_launch import kernels, new_facts, no_error, options, pack_raw
from .names import CODEC_NAMES

_ALONE, _BOTH = CODEC_NAMES.index("exponent"), CODEC_NAMES.index("zero_value+exponent")
_WARPS = 16  # of a program for a block; with 8 a thread needs twice the registers
_STATE, _BOOK = (
    8,
    40,
)  # u64: numbers that kernels leave each other; a plan section and the rank of each exponent


def pack(words: Tensor, payload: Tensor, dtype: torch.dtype) -> Tensor:
    """Write words as ``Exponent`` does; raw where it goes raw, decided on the device."""
    if not _suits(words, dtype):
        return pack_raw(words, payload)
    return _pack(words, payload, new_facts(words.device), head=0, alone=_ALONE)


def pack_combined(words: Tensor, payload: Tensor, dtype: torch.dtype) -> Tensor:
    """Write bitmap, offsets and packed values; one codec alone where ``Combined`` takes one alone."""
    head = sections(words.numel()).values
    if head >= words.nbytes:
        return pack(words, payload, dtype)
    if not _suits(words, dtype):
        return gpu_zero_value.pack(words, payload)
    values = torch.empty_like(words)
    facts = gpu_zero_value.pack(words, payload, apart=values)
    return _pack(values, payload, facts, head=head, alone=_ALONE)


def pack_masked(words: Tensor, payload: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Write the words at the set bits of ``mask``, packed where that is shorter."""
    if not _suits(words, dtype):
        return gpu_zero_value.pack_masked(words, payload, mask)
    values = torch.empty_like(words)
    facts = gpu_zero_value.pack_masked(words, values.view(torch.uint8), mask)
    return _pack(values, payload, facts, head=0, alone=_BOTH)


def unpack(payload: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo ``pack``, whatever the bytes hold.

    Returns: int32 on the device: not 0 if plan, codes, offsets, tail and length contradict each other.
    Raises:  CodecError: no such payload has this dtype.
    """
    number = torch.full((1,), out.numel(), dtype=torch.int64, device=out.device)
    return _unpack(payload, number, out, dtype)


def unpack_combined(payload: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo ``pack_combined``; returns and errors as ``unpack``."""
    parts, values = sections(out.numel()), torch.empty_like(out)
    ends = payload[parts.offsets : parts.values].view(torch.int64)
    error = _unpack(payload[parts.values :], ends[parts.num_blocks - 1 :], values, dtype)
    return gpu_zero_value.unpack(payload, out, apart=values, error=error)


def unpack_masked(payload: Tensor, out: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo ``pack_masked``; returns and errors as ``unpack``."""
    values = torch.empty_like(out)
    error = _unpack(payload, gpu_zero_value.num_values(mask, out), values, dtype)
    return gpu_zero_value.unpack(payload, out, mask=mask, apart=values, error=error)


def _suits(words: Tensor, dtype: torch.dtype) -> bool:
    return dtype in _DTYPES and words.numel() >= _SHORTEST


def _pack(words: Tensor, payload: Tensor, facts: Tensor, *, head: int, alone: int) -> Tensor:
    """Pack ``words``, or so many of them as the ``facts`` of zero_value say, and bring those up to date.

    Args:    payload: at its start for all words, behind ``head`` bytes for values.
             alone: the codec's number where zero_value left nothing out.
    """
    loops, device = kernels("gpu_exponent"), words.device
    num_words, num_bytes, bits = words.numel(), words.nbytes, 8 * words.element_size()
    num_blocks = -(-num_words // BLOCK)
    state, book = torch.empty(_STATE + _BOOK, dtype=torch.int64, device=device).split([_STATE, _BOOK])
    codes2, codes3 = torch.empty((2, num_blocks * BLOCK), dtype=torch.uint8, device=device)
    heads, lengths = torch.empty((2, num_blocks), dtype=torch.int64, device=device)
    book, numbers = book.view(torch.uint8), (num_words, head, alone, _BOTH)
    rules = options(16, BITS=bits, RUNS=_RUNS, SHORTEST=_SHORTEST, PERCENT=_LEAST_PERCENT)
    loops.choose_plan[(1,)](words, facts, state, book, *numbers, **rules)
    made, grid, launch = (
        (words, state, book, codes2, codes3, heads),
        (num_blocks,),
        options(_WARPS, BITS=bits),
    )
    loops.list_escapes[grid](*made, lengths, **launch)
    ends, as_they_are = torch.cumsum(lengths, 0), payload[:num_bytes].view(words.dtype)
    loops.write_words[grid](*made, ends, facts, payload, as_they_are, **launch)
    return facts


def _unpack(payload: Tensor, number: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """Read ``number`` words, counted on the device, to the beginning of ``out``, level by level."""
    bits, num_blocks = 8 * out.element_size(), -(-out.numel() // BLOCK)
    if _DTYPES.get(dtype) != bits:
        raise CodecError(f"an exponent frame has floats of 32 or 16 bits, found {dtype}; it was damaged")
    loops, error = kernels("gpu_exponent"), no_error(out.device)
    second, first = torch.empty((2, num_blocks * BLOCK), dtype=torch.uint8, device=out.device)
    sizes, grid, launch = (payload.numel(), out.numel()), (num_blocks,), options(_WARPS, BITS=bits)
    loops.restore_escapes[grid](payload, number, payload, second, error, *sizes, LEVEL=3, **launch)
    loops.restore_escapes[grid](payload, number, second, first, error, *sizes, LEVEL=2, **launch)
    loops.restore_words[grid](payload, number, first, out, error, *sizes, **launch)
    return error
