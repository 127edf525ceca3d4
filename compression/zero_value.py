"""Zero-value compression: a bit per word says whether it is zero, and only the others travel.

Activations after a ReLU are about half zeros, and this runs at the speed of a copy. Bits are compared, not
values: -0.0 is kept.

Source: Rhu et al., Compressing DMA Engine, HPCA 2018, section 4; patent CN115016937A, claim 7.
"""

from __future__ import annotations

import ctypes

from .errors import CodecError
from .frame import BLOCK, Sections, sections
from .geometry import Words
from .kernels import cpu
from .raw import Packed, Raw

SLACK = 64  # pack stores whole vectors
STREAM_BYTES = 16 << 20  # outputs from here on would only push others out of the cache
_MASK_BYTES = BLOCK // 8
# Of a long tensor one part in 32 is packed first; if that did not shrink, a sample decides whether to go on.
_LONG, _PART, _MOST = 64, 32, 32  # blocks
_SCRATCH = ctypes.c_char * (_MASK_BYTES + BLOCK * 8 + SLACK)  # a bitmap and words of one block


class ZeroValue:
    """Bitmap, offsets and values as laid out in ``frame``; raw where that would not be shorter."""

    name = "zero_value"

    def __init__(self, kernels: cpu.Kernels | None = None) -> None:
        """Use ``kernels``; default: the host's best, built at the first use."""
        self._kernels = kernels

    @property
    def kernels(self) -> cpu.Kernels:
        """The compiled loops."""
        if self._kernels is None:
            self._kernels = cpu.build()
        return self._kernels

    def max_bytes(self, num_words: int, bits: int) -> int:
        """Room that ``pack`` needs, in bytes: that of no zeros at all, and a vector."""
        return sections(num_words).values + num_words * bits // 8 + SLACK

    def fits(self, num_words: int, bits: int, num_bytes: int) -> bool:
        """Whether a payload of ``num_bytes`` can hold these words."""
        values = sections(num_words).values
        return values <= num_bytes < num_words * bits // 8 and (num_bytes - values) * 8 % bits == 0

    def pack(self, words: Words, out: int) -> Packed:
        """Pack ``words`` to the address ``out``."""
        parts = sections(words.num_words)
        num_bytes = parts.values + self._pack(words, parts, out) * words.bits // 8
        if num_bytes < words.num_bytes:
            return Packed(self.name, num_bytes)
        return Raw().pack(words, out)

    def _pack(self, words: Words, parts: Sections, out: int) -> int:
        """Write all sections and return the number of values; that of all words if it gave up."""
        pack, word_bytes = self.kernels.pack[words.bits], words.bits // 8
        whole, rest = divmod(words.num_words, BLOCK)
        offsets, values, count = out + parts.offsets, out + parts.values, 0
        head = min(whole // _PART, _MOST) if whole >= _LONG else 0
        if head:
            count = pack(words.address, head, out, offsets, values, 0)
            scratch = values + count * word_bytes
            if self._full(count, head, words, parts) and self._sampled_full(words, parts, scratch):
                return words.num_words
        if whole:
            source = words.address + head * BLOCK * word_bytes
            count = pack(source, whole - head, out + head * _MASK_BYTES, offsets + 8 * head, values, count)
        if rest:
            scratch = _SCRATCH()
            mask = ctypes.addressof(scratch)
            source = words.address + whole * BLOCK * word_bytes
            ctypes.memmove(mask + _MASK_BYTES, source, rest * word_bytes)
            count = pack(mask + _MASK_BYTES, 1, mask, offsets + 8 * whole, values, count)
            ctypes.memmove(out + whole * _MASK_BYTES, mask, parts.offsets - whole * _MASK_BYTES)
        if (end := parts.offsets + 8 * parts.num_blocks) < parts.values:
            ctypes.memset(out + end, 0, parts.values - end)
        return count

    def _full(self, count: int, num_blocks: int, words: Words, parts: Sections) -> bool:
        """Whether words would not shrink if all had as many values as ``num_blocks`` of their blocks."""
        saved = num_blocks * BLOCK - count
        return words.num_bytes * saved <= parts.values * num_blocks * BLOCK

    def _sampled_full(self, words: Words, parts: Sections, scratch: int) -> bool:
        """Whether a few blocks, evenly spread, say that ``words`` will not shrink."""
        pack, whole, count = self.kernels.pack[words.bits], words.num_words // BLOCK, 0
        num_samples = min(whole // _PART, _MOST // 2)
        for i in range(num_samples):
            source = words.address + (2 * i + 1) * whole // (2 * num_samples) * BLOCK * words.bits // 8
            count += pack(source, 1, scratch, scratch + _MASK_BYTES, scratch + _MASK_BYTES + 8, 0)
        return self._full(count, num_samples, words, parts)

    def unpack(self, payload: int, num_bytes: int, out: Words) -> None:
        """Unpack the ``num_bytes`` bytes at the address ``payload`` to ``out``, and touch nothing else.

        Raises: CodecError: bitmap, offsets and length disagree.
        """
        parts, word_bytes = sections(out.num_words), out.bits // 8
        offsets, values = payload + parts.offsets, payload + parts.values
        count = (num_bytes - parts.values) // word_bytes
        whole, rest = divmod(out.num_words, BLOCK)
        stream = out.address % 64 == 0 and out.num_bytes >= STREAM_BYTES
        kernel, end = (self.kernels.stream if stream else self.kernels.unpack)[out.bits], 0
        if whole:
            end = kernel(payload, offsets, values, 0, count, whole, out.address)
        if rest and end >= 0:
            scratch = _SCRATCH()
            mask, used = ctypes.addressof(scratch), (rest + 7) // 8
            ctypes.memmove(mask, payload + whole * _MASK_BYTES, used)
            beyond = rest % 8 and scratch[used - 1][0] >> rest % 8
            kernel, room = self.kernels.unpack[out.bits], mask + _MASK_BYTES
            end = -1 if beyond else kernel(mask, offsets + 8 * whole, values, end, count, 1, room)
            ctypes.memmove(out.address + whole * BLOCK * word_bytes, room, rest * word_bytes)
        if end != count:
            rule = f"bitmap and offsets of a zero_value frame agree with its {count} values"
            raise CodecError(f"{rule}, these do not; it was damaged")
