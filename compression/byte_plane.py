"""Planes of bytes, those that pay through zstd: for slow links, where bytes are worth more than time.

The exponents of dense floats, and the high bytes of integers, are alike; beside the noise of the other bytes
no LZ stage finds them, in a plane of their own it does.

A payload, little-endian::

    head     u64 per plane: its bytes here (those of the plane itself: it is stored); zeros up to 64 bytes
    planes   one after another, least significant byte first; zeros where a payload must not be so short

Words are those of ``kernels/planes_ir.py``: floats are rotated left by one bit; halves of a complex number
are words of their own.
"""

import ctypes
import struct
import threading

import numpy as np
import torch
import zstandard

from .buffers import Scratch, view_at
from .errors import CodecError
from .frame import FLOATS, MAX_RATIO, OTHERS
from .geometry import Words
from .raw import Codec, Packed, Raw

HEAD_BYTES = 64
_LEVEL = 1
_GAIN = 0.98  # a plane that keeps more of its bytes is stored: it would cost more time than it saves
_SAMPLE_WORDS, _NUM_SAMPLES = 16384, 4
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HALVES = {torch.complex32: 16, torch.complex64: 32, torch.complex128: 64}


def _parts(words: Words) -> tuple[Words, int]:
    """The same memory as words of their own, and by how many bits they are rotated."""
    bits = _HALVES.get(words.dtype, words.bits)
    rotate = int(words.dtype in _HALVES or words.dtype in _FLOATS)
    return words._replace(num_words=words.num_bytes * 8 // bits, bits=bits), rotate


class _Zstd(threading.local):
    """A thread's contexts, kept: to make one takes longer than to pack a short plane."""

    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(level=_LEVEL).compress
        self.decompress = zstandard.ZstdDecompressor().decompress


class BytePlane(Codec):
    """Planes of bytes, through zstd where that gains 2 %; raw where none does."""

    name, dtypes = "byte_plane", FLOATS | OTHERS

    def __init__(self) -> None:
        self._scratch, self._zstd = Scratch(), _Zstd()

    def max_bytes(self, num_words: int, bits: int) -> int:
        return HEAD_BYTES + num_words * bits // 8

    def fits(self, num_words: int, bits: int, num_bytes: int) -> bool:
        return HEAD_BYTES < num_bytes < num_words * bits // 8

    def pack(self, words: Words, out: int) -> Packed:
        parts, rotate = _parts(words)
        paying = self._paying(parts, rotate)
        if not any(paying):
            return Raw().pack(words, out)
        lengths, end, size = [], HEAD_BYTES, parts.num_words
        for plane, pays in zip(self._split(parts, rotate), paying, strict=True):
            length = size
            if pays:
                packed = self._zstd.compress(view_at(plane, size))
                if len(packed) <= size * _GAIN:
                    length = len(packed)
                    ctypes.memmove(out + end, packed, length)
            if length == size:
                ctypes.memmove(out + end, plane, size)
            lengths.append(length)
            end += length
        num_bytes = max(end, -(-words.num_bytes // MAX_RATIO))
        if num_bytes >= words.num_bytes:
            return Raw().pack(words, out)
        ctypes.memset(out + end, 0, num_bytes - end)
        ctypes.memmove(out, struct.pack(f"<{len(lengths)}Q", *lengths).ljust(HEAD_BYTES, b"\0"), HEAD_BYTES)
        return Packed(self.name, num_bytes)

    def _paying(self, words: Words, rotate: int) -> list[bool]:
        """Tell by a few samples, evenly spread, which planes are worth compressing."""
        if words.num_words <= _NUM_SAMPLES * _SAMPLE_WORDS:
            return [words.num_words > 0] * (words.bits // 8)
        sizes = [0] * (words.bits // 8)
        for i in range(_NUM_SAMPLES):
            first = (words.num_words - _SAMPLE_WORDS) * i // (_NUM_SAMPLES - 1)
            address = words.address + first * words.bits // 8
            sample = Words(address, _SAMPLE_WORDS, words.bits, words.dtype)
            for k, plane in enumerate(self._split(sample, rotate)):
                sizes[k] += len(self._zstd.compress(view_at(plane, _SAMPLE_WORDS)))
        return [size <= _GAIN * _NUM_SAMPLES * _SAMPLE_WORDS for size in sizes]

    def _split(self, words: Words, rotate: int) -> list[int]:
        """Return the addresses of the planes of ``words`` in this thread's scratch, until it splits again."""
        if words.bits == 8:
            return [words.address]
        first = self._scratch.address(words.num_bytes)
        planes = [first + k * words.num_words for k in range(words.bits // 8)]
        at = (ctypes.c_uint64 * len(planes))(*planes)
        self.kernel(f"split{words.bits}")(words.address, words.num_words, rotate, ctypes.addressof(at))
        return planes

    def unpack(self, payload: int, num_bytes: int, out: Words) -> None:
        parts, rotate = _parts(out)
        num_planes = parts.bits // 8
        head = ctypes.string_at(payload, HEAD_BYTES)
        lengths, end = struct.unpack_from(f"<{num_planes}Q", head), HEAD_BYTES
        padded = max(HEAD_BYTES + sum(lengths), -(-out.num_bytes // MAX_RATIO))
        if max(lengths) > parts.num_words or num_bytes != padded or head[8 * num_planes :].strip(b"\0"):
            rule = f"a byte_plane frame of {num_bytes} bytes has planes that fill it"
            raise CodecError(f"{rule}, found {lengths} bytes for {parts.num_words} each; it was damaged")
        planes, kept = [], []  # a plane's address does not keep it
        for length in lengths:
            planes.append(payload + end)
            if length < parts.num_words:
                kept.append(self._plane(view_at(payload + end, length), parts.num_words))
                planes[-1] = np.frombuffer(kept[-1], np.uint8).ctypes.data
            end += length
        if num_planes == 1:
            ctypes.memmove(out.address, planes[0], parts.num_words)
            return
        at = (ctypes.c_uint64 * num_planes)(*planes)
        self.kernel(f"join{parts.bits}")(ctypes.addressof(at), parts.num_words, rotate, out.address)

    def _plane(self, packed: memoryview, num_bytes: int) -> bytes:
        """Unpack one zstd frame; memory is taken for ``num_bytes`` bytes alone."""
        try:
            found, plain = zstandard.get_frame_parameters(packed).content_size, b""
            if found == num_bytes:
                plain = self._zstd.decompress(packed, allow_extra_data=False)
        except (zstandard.ZstdError, MemoryError) as error:
            raise CodecError(f"a plane is one zstd frame, found {error}; it was damaged") from error
        if len(plain) != num_bytes:
            raise CodecError(f"a plane of this frame has {num_bytes} bytes, found {found}; it was damaged")
        return plain
