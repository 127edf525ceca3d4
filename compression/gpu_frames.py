"""Frames as the engine sends them from a GPU: nothing here waits, what only the device knows is asked later.

The payload lies in a buffer on the device; its header is a value of the host, made once the payload's length
is known (``header_of``), and written by whoever copies the frame off the device. Beside ``encode`` and
``decode`` of ``gpu.py``, which wait, these are what ``codec.pack_into`` and ``decode_received`` are on a CPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import gpu, gpu_zero_value
from .errors import CodecError
from .frame import MASKED, Header, header_bytes, sections
from .geometry import gather, resolved
from .gpu import geometry_of
from .gpu_launch import at_64, empty
from .zero_value import Bitmap, has_bitmap, shows_bitmap


class Packed(NamedTuple):
    """A payload on the way, and a header that says all but its codec and length."""

    frame: gpu.PendingFrame
    base: Header


Mask = tuple[Header, Tensor]
"""A frame on the device, whose bitmap says where another tensor matters."""


def pack(
    tensor: Tensor, buffer: Tensor, codec: str, *, requires_grad: bool, mask: Mask | None = None
) -> Packed:
    """Start packing ``tensor`` of any strides on the current stream; arguments as ``codec.pack_into``.

    What has gaps travels raw: whether its payload accounts for them is known too late."""
    geo, base = geometry_of(tensor), gpu.header_of(tensor, requires_grad=requires_grad)
    plain = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        plain = resolved(tensor, geo)
        geo = geo if geo.travels else geometry_of(plain)
    if geo.order != "dense" and geo.num_elements:
        codec = "raw"
    bitmap = None
    if mask is not None and has_bitmap(codec):
        bitmap = _bitmap(*mask, base)
    words = gather(plain, geo) if geo.num_elements else empty(0, geo.word_bits, plain.device)
    start = header_bytes(tensor.dim())
    return Packed(gpu.pack_words(words, buffer, start, codec, tensor.dtype, bitmap), base)


def header_of(work: Any) -> Header:
    """The header of what was ``Packed`` by ``work``; waits until it is known: at once for a raw frame."""
    return gpu.said(*work.value)


def unpack(header: Header, buffer: Tensor, *, mask: Mask | None = None) -> tuple[Tensor, Tensor]:
    """Start unpacking the frame in ``buffer`` on the current stream, into new memory.

    Args:    buffer: uint8 on the device, at least the frame; its header is not looked at.
             mask: the frame whose bitmap it was made with, if it was.
    Returns: the tensor, and int32 on the device: not 0 if the payload contradicts itself or the mask.
    Raises:  CodecError: the lengths of frame and mask do not suit the tensor.
    """
    start, bitmap, other = header_bytes(len(header.sizes)), None, None
    if header.flags & MASKED:
        bitmap = None if mask is None else _bitmap(*mask, header)
        if bitmap is None:
            raise CodecError("this frame has values alone, found no bitmap for it; the ranks' plans differ")
        checksum = gpu_zero_value.checksum_of(bitmap, header.geometry.num_words)
        other = (checksum != header.checksum - (header.checksum >> 63 << 64)).to(torch.int32)
    tensor, error = gpu.laid_out(buffer[: start + header.payload_bytes], header, bitmap)
    return tensor, error if other is None else error | other


def _bitmap(header: Header, buffer: Tensor, of: Header) -> Tensor | None:
    """The bitmap in a frame for the tensor that ``of`` describes; None if it has none that suits."""
    assert of.dtype is not None, "None has no bitmap"
    if not shows_bitmap(header) or not Bitmap(0, header, 0).suits(of.dtype, of.geometry):
        return None
    start = header_bytes(len(header.sizes))
    return at_64(buffer[start : start + sections(header.geometry.num_words).offsets])
