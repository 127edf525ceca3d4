"""Zero-value payloads on a device, and values selected by a bitmap that both sides have.

Two passes, since a scan of the blocks' counts keeps the values in order: count and write the bitmap, then
write the values. Whether it pays is decided between them, on the device.

Source: Rhu et al., Compressing DMA Engine, HPCA 2018, section 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .frame import BLOCK, sections
from .gpu_launch import kernels, new_facts, no_error, options, pack_raw
from .names import CODEC_NAMES
from .zero_value import _LONG, _MOST, _PART

# Warps of a program by the bytes of a word: 16 bytes a lane, several loads in flight.
NUM_WARPS = {1: 4, 2: 4, 4: 8, 8: 8}
_LOOPS = "gpu_zero_value"
_NUMBER = CODEC_NAMES.index("zero_value")
_SUMMED = 4096  # 64-bit words of a bitmap for one program


def pack(
    words: Tensor,
    payload: Tensor,
    dtype: torch.dtype | None = None,
    *,
    apart: Tensor | None = None,
    num_warps: int | None = None,
) -> Tensor:
    """Write bitmap, offsets and values; raw where ``ZeroValue`` goes raw, decided on the device.

    Args:    apart: as many words, where values, or words as they are, go instead.
    """
    parts, num_words, num_bytes = sections(words.numel()), words.numel(), words.nbytes
    if parts.values >= num_bytes:
        return pack_raw(words, payload)
    loops, grid, facts = kernels(_LOOPS), (parts.num_blocks,), new_facts(words.device)
    launch = options(num_warps or NUM_WARPS[words.element_size()], BLOCK=BLOCK)
    bitmap = payload[: parts.offsets].view(torch.int32)
    offsets = payload[parts.offsets : parts.values].view(torch.int64)
    values = payload[parts.values : num_bytes].view(words.dtype) if apart is None else apart
    counts = torch.empty(parts.num_blocks, dtype=torch.int64, device=words.device)
    loops.count_words[grid](words, bitmap, counts, num_words, len(bitmap), **launch)
    torch.cumsum(counts, 0, out=offsets[: parts.num_blocks])
    whole, num_pad = num_words // BLOCK, len(offsets) - parts.num_blocks
    head = min(whole // _PART, _MOST) if whole >= _LONG else 0
    num_samples = min(head, _MOST // 2)
    sizes = (parts.num_blocks, whole, head, num_samples, num_bytes, parts.values, num_pad)
    constants = options(1, BLOCK=BLOCK, WORD_BYTES=words.element_size(), MOST=_MOST, NUMBER=_NUMBER)
    loops.decide[(1,)](counts, offsets, facts, *sizes, **constants)
    as_they_are = payload[:num_bytes].view(words.dtype) if apart is None else apart
    loops.compact[grid](words, bitmap, offsets, facts, values, as_they_are, num_words, **launch)
    return facts


def pack_masked(
    words: Tensor,
    payload: Tensor,
    mask: Tensor,
    dtype: torch.dtype | None = None,
    *,
    num_warps: int | None = None,
) -> Tensor:
    """Write the words at the set bits of ``mask``, zeros among them; all bits set is raw."""
    parts, num_words = sections(words.numel()), words.numel()
    loops, facts = kernels(_LOOPS), new_facts(words.device)
    bitmap, offsets = mask.view(torch.int32), _ends(mask, words)
    constants = options(1, WORD_BYTES=words.element_size(), NUMBER=_NUMBER)
    loops.decide_masked[(1,)](offsets, facts, parts.num_blocks, words.nbytes, **constants)
    facts[2:].copy_(checksum_of(mask, num_words))
    values = payload[: words.nbytes].view(words.dtype)
    launch = options(num_warps or NUM_WARPS[words.element_size()], BLOCK=BLOCK)
    grid = (parts.num_blocks,)
    loops.compact[grid](words, bitmap, offsets, facts, values, values, num_words, **launch)
    return facts


def unpack(
    payload: Tensor,
    out: Tensor,
    dtype: torch.dtype | None = None,
    *,
    mask: Tensor | None = None,
    apart: Tensor | None = None,
    error: Tensor | None = None,
    num_warps: int | None = None,
) -> Tensor:
    """Read bitmap, offsets and values, or values alone by ``mask``, whatever their bytes hold.

    Args:    apart: where values are that do not stand in the payload; behind them there may be others.
             error: a flag to set instead of a new one.
    Returns: int32 on the device: not 0 if bitmap, offsets and length contradict each other.
    """
    num_words, parts = out.numel(), sections(out.numel())
    error = no_error(out.device) if error is None else error
    if mask is None:
        bitmap = payload[: parts.offsets].view(torch.int32)
        offsets, start = payload[parts.offsets : parts.values].view(torch.int64), parts.values
    else:
        bitmap, offsets, start = mask.view(torch.int32), _ends(mask, out), 0
    values = payload[start:].view(out.dtype) if apart is None else apart
    launch = options(num_warps or NUM_WARPS[out.element_size()], BLOCK=BLOCK, EXACT=apart is None)
    sizes = (len(values), num_words, parts.num_blocks)
    kernels(_LOOPS).expand[(parts.num_blocks,)](bitmap, offsets, values, out, error, *sizes, **launch)
    return error


def checksum_of(bitmap: Tensor, num_words: int) -> Tensor:
    """``ZeroValue.bitmap_checksum`` of the bitmap of ``num_words`` words, as int64 on its device."""
    num_rows = -(-num_words // 64)
    sums = torch.zeros(max(1, -(-num_rows // _SUMMED)), dtype=torch.int64, device=bitmap.device)
    if num_rows:
        rows, constants = bitmap.view(torch.int64), options(8, BLOCK=_SUMMED)
        kernels(_LOOPS).checksum[(len(sums),)](rows, sums, num_words, num_rows, **constants)
    total = sums.sum()
    return total + (total == 0)


def num_values(mask: Tensor, words: Tensor) -> Tensor:
    """The set bits of the bitmap of ``words``, one int64 on its device."""
    return _ends(mask, words)[-1:]


def _ends(mask: Tensor, words: Tensor) -> Tensor:
    """How many bits of a bitmap are set before the end of each block."""
    num_words, num_blocks = words.numel(), sections(words.numel()).num_blocks
    counts = torch.empty(num_blocks, dtype=torch.int64, device=mask.device)
    rows = mask.view(torch.int32)
    kernels(_LOOPS).count_bits[(num_blocks,)](rows, counts, num_words, **options(1, BLOCK=BLOCK))
    return torch.cumsum(counts, 0)


def unpack_masked(payload: Tensor, out: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Read values alone by ``mask``; returns as ``unpack``."""
    return unpack(payload, out, mask=mask)
