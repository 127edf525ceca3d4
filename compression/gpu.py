"""Tensors on a GPU to frames and back: the same bytes as on the CPU.

Packing never waits: ``pack_on_device`` launches and returns, and whoever sends the frame calls ``finish``,
which waits for the event behind it and not for what the device computes meanwhile. Tensors, buffers, masks
and frames are checked first, since kernels rely on it; only what looks into a frame waits: for its header,
or for the checksum of its bitmap.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import gpu_launch, gpu_words, gpu_zero_value
from .buffers import memory, new_bytes, no_memory
from .errors import CodecError
from .frame import (
    ALIGNMENT,
    DTYPE_NUMBERS,
    MASKED,
    MAX_HEADER_BYTES,
    Header,
    accounts,
    check_bytes,
    header_bytes,
    header_text,
    parse_header,
    sections,
)
from .geometry import Geometry, contiguous, gather, geometry, resolved, scatter
from .gpu_launch import at_64
from .names import CODEC_NAMES, HOST
from .registry import codec_named
from .zero_value import Bitmap, has_bitmap, shows_bitmap


def geometry_of(tensor: Tensor) -> Geometry:
    """The geometry of a tensor that a frame can carry and kernels can read; CodecError for any other."""
    plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
    if not plain or tensor.dtype not in DTYPE_NUMBERS:
        found = f"{tensor.layout} tensor of {tensor.dtype} on {tensor.device}"
        raise CodecError(f"a frame carries a dense tensor, found a {found}; convert it first")
    geo = geometry(tensor.size(), tensor.stride(), tensor.dtype.itemsize)
    if tensor.data_ptr() % (geo.word_bits // 8):
        found = f"{tensor.dtype} at {tensor.data_ptr() % ALIGNMENT} mod {ALIGNMENT}"
        raise CodecError(f"elements on a GPU stand at multiples of their size, found {found}; clone it")
    return geo


def check_buffer(buffer: Tensor, needed: int, device: torch.device) -> None:
    """Raise CodecError unless ``buffer`` has room for ``needed`` bytes of a frame on ``device``."""
    flat = buffer.dtype is torch.uint8 and buffer.dim() == 1 and buffer.is_contiguous()
    if flat and buffer.numel() >= needed and buffer.data_ptr() % ALIGNMENT == 0 and buffer.device == device:
        return
    found = f"{tuple(buffer.shape)} of {buffer.dtype} on {buffer.device}"
    rule = f"a buffer for this tensor is {needed} bytes of uint8 at a multiple of {ALIGNMENT} on {device}"
    raise CodecError(f"{rule}, found {found}; ask frame_bytes")


def check_mask(mask: Tensor, num_words: int, device: torch.device) -> None:
    """Raise CodecError unless ``mask`` is as long as the bitmap of ``num_words`` words."""
    needed = sections(num_words).offsets
    flat = mask.dtype is torch.uint8 and mask.shape == (needed,) and mask.is_contiguous()
    if not flat or mask.device != device:
        found = f"{tuple(mask.shape)} of {mask.dtype} on {mask.device}"
        rule = f"the mask of {num_words} words is a bitmap of {needed} bytes on {device}"
        raise CodecError(f"{rule}, found {found}; take it from the frame of the forward")


def read_header(frame: Tensor) -> Header:
    """The header of a frame on a device; waits for its first bytes.

    Raises: CodecError: it is malformed or damaged, or the frame is longer or shorter than it says.
    """
    if frame.dtype is not torch.uint8 or frame.dim() != 1 or not frame.is_contiguous():
        found = f"{frame.dim()} dimensions of {frame.dtype}, strides {frame.stride()}"
        raise CodecError(f"a frame is a contiguous 1-D uint8 tensor, found {found}; convert it")
    header = parse_header(frame[:MAX_HEADER_BYTES].cpu().numpy().tobytes(), frame.numel())
    if frame.numel() != (length := header_bytes(len(header.sizes)) + header.payload_bytes):
        raise CodecError(f"this frame has {length} bytes, found {frame.numel()}; cut off what follows it")
    return header


def bitmap_in(frame: Tensor, dtype: torch.dtype, geo: Geometry) -> Tensor | None:
    """The bitmap of a frame, for a tensor of this dtype and geometry; None if it has none that suits.

    Raises: CodecError: the frame is damaged.
    """
    header = read_header(frame)
    if not shows_bitmap(header) or not Bitmap(0, header, 0).suits(dtype, geo):
        return None
    start = header_bytes(len(header.sizes))
    return at_64(frame[start : start + sections(geo.num_words).offsets])


def bitmap_for(header: Header, mask: Tensor | None) -> Tensor:
    """The bitmap that the frame of ``header`` was made with, found in the frame ``mask``.

    Raises: CodecError: there is none, or another one.
    """
    rule = "this frame has values alone; decode it with mask=, the frame whose bitmap it was made with"
    if mask is None:
        raise CodecError(f"{rule}, found none")
    assert header.dtype is not None, "a frame without a tensor has no values"
    bitmap = bitmap_in(mask, header.dtype, header.geometry)
    if bitmap is None:
        raise CodecError(f"{rule}, found a frame without a bitmap for it")
    found = int(gpu_zero_value.checksum_of(bitmap, header.geometry.num_words)) % (1 << 64)
    if found != header.checksum:
        raise CodecError(f"{rule}, found another bitmap")
    return bitmap


def check_payload(header: Header, payload: Tensor, num_words: int, bits: int, mask: Tensor | None) -> None:
    """Raise CodecError unless payload, words and mask have lengths that suit each other."""
    num_bytes = payload.numel()
    if header.flags & MASKED:
        if mask is None:
            raise CodecError("this frame has values alone; decode it with the bitmap that it was made with")
        check_mask(mask, num_words, payload.device)
        fits = has_bitmap(header.codec) and (header.codec != "zero_value" or num_bytes * 8 % bits == 0)
    else:
        fits = codec_named(header.codec).fits(num_words, bits, num_bytes)
    if not fits or num_bytes != header.payload_bytes:
        found = f"{num_bytes} bytes for {num_words} words of {bits} bits"
        raise CodecError(f"a {header.codec} payload suits its elements, found {found}; it is damaged")


class PendingFrame(NamedTuple):
    """A payload behind room for its header, perhaps still being written."""

    buffer: Tensor  # uint8 on the device
    start: int  # bytes of the header
    facts: Tensor  # on the device, see gpu_launch
    on_host: Tensor  # the same in pinned memory, once ready
    masked: bool  # whether only the values at the set bits of a mask travel
    ready: torch.cuda.Event | None  # None: not on a GPU, or raw, there is nothing to wait for

    @property
    def num_bytes(self) -> Tensor:
        """Bytes of the payload, int64 on the device."""
        return self.facts[0]

    @property
    def raw(self) -> Tensor:
        """Whether the payload is raw, bool on the device."""
        return self.facts[1] == 0


def encode(
    tensor: Tensor,
    codec: str = "zero_value",
    *,
    requires_grad: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Pack a tensor of any strides to a frame on its device, and wait for it; as ``codec.encode``.

    Args:    mask: a frame on the same device, as for ``codec.encode``.
    Raises:  CodecError: the tensor is sparse, quantised or nested, the mask is damaged, or no Triton.
    """
    codec_named(codec)
    geo, header = geometry_of(tensor), header_of(tensor, requires_grad=requires_grad)
    with torch.cuda.device_of(tensor):
        plain = tensor.detach()
        if tensor.is_conj() or tensor.is_neg():
            plain = resolved(tensor, geo)
            geo = geo if geo.travels else geometry_of(plain)
        words = gather(plain, geo) if geo.num_elements else gpu_launch.empty(0, geo.word_bits, plain.device)
        start = header_bytes(len(geo.sizes))
        room = start + words.nbytes
        buffer, bitmap = new_bytes(room, tensor.device), None
        if mask is not None and has_bitmap(codec):
            bitmap = bitmap_in(mask, tensor.dtype, header.geometry)
        frame = finish(pack_words(words, buffer, start, codec, tensor.dtype, bitmap), header)
        if bitmap is None and not accounts(frame.numel() - start, header.geometry):
            frame = finish(pack_words(words, buffer, start, "raw", tensor.dtype, None), header)
        return frame.clone() if frame.numel() * 9 < room * 8 else frame


