"""The frame: one packed tensor as bytes, header and payload, in the same layout for every device.

It is the only thing that leaves a stage, so its header says everything a receiver needs, and all of it is
checked before anything is allocated (law L9), at a cost that grows with its dimensions alone. Little-endian,
every section at a multiple of 64 bytes::

    header   4s magic, u16 version, u8 codec, u8 dtype, u8 flags, u8 number of dimensions, u8 address mod 64,
             u8 requires_grad, u32 CRC32 of all the rest, u64 payload bytes, u64 payload checksum (0: none),
             u64 sizes, u64 strides, zeros up to a multiple of 64
    bitmap   one bit per word, least significant first: set where the word is not zero      zero_value only
    offsets  u64 per block of 4,096 words: how many values stand before the block's end     zero_value only
    values   the words that are not zero (raw: all words), in memory order

A word is an element, or an 8-byte half of a complex128. The numbers of dtypes are for ever: a frame on disk
outlives the release that wrote it, and no name is ever evaluated. A frame may come from anybody who reaches
the port, so a receiver holds it against its ``FrameSpec`` before anything is allocated.
"""

import ctypes
import math
import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import names
from .errors import CodecError
from .geometry import ALIGNMENT, MAX_DIMS, MAX_SPREAD, Geometry, geometry, in_memory
from .names import AUTO, lossless

# A dtype's number is its place here: append, never reorder. 0 stands for no tensor.
_NAMES = """
    none uint8 int8 bool uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64
    complex32 complex64 complex128 bcomplex32 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz
    float8_e8m0fnu float4_e2m1fn_x2 bits8 bits16 bits1x8 bits2x4 bits4x2 int1 int2 int3 int4 int5 int6 int7
    uint1 uint2 uint3 uint4 uint5 uint6 uint7
""".split()

DTYPES: dict[int, torch.dtype] = {
    number: getattr(torch, name) for number, name in enumerate(_NAMES) if number and hasattr(torch, name)
}
DTYPE_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}

# What a codec's ``dtypes`` are made of: those on which ``codec=auto`` tries it.
FLOATS = frozenset(dtype for dtype in DTYPES.values() if dtype.is_floating_point)
OTHERS = frozenset(DTYPES.values()) - FLOATS
ON_REQUEST: frozenset[torch.dtype] = frozenset()  # only where it is asked for by name


MAGIC, VERSION = b"PNST", 1
BLOCK = 4096  # words per block of a zero_value payload
NO_TENSOR = 1  # flag: this frame stands for None, as where there is no gradient
MASKED = 2  # flag: values alone, at the set bits of a bitmap that the reader has; its checksum is the frame's
MAX_RATIO = 4096  # bytes laid out, gaps included, per payload byte: few must not ask for a machine's memory

_START = struct.Struct("<4sHBBBBBB")
_FIXED_BYTES = _START.size + 4 + 16


class Header(NamedTuple):
    """A frame's description of its tensor; a tuple, since one is made for every message."""

    codec: str
    dtype: torch.dtype | None  # None where the flag NO_TENSOR is set
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    payload_bytes: int
    flags: int = 0
    address: int = 0  # mod 64
    requires_grad: bool = False
    checksum: int = 0  # of the payload; 0: none

    @property
    def geometry(self) -> Geometry:
        """Geometry of the elements; only for a frame that carries a tensor."""
        assert self.dtype is not None, "a frame without a tensor has no geometry"
        return geometry(self.sizes, self.strides, self.dtype.itemsize)


class Sections(NamedTuple):
    """Starts of the parts of a zero_value payload, in bytes."""

    num_blocks: int
    offsets: int
    values: int


