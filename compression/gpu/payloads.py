"""Words on a device to payloads and back, by the name of the codec.

A codec without kernels runs on the host, on a copy of the words, so that every codec works on every device.
Facts about a payload are three int64 on its device, since nobody waits for them: its bytes, the number of the
codec that reads it (0: raw), and the checksum of the bitmap that its values were selected with.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..errors import CodecError
from ..frame import ALIGNMENT
from ..geometry import WORDS, Words
from ..names import CODEC_NAMES
from ..registry import codec_named

# A codec's file here, and the end of its functions' names. Those of a mask end in "_masked"; none waits.
#   pack(words, payload, dtype) -> facts                 unpack(payload, out, dtype) -> flag of an error
#   pack_masked(words, payload, mask, dtype) -> facts    unpack_masked(payload, out, mask, dtype) -> flag
KERNELS = {
    "raw": ("", ""),
    "zero_value": ("zero_value", ""),
    "exponent": ("exponent", ""),
    "zero_value+exponent": ("exponent", "_combined"),
    "narrow": ("narrow", ""),
}


def kernels(name: str) -> Any:
    """Return one of the files of Triton kernels; raises CodecError if this installation has no Triton."""
    try:
        return import_module(f".{name}", __package__)
    except ImportError as error:
        remedy = "install the triton that this torch asks for, or move the tensor to the CPU"
        raise CodecError(f"kernels for a GPU need Triton, found none ({error}); {remedy}") from error


def pack(codec: str, words: Tensor, payload: Tensor, dtype: torch.dtype, mask: Tensor | None) -> Tensor:
    """Pack ``words`` by ``codec``, or with ``mask`` those at its set bits alone; return facts, on the device.

    Args:    codec: any name; one without kernels waits.
             words: 1-D contiguous integers; ``dtype``: of the elements that they are.
             payload: uint8 at a multiple of 64, at least as long as the words; no payload is longer.
             mask: the bitmap of as many words, padded with zeros to a multiple of 64 bytes."""
    if codec == "raw" or not words.numel():
        return pack_raw(words, payload)
    if codec in KERNELS:
        file, end = KERNELS[codec]
        if mask is None:
            return getattr(kernels(file), f"pack{end}")(words, payload, dtype)
        return kernels(file).pack_masked(words, payload, at_64(mask), dtype)
    if mask is None:
        return _pack_on_host(codec, words, payload, dtype)
    # The values at the set bits, then those by the second half of the codec.
    first, _, inner = codec.partition("+")
    facts = kernels("zero_value").pack_masked(words, payload, at_64(mask))
    values = payload[: int(facts[0])].view(words.dtype)
    num_bytes, number, _ = _pack_on_host(inner, values, payload, dtype).tolist()
    name = f"{first}+{CODEC_NAMES[number]}" if number else first
    return torch.tensor([num_bytes, CODEC_NAMES.index(name), int(facts[2])], device=words.device)


def unpack(codec: str, payload: Tensor, out: Tensor, dtype: torch.dtype, mask: Tensor | None) -> Tensor:
    """Undo ``pack`` for a payload of a length that fits; return int32 on the device: not 0 if it contradicts
    itself. Raises CodecError if no payload of this codec has this dtype."""
    if codec == "raw":
        out.view(torch.uint8).copy_(payload)
        return no_error(out.device)
    if codec in KERNELS:
        file, end = KERNELS[codec]
        if mask is None:
            return getattr(kernels(file), f"unpack{end}")(at_64(payload), out, dtype)
        return kernels(file).unpack_masked(at_64(payload), out, at_64(mask), dtype)
    if mask is None:
        _unpack_on_host(codec, payload, out, dtype)
        return no_error(out.device)
    inner, bits, zero_value = codec.partition("+")[2], 8 * out.element_size(), kernels("zero_value")
    num_values = int(zero_value.num_values(mask, out))
    if not codec_named(inner).fits(num_values, bits, payload.numel()):
        found = f"{payload.numel()} bytes for the {num_values} values of its mask"
        raise CodecError(f"a payload suits its mask, found {found}; it is damaged")
    values = empty(num_values, bits, out.device)
    _unpack_on_host(inner, payload, values, dtype)
    return zero_value.unpack(values.view(torch.uint8), out, mask=at_64(mask))


def checksum_of(bitmap: Tensor, num_words: int) -> Tensor:
    """Return ``ZeroValue.bitmap_checksum`` of the bitmap of ``num_words`` words, as int64 on its device."""
    return kernels("zero_value").checksum_of(bitmap, num_words)


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


# For the files of kernels.


def new_facts(device: torch.device) -> Tensor:
    return torch.zeros(3, dtype=torch.int64, device=device)


def no_error(device: torch.device) -> Tensor:
    """Return a flag that kernels set where a payload contradicts itself: int32, 0."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def empty(num_words: int, bits: int, device: torch.device) -> Tensor:
    return torch.empty(num_words, dtype=WORDS[bits], device=device)


def at_64(memory: Tensor) -> Tensor:
    """Return ``memory``, copied if it does not begin at a multiple of 64."""
    return memory.clone() if memory.data_ptr() % ALIGNMENT or memory.storage_offset() % 8 else memory


def options(num_warps: int, **constants: Any) -> dict[str, Any]:
    """Return keywords of a launch; no floats here, and Triton warns where fusing them is left open."""
    return {"num_warps": num_warps, "enable_fp_fusion": False, **constants}


def pack_raw(words: Tensor, payload: Tensor) -> Tensor:
    """Copy ``words`` to ``payload``; returns the facts."""
    payload[: words.nbytes].copy_(words.view(torch.uint8))
    facts = new_facts(words.device)
    facts[0].fill_(words.nbytes)
    return facts
