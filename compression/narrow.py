"""Integers in the fewest bits that hold their range, and booleans as bits.

Indices of pooling, tokens and labels are 64 bits wide and hold 4 to 17; this runs at the speed of a copy.

A payload, little-endian::

    head     u64 width in bits, u64 the least word, zeros up to 64 bytes
    rows     word minus least, ``width`` bits each, as ``kernels/narrow_ir.py`` lays them out: lane l of a row
             of 64 bytes takes the words l, l + lanes, l + 2 lanes, ..., least significant bit first

The width is the least that holds the range and at least 1, so the bytes are the same on every machine.
"""

import ctypes
import struct

import torch

from .errors import CodecError
from .frame import OTHERS
from .geometry import Words
from .kernels.narrow_ir import ROW_BYTES
from .raw import Codec, Packed, Raw

HEAD_BYTES = 64
# From here on outputs would only push others out of the cache.
_STREAM_BYTES = 16 << 20
_PART = 32  # of long words one part in 32 is looked at first: words of all widths need no second look
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_UNSIGNED = (torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_HEAD = struct.Struct("<QQ48s")


def _num_rows(num_words: int, bits: int) -> int:
    return -(-num_words * bits // 8 // ROW_BYTES)


def _payload_bytes(num_words: int, bits: int, width: int) -> int:
    return HEAD_BYTES + ROW_BYTES * -(-_num_rows(num_words, bits) * width // bits)


class Narrow(Codec):
    """Integers and booleans in the fewest bits; all else, and what would not shrink, goes raw."""

    name, dtypes = "narrow", OTHERS

    def fits(self, num_words: int, bits: int, num_bytes: int) -> bool:
        rows = (num_bytes - HEAD_BYTES) // ROW_BYTES
        if rows <= 0 or num_bytes >= num_words * bits // 8:
            return False
        widest = min(bits - 1, rows * bits // _num_rows(num_words, bits))
        return widest > 0 and num_bytes == _payload_bytes(num_words, bits, widest)

    def pack(self, words: Words, out: int) -> Packed:
        if words.dtype not in _SIGNED and words.dtype not in _UNSIGNED:
            return Raw().pack(words, out)
        least, width = self._range(words)
        num_bytes = _payload_bytes(words.num_words, words.bits, width)
        if width == words.bits or num_bytes >= words.num_bytes:
            return Raw().pack(words, out)
        ctypes.memmove(out, _HEAD.pack(width, least, b""), HEAD_BYTES)
        self._pack(words, width, least, out + HEAD_BYTES)
        return Packed(self.name, num_bytes)

    def _range(self, words: Words) -> tuple[int, int]:
        """The least word, as an unsigned number, and the width of the range (or all bits, known early)."""
        kernel, word_bytes = self.kernel(f"range{words.bits}"), words.bits // 8
        bias = 1 << (words.bits - 1) if words.dtype in _SIGNED else 0
        ends = (ctypes.c_char * (2 * word_bytes))()
        head, least, most = words.num_words // _PART, (1 << words.bits) - 1, 0
        for first, count in ((0, head), (head, words.num_words - head)):
            if count and max(0, most - least).bit_length() < words.bits:
                kernel(words.address + first * word_bytes, count, bias, ctypes.addressof(ends))
                least = min(least, int.from_bytes(ends.raw[:word_bytes], "little"))
                most = max(most, int.from_bytes(ends.raw[word_bytes:], "little"))
        return least ^ bias, max(1, (most - least).bit_length())

    def _pack(self, words: Words, width: int, least: int, out: int) -> None:
        """All whole groups of ``bits`` rows, and what is behind them from a copy that is filled up."""
        kernel, group = self.kernel(f"pack{words.bits}"), words.bits * ROW_BYTES
        num_groups, rest = divmod(words.num_bytes, group)
        if num_groups:
            kernel(words.address, num_groups * words.bits, width, least, out)
        if rest:
            word_bytes, num_rows = words.bits // 8, -(-rest // ROW_BYTES)
            tail = ctypes.string_at(words.address + num_groups * group, rest)
            tail += least.to_bytes(word_bytes, "little") * ((num_rows * ROW_BYTES - rest) // word_bytes)
            copy = ctypes.create_string_buffer(tail)
            to = out + num_groups * width * ROW_BYTES
            kernel(ctypes.addressof(copy), num_rows, width, least, to)

    def unpack(self, payload: int, num_bytes: int, out: Words) -> None:
        width, least, padding = _HEAD.unpack(ctypes.string_at(payload, HEAD_BYTES))
        sound = 0 < width < out.bits and not least >> out.bits and not padding.strip(b"\0")
        if not sound or num_bytes != _payload_bytes(out.num_words, out.bits, width):
            rule = f"a narrow frame of {out.num_words} words of {out.bits} bits has the length of its width"
            raise CodecError(f"{rule}, found {width}, {least} and {num_bytes} bytes; it was damaged")
        rows, last = payload + HEAD_BYTES, (num_bytes - HEAD_BYTES) // ROW_BYTES - 1
        group = out.bits * ROW_BYTES
        stream = out.address % ROW_BYTES == 0 and out.num_bytes >= _STREAM_BYTES
        num_groups, rest = divmod(out.num_bytes, group)
        if num_groups:
            kernel = self.kernel(f"{'stream' if stream else 'unpack'}{out.bits}")
            kernel(rows, num_groups * out.bits, width, least, last, out.address)
        if rest:
            copy, at = (ctypes.c_char * group)(), num_groups * width
            arguments = -(-rest // ROW_BYTES), width, least, last - at, ctypes.addressof(copy)
            self.kernel(f"unpack{out.bits}")(rows + at * ROW_BYTES, *arguments)
            ctypes.memmove(out.address + num_groups * group, copy, rest)
