"""Tensors on a GPU to frames and back: the same bytes as on the CPU.

``encode`` and ``decode`` wait, as on a CPU. ``pack``, ``header_of`` and ``unpack`` are for the engine, and
``pack`` and ``unpack`` never wait: the payload lies in a buffer on the device, and its header is a value of
the host, which is known behind the event of the packing and written by whoever copies the frame off the
device. Tensors, buffers, masks and frames are checked first, since kernels rely on it.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..buffers import memory, new_bytes, no_memory
from ..errors import CodecError
from ..frame import (
    ALIGNMENT,
    DTYPE_NUMBERS,
    MASKED,
    MAX_HEADER_BYTES,
    Header,
    accounts,
    check_bytes,
    decoded_bytes,
    header_bytes,
    header_text,
    parse_header,
)
from ..geometry import Geometry, geometry, in_order, scatter
from ..names import CODEC_NAMES, HOST
from ..registry import codec_named
from ..zero_value import bitmap_bytes, bitmap_for, has_bitmap
from . import payloads
from .payloads import at_64, checksum_of, empty


def read_header(frame: Tensor) -> Header:
    """Return the header of a frame on a device; waits for its first bytes. Raises CodecError if it is
    malformed or damaged, or the frame is longer or shorter than it says."""
    if frame.dtype is not torch.uint8 or frame.dim() != 1 or not frame.is_contiguous():
        found = f"{frame.dim()} dimensions of {frame.dtype}, strides {frame.stride()}"
        raise CodecError(f"a frame is a contiguous 1-D uint8 tensor, found {found}; convert it")
    header = parse_header(frame[:MAX_HEADER_BYTES].cpu().numpy().tobytes(), frame.numel())
    if frame.numel() != (length := header_bytes(len(header.sizes)) + header.payload_bytes):
        raise CodecError(f"this frame has {length} bytes, found {frame.numel()}; cut off what follows it")
    return header


Mask = tuple[Header, Tensor]
"""A frame on the device and its header; its bitmap says where another tensor matters."""


def _bitmap(mask: Mask, dtype: torch.dtype | None, geo: Geometry) -> Tensor | None:
    place = bitmap_bytes(mask[0], dtype, geo)
    return None if place is None else at_64(mask[1][place])


def _bitmap_in(frame: Tensor, dtype: torch.dtype | None, geo: Geometry) -> Tensor | None:
    return _bitmap((read_header(frame), frame), dtype, geo)


class PendingFrame(NamedTuple):
    """A payload behind room for its header, perhaps still being written."""

    buffer: Tensor  # uint8 on the device
    header: Header  # but for codec, payload bytes, flags and checksum
    facts: Tensor  # on the device, see payloads
    on_host: Tensor  # the same in pinned memory, once ready
    masked: bool  # whether only the values at the set bits of a mask travel
    ready: torch.cuda.Event | None  # None: not on a GPU, or raw, there is nothing to wait for

    def known_header(self) -> Header:
        """Wait until the frame is ready, and return its whole header."""
        if self.ready is not None:
            self.ready.synchronize()
        num_bytes, number, checksum = self.on_host.tolist()
        header = self.header._replace(codec=CODEC_NAMES[number], payload_bytes=num_bytes)
        if self.masked and number:
            return header._replace(flags=MASKED, checksum=checksum % (1 << 64))
        return header

    def finish(self) -> Tensor:
        """Wait until the frame is ready, write its header on the current stream, and return it exactly."""
        header, buffer = self.known_header(), self.buffer
        text = torch.frombuffer(bytearray(header_text(header)), dtype=torch.uint8)
        with torch.cuda.device_of(buffer):
            # From pinned memory, or the copy would wait for the stream; torch keeps it until it is done.
            if buffer.is_cuda:
                text = text.pin_memory()
                buffer.record_stream(torch.cuda.current_stream())  # which need not be the packer's
            buffer[: len(text)].copy_(text, non_blocking=True)
        return buffer[: len(text) + header.payload_bytes]


def pack_words(
    words: Tensor, buffer: Tensor, header: Header, codec: str, mask: Tensor | None = None
) -> PendingFrame:
    """Start packing ``words`` behind room for ``header``: all, or those at the set bits of ``mask``."""
    start, dtype = header_bytes(len(header.sizes)), header.dtype
    assert dtype is not None, "None has no words"
    assert buffer.numel() >= start + words.nbytes, "a buffer has room for the longest frame"
    with torch.cuda.device_of(words):
        facts = payloads.pack(codec, words.view(-1), buffer[start:], dtype, mask)
        if codec == "raw":  # the host knows it all
            on_host = torch.zeros(3, dtype=torch.int64, device=HOST)
            on_host[0].fill_(words.nbytes)
            return PendingFrame(buffer, header, facts, on_host, False, None)
        on_host, ready = facts.to("cpu", non_blocking=True), None  # pinned: torch asks no stream to wait
        if words.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
    return PendingFrame(buffer, header, facts, on_host, mask is not None, ready)


def words_of(tensor: Tensor, *, requires_grad: bool = False) -> tuple[Tensor, Header]:
    """Words of ``tensor`` in order, and a header that says all but codec and payload."""
    plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
    if not plain or tensor.dtype not in DTYPE_NUMBERS:
        found = f"{tensor.layout} tensor of {tensor.dtype} on {tensor.device}"
        raise CodecError(f"a frame carries a dense tensor, found a {found}; convert it first")
    geo = geometry(tensor.size(), tensor.stride(), tensor.dtype.itemsize)
    if tensor.data_ptr() % (geo.word_bits // 8):
        found = f"{tensor.dtype} at {tensor.data_ptr() % ALIGNMENT} mod {ALIGNMENT}"
        raise CodecError(f"elements on a GPU stand at multiples of their size, found {found}; clone it")
    words, geo, address = in_order(tensor.detach(), geo, words=True)
    return words, Header("raw", tensor.dtype, geo.sizes, geo.strides, 0, 0, address, requires_grad)


def encode(
    tensor: Tensor, codec: str = "zero_value", *, requires_grad: bool = False, mask: Tensor | None = None
) -> Tensor:
    """Pack a tensor of any strides to a frame on its device, and wait for it; as ``codec.encode``.

    The mask is a frame on the same device. Where there is no Triton, that is a CodecError too."""
    codec_named(codec)
    with torch.cuda.device_of(tensor):
        words, header = words_of(tensor, requires_grad=requires_grad)
        start, bitmap = header_bytes(len(header.sizes)), None
        buffer = new_bytes(start + words.nbytes, tensor.device)
        if mask is not None and has_bitmap(codec):
            bitmap = _bitmap_in(mask, tensor.dtype, header.geometry)
        frame = pack_words(words, buffer, header, codec, bitmap).finish()
        if bitmap is None and not accounts(frame.numel() - start, header.geometry):
            frame = pack_words(words, buffer, header, "raw").finish()
        return frame.clone() if frame.numel() * 9 < buffer.numel() * 8 else frame


def pack(
    tensor: Tensor, buffer: Tensor, codec: str, *, requires_grad: bool, mask: Mask | None = None
) -> PendingFrame:
    """Start packing ``tensor`` of any strides on the current stream, and never wait; as ``codec.pack_into``.

    What has gaps travels raw: whether its payload accounts for them is known too late.

    Args:    buffer: uint8 at a multiple of 64 on the same device, of at least ``frame_bytes`` bytes. It is
             the stream's until the frame is ready.
             codec: one of ``payloads.KERNELS``; another one runs on the host, and waits.
             requires_grad: written to the header.
             mask: a frame with a bitmap: only the values at its set bits travel."""
    words, header = words_of(tensor, requires_grad=requires_grad)
    geo, bitmap = header.geometry, None
    if geo.order != "dense" and geo.num_elements:
        codec = "raw"
    if mask is not None and has_bitmap(codec):
        bitmap = _bitmap(mask, header.dtype, geo)
    return pack_words(words, buffer, header, codec, bitmap)


def header_of(work: Any) -> Header:
    """Return the header of the ``PendingFrame`` of ``work``; waits until it is known."""
    return work.value.known_header()


def unpack(header: Header, buffer: Tensor, *, mask: Mask | None = None) -> tuple[Tensor, Tensor]:
    """Start unpacking the frame in ``buffer`` on the current stream, into new memory.

    Args:    header: of the frame; the one in the buffer is not looked at.
             buffer: uint8 on the device, at least the frame.
             mask: the frame whose bitmap it was made with, if it was.
    Returns: the tensor, and int32 on the device: not 0 if the payload contradicts itself or the mask.
    Raises:  CodecError: the lengths of frame and mask do not suit the tensor."""
    bitmap, other = None, None
    if header.flags & MASKED:
        bitmap = None if mask is None else _bitmap(mask, header.dtype, header.geometry)
        if bitmap is None:
            raise CodecError("this frame has values alone, found no bitmap for it; the ranks' plans differ")
        checksum = checksum_of(bitmap, header.geometry.num_words)
        other = (checksum != header.checksum - (header.checksum >> 63 << 64)).to(torch.int32)
    tensor, error = _new_tensor(buffer, header, bitmap)
    return tensor, error if other is None else error | other


def decode(frame: Tensor, *, mask: Tensor | None = None, max_bytes: int | None = None) -> Tensor | None:
    """Unpack a frame to a tensor on its device, and wait for it; as ``codec.decode``."""
    with torch.cuda.device_of(frame):
        header = read_header(frame)
        check_bytes(header, max_bytes)
        if header.dtype is None:
            return None
        try:
            bitmap = bitmap_for(header, mask, _bitmap_in, checksum_of) if header.flags & MASKED else None
            tensor, error = _new_tensor(frame, header, bitmap)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise no_memory(error) from error
        if int(error):
            rule = f"bitmap, offsets and values of a {header.codec} frame agree"
            raise CodecError(f"{rule}, these do not; it was damaged")
        return tensor


def _new_tensor(buffer: Tensor, header: Header, bitmap: Tensor | None) -> tuple[Tensor, Tensor]:
    """Start unpacking a frame into new memory; returns the tensor, and the flag of an error as ``unpack``."""
    dtype, geo, start = header.dtype, header.geometry, header_bytes(len(header.sizes))
    payload = buffer[start : start + header.payload_bytes]
    # 1. Lengths, before memory is taken.
    num_bytes, bits, codec = payload.numel(), geo.word_bits, header.codec
    if bitmap is None:
        fits = codec_named(codec).fits(geo.num_words, bits, num_bytes)
    else:
        fits = has_bitmap(codec) and (codec != "zero_value" or num_bytes * 8 % bits == 0)
    if not fits or num_bytes != header.payload_bytes:
        found = f"{num_bytes} bytes for {geo.num_words} words of {bits} bits"
        raise CodecError(f"a {codec} payload suits its elements, found {found}; it is damaged")
    # 2. The words, in place where they lie one after another.
    storage, base = memory(decoded_bytes(header), buffer.device)
    first = base + header.address
    in_place = geo.order == "dense" and geo.num_words > 0
    words = empty(0 if in_place else geo.num_words, bits, buffer.device)
    if in_place:
        words.set_(storage, first * 8 // bits, (geo.num_words,), (1,))
    error = unpack_payload(header, payload, words, mask=bitmap)
    if geo.num_words and not in_place:
        scatter(words, storage, first, geo)
    assert dtype is not None, "a frame without a tensor has no payload"
    kind = torch.uint8 if dtype.is_complex else dtype  # as codec.decode does
    tensor = torch.empty(0, dtype=kind, device=buffer.device).view(dtype)
    return tensor.set_(storage, first // geo.item_bytes, geo.sizes, geo.strides), error


def unpack_payload(header: Header, payload: Tensor, out: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Start unpacking on the current stream, and never wait if the codec has kernels.

    Args:    payload: uint8, what follows the header of the frame, of a length that suits ``out``.
             out: the words, contiguous: all that is written, whatever the payload holds.
             mask: for a frame of values alone, the bitmap that it was made with.
    Returns: int32 on the device: not 0 if the payload contradicts itself."""
    assert header.dtype is not None, "a frame without a tensor has no payload"
    with torch.cuda.device_of(out):
        error = payloads.unpack(header.codec, payload, out.view(-1), header.dtype, mask)
        if header.dtype is torch.bool:  # as codec.decode does
            out.view(torch.uint8).ne_(0)
        return error
