"""Words on a device to payloads and back: what is launched, in which order, in whose memory.

Nothing here waits where a codec has kernels: sizes and errors stay on the device as facts and flags, and
whoever needs them waits for an event that stands behind all of it.

Facts are three int64: the payload's bytes, the number of the codec that reads it (0: raw), and the checksum
of the bitmap that its values were selected with.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from .codec import codec_named
from .errors import CodecError
from .frame import ALIGNMENT, BLOCK, CODEC_NAMES, sections
from .geometry import Words
from .zero_value import _LONG, _MOST, _PART

KERNELS = ("raw", "zero_value")  # codecs that run on the device; the others run on the host
# Warps of a program by the bytes of a word: 16 bytes a lane, several loads in flight.
NUM_WARPS = {1: 4, 2: 4, 4: 8, 8: 8}
_NUMBER = CODEC_NAMES.index("zero_value")
_SUMMED = 4096  # 64-bit words of a bitmap for one program
_INTEGERS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def pack(codec: str, words: Tensor, payload: Tensor, dtype: torch.dtype, mask: Tensor | None) -> Tensor:
    """Pack ``words`` by ``codec``, or with ``mask`` those at its set bits alone; returns the facts.

    Args:    words: 1-D contiguous integers. dtype: of the elements that they are.
             payload: uint8 at a multiple of 64, at least as long as the words; no payload is longer.
             mask: the bitmap of as many words, padded with zeros to a multiple of 64 bytes.
    """
    if codec == "raw" or not words.numel():
        return pack_raw(words, payload)
    if mask is not None:
        return pack_masked(words, payload, at_64(mask))
    return pack_words(words, payload) if codec in KERNELS else _pack_on_host(codec, words, payload, dtype)


def unpack(
    codec: str, payload: Tensor, out: Tensor, dtype: torch.dtype | None, mask: Tensor | None
) -> Tensor:
    """Undo ``pack`` for a payload whose length fits; returns int32, not 0 if it contradicts itself."""
    if codec == "raw":
        out.view(torch.uint8).copy_(payload)
    elif codec in KERNELS:
        return unpack_words(at_64(payload), out, mask=None if mask is None else at_64(mask))
    else:
        _unpack_on_host(codec, payload, out, dtype)
    return torch.zeros(1, dtype=torch.int32, device=out.device)


def pack_raw(words: Tensor, payload: Tensor) -> Tensor:
    """Copy the words."""
    payload[: words.nbytes].copy_(words.view(torch.uint8))
    facts = new_facts(words.device)
    facts[0].fill_(words.nbytes)
    return facts


def pack_words(words: Tensor, payload: Tensor, *, num_warps: int | None = None) -> Tensor:
    """Write bitmap, offsets and values; raw where ``ZeroValue`` goes raw, decided on the device."""
    parts, num_words, num_bytes = sections(words.numel()), words.numel(), words.nbytes
    if parts.values >= num_bytes:
        return pack_raw(words, payload)
    loops, grid, facts = kernels(), (parts.num_blocks,), new_facts(words.device)
    launch = {"BLOCK": BLOCK, "num_warps": num_warps or NUM_WARPS[words.element_size()]}
    bitmap = payload[: parts.offsets].view(torch.int32)
    offsets = payload[parts.offsets : parts.values].view(torch.int64)
    values = payload[parts.values : num_bytes].view(words.dtype)
    counts = torch.empty(parts.num_blocks, dtype=torch.int64, device=words.device)
    loops.count_words[grid](words, bitmap, counts, num_words, len(bitmap), **launch)
    torch.cumsum(counts, 0, out=offsets[: parts.num_blocks])
    whole, num_pad = num_words // BLOCK, len(offsets) - parts.num_blocks
    head = min(whole // _PART, _MOST) if whole >= _LONG else 0
    num_samples = min(head, _MOST // 2)
    sizes = (parts.num_blocks, whole, head, num_samples, num_bytes, parts.values, num_pad)
    constants = {"BLOCK": BLOCK, "WORD_BYTES": words.element_size(), "MOST": _MOST, "NUMBER": _NUMBER}
    loops.decide[(1,)](counts, offsets, facts, *sizes, **constants, num_warps=1)
    as_they_are = payload[:num_bytes].view(words.dtype)
    loops.compact[grid](words, bitmap, offsets, facts, values, as_they_are, num_words, **launch)
    return facts


def pack_masked(words: Tensor, payload: Tensor, mask: Tensor, *, num_warps: int | None = None) -> Tensor:
    """Write the words at the set bits of ``mask``, zeros among them; all bits set is raw."""
    parts, num_words = sections(words.numel()), words.numel()
    loops, facts, bitmap, offsets = (
        kernels(),
        new_facts(words.device),
        mask.view(torch.int32),
        _ends(mask, words),
    )
    constants = {"WORD_BYTES": words.element_size(), "NUMBER": _NUMBER}
    loops.decide_masked[(1,)](offsets, facts, parts.num_blocks, words.nbytes, **constants, num_warps=1)
    facts[2:].copy_(bitmap_checksum(mask))
    values = payload[: words.nbytes].view(words.dtype)
    launch = {"BLOCK": BLOCK, "num_warps": num_warps or NUM_WARPS[words.element_size()]}
    grid = (parts.num_blocks,)
    loops.compact[grid](words, bitmap, offsets, facts, values, values, num_words, **launch)
    return facts


def unpack_words(
    payload: Tensor, out: Tensor, *, mask: Tensor | None = None, num_warps: int | None = None
) -> Tensor:
    """Read bitmap, offsets and values, or values alone by ``mask``, whatever their bytes hold.

    Returns: int32 on the device: not 0 if bitmap, offsets and length contradict each other.
    """
    num_words, parts = out.numel(), sections(out.numel())
    if mask is None:
        bitmap = payload[: parts.offsets].view(torch.int32)
        offsets = payload[parts.offsets : parts.values].view(torch.int64)
        values = payload[parts.values :].view(out.dtype)
    else:
        bitmap, offsets, values = mask.view(torch.int32), _ends(mask, out), payload.view(out.dtype)
    error = torch.zeros(1, dtype=torch.int32, device=out.device)
    launch = {"BLOCK": BLOCK, "num_warps": num_warps or NUM_WARPS[out.element_size()]}
    sizes = (len(values), num_words, parts.num_blocks)
    kernels().expand[(parts.num_blocks,)](bitmap, offsets, values, out, error, *sizes, **launch)
    return error


def bitmap_checksum(bitmap: Tensor) -> Tensor:
    """A checksum of a bitmap (uint8, padded to a multiple of 64), one int64 on its device, never 0.

    The sum over its 64-bit words w[i] of mix(w[i] + (i + 1) * 0x9E3779B97F4A7C15), mod 2^64: the parts can be
    summed in any order.
    """
    rows = bitmap.view(torch.int64)
    num_programs = -(-len(rows) // _SUMMED)
    sums = torch.zeros(max(1, num_programs), dtype=torch.int64, device=bitmap.device)
    if num_programs:
        kernels().checksum[(num_programs,)](rows, sums, len(rows), BLOCK=_SUMMED, num_warps=8)
    total = sums.sum()
    return total + (total == 0)


def kernels() -> ModuleType:
    """The Triton loops.

    Raises: CodecError: this installation has no Triton.
    """
    try:
        from .kernels import gpu
    except ImportError as error:
        remedy = "install the triton that this torch asks for, or move the tensor to the CPU"
        raise CodecError(f"kernels for a GPU need Triton, found none ({error}); {remedy}") from error
    return gpu


def new_facts(device: torch.device) -> Tensor:
    """Facts of nothing: zeros."""
    return torch.zeros(3, dtype=torch.int64, device=device)


def empty(num_words: int, bits: int, device: torch.device) -> Tensor:
    """Words not yet written."""
    return torch.empty(num_words, dtype=_INTEGERS[bits], device=device)


def at_64(memory: Tensor) -> Tensor:
    """``memory``, copied if it does not begin at a multiple of 64."""
    return memory.clone() if memory.data_ptr() % ALIGNMENT or memory.storage_offset() % 8 else memory


def _ends(mask: Tensor, words: Tensor) -> Tensor:
    """How many bits of a bitmap are set before the end of each block."""
    num_words, num_blocks = words.numel(), sections(words.numel()).num_blocks
    counts = torch.empty(num_blocks, dtype=torch.int64, device=mask.device)
    kernels().count_bits[(num_blocks,)](mask.view(torch.int32), counts, num_words, BLOCK=BLOCK, num_warps=1)
    return torch.cumsum(counts, 0)


def _pack_on_host(codec: str, words: Tensor, payload: Tensor, dtype: torch.dtype) -> Tensor:
    """Pack by a codec that has no kernels; waits."""
    source, bits, chosen = words.cpu(), 8 * words.element_size(), codec_named(codec)
    out = torch.empty(chosen.max_bytes(words.numel(), bits), dtype=torch.uint8)
    packed = chosen.pack(Words(source.data_ptr(), words.numel(), bits, dtype), out.data_ptr())
    payload[: packed.num_bytes].copy_(out[: packed.num_bytes])
    return torch.tensor([packed.num_bytes, CODEC_NAMES.index(packed.codec), 0], device=words.device)


def _unpack_on_host(codec: str, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
    source, bits = payload.cpu(), 8 * out.element_size()
    back = torch.empty(out.shape, dtype=out.dtype)
    words = Words(back.data_ptr(), out.numel(), bits, dtype)
    codec_named(codec).unpack(source.data_ptr(), payload.numel(), words)
    out.copy_(back)
