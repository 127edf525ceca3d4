"""A frame whose header was read becomes a tensor: in memory that its payload accounts for, or not at all."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .errors import CodecError
from .frame import ALIGNMENT, MASKED, Header, header_bytes
from .geometry import Geometry, Words, scatter
from .masked import bitmap_for, unpack_masked
from .memory import lent, memory, new_bytes
from .names import HOST
from .raw import Codec
from .registry import ZERO_VALUE, codec_named, inner_of

_CPU = torch.device(HOST)
_PLAIN = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64})
_SHORT = 1 << 14  # bytes: where algorithms are deterministic torch fills the memory first, which is soon done


def check_bytes(header: Header, max_bytes: int | None) -> None:
    """Raise CodecError if the tensor of ``header`` has more than ``max_bytes``, as it lies or as a copy."""
    if max_bytes is None or header.dtype is None:
        return
    geo = header.geometry
    found = max(geo.span, geo.num_elements) * geo.item_bytes
    if found > max_bytes:
        raise CodecError(f"this tensor may have {max_bytes} bytes, found {found}; raise max_bytes to take it")


def unpacked(frame: Tensor, header: Header, buffer: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """The tensor of ``frame``, whose header is ``header``; arguments and errors as ``codec.decode``."""
    try:
        return None if header.dtype is None else _laid_out(frame, header, header.dtype, buffer, mask)
    except (MemoryError, RuntimeError) as error:  # torch has no kind of its own for memory that is not there
        raise no_memory(error) from error


def no_memory(error: Exception) -> CodecError:
    """What to raise where memory to unpack in could not be had."""
    rule = "a frame is unpacked in memory that this machine has"
    return CodecError(f"{rule}, found {type(error).__name__}: {error}; free some of it")


@lru_cache(maxsize=1024)
def _reading(header: Header) -> tuple[int, Geometry, Codec, bool]:
    """Where the payload begins, what it is, and whether it is that of a short tensor like most."""
    geo, codec = header.geometry, codec_named(header.codec)
    if not header.flags & MASKED and not codec.fits(geo.num_words, geo.word_bits, header.payload_bytes):
        found = f"{header.payload_bytes} bytes for {geo.num_stored} elements of {geo.item_bytes}"
        raise CodecError(f"a {header.codec} payload suits its elements, found {found}; it is damaged")
    short = 0 < geo.span * geo.item_bytes <= _SHORT and header.dtype in _PLAIN and geo.order == "dense"
    return header_bytes(len(header.sizes)), geo, codec, short and not header.flags and not header.address


def _laid_out(
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
    bitmap = bitmap_for(header, mask, ZERO_VALUE) if header.flags & MASKED else None
    needed = header.address + geo.span * geo.item_bytes
    storage, base = memory(needed) if buffer is None else lent(buffer, needed, geo.item_bytes)
    first = base + header.address
    words = None if geo.order == "dense" else new_bytes(geo.num_words * geo.word_bits // 8)
    address = storage.data_ptr() + first if words is None else words.data_ptr()
    out = Words(address, geo.num_words, geo.word_bits, dtype)
    if bitmap is None:
        codec.unpack(frame.data_ptr() + start, header.payload_bytes, out)
    else:
        inner = inner_of(header.codec)
        unpack_masked(frame.data_ptr() + start, header.payload_bytes, bitmap, out, ZERO_VALUE, inner)
    if dtype is torch.bool:  # kernels do not agree on what another byte than 0 and 1 means
        flat = torch.empty(0, dtype=torch.uint8).set_(storage, first, (geo.num_words,), (1,))
        (flat if words is None else words).ne_(0)
    if words is not None:
        scatter(words, storage, first, geo)
    if dtype.is_complex:  # torch.empty warns of the experimental ones, which the sender chose
        tensor = torch.empty(0, dtype=torch.uint8).view(dtype)
    else:
        tensor = torch.empty(0, dtype=dtype)
    return tensor.set_(storage, first // geo.item_bytes, geo.sizes, geo.strides)
