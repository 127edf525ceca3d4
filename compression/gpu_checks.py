"""What tensors, buffers, masks, frames and payloads on a device must be: kernels rely on it.

Only what looks into a frame waits: for its header, or for the checksum of its bitmap.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import gpu_zero_value
from .dtypes import DTYPE_NUMBERS
from .errors import CodecError
from .frame import ALIGNMENT, MASKED, MAX_HEADER_BYTES, Header, header_bytes, parse_header, sections
from .geometry import Geometry, geometry
from .gpu_launch import at_64
from .masked import Bitmap, has_bitmap, shows_bitmap
from .registry import codec_named


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
