"""Zero-value compression: a bit per word says whether it is zero, and only the others travel.

Activations after a ReLU are about half zeros, and this runs at the speed of a copy. Bits are compared, not
values: -0.0 is kept.

The bitmap is used again for gradients: that of a ReLU's output is dense, but it matters only where the
output was not zero, and the frame of the output said where. So it travels as values alone, at the set bits
of a bitmap that both sides have. Whoever packs names the bitmap by its checksum, so that no other one is
ever used.

Source: Rhu et al., Compressing DMA Engine, HPCA 2018, section 4.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .buffers import Scratch
from .errors import CodecError
from .frame import BLOCK, FLOATS, OTHERS, Header, Sections, header_bytes, read_header, sections
from .geometry import Geometry, Words
from .raw import Codec, Packed, Raw

SLACK = 64  # pack stores whole vectors
STREAM_BYTES = 16 << 20  # outputs from here on would only push others out of the cache
# Of a long tensor one part in 32 is packed first; if that did not shrink, a sample decides whether to go on.
_LONG, _PART, _MOST = 64, 32, 32  # blocks
_MASK_BYTES = BLOCK // 8


def num_values(offsets: int, num_words: int) -> int:
    """Return the last of the ``offsets`` of a zero_value payload; CodecError: more values than words."""
    if not num_words:
        return 0
    last = offsets + 8 * (sections(num_words).num_blocks - 1)
    if (found := ctypes.c_uint64.from_address(last).value) > num_words:
        raise CodecError(f"{num_words} words have at most as many values, found {found}; it was damaged")
    return found


class ZeroValue(Codec):
    """Bitmap, offsets and values as laid out in ``frame``; raw where that would not be shorter."""

    name, dtypes = "zero_value", FLOATS | OTHERS

    def max_bytes(self, num_words: int, bits: int) -> int:
        return sections(num_words).values + num_words * bits // 8 + SLACK

    def fits(self, num_words: int, bits: int, num_bytes: int) -> bool:
        values = sections(num_words).values
        return values <= num_bytes < num_words * bits // 8 and (num_bytes - values) * 8 % bits == 0

    def pack(self, words: Words, out: int) -> Packed:
        start = sections(words.num_words).values
        count = self.pack_to(words, out, out + start)
        if count is None:
            return Raw().pack(words, out)
        return Packed(self.name, start + count * words.bits // 8)

    def pack_to(self, words: Words, out: int, values: int) -> int | None:
        """Write bitmap and offsets to the address ``out``, as in a payload, and the values to ``values``.

        Args:    values: where there is room for all words and ``SLACK`` bytes.
        Returns: the number of values; None: the payload would not be shorter, what was written means nothing.
        """
        address, num_words, bits, _ = words
        parts = sections(num_words)
        if parts.values >= num_words * bits // 8:
            return None
        offsets, pack = out + parts.offsets, self.kernel(f"pack{bits}")
        head = min(num_words // BLOCK // _PART, _MOST) if num_words >= _LONG * BLOCK else 0
        done = head * BLOCK
        count = pack(address, done, out, offsets, values, 0) if head else 0
        if head and self._full(count, head, words, parts):
            if self._sampled_full(words, parts, values + count * bits // 8):
                return None
        address += done * bits // 8
        count = pack(address, num_words - done, out + done // 8, offsets + 8 * head, values, count)
        if (end := parts.offsets + 8 * parts.num_blocks) < parts.values:
            ctypes.memset(out + end, 0, parts.values - end)
        return count if parts.values + count * bits // 8 < words.num_bytes else None

    def _full(self, count: int, num_blocks: int, words: Words, parts: Sections) -> bool:
        saved = num_blocks * BLOCK - count
        return words.num_bytes * saved <= parts.values * num_blocks * BLOCK

    def _sampled_full(self, words: Words, parts: Sections, scratch: int) -> bool:
        """Return whether a few blocks, evenly spread, say that ``words`` will not shrink."""
        pack, whole, count = self.kernel(f"pack{words.bits}"), words.num_words // BLOCK, 0
        num_samples = min(whole // _PART, _MOST // 2)
        for i in range(num_samples):
            source = words.address + (2 * i + 1) * whole // (2 * num_samples) * BLOCK * words.bits // 8
            count += pack(source, BLOCK, scratch, scratch + _MASK_BYTES, scratch + _MASK_BYTES + 8, 0)
        return self._full(count, num_samples, words, parts)

    def unpack(self, payload: int, num_bytes: int, out: Words) -> None:
        start = sections(out.num_words).values
        self.unpack_from(payload, payload + start, (num_bytes - start) * 8 // out.bits, out)

    def unpack_from(self, payload: int, values: int, num_values: int, out: Words) -> None:
        """Undo ``pack_to``: ``payload`` has bitmap and offsets, ``values`` so many values.

        Nothing else is read or written, whatever they hold.

        Raises: CodecError: bitmap, offsets and number of values disagree.
        """
        address, num_words, bits, _ = out
        stream = num_words * bits >= 8 * STREAM_BYTES and address % 64 == 0
        unpack = self.kernel(f"{'stream' if stream else 'unpack'}{bits}")
        offsets, end = payload + sections(num_words).offsets, 0
        if num_words:
            end = unpack(payload, offsets, values, 0, num_values, num_words, address)
        if end != num_values:
            rule = f"bitmap and offsets of a zero_value frame agree with its {num_values} values"
            raise CodecError(f"{rule}, these do not; it was damaged")

    def pack_masked(self, words: Words, mask: int, out: int) -> int:
        """Write the words at the set bits of another tensor's bitmap, zeros included, and drop the others.

        Args:    mask: the address of a zero_value payload (bitmap and offsets) of as many words.
                 out: where there is room for all words and ``SLACK`` bytes.
        Returns: the number of values.
        Raises:  CodecError: bitmap and offsets disagree.
        """
        address, num_words, bits, _ = words
        count = self.kernel(f"packm{bits}")(address, num_words, mask, out, 0) if num_words else 0
        if count != (expected := num_values(mask + sections(num_words).offsets, num_words)):
            rule = f"the bitmap of a mask has the {expected} bits that its offsets say"
            raise CodecError(f"{rule}, found {count}; it was damaged")
        return count

    def unpack_masked(self, payload: int, num_bytes: int, mask: int, out: Words) -> None:
        """Undo ``pack_masked``: the values to their places, zeros to all others.

        Args:    payload: the address of the values alone, ``num_bytes`` bytes.
                 mask: as ``pack_masked``; nothing else is read, whatever it holds.
        Raises:  CodecError: the values are not those of the mask, or its bitmap and offsets disagree.
        """
        if num_bytes * 8 % out.bits:
            raise CodecError(f"values have {out.bits} bits each, found {num_bytes} bytes; they were damaged")
        self.unpack_from(mask, payload, num_bytes * 8 // out.bits, out)

    def bitmap_checksum(self, mask: int, num_words: int) -> int:
        """Checksum of the bitmap of ``num_words`` words at the address ``mask``: a u64, never 0.

        The bitmap as little-endian u64 words w[i], zeros behind its last bit up to a whole one::

            mix(x)    x ^= x >> 32;  x *= 0xD6E8FEB86659FD93;  x ^= x >> 32             modulo 2^64
            checksum  sum over i of mix(w[i] + (i + 1) * 0x9E3779B97F4A7C15), 1 for 0   modulo 2^64

        A sum, so that it can be taken in any order, with the place in every term. No defence against malice.
        """
        return self.kernel("checksum")(mask, num_words) % (1 << 64)


ZERO_VALUE = ZeroValue()
CODECS_WITH_BITMAP = ("zero_value", "zero_value+exponent", "zero_value+byte_plane")
_scratch = Scratch()


def has_bitmap(codec: str) -> bool:
    """Return whether frames of a codec have a bitmap that others can use."""
    return codec in CODECS_WITH_BITMAP


def bitmap_bytes(header: Header, dtype: torch.dtype | None, geo: Geometry) -> slice | None:
    """Return the place of the bitmap in the frame of ``header``.

    None where it has none (it travelled raw, say), or where a tensor of this dtype and geometry has its words
    in another order; CodecError where the payload is too short for a bitmap.
    """
    if not has_bitmap(header.codec) or header.flags:
        return None
    other, start = header.geometry, header_bytes(len(header.sizes))
    parts, found = sections(other.num_words), header.payload_bytes
    if found < parts.values:
        rule = f"bitmap and offsets of this frame take {parts.values} bytes"
        raise CodecError(f"{rule}, found {found}; it is damaged")
    dims = zip(other.sizes, other.strides, geo.strides, strict=False)
    same = (dtype, geo.sizes, geo.num_words) == (header.dtype, other.sizes, other.num_words)
    same = same and all(size <= 1 or a == b for size, a, b in dims)
    return slice(start, start + parts.offsets) if same else None


def bitmap_in(frame: Tensor, dtype: torch.dtype | None, geo: Geometry) -> int | None:
    """Return the address of the bitmap in ``frame``, or None, as ``bitmap_bytes``."""
    place = bitmap_bytes(read_header(frame), dtype, geo)
    return None if place is None else frame.data_ptr() + place.start


def bitmap_for(
    header: Header,
    mask: Tensor | None,
    find: Callable[[Tensor, torch.dtype | None, Geometry], Any] = bitmap_in,
    checksum: Callable[[Any, int], Any] = ZERO_VALUE.bitmap_checksum,
) -> Any:
    """Return the bitmap that the frame of ``header`` was made with, found in the frame ``mask``.

    Where that is not in host memory, ``find`` and ``checksum`` know how to read it. CodecError: there is no
    bitmap, or another one.
    """
    rule = "this frame has values alone; decode it with mask=, the frame whose bitmap it was made with"
    if not has_bitmap(header.codec):
        raise CodecError(f"values alone are packed by {', '.join(CODECS_WITH_BITMAP)}, found {header.codec}")
    if mask is None:
        raise CodecError(f"{rule}, found none")
    bitmap = find(mask, header.dtype, header.geometry)
    if bitmap is None:
        raise CodecError(f"{rule}, found a frame without a bitmap for it")
    if int(checksum(bitmap, header.geometry.num_words)) % (1 << 64) != header.checksum:
        raise CodecError(f"{rule}, found another bitmap")
    return bitmap


def pack_masked(words: Words, bitmap: int, out: int, inner: Codec | None) -> Packed:
    """Write the words at the set bits of ``bitmap`` to the address ``out``, packed again by ``inner``."""
    if inner is None:
        count = ZERO_VALUE.pack_masked(words, bitmap, out)
        return Packed(ZERO_VALUE.name, count * words.bits // 8)
    values = _scratch.address(words.num_bytes + SLACK)
    count = ZERO_VALUE.pack_masked(words, bitmap, values)
    packed = inner.pack(words._replace(address=values, num_words=count), out)
    name = ZERO_VALUE.name if packed.codec == "raw" else f"{ZERO_VALUE.name}+{packed.codec}"
    return Packed(name, packed.num_bytes)


def unpack_masked(payload: int, num_bytes: int, bitmap: int, out: Words, inner: Codec | None) -> None:
    """Undo ``pack_masked``; zeros where the bitmap has none. CodecError: payload and bitmap disagree."""
    if inner is not None:
        count = num_values(bitmap + sections(out.num_words).offsets, out.num_words)
        if not inner.fits(count, out.bits, num_bytes):
            raise CodecError(f"{num_bytes} bytes cannot hold the {count} values of a mask; it was damaged")
        values = out._replace(address=_scratch.address(out.num_bytes + SLACK), num_words=count)
        inner.unpack(payload, num_bytes, values)
        payload, num_bytes = values.address, values.num_bytes
    ZERO_VALUE.unpack_masked(payload, num_bytes, bitmap, out)
