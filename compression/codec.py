"""Tensors to frames and back: ``encode``, ``decode``, and ``pack_into`` for kept buffers.

One place decides what may be packed and in which memory it comes back; the codecs only see words.

Source: patent CN115016937A, claim 7 (one pack and unpack module on every path out of a stage).
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from .dtypes import DTYPE_NUMBERS
from .errors import CodecError
from .frame import (
    ALIGNMENT,
    MASKED,
    Header,
    accounts,
    check_memory,
    header_bytes,
    no_tensor,
    read_header,
    write_header,
)
from .geometry import Geometry, Words, contiguous, gather, geometry, in_memory, resolved
from .masked import bitmap_of, has_bitmap, pack_masked
from .memory import SMALL_BYTES, cut, new_bytes
from .pool import Scratch
from .promise import Promise
from .raw import Codec, Raw
from .registry import CODECS as CODECS
from .registry import LOSSY_CODECS as LOSSY_CODECS
from .registry import ZERO_VALUE, codec_named, inner_of
from .unpack import check_bytes, unpacked

_kept = Scratch()


def encode(tensor: Tensor | None, codec: str = "zero_value", *, mask: Tensor | None = None) -> Tensor:
    """Pack ``tensor`` into a frame; ``decode`` restores it bit for bit (NaN, -0.0 and empty included).

    Args:    tensor: any shape, dense dtype and strides, on the CPU or a GPU; one whose elements overlap or
             span more than 64 times their number is made contiguous first. None gives a frame of None.
             codec: a name in ``CODECS``.
             mask: a frame of the same sizes and strides; where its tensor is zero, ``tensor`` is left out,
             and ``decode`` with the same mask gives zeros there.
    Returns: 1-D uint8 tensor, exactly the frame, no longer than ``tensor.nbytes`` and the header, on the
             tensor's device. A long one may begin a longer storage, whose other pages take no memory.
    Raises:  CodecError: the tensor is sparse, quantised, nested or on another device, or no such codec.
    Source:  Rhu et al., Compressing DMA Engine, HPCA 2018, section 4.
    """
    codec_named(codec)
    if tensor is not None and not isinstance(tensor, Tensor):
        raise CodecError(
            f"a frame carries a tensor or None, found a {type(tensor).__name__}; convert it first"
        )
    if tensor is not None and tensor.is_cuda:
        from . import gpu  # brings Triton

        return gpu.encode(tensor, codec, requires_grad=tensor.requires_grad, mask=mask)
    most = header_bytes(0) if tensor is None else _layout(_geometry_of(tensor), codec)[2]
    whole = _kept.buffer(most) if most <= SMALL_BYTES else new_bytes(most)
    requires_grad = tensor is not None and tensor.requires_grad
    length = pack_into(tensor, whole, codec=codec, requires_grad=requires_grad, mask=mask)
    return cut(whole, length, of=most)


@lru_cache(maxsize=1024)
def buffer_bytes(sizes: tuple[int, ...], dtype: torch.dtype, codec: str) -> int:
    """What ``pack_into`` needs for any tensor of these sizes, in bytes."""
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
    """Write the frame of ``tensor`` at the start of ``buffer``; a kept buffer spares the page faults.

    Args:    buffer: 1-D uint8 tensor of at least ``buffer_bytes``, from a ``Pool``.
             pooled: it is from a ``Pool`` for sure, which made it as it must be.
             requires_grad: what the header says; autograd itself is left out.
             mask: as ``encode``; not used where the frame has no bitmap for this tensor and codec.
    Returns: the exact length of the frame in bytes.
    Raises:  CodecError: as ``encode``, or the buffer is too short.
    """
    if not pooled:
        check_memory(buffer)
    if tensor is None:
        _check_room(buffer, header_bytes(0))
        return write_header(buffer, no_tensor())
    geo, dtype = _geometry_of(tensor), tensor.dtype
    chosen, start, needed = _layout(geo, codec)
    if buffer.numel() < needed:
        _check_room(buffer, needed)
    if not in_memory(tensor, geo.span):  # where the kernels would read all the same
        found = f"a {type(tensor).__name__} of sizes {tuple(geo.sizes)} without it"
        raise CodecError(f"a frame carries a tensor in memory of its own, found {found}; pass a real tensor")
    address = tensor.data_ptr() % ALIGNMENT
    if tensor.is_conj() or tensor.is_neg():
        tensor = resolved(tensor, geo)
        geo = geo if geo.travels else _geometry_of(tensor)
    if geo.order != "dense":
        tensor = gather(tensor, geo)
        geo = geo if geo.travels else contiguous(geo.sizes, geo.item_bytes)
    words, out = Words(tensor.data_ptr(), geo.num_words, geo.word_bits, dtype), buffer.data_ptr() + start
    bitmap = None if mask is None or not has_bitmap(codec) else bitmap_of(mask, ZERO_VALUE)
    if bitmap is None or not bitmap.suits(dtype, geo):
        written, num_bytes = chosen.pack(words, out)
        flags = checksum = 0
        if written != "raw" and not accounts(num_bytes, geo):  # wide gaps around what shrank to nothing
            written, num_bytes = Raw().pack(words, out)
    else:
        written, num_bytes = pack_masked(words, bitmap, out, ZERO_VALUE, inner_of(codec))
        flags, checksum = MASKED, bitmap.checksum
    place = 0 if address % geo.item_bytes else address
    header = Header(written, dtype, geo.sizes, geo.strides, num_bytes, flags, place, requires_grad, checksum)
    return write_header(buffer, header) + num_bytes


def decode(
    frame: Tensor, buffer: Tensor | None = None, *, mask: Tensor | None = None, max_bytes: int | None = None
) -> Tensor | None:
    """Unpack a frame: same bits, shape, strides and address mod 64, outside autograd; a bool is 0 or 1.

    Memory is taken only once the payload accounts for it: with the gaps between elements at most 64 bytes per
    byte of a raw payload, 4,096 of a packed one, or of the mask's; while it unpacks, up to three times that.

    Args:    frame: 1-D uint8 tensor of the frame's exact length.
             buffer: memory for the tensor, 1-D uint8 at a multiple of 64 and of at least
             ``decoded_bytes(header)`` bytes; default: new memory.
             mask: the frame that ``encode`` was given as mask; needed if it was used.
             max_bytes: refuse a tensor of more bytes, its gaps and repeated elements included; default: what
             the header says.
    Returns: the tensor, or None for the frame of None.
    Raises:  CodecError: the frame is truncated or damaged, the buffer does not fit, or there is no memory;
             nothing else ever.
    """
    if isinstance(frame, Tensor) and frame.is_cuda:
        from . import gpu

        return gpu.decode(frame, mask=mask, max_bytes=max_bytes)
    header = read_header(frame)
    if frame.numel() != (length := header_bytes(len(header.sizes)) + header.payload_bytes):
        raise CodecError(f"this frame has {length} bytes, found {frame.numel()}; cut off what follows it")
    check_bytes(header, max_bytes)
    return unpacked(frame, header, buffer, mask)


def decode_received(
    buffer: Tensor, promise: Promise | None = None, *, mask: Tensor | None = None, pooled: bool = False
) -> tuple[Tensor | None, int, bool]:
    """Unpack the frame at the start of ``buffer``, which was posted before anybody knew how long it would be.

    Args:    promise: what must come; nothing is allocated for anything else. None: what the header says,
             within the bounds of ``decode``.
             mask: as ``decode``.
             pooled: the buffer is from a ``Pool``, as ``pack_into``.
    Returns: the tensor as ``decode``, the length of the frame in bytes, and whether it asks for a gradient.
    Raises:  CodecError: as ``decode``, or the promise is broken.
    """
    header = read_header(buffer, pooled=pooled)
    if promise is not None:
        promise.hold(header)
    length = header_bytes(len(header.sizes)) + header.payload_bytes
    return unpacked(buffer, header, None, mask), length, header.requires_grad


def _geometry_of(tensor: Tensor) -> Geometry:
    """The geometry of a tensor that a frame can carry."""
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


def _check_room(buffer: Tensor, needed: int) -> None:
    if buffer.numel() < needed:
        found = buffer.numel()
        raise CodecError(f"this tensor needs a buffer of {needed} bytes, found {found}; ask buffer_bytes")