def header_of(tensor: Tensor, *, requires_grad: bool = False) -> Header:
    """What a frame says about ``tensor``, but for codec and payload, which ``finish`` knows."""
    geo = geometry_of(tensor)
    if not geo.travels:
        geo = contiguous(geo.sizes, geo.item_bytes)
    address = tensor.data_ptr() % ALIGNMENT
    address = 0 if address % geo.item_bytes else address
    return Header("raw", tensor.dtype, geo.sizes, geo.strides, 0, 0, address, requires_grad)


def pack_on_device(
    tensor: Tensor, buffer: Tensor, *, codec: str = "zero_value", mask: Tensor | None = None
) -> PendingFrame:
    """Start packing ``tensor`` on the current stream, and never wait.

    Args:    tensor: dense in memory, its dimensions in any order.
             buffer: uint8 at a multiple of 64 on the same device, of at least ``frame_bytes`` bytes. It is
             the stream's until ``ready``.
             codec: one of ``gpu_words.KERNELS``; another one would run on the host.
             mask: a bitmap of the tensor's words, as in a payload: only the values at its set bits travel.
    Raises:  CodecError: the tensor has gaps, buffer or mask do not suit it, or no such kernels.
    """
    geo = geometry_of(tensor)
    if geo.order != "dense" or tensor.is_conj() or tensor.is_neg() or codec not in gpu_words.KERNELS:
        found = f"sizes {geo.sizes}, strides {geo.strides}, codec {codec}"
        rule = f"kernels pack dense tensors by {', '.join(gpu_words.KERNELS)}"
        raise CodecError(f"{rule}, found {found}; use encode")
    words = gpu_launch.empty(0, geo.word_bits, tensor.device)
    if geo.num_elements:
        words = gather(tensor.detach(), geo)
    return pack_words(words, buffer, header_bytes(tensor.dim()), codec, tensor.dtype, mask)


