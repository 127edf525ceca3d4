"""What tensors, buffers, masks and payloads on a device must be: kernels rely on it and check nothing twice.

All of it is known on the host, so none of it waits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .codec import codec_named
from .dtypes import DTYPE_NUMBERS
from .errors import CodecError
from .frame import ALIGNMENT, MASKED, Header, sections
from .geometry import Geometry, geometry


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
    if mask.dtype is not torch.uint8 or mask.shape != (needed,) or mask.device != device:
        found = f"{tuple(mask.shape)} of {mask.dtype} on {mask.device}"
        rule = f"the mask of {num_words} words is a bitmap of {needed} bytes on {device}"
        raise CodecError(f"{rule}, found {found}; take it from the frame of the forward")


def check_payload(header: Header, payload: Tensor, num_words: int, bits: int, mask: Tensor | None) -> None:
    """Raise CodecError unless payload, words and mask have lengths that suit each other."""
    num_bytes = payload.numel()
    if header.flags & MASKED:
        if mask is None:
            raise CodecError("this frame has values alone; decode it with the bitmap that it was made with")
        check_mask(mask, num_words, payload.device)
        fits = num_bytes * 8 % bits == 0 and header.codec == "zero_value"
    else:
        fits = codec_named(header.codec).fits(num_words, bits, num_bytes)
    if not fits or num_bytes != header.payload_bytes:
        found = f"{num_bytes} bytes for {num_words} words of {bits} bits"
        raise CodecError(f"a {header.codec} payload suits its elements, found {found}; it is damaged")
