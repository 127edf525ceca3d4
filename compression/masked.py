"""Mask reuse: a gradient travels as values alone, at the set bits of a bitmap that both sides already have.

The gradient of a ReLU's output is dense, but it matters only where that output was not zero, and the frame of
the output said where. Whoever packs names the bitmap by its checksum, so that no other one is ever used.

Source: docs/architecture.md, "Where the bits are kept"; the proof is in stages/tracing/proof.py."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .errors import CodecError
from .frame import Header, header_bytes, read_header, sections
from .geometry import Geometry, Words
from .pool import Scratch
from .raw import Codec, Packed
from .zero_value import SLACK, ZeroValue

CODECS_WITH_BITMAP = ("zero_value", "zero_value+exponent", "zero_value+byte_plane")
_scratch = Scratch()


class Bitmap(NamedTuple):
    """Bitmap and offsets of a frame, as laid out in ``frame``: which words of its tensor are not zero."""

    address: int
    header: Header
    checksum: int

    def suits(self, dtype: object, geo: Geometry) -> bool:
        """Whether a tensor of this dtype and geometry has its words in the bitmap's order."""
        own = self.header.geometry
        dims = zip(own.sizes, own.strides, geo.strides, strict=False)
        same = (dtype, geo.sizes, geo.num_words) == (self.header.dtype, own.sizes, own.num_words)
        return same and all(size <= 1 or mine == other for size, mine, other in dims)


def bitmap_of(frame: Tensor, codec: ZeroValue) -> Bitmap | None:
    """The bitmap of a frame; None if it has none that can be read in place (it travelled raw, say).

    Raises: CodecError: the frame is damaged.
    """
    header = read_header(frame)
    if not shows_bitmap(header):
        return None
    address = frame.data_ptr() + header_bytes(len(header.sizes))
    return Bitmap(address, header, codec.bitmap_checksum(address, header.geometry.num_words))


def shows_bitmap(header: Header) -> bool:
    """Whether the frame of ``header`` has a bitmap that can be read in place, as long as its words need.

    Raises: CodecError: its payload is too short for one.
    """
    if not has_bitmap(header.codec) or header.flags:
        return False
    needed, found = sections(header.geometry.num_words).values, header.payload_bytes
    if found < needed:
        raise CodecError(
            f"bitmap and offsets of this frame take {needed} bytes, found {found}; it is damaged"
        )
    return True


def bitmap_for(header: Header, mask: Tensor | None, codec: ZeroValue) -> Bitmap:
    """The bitmap that the frame of ``header`` was made with, found in the frame ``mask``.

    Raises: CodecError: there is none, or another one.
    """
    rule = "this frame has values alone; decode it with mask=, the frame whose bitmap it was made with"
    if not has_bitmap(header.codec):
        raise CodecError(f"values alone are packed by {', '.join(CODECS_WITH_BITMAP)}, found {header.codec}")
    if mask is None:
        raise CodecError(f"{rule}, found none")
    bitmap = bitmap_of(mask, codec)
    if bitmap is None:
        raise CodecError(f"{rule}, found a frame without a bitmap")
    if not bitmap.suits(header.dtype, header.geometry) or bitmap.checksum != header.checksum:
        raise CodecError(f"{rule}, found another bitmap")
    return bitmap


def has_bitmap(codec: str) -> bool:
    """Whether frames of a codec have a bitmap that others can use."""
    return codec in CODECS_WITH_BITMAP


def pack_masked(words: Words, bitmap: Bitmap, out: int, zero_value: ZeroValue, inner: Codec | None) -> Packed:
    """Write the words at the set bits of ``bitmap`` to the address ``out``, packed again by ``inner``."""
    if inner is None:
        count = zero_value.pack_masked(words, bitmap.address, out)
        return Packed(zero_value.name, count * words.bits // 8)
    values = _scratch.address(words.num_bytes + SLACK)
    count = zero_value.pack_masked(words, bitmap.address, values)
    packed = inner.pack(words._replace(address=values, num_words=count), out)
    name = zero_value.name if packed.codec == "raw" else f"{zero_value.name}+{packed.codec}"
    return Packed(name, packed.num_bytes)


def unpack_masked(
    payload: int, num_bytes: int, bitmap: Bitmap, out: Words, zero_value: ZeroValue, inner: Codec | None
) -> None:
    """Undo ``pack_masked``; zeros where the bitmap has none.

    Raises: CodecError: payload and bitmap disagree.
    """
    if inner is not None:
        count = zero_value.num_values(bitmap.address, out.num_words)
        if count > out.num_words or not inner.fits(count, out.bits, num_bytes):
            raise CodecError(f"{num_bytes} bytes cannot hold the {count} values of a mask; it was damaged")
        values = out._replace(address=_scratch.address(out.num_bytes + SLACK), num_words=count)
        inner.unpack(payload, num_bytes, values)
        payload, num_bytes = values.address, values.num_bytes
    zero_value.unpack_masked(payload, num_bytes, bitmap.address, out)