def finish(packed: PendingFrame, header: Header) -> Tensor:
    """Wait until ``packed`` is ready and write its header, on the current stream.

    Args:    header: from ``header_of``.
    Returns: the exact frame: the beginning of ``packed.buffer``.
    """
    header = said(packed, header)
    num_bytes = header.payload_bytes
    text = torch.frombuffer(bytearray(header_text(header)), dtype=torch.uint8)
    assert len(text) == packed.start, "the header takes the room that was left for it"
    with torch.cuda.device_of(packed.buffer):
        # From pinned memory, or the copy would wait for the stream; torch keeps that memory until it is done.
        if packed.buffer.is_cuda:
            text = text.pin_memory()
            packed.buffer.record_stream(torch.cuda.current_stream())  # which need not be the packer's
        packed.buffer[: len(text)].copy_(text, non_blocking=True)
    return packed.buffer[: packed.start + num_bytes]


def said(packed: PendingFrame, header: Header) -> Header:
    """``header`` with codec and payload, once ``packed`` is ready, for which this thread waits."""
    if packed.ready is not None:
        packed.ready.synchronize()
    num_bytes, number, checksum = packed.on_host.tolist()
    header = header._replace(codec=CODEC_NAMES[number], payload_bytes=num_bytes)
    if packed.masked and number:
        return header._replace(flags=MASKED, checksum=checksum % (1 << 64))
    return header


