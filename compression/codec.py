"""Tensors to frames and back: ``encode``, ``decode``, and ``pack_into`` for kept buffers.

One place decides what may be packed and in which memory it comes back; the codecs only see words. A frame
whose header was read becomes a tensor in memory that its payload accounts for, or not at all.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from .buffers import SMALL_BYTES, Scratch, cut, lent, memory, new_bytes, no_memory
from .errors import CodecError
from .frame import (
    ALIGNMENT,
    DTYPE_NUMBERS,
    MASKED,
    FrameSpec,
    Header,
    accounts,
    check_bytes,
    check_memory,
    decoded_bytes,
    header_bytes,
    no_tensor,
    read_header,
    write_header,
)
from .geometry import Geometry, Words, geometry, in_memory, in_order, scatter
from .names import HOST
from .raw import Codec, Raw
from .registry import CODECS as CODECS
from .registry import LOSSY_CODECS as LOSSY_CODECS
from .registry import codec_named, inner_of
from .zero_value import ZERO_VALUE, bitmap_for, bitmap_in, has_bitmap, pack_masked, unpack_masked

_CPU = torch.device(HOST)
_PLAIN = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64})
_SHORT = 1 << 14  # bytes: where algorithms are deterministic torch fills the memory first, which is soon done


def unpacked(frame: Tensor, header: Header, buffer: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """The tensor of ``frame``, whose header is ``header``; arguments and errors as ``codec.decode``."""
    try:
        return None if header.dtype is None else _new_tensor(frame, header, header.dtype, buffer, mask)
    except (MemoryError, RuntimeError) as error:  # torch has no kind of its own for memory that is not there
        raise no_memory(error) from error


@lru_cache(maxsize=1024)
def _reading(header: Header) -> tuple[int, Geometry, Codec, bool]:
    """Return the payload's start, its geometry and codec, and whether the tensor is short and dense."""
    geo, codec = header.geometry, codec_named(header.codec)
    if not header.flags & MASKED and not codec.fits(geo.num_words, geo.word_bits, header.payload_bytes):
        found = f"{header.payload_bytes} bytes for {geo.num_stored} elements of {geo.item_bytes}"
        raise CodecError(f"a {header.codec} payload suits its elements, found {found}; it is damaged")
    short = 0 < geo.span * geo.item_bytes <= _SHORT and header.dtype in _PLAIN and geo.order == "dense"
    return header_bytes(len(header.sizes)), geo, codec, short and not header.flags and not header.address


