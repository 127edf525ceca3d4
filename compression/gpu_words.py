"""Words on a device to payloads and back, by the name of the codec.

A codec without kernels runs on the host, on a copy of the words, so that every codec works on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import gpu_exponent, gpu_narrow, gpu_zero_value
from .errors import CodecError
from .geometry import Words
from .gpu_launch import at_64, empty, no_error, pack_raw, unpack_raw
from .names import CODEC_NAMES
from .registry import codec_named


class GpuKernels(NamedTuple):
    """A codec on a device; neither side waits."""

    pack: Callable[[Tensor, Tensor, torch.dtype], Tensor]  # (words, payload, dtype) -> facts
    unpack: Callable[[Tensor, Tensor, torch.dtype], Tensor]  # (payload, out, dtype) -> flag of an error
    # (words, payload, mask, dtype) -> facts, (payload, out, mask, dtype) -> flag of an error
    pack_masked: Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor] = gpu_zero_value.pack_masked
    unpack_masked: Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor] = gpu_zero_value.unpack_masked


KERNELS = {
    "raw": GpuKernels(pack_raw, unpack_raw),
    "zero_value": GpuKernels(gpu_zero_value.pack, gpu_zero_value.unpack),
    "exponent": GpuKernels(gpu_exponent.pack, gpu_exponent.unpack),
    "zero_value+exponent": GpuKernels(
        gpu_exponent.pack_combined,
        gpu_exponent.unpack_combined,
        gpu_exponent.pack_masked,
        gpu_exponent.unpack_masked,
    ),
    "narrow": GpuKernels(gpu_narrow.pack, gpu_narrow.unpack),
}


def pack(codec: str, words: Tensor, payload: Tensor, dtype: torch.dtype, mask: Tensor | None) -> Tensor:
    """Pack ``words`` by ``codec``, or with ``mask`` those at its set bits alone.

    Args:    words: 1-D contiguous integers. dtype: of the elements that they are.
             payload: uint8 at a multiple of 64, at least as long as the words; no payload is longer.
             mask: the bitmap of as many words, padded with zeros to a multiple of 64 bytes.
    Returns: the facts (see ``gpu_launch``), on the device.
    """
    if not words.numel():
        return pack_raw(words, payload)
    if codec in KERNELS:
        own = KERNELS[codec]
        if mask is None:
            return own.pack(words, payload, dtype)
        return own.pack_masked(words, payload, at_64(mask), dtype)
    if mask is None:
        return _pack_on_host(codec, words, payload, dtype)
    facts = gpu_zero_value.pack_masked(words, payload, at_64(mask))
    return _pack_values_on_host(codec, facts, words, payload, dtype)


def unpack(codec: str, payload: Tensor, out: Tensor, dtype: torch.dtype, mask: Tensor | None) -> Tensor:
    """Undo ``pack`` for a payload of a length that fits.

    Returns: int32 on the device: not 0 if the payload contradicts itself.
    Raises:  CodecError: no payload of this codec has this dtype.
    """
    if codec in KERNELS:
        own = KERNELS[codec]
        if mask is None:
            return own.unpack(at_64(payload), out, dtype)
        return own.unpack_masked(at_64(payload), out, at_64(mask), dtype)
    if mask is None:
        _unpack_on_host(codec, payload, out, dtype)
        return no_error(out.device)
    values = _unpack_values_on_host(codec, payload, out, dtype, mask)
    return gpu_zero_value.unpack(values, out, mask=at_64(mask))


def _pack_on_host(codec: str, words: Tensor, payload: Tensor, dtype: torch.dtype) -> Tensor:
    source, bits, chosen = words.cpu(), 8 * words.element_size(), codec_named(codec)
    out = torch.empty(chosen.max_bytes(words.numel(), bits), dtype=torch.uint8)
    packed = chosen.pack(Words(source.data_ptr(), words.numel(), bits, dtype), out.data_ptr())
    payload[: packed.num_bytes].copy_(out[: packed.num_bytes])
    return torch.tensor([packed.num_bytes, CODEC_NAMES.index(packed.codec), 0], device=words.device)


def _unpack_on_host(codec: str, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
    source, back = payload.cpu(), torch.empty(out.shape, dtype=out.dtype)
    words = Words(back.data_ptr(), out.numel(), 8 * out.element_size(), dtype)
    codec_named(codec).unpack(source.data_ptr(), payload.numel(), words)
    out.copy_(back)


def _pack_values_on_host(
    codec: str, facts: Tensor, words: Tensor, payload: Tensor, dtype: torch.dtype
) -> Tensor:
    """Pack the values at the set bits of a mask, already in ``payload``, by the second half of ``codec``."""
    first, _, inner = codec.partition("+")
    values = payload[: int(facts[0])].view(words.dtype)
    num_bytes, number, _ = _pack_on_host(inner, values, payload, dtype).tolist()
    name = f"{first}+{CODEC_NAMES[number]}" if number else first
    return torch.tensor([num_bytes, CODEC_NAMES.index(name), int(facts[2])], device=words.device)


def _unpack_values_on_host(
    codec: str, payload: Tensor, out: Tensor, dtype: torch.dtype, mask: Tensor
) -> Tensor:
    """The values at the set bits of ``mask``, as bytes."""
    inner, bits = codec.partition("+")[2], 8 * out.element_size()
    num_values = int(gpu_zero_value.num_values(mask, out))
    if not codec_named(inner).fits(num_values, bits, payload.numel()):
        found = f"{payload.numel()} bytes for the {num_values} values of its mask"
        raise CodecError(f"a payload suits its mask, found {found}; it is damaged")
    values = empty(num_values, bits, out.device)
    _unpack_on_host(inner, payload, values, dtype)
    return values.view(torch.uint8)