def unpack_on_device(header: Header, payload: Tensor, out: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Start unpacking on the current stream, and never wait if the codec has kernels.

    Args:    payload: uint8, what follows the header; as long as the header says.
             out: the words, contiguous: all that is written, whatever the payload holds.
             mask: for a frame of values alone, the bitmap that it was made with.
    Returns: int32 on the device: not 0 if the payload contradicts itself.
    Raises:  CodecError: the payload's length or the mask does not suit the words.
    """
    check_payload(header, payload, out.numel(), 8 * out.element_size(), mask)
    with torch.cuda.device_of(out):
        mask = mask if header.flags & MASKED else None
        assert header.dtype is not None, "a frame without a tensor has no payload"
        error = gpu_words.unpack(header.codec, payload, out.view(-1), header.dtype, mask)
        if header.dtype is torch.bool:  # as codec.decode does
            out.view(torch.uint8).ne_(0)
        return error


def decode(frame: Tensor, *, mask: Tensor | None = None, max_bytes: int | None = None) -> Tensor | None:
    """Unpack a frame to a tensor on its device, and wait for it; as ``codec.decode``.

    Args:    mask: the frame that ``encode`` was given as mask; needed if it was used.
             max_bytes: as for ``codec.decode``.
    Raises:  CodecError: the frame is truncated or damaged, or of another mask, or there is no memory; nothing
             else ever.
    """
    with torch.cuda.device_of(frame):
        header = read_header(frame)
        check_bytes(header, max_bytes)
        try:
            return None if header.dtype is None else _decoded(frame, header, mask)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise no_memory(error) from error


def _decoded(frame: Tensor, header: Header, mask: Tensor | None) -> Tensor:
    bitmap = bitmap_for(header, mask) if header.flags & MASKED else None
    tensor, error = laid_out(frame, header, bitmap)
    if int(error):
        rule = f"bitmap, offsets and values of a {header.codec} frame agree"
        raise CodecError(f"{rule}, these do not; it was damaged")
    return tensor


def laid_out(frame: Tensor, header: Header, bitmap: Tensor | None) -> tuple[Tensor, Tensor]:
    """Start unpacking ``frame``, whose header is ``header``, into new memory, and never wait.

    Returns: the tensor, and int32 on the device: not 0 if the payload contradicts itself.
    Raises:  CodecError: the payload's length does not suit the words.
    """
    dtype, geo, start = header.dtype, header.geometry, header_bytes(len(header.sizes))
    check_payload(header, frame[start:], geo.num_words, geo.word_bits, bitmap)
    storage, base = memory(header.address + geo.span * geo.item_bytes, frame.device)
    first = base + header.address
    in_place = geo.order == "dense" and geo.num_words > 0
    words = gpu_launch.empty(0 if in_place else geo.num_words, geo.word_bits, frame.device)
    if in_place:
        words.set_(storage, first * 8 // geo.word_bits, (geo.num_words,), (1,))
    error = unpack_on_device(header, frame[start:], words, mask=bitmap)
    if geo.num_words and not in_place:
        scatter(words, storage, first, geo)
    assert dtype is not None, "a frame without a tensor has no payload"
    kind = torch.uint8 if dtype.is_complex else dtype  # as codec.decode does
    tensor = torch.empty(0, dtype=kind, device=frame.device).view(dtype)
    return tensor.set_(storage, first // geo.item_bytes, geo.sizes, geo.strides), error


def pack_words(
    words: Tensor, buffer: Tensor, start: int, codec: str, dtype: torch.dtype, mask: Tensor | None
) -> PendingFrame:
    """Launch the packing of ``words`` behind the first ``start`` bytes of ``buffer``."""
    check_buffer(buffer, start + words.nbytes, words.device)
    if mask is not None:
        check_mask(mask, words.numel(), words.device)
    with torch.cuda.device_of(words):
        facts = gpu_words.pack(codec, words.view(-1), buffer[start:], dtype, mask)
        if codec == "raw":  # the host knows it all
            on_host = torch.zeros(3, dtype=torch.int64, device=HOST)
            on_host[0].fill_(words.nbytes)
            return PendingFrame(buffer, start, facts, on_host, False, None)
        on_host, ready = facts.to("cpu", non_blocking=True), None  # pinned: torch asks no stream to wait
        if words.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
    return PendingFrame(buffer, start, facts, on_host, mask is not None, ready)
