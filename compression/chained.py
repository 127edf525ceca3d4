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

from __future__ import annotations

import ctypes

import lz4.block
import numpy as np

from .buffers import Scratch, view_at
from .errors import CodecError
from .frame import FLOATS, ON_REQUEST, sections
from .geometry import Words
from .raw import Base, Codec, Packed, Raw
from .zero_value import SLACK, ZeroValue


def num_values_at(offsets: int, num_words: int) -> int:
    """Return the last of the ``offsets`` of a zero_value payload.

    Raises: CodecError: more values than words.
    """
    last = offsets + 8 * (sections(num_words).num_blocks - 1)
    found = int.from_bytes(ctypes.string_at(last, 8), "little")
    if found > num_words:
        raise CodecError(f"{num_words} words have at most as many values, found {found}; it was damaged")
    return found


class Combined:
    """The codec ``inner`` behind zero_value; one of them alone where the other does not shrink."""

    def __init__(self, zero_value: ZeroValue, inner: Codec) -> None:
        """Pack by ``zero_value`` first, its values by ``inner``."""
        self.name, self.dtypes = f"{zero_value.name}+{inner.name}", FLOATS & inner.dtypes
        self._zero_value, self._inner = zero_value, inner
        self._values = Scratch()

    def max_bytes(self, num_words: int, bits: int) -> int:
        """Room that ``pack`` needs, in bytes."""
        return sections(num_words).values + self._inner.max_bytes(num_words, bits)

    def fits(self, num_words: int, bits: int, num_bytes: int) -> bool:
        """Return whether a payload of ``num_bytes`` can hold these words."""
        return sections(num_words).values < num_bytes < num_words * bits // 8

    def pack(self, words: Words, out: int) -> Packed:
        """Pack ``words`` to the address ``out``."""
        head, values = sections(words.num_words).values, self._values.address(words.num_bytes + SLACK)
        count = self._zero_value.pack_to(words, out, values)
        if count is None:
            return self._inner.pack(words, out)
        codec, num_bytes = self._inner.pack(words._replace(address=values, num_words=count), out + head)
        # Values that the other codec leaves as they are make a payload of zero_value.
        return Packed(self.name if codec == self._inner.name else self._zero_value.name, head + num_bytes)

    def unpack(self, payload: int, num_bytes: int, out: Words) -> None:
        """Read bitmap and offsets, and the values by the other codec."""
        parts = sections(out.num_words)
        count, rest = num_values_at(payload + parts.offsets, out.num_words), num_bytes - parts.values
        if not self._inner.fits(count, out.bits, rest):
            rule = f"the values of a {self.name} frame suit its offsets"
            raise CodecError(f"{rule}, found {rest} bytes for {count} values; it was damaged")
        values = self._values.address(out.num_bytes + SLACK)
        inner = out._replace(address=values, num_words=count)
        self._inner.unpack(payload + parts.values, rest, inner)
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
    """Undo ``_shorter``, whose result has ``length`` bytes; memory is taken for ``num_bytes``.

    Raises: CodecError: they are no lz4 block of that many bytes.
    """
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


def _at(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


class ZeroValueLz4(Base):
    """Bitmap and values through lz4, each where it shrinks; zero_value where neither does."""

    dtypes = ON_REQUEST

    def __init__(self, zero_value: ZeroValue) -> None:
        super().__init__(zero_value.isa)
        self.name = f"{zero_value.name}+lz4"
        self._zero_value = zero_value
        self._head, self._values = Scratch(), Scratch()

    def fits(self, num_words: int, bits: int, num_bytes: int) -> bool:
        """Return whether a payload of ``num_bytes`` can hold these words."""
        parts = sections(num_words)
        return HEAD_BYTES + parts.values - parts.offsets < num_bytes < num_words * bits // 8

    def pack(self, words: Words, out: int) -> Packed:
        """Pack ``words`` to the address ``out``."""
        parts, word_bytes = sections(words.num_words), words.bits // 8
        head = self._head.address(parts.values)
        values = self._values.address(words.num_bytes + SLACK)
        count = self._zero_value.pack_to(words, head, values)
        if count is None:
            return Raw().pack(words, out)
        plain = parts.values + count * word_bytes
        bitmap, rest = _shorter(head, parts.offsets), _shorter(values, count * word_bytes)
        offsets = view_at(head + parts.offsets, parts.values - parts.offsets)
        start = len(bitmap).to_bytes(8, "little").ljust(HEAD_BYTES, b"\0")
        pieces, name = [memoryview(start), offsets, bitmap, rest], self.name
        if sum(map(len, pieces)) >= plain:
            name = self._zero_value.name
            pieces = [view_at(head, parts.values), view_at(values, count * word_bytes)]
        end = out
        for piece in pieces:
            if piece:
                ctypes.memmove(end, _at(piece), len(piece))
            end += len(piece)
        return Packed(name, end - out)

    def unpack(self, payload: int, num_bytes: int, out: Words) -> None:
        """Read head and offsets, restore bitmap and values, and expand them."""
        parts = sections(out.num_words)
        start = ctypes.string_at(payload, HEAD_BYTES)
        length, padding = int.from_bytes(start[:8], "little"), start[8:]
        first = HEAD_BYTES + parts.values - parts.offsets
        if padding.strip(b"\0") or not length or length > min(parts.offsets, num_bytes - first):
            rule = f"a bitmap of {parts.offsets} bytes fits into a {self.name} frame"
            raise CodecError(f"{rule} of {num_bytes}, found {length}; it was damaged")
        count = num_values_at(payload + HEAD_BYTES, out.num_words)
        bitmap = _restored(payload + first, length, parts.offsets)
        first += length
        values = _restored(payload + first, num_bytes - first, count * out.bits // 8)
        head = self._head.address(parts.values)
        ctypes.memmove(head, _at(bitmap), parts.offsets)
        ctypes.memmove(head + parts.offsets, payload + HEAD_BYTES, parts.values - parts.offsets)
        self._zero_value.unpack_from(head, _at(values) if count else payload, count, out)