def aligned(num_bytes: int) -> int:
    """``num_bytes`` rounded up to a multiple of 64."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@lru_cache(maxsize=256)
def header_bytes(num_dims: int) -> int:
    """Exact length in bytes of the header of a ``num_dims``-dimensional tensor: a multiple of 64."""
    return aligned(_FIXED_BYTES + 16 * num_dims)


MAX_HEADER_BYTES = header_bytes(MAX_DIMS)


def frame_bytes(sizes: Sequence[int], dtype: torch.dtype) -> int:
    """The longest frame of a tensor of these sizes, in bytes: what a receiver posts."""
    return header_bytes(len(sizes)) + math.prod(sizes) * dtype.itemsize


def accounts(payload_bytes: int, geo: Geometry) -> bool:
    """Return whether a payload is long enough to ask for the memory of this geometry, gaps included."""
    return geo.span * geo.item_bytes <= payload_bytes * MAX_RATIO


def decoded_bytes(header: Header) -> int:
    """Bytes, from a multiple of 64 on, in which ``decode`` lays out the tensor with gaps and address."""
    if header.dtype is None:
        return 0
    geo = header.geometry
    return header.address + geo.span * geo.item_bytes


@lru_cache(maxsize=4096)
def sections(num_words: int) -> Sections:
    """Return the starts of the offsets and values of ``num_words`` packed words."""
    num_blocks = -(-num_words // BLOCK)
    offsets = aligned(-(-num_words // 8))
    return Sections(num_blocks, offsets, offsets + aligned(8 * num_blocks))


def no_tensor() -> Header:
    """The header of a frame that stands for None: 64 bytes and no payload."""
    return Header(codec="raw", dtype=None, sizes=(), strides=(), payload_bytes=0, flags=NO_TENSOR)


def check_memory(buffer: Tensor) -> None:
    """Raise CodecError unless ``buffer`` is a 1-D uint8 tensor without gaps on the CPU."""
    rule = "a frame or buffer is a contiguous 1-D uint8 tensor on the CPU, with memory of its own"
    if not isinstance(buffer, Tensor):
        raise CodecError(f"{rule}, found a {type(buffer).__name__}; convert it")
    plain = buffer.dtype is torch.uint8 and buffer.dim() == 1 and buffer.is_cpu and buffer.is_contiguous()
    if not plain or not in_memory(buffer, buffer.numel()):
        found = f"{buffer.dtype} on {buffer.device}, sizes {tuple(buffer.shape)}, strides {buffer.stride()}"
        remedy = "pass a real tensor" if plain else "convert or move it"
        raise CodecError(f"{rule}, found a {type(buffer).__name__} of {found}; {remedy}")


@lru_cache(maxsize=256)
def _rest(num_dims: int) -> struct.Struct:
    """Layout after the CRC32: payload bytes, checksum, sizes, strides, padding."""
    padding = header_bytes(num_dims) - _FIXED_BYTES - 16 * num_dims
    return struct.Struct(f"<QQ{2 * num_dims}Q{padding}s")


def write_header(buffer: Tensor, header: Header) -> int:
    """Write ``header`` at the start of ``buffer`` (1-D uint8); returns its length in bytes."""
    text = header_text(header)
    ctypes.memmove(buffer.data_ptr(), text, len(text))
    return len(text)


@lru_cache(maxsize=1024)
def header_text(header: Header) -> bytes:
    """The bytes of ``header``; most frames of a training say what an earlier one said."""
    num_dims, number = len(header.sizes), DTYPE_NUMBERS[header.dtype] if header.dtype else 0
    codec = names.CODEC_NAMES.index(header.codec)
    flags, address, requires_grad = header.flags, header.address, header.requires_grad
    start = _START.pack(MAGIC, VERSION, codec, number, flags, num_dims, address, requires_grad)
    rest = _rest(num_dims).pack(header.payload_bytes, header.checksum, *header.sizes, *header.strides, b"")
    crc = zlib.crc32(rest, zlib.crc32(start)).to_bytes(4, "little")
    return b"%b%b%b" % (start, crc, rest)


def read_header(buffer: Tensor, *, pooled: bool = False) -> Header:
    """Read and check the header at the start of ``buffer`` (1-D uint8, at least as long as the frame).

    Args:   pooled: the buffer is from a ``Pool``, which made it as it must be.
    Raises: CodecError: it is malformed or damaged, or ``buffer`` is shorter than header and payload.
    """
    if not pooled:
        check_memory(buffer)
    length = buffer.numel()
    return parse_header(ctypes.string_at(buffer.data_ptr(), min(length, MAX_HEADER_BYTES)), length)


def parse_header(text: bytes, length: int) -> Header:
    """Read and check the header in ``text``, the first bytes of a frame (``MAX_HEADER_BYTES`` are enough).

    Args:    length: bytes there are of the frame, which may lie in another memory.
    Raises:  CodecError: as ``read_header``.
    """
    if length < header_bytes(0):
        raise CodecError(f"a frame has at least {header_bytes(0)} bytes, found {length}; it was truncated")
    end = header_bytes(text[_START.size - 3])
    if length < end:
        raise _no_frame(text, length)
    header = _parsed(text[:end])
    if length < (whole := end + header.payload_bytes):
        raise CodecError(f"this frame has {whole} bytes, found {length}; it was truncated")
    return header


@lru_cache(maxsize=1024)
def _parsed(text: bytes) -> Header:
    """Read and check a whole header; most frames of a training say what an earlier one said."""
    magic, version, codec, number, flags, num_dims, address, requires_grad = _START.unpack_from(text)
    if magic != MAGIC or version != VERSION or num_dims > MAX_DIMS:
        raise _no_frame(text, len(text))
    start, crc, rest = text[: _START.size], text[_START.size : _START.size + 4], text[_START.size + 4 :]
    if zlib.crc32(rest, zlib.crc32(start)).to_bytes(4, "little") != crc:
        raise CodecError("the header of a frame matches its CRC32, this one does not; it was damaged")
    payload, checksum, *dims, padding = _rest(num_dims).unpack(rest)
    unknown = codec >= len(names.CODEC_NAMES) or (number and number not in DTYPES) or flags > MASKED
    if unknown or requires_grad > 1 or bool(checksum) != (flags == MASKED) or padding.strip(b"\0"):
        found = f"codec {codec}, dtype {number}, flags {flags}, {requires_grad=}, {checksum=}"
        raise CodecError(f"a header names what this release knows, found {found}; use the sender's release")
    sizes, strides = tuple(dims[:num_dims]), tuple(dims[num_dims:])
    dtype, grad = DTYPES.get(number), bool(requires_grad)
    header = Header(names.CODEC_NAMES[codec], dtype, sizes, strides, payload, flags, address, grad, checksum)
    _check(header)
    return header


def _no_frame(text: bytes, length: int) -> CodecError:
    magic, version, *_, num_dims, _, _ = _START.unpack_from(text)
    found = f"{magic!r}, version {version}, {num_dims} dimensions in {length} bytes"
    return CodecError(f"a frame starts with {MAGIC!r}, version {VERSION}, found {found}; it is damaged")


def _check(header: Header) -> None:
    """Refuse what is well-formed but cannot be.

    The payload, whose bytes are really there, bounds the memory that is asked for; of values alone the mask
    does, which has the same geometry. Nothing is enumerated: what only that would tell, ``scatter`` finds.
    """
    if header.dtype is None or header.flags & NO_TENSOR:
        if header != no_tensor():
            raise CodecError(f"a frame without a tensor says nothing else, found {header}; it is damaged")
        return
    geo, payload = header.geometry, header.payload_bytes
    if header.address >= ALIGNMENT or header.address % geo.item_bytes:
        found = f"{header.address} for elements of {geo.item_bytes} bytes"
        raise CodecError(f"an address mod {ALIGNMENT} suits its elements, found {found}; it is damaged")
    if not geo.plausible:
        rule = f"elements in a frame do not overlap and span at most {MAX_SPREAD} times their number"
        raise CodecError(f"{rule}, found sizes {header.sizes}, strides {header.strides}; it is damaged")
    raw = geo.num_stored * geo.item_bytes
    if header.codec == "raw":
        fits = payload == raw and not header.flags
    else:
        fits = payload < raw and (header.flags == MASKED or accounts(payload, geo))
    if not fits:
        found = f"{payload} bytes for {geo.num_stored} elements of {geo.item_bytes}, span {geo.span}"
        raise CodecError(f"a {header.codec} payload suits its elements, found {found}; it is damaged")


class FrameSpec(NamedTuple):
    """The frame that will come; a tuple, since one is made for every message.

    Any address mod 64 is lawful: it costs 63 bytes at most, and moves no element to another one's place.
    """

    sizes: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None  # None: any that a frame can have, so up to 64 times the tensor's bytes
    codecs: frozenset[str]
    requires_grad: bool = False
    masked: bool = False  # whether it may be values alone, at the set bits of the mask that the reader has
    none: bool = False  # whether a frame of None may come instead
    frozen: bool = False  # whether it may ask for no gradient all the same: it was frozen since

    def check(self, header: Header) -> None:
        """Raise CodecError unless ``header`` is what was promised."""
        codec, dtype, sizes, strides, _, flags, _, requires_grad, _ = header
        if dtype is None and self.none:
            return
        kept = dtype is self.dtype and sizes == self.sizes and codec in self.codecs
        kept = kept and (strides == self.strides or self.strides is None)
        kept = kept and (requires_grad == self.requires_grad or (self.frozen and not requires_grad))
        if not kept or (flags == MASKED and not self.masked):
            remedy = "give every rank the same model, plan and batches, and let nobody else reach its ports"
            raise CodecError(f"a frame brings what was promised, {self._difference(header)}; {remedy}")

    def _difference(self, header: Header) -> str:
        """The first thing that is not as it was promised."""
        if header.dtype is None:
            return f"a tensor of {self.dtype} and sizes {self.sizes}, found None"
        strides = header.strides if self.strides is None else self.strides
        asks = self.requires_grad and (header.requires_grad or not self.frozen)
        codec = header.codec if header.codec in self.codecs else " or ".join(sorted(self.codecs))
        spec = {"dtype": self.dtype, "sizes": self.sizes, "strides": strides, "codec": codec}
        for name, promised in (spec | {"requires_grad": asks}).items():
            if promised != (found := getattr(header, name)):
                return f"{name} {promised}, found {found}"
        return "all values, found those at the set bits of a mask"


@lru_cache(maxsize=64)
def written_by(codec: str) -> frozenset[str]:
    """The codecs that frames packed with ``codec`` may name: its parts, where a whole does not shrink.

    Under "auto" those are all that lose nothing."""
    if codec == AUTO:
        return frozenset(lossless())
    return frozenset({"raw", codec, *codec.split("+")})


def check_bytes(header: Header, max_bytes: int | None) -> None:
    """Raise CodecError if the tensor of ``header`` has more than ``max_bytes``, as it lies or as a copy."""
    if max_bytes is None or header.dtype is None:
        return
    geo = header.geometry
    found = max(geo.span, geo.num_elements) * geo.item_bytes
    if found > max_bytes:
        raise CodecError(f"this tensor may have {max_bytes} bytes, found {found}; raise max_bytes to take it")
