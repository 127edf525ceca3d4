"""Zero-value compression first, another codec on what is left.

``Combined``: half zeros make any other codec slow and its statistics worse; without them it sees half the
bytes. A payload is bitmap and offsets of zero_value as laid out in ``frame``, then the values as the other
codec packs them.

``ZeroValueLz4``: where zeros come in runs, and values repeat, bitmap and values both shrink again at the
speed of lz4. A payload, little-endian, the sections of zero_value as laid out in ``frame``::

    head     u64 bytes of the bitmap here; zeros up to 64 bytes
    offsets  as they are
    bitmap   an lz4 block, or as it is where that is not shorter
    values   the rest: an lz4 block, or as they are where that is not shorter
"""

import lz4.block
import numpy as np

from .buffers import Scratch, view_at
from .errors import CodecError
from .frame import FLOATS, ON_REQUEST, sections
from .geometry import Words
from .raw import Codec, Packed, Raw
from .zero_value import SLACK, ZeroValue, num_values


class Combined(Codec):
    """The codec ``inner`` behind zero_value; one of them alone where the other does not shrink."""

    def __init__(self, zero_value: ZeroValue, inner: Codec) -> None:
        self.name, self.dtypes = f"{zero_value.name}+{inner.name}", FLOATS & inner.dtypes
        self._zero_value, self._inner, self._values = zero_value, inner, Scratch()

    def max_bytes(self, num_words: int, bits: int) -> int:
        return sections(num_words).values + self._inner.max_bytes(num_words, bits)

    def fits(self, num_words: int, bits: int, num_bytes: int) -> bool:
        return sections(num_words).values < num_bytes < num_words * bits // 8

    def pack(self, words: Words, out: int) -> Packed:
        head, values = sections(words.num_words).values, self._values.address(words.num_bytes + SLACK)
        count = self._zero_value.pack_to(words, out, values)
        if count is None:
            return self._inner.pack(words, out)
        codec, num_bytes = self._inner.pack(words._replace(address=values, num_words=count), out + head)
        # Values that the other codec leaves as they are make a payload of zero_value.
        return Packed(self.name if codec == self._inner.name else self._zero_value.name, head + num_bytes)

    def unpack(self, payload: int, num_bytes: int, out: Words) -> None:
        parts = sections(out.num_words)
        count, rest = num_values(payload + parts.offsets, out.num_words), num_bytes - parts.values
        if not self._inner.fits(count, out.bits, rest):
            rule = f"the values of a {self.name} frame suit its offsets"
            raise CodecError(f"{rule}, found {rest} bytes for {count} values; it was damaged")
        values = self._values.address(out.num_bytes + SLACK)
        self._inner.unpack(payload + parts.values, rest, out._replace(address=values, num_words=count))
        self._zero_value.unpack_from(payload, values, count, out)


HEAD_BYTES = 64
_MOST = 0x7E000000  # what lz4 takes in one block, in bytes


def _shorter(address: int, num_bytes: int) -> memoryview:
    """Those bytes as an lz4 block, or themselves."""
    plain = view_at(address, num_bytes)
    if not 0 < num_bytes <= _MOST:
        return plain
    packed = lz4.block.compress(plain, store_size=False)
    return memoryview(packed) if len(packed) < num_bytes else plain


def _restored(address: int, length: int, num_bytes: int) -> memoryview:
    """Undo ``_shorter``, whose result has ``length`` bytes; memory is taken for ``num_bytes`` alone."""
    found = view_at(address, length)
    if length == num_bytes:
        return found
    try:
        if length < num_bytes <= _MOST:
            found = memoryview(lz4.block.decompress(found, uncompressed_size=num_bytes))
    except (lz4.block.LZ4BlockError, MemoryError) as error:
        raise CodecError(f"a section of this frame is an lz4 block, found {error}; it was damaged") from error
    if len(found) != num_bytes:
        rule = f"a section of this frame has {num_bytes} bytes"
        raise CodecError(f"{rule}, found {len(found)}; it was damaged")
    return found


class ZeroValueLz4(Codec):
    """Bitmap and values through lz4, each where it shrinks; zero_value where neither does."""

    dtypes = ON_REQUEST

    def __init__(self, zero_value: ZeroValue) -> None:
        self.name = f"{zero_value.name}+lz4"
        self._zero_value, self._head, self._values = zero_value, Scratch(), Scratch()

    def fits(self, num_words: int, bits: int, num_bytes: int) -> bool:
        parts = sections(num_words)
        return HEAD_BYTES + parts.values - parts.offsets < num_bytes < num_words * bits // 8

    def pack(self, words: Words, out: int) -> Packed:
        parts, name = sections(words.num_words), self.name
        head, values = self._head.address(parts.values), self._values.address(words.num_bytes + SLACK)
        count = self._zero_value.pack_to(words, head, values)
        if count is None:
            return Raw().pack(words, out)
        value_bytes = count * words.bits // 8
        bitmap, rest = _shorter(head, parts.offsets), _shorter(values, value_bytes)
        start = memoryview(len(bitmap).to_bytes(8, "little").ljust(HEAD_BYTES, b"\0"))
        pieces = [start, view_at(head + parts.offsets, parts.values - parts.offsets), bitmap, rest]
        if sum(map(len, pieces)) >= parts.values + value_bytes:
            pieces, name = [view_at(head, parts.values), view_at(values, value_bytes)], self._zero_value.name
        end = out
        for piece in pieces:
            view_at(end, len(piece))[:] = piece
            end += len(piece)
        return Packed(name, end - out)

    def unpack(self, payload: int, num_bytes: int, out: Words) -> None:
        parts = sections(out.num_words)
        start, first = view_at(payload, HEAD_BYTES), HEAD_BYTES + parts.values - parts.offsets
        length = int.from_bytes(start[:8], "little")
        if any(start[8:]) or not 0 < length <= min(parts.offsets, num_bytes - first):
            rule = f"a bitmap of {parts.offsets} bytes fits into a {self.name} frame"
            raise CodecError(f"{rule} of {num_bytes}, found {length}; it was damaged")
        count = num_values(payload + HEAD_BYTES, out.num_words)
        bitmap = _restored(payload + first, length, parts.offsets)
        first += length
        values = _restored(payload + first, num_bytes - first, count * out.bits // 8)
        head = view_at(self._head.address(parts.values), parts.values)
        head[: parts.offsets] = bitmap
        head[parts.offsets :] = view_at(payload + HEAD_BYTES, parts.values - parts.offsets)
        at = np.frombuffer(values, np.uint8).ctypes.data if count else payload
        self._zero_value.unpack_from(self._head.address(parts.values), at, count, out)