def _new_tensor(
    frame: Tensor, header: Header, dtype: torch.dtype, buffer: Tensor | None, mask: Tensor | None
) -> Tensor:
    start, geo, codec, short = _reading(header)
    if short and buffer is None:  # the same memory by fewer calls
        tensor = torch.empty_strided(header.sizes, header.strides, dtype=dtype, device=_CPU)
        address = tensor.data_ptr() if type(tensor) is Tensor else 0  # a mode of torch may give another
        if address and not address % ALIGNMENT:
            out = Words(address, geo.num_words, geo.word_bits, dtype)
            codec.unpack(frame.data_ptr() + start, header.payload_bytes, out)
            return tensor
    bitmap = bitmap_for(header, mask) if header.flags & MASKED else None
    needed = decoded_bytes(header)
    storage, base = memory(needed) if buffer is None else lent(buffer, needed, geo.item_bytes)
    first = base + header.address
    words = None if geo.order == "dense" else new_bytes(geo.num_words * geo.word_bits // 8)
    address = storage.data_ptr() + first if words is None else words.data_ptr()
    out = Words(address, geo.num_words, geo.word_bits, dtype)
    if bitmap is None:
        codec.unpack(frame.data_ptr() + start, header.payload_bytes, out)
    else:
        unpack_masked(frame.data_ptr() + start, header.payload_bytes, bitmap, out, inner_of(header.codec))
    if dtype is torch.bool:  # kernels do not agree on what another byte than 0 and 1 means
        flat = torch.empty(0, dtype=torch.uint8).set_(storage, first, (geo.num_words,), (1,))
        (flat if words is None else words).ne_(0)
    if words is not None:
        scatter(words, storage, first, geo)
    # torch.empty warns of the experimental complex ones, which the sender chose.
    empty = torch.empty(0, dtype=torch.uint8 if dtype.is_complex else dtype).view(dtype)
    return empty.set_(storage, first // geo.item_bytes, geo.sizes, geo.strides)


_kept = Scratch()


def encode(tensor: Tensor | None, codec: str = "zero_value", *, mask: Tensor | None = None) -> Tensor:
    """Pack ``tensor`` into a frame; ``decode`` restores it bit for bit (NaN, -0.0 and empty included).

    Args:
        tensor: Any shape, dense dtype and strides, on the CPU or a GPU; one whose elements overlap or span
            more than 64 times their number is made contiguous first. None gives a frame of None.
        codec: A name in ``CODECS``.
        mask: A frame of the same sizes and strides; where its tensor is zero, ``tensor`` is left out, and
            ``decode`` with the same mask gives zeros there.

    Returns:
        1-D uint8 tensor, exactly the frame, no longer than ``tensor.nbytes`` and the header, on the tensor's
        device. A long one may begin a longer storage, whose other pages take no memory.

    Raises:
        CodecError: The tensor is sparse, quantised, nested or on another device, or no such codec.

    Source:  Rhu et al., Compressing DMA Engine, HPCA 2018, section 4.
    """
    codec_named(codec)
    if tensor is not None and not isinstance(tensor, Tensor):
        raise CodecError(f"a frame carries a tensor or None, found a {type(tensor).__name__}; convert it")
    if tensor is not None and tensor.is_cuda:
        from .gpu import frames

        return frames.encode(tensor, codec, requires_grad=tensor.requires_grad, mask=mask)
    most = header_bytes(0) if tensor is None else _layout(_geometry_of(tensor), codec)[2]
    whole = _kept.buffer(most) if most <= SMALL_BYTES else new_bytes(most)
    requires_grad = tensor is not None and tensor.requires_grad
    length = pack_into(tensor, whole, codec=codec, requires_grad=requires_grad, mask=mask)
    return cut(whole, length, of=most)


@lru_cache(maxsize=1024)
def buffer_bytes(sizes: tuple[int, ...], dtype: torch.dtype, codec: str) -> int:
    """Return the bytes that ``pack_into`` needs for any tensor of these sizes."""
    bits, num_bytes = 8 * min(dtype.itemsize, 8), math.prod(sizes) * dtype.itemsize
    return header_bytes(len(sizes)) + codec_named(codec).max_bytes(num_bytes * 8 // bits, bits)


def pack_into(
    tensor: Tensor | None,
    buffer: Tensor,
    *,
    codec: str = "zero_value",
    requires_grad: bool = False,
    mask: Tensor | None = None,
    pooled: bool = False,
) -> int:
    """Write the frame of ``tensor`` at the start of ``buffer``; a kept buffer spares the page faults. Returns
    its exact length in bytes; raises CodecError as ``encode``, or if the buffer is too short.

    Args:    buffer: 1-D uint8 tensor of at least ``buffer_bytes``, from a ``Pool``; ``pooled``: from one for
             sure, which made it as it must be.
             requires_grad: what the header says; autograd itself is left out.
             mask: as ``encode``; not used where the frame has no bitmap for this tensor and codec."""
    if not pooled:
        check_memory(buffer)
    if tensor is None:
        if (found := buffer.numel()) < (needed := header_bytes(0)):
            raise CodecError(f"None needs a buffer of {needed} bytes, found {found}; make it longer")
        return write_header(buffer, no_tensor())
    geo, dtype = _geometry_of(tensor), tensor.dtype
    chosen, start, needed = _layout(geo, codec)
    if (found := buffer.numel()) < needed:
        raise CodecError(f"this tensor needs a buffer of {needed} bytes, found {found}; ask buffer_bytes")
    if not in_memory(tensor, geo.span):  # where the kernels would read all the same
        found = f"a {type(tensor).__name__} of sizes {tuple(geo.sizes)} without it"
        raise CodecError(f"a frame carries a tensor in memory of its own, found {found}; pass a real tensor")
    tensor, geo, place = in_order(tensor, geo)
    words, out = Words(tensor.data_ptr(), geo.num_words, geo.word_bits, dtype), buffer.data_ptr() + start
    bitmap = None if mask is None or not has_bitmap(codec) else bitmap_in(mask, dtype, geo)
    if bitmap is None:
        written, num_bytes = chosen.pack(words, out)
        flags = checksum = 0
        if written != "raw" and not accounts(num_bytes, geo):  # wide gaps around what shrank to nothing
            written, num_bytes = Raw().pack(words, out)
    else:
        written, num_bytes = pack_masked(words, bitmap, out, inner_of(codec))
        flags, checksum = MASKED, ZERO_VALUE.bitmap_checksum(bitmap, geo.num_words)
    header = Header(written, dtype, geo.sizes, geo.strides, num_bytes, flags, place, requires_grad, checksum)
    return write_header(buffer, header) + num_bytes


def decode(
    frame: Tensor, buffer: Tensor | None = None, *, mask: Tensor | None = None, max_bytes: int | None = None
) -> Tensor | None:
    """Unpack a frame: same bits, shape, strides and address mod 64, outside autograd; a bool is 0 or 1.

    Memory is taken only once the payload accounts for it: with the gaps between elements at most 64 bytes per
    byte of a raw payload, 4,096 of a packed one, or of the mask's; while it unpacks, up to three times that.

    Args:
        frame: 1-D uint8 tensor of the frame's exact length.
        buffer: Memory for the tensor, 1-D uint8 at a multiple of 64 and of at least ``decoded_bytes(header)``
            bytes; default: new memory.
        mask: The frame that ``encode`` was given as mask; needed if it was used.
        max_bytes: Refuse a tensor of more bytes, its gaps and repeated elements included; default: what the
            header says.

    Returns:
        The tensor, or None for the frame of None.

    Raises:
        CodecError: The frame is truncated or damaged, the buffer does not fit, or there is no memory; nothing
            else ever.
    """
    if isinstance(frame, Tensor) and frame.is_cuda:
        from .gpu import frames

        return frames.decode(frame, mask=mask, max_bytes=max_bytes)
    header = read_header(frame)
    if frame.numel() != (length := header_bytes(len(header.sizes)) + header.payload_bytes):
        raise CodecError(f"this frame has {length} bytes, found {frame.numel()}; cut off what follows it")
    check_bytes(header, max_bytes)
    return unpacked(frame, header, buffer, mask)


def decode_received(
    buffer: Tensor, promise: FrameSpec | None = None, *, mask: Tensor | None = None, pooled: bool = False
) -> tuple[Tensor | None, int, bool]:
    """Unpack the frame at the start of ``buffer``, which was posted before anybody knew how long it would be.

    Args:    promise: what must come; nothing is allocated for anything else. None: what the header says,
             within the bounds of ``decode``. mask, pooled: as ``decode`` and ``pack_into``.
    Returns: the tensor as ``decode``, the length of the frame in bytes, and whether it asks for a gradient.
    Raises:  CodecError: as ``decode``, or the promise is broken."""
    header = read_header(buffer, pooled=pooled)
    if promise is not None:
        promise.check(header)
    length = header_bytes(len(header.sizes)) + header.payload_bytes
    return unpacked(buffer, header, None, mask), length, header.requires_grad


def _geometry_of(tensor: Tensor) -> Geometry:
    plain = tensor.layout is torch.strided and tensor.is_cpu and not tensor.is_nested
    if not plain or tensor.dtype not in DTYPE_NUMBERS:
        found = f"{tensor.layout} tensor of {tensor.dtype} on {tensor.device}"
        raise CodecError(f"a frame carries a dense tensor on the CPU, found a {found}; convert it first")
    return geometry(tensor.shape, tensor.stride(), tensor.itemsize)


@lru_cache(maxsize=1024)
def _layout(geo: Geometry, codec: str) -> tuple[Codec, int, int]:
    """The codec called ``codec``, where its payload begins, and what a frame of ``geo`` takes at most."""
    chosen, start = codec_named(codec), header_bytes(len(geo.sizes))
    num_stored = geo.num_stored if geo.travels else geo.num_elements
    return chosen, start, start + chosen.max_bytes(num_stored * geo.words_per_item, geo.word_bits)
