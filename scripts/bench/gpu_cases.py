"""What the bench of the kernels times: tensors on the GPU, and all that a route of theirs reads and writes.

Everything is there before the clock starts, in memory of its own for every tensor, so that no route finds
another's data in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...compression import gpu_words, gpu_zero_value
from ...compression.frame import sections
from ...compression.names import CODEC_NAMES

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A tensor on the GPU with its routes, by name: ``copy`` is one from device to device.

    Attributes:
        words, out: what is packed, and where it is unpacked to. payload: what the codec makes of it.
        least_bytes: what a route has to read and write, whatever it does.
        moved_bytes: what the kernels read and write: two passes over the words, over bitmaps again, and over
        values in a memory of their own; without the lists of escapes of exponent.
    """

    words: Tensor
    out: Tensor
    payload: Tensor
    routes: dict[str, Callable[[], object]]
    least_bytes: dict[str, int]
    moved_bytes: dict[str, int]


def tensors(
    dtypes: Sequence[str], sizes: Sequence[int], densities: Sequence[float], device: str
) -> Iterator[tuple[Tensor, str, dict[str, Any]]]:
    """Yield random tensors of ``sizes`` bytes, their codec, and what a row says of them.

    Integers and booleans are for narrow, and of one density; floats for zero_value, and for exponent, behind
    zero_value where there are zeros.
    """
    source = torch.Generator(device).manual_seed(0)
    for name in dtypes:
        dtype = getattr(torch, name)
        for size in [num_bytes // dtype.itemsize for num_bytes in sizes]:
            for density in densities if dtype.is_floating_point else [0.5]:
                kept = torch.rand(size, generator=source, device=device) < density
                tensor = torch.where(kept, torch.randn(size, generator=source, device=device), 0.0)
                tensor = (tensor if dtype.is_floating_point else tensor.abs() * 3).to(dtype)
                exponent = "exponent" if density == 1 else "zero_value+exponent"
                for codec in ("zero_value", exponent) if dtype.is_floating_point else ("narrow",):
                    yield tensor, codec, {"dtype": name, "codec": codec, "density": density}


def case(tensor: Tensor, codec: str, num_warps: int | None) -> Case:
    """A copy of ``tensor`` with a payload, the values at its bitmap, and room."""
    words, device, dtype = words_of(tensor).clone(), tensor.device, tensor.dtype
    warps: dict[str, Any] = {"num_warps": num_warps}
    payload, values, room = (room_of(tensor.nbytes, device) for _ in range(3))
    num_bytes, number, _ = gpu_words.pack(codec, words, payload, dtype, None).tolist()
    payload, out, made_by = payload[:num_bytes], torch.empty_like(words), CODEC_NAMES[number]
    bits = (words != 0).view(-1, 8) * torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], device=device)
    mask = bits.sum(1).to(torch.uint8)
    mask = torch.nn.functional.pad(mask, (0, sections(len(words)).offsets - len(mask)))
    values = values[: int(gpu_zero_value.pack_masked(words, values, mask)[0])]
    routes: dict[str, Callable[[], object]] = {
        "copy": lambda: out.copy_(words),
        "pack": lambda: gpu_words.pack(codec, words, room, dtype, None),
        "unpack": lambda: gpu_words.unpack(made_by, payload, out, dtype, None),
    }
    if codec == "zero_value":
        routes["pack"] = lambda: gpu_zero_value.pack(words, room, **warps)
        if made_by == codec:
            routes["unpack"] = lambda: gpu_zero_value.unpack(payload, out, **warps)
        routes["pack_masked"] = lambda: gpu_zero_value.pack_masked(words, room, mask, **warps)
        routes["unpack_masked"] = lambda: gpu_zero_value.unpack(values, out, mask=mask, **warps)
    packed, masked = words.nbytes + payload.nbytes, words.nbytes + values.nbytes + mask.nbytes
    apart = values.nbytes if codec == "zero_value+exponent" else 0
    again = words.nbytes + mask.nbytes * codec.startswith("zero_value")
    moves = {  # what has to be moved, and what the kernels move again
        "copy": (2 * words.nbytes, 0),
        "pack": (packed, again + 3 * apart),
        "unpack": (packed, 2 * apart),
        "pack_masked": (masked, 2 * mask.nbytes),
        "unpack_masked": (masked, mask.nbytes),
    }
    least, moved = (
        {route: moves[route][0] for route in routes},
        {route: sum(moves[route]) for route in routes},
    )
    return Case(words=words, out=out, payload=payload, routes=routes, least_bytes=least, moved_bytes=moved)


def words_of(tensor: Tensor) -> Tensor:
    """The words of a contiguous tensor."""
    return tensor.view(-1).view(_INTEGERS[tensor.element_size()])


def room_of(num_bytes: int, device: torch.device) -> Tensor:
    """Bytes not yet written."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
