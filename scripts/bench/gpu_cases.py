"""What the bench of the kernels times: tensors on the GPU, and all that a route of theirs reads and writes.

Everything is there before the clock starts, in memory of its own for every tensor, so that no route finds
another's data in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...compression import gpu_words, gpu_zero_value
from ...compression.codec import CODECS
from ...compression.frame import sections

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A tensor on the GPU with all that its routes read and write."""

    codec: str
    dtype: torch.dtype
    words: Tensor
    out: Tensor
    room: Tensor  # for a payload or values
    payload: Tensor
    mask: Tensor
    values: Tensor
    made_by: str  # the codec that reads the payload: raw where it did not shrink
    num_warps: int | None

    def copy(self) -> None:
        """Copy from device to device."""
        self.out.copy_(self.words)

    def pack(self) -> None:
        """Write the payload."""
        if self.codec == "zero_value":
            gpu_zero_value.pack(self.words, self.room, num_warps=self.num_warps)
        else:
            gpu_words.pack(self.codec, self.words, self.room, self.dtype, None)

    def unpack(self) -> None:
        """Read the payload."""
        if self.made_by == "zero_value":
            gpu_zero_value.unpack(self.payload, self.out, num_warps=self.num_warps)
        else:
            gpu_words.unpack(self.made_by, self.payload, self.out, self.dtype, None)

    def pack_masked(self) -> None:
        """Write the values at the set bits of a bitmap."""
        gpu_zero_value.pack_masked(self.words, self.room, self.mask, num_warps=self.num_warps)

    def unpack_masked(self) -> None:
        """Read the values at the set bits of a bitmap."""
        gpu_zero_value.unpack(self.values, self.out, mask=self.mask, num_warps=self.num_warps)

    def least_bytes(self, route: str) -> int:
        """Bytes that a route has to read and write, whatever it does."""
        if route == "copy":
            return 2 * self.words.nbytes
        if route.endswith("masked"):
            return self.words.nbytes + self.values.nbytes + self.mask.nbytes
        return self.words.nbytes + self.payload.nbytes

    def moved_bytes(self, route: str) -> int:
        """Bytes that the kernels read and write: two passes over the words, and over bitmaps again."""
        again = {
            "pack": self.words.nbytes,
            "pack_masked": 2 * self.mask.nbytes,
            "unpack_masked": self.mask.nbytes,
        }
        if route == "pack" and self.codec == "zero_value":
            again["pack"] += self.mask.nbytes
        return self.least_bytes(route) + again.get(route, 0)


def tensors(
    dtypes: Sequence[str], sizes: Sequence[int], densities: Sequence[float], device: str
) -> Iterator[tuple[Tensor, str, dict[str, Any]]]:
    """Yield random tensors of ``sizes`` bytes, their codec, and what a row says of them.

    Integers and booleans are for narrow, and of one density.
    """
    source = torch.Generator(device).manual_seed(0)
    for name in dtypes:
        dtype = getattr(torch, name)
        integers = not dtype.is_floating_point
        codec = "narrow" if integers else "zero_value"
        if codec not in CODECS:
            continue
        for size in [num_bytes // dtype.itemsize for num_bytes in sizes]:
            for density in [0.5] if integers else densities:
                kept = torch.rand(size, generator=source, device=device) < density
                values = torch.randn(size, generator=source, device=device)
                tensor = torch.where(kept, values, 0.0)
                tensor = (tensor.abs() * 3).to(dtype) if integers else tensor.to(dtype)
                yield tensor, codec, {"dtype": name, "codec": codec, "density": density}


def case(tensor: Tensor, codec: str, num_warps: int | None) -> Case:
    """A copy of ``tensor`` with a payload, the values at its bitmap, and room."""
    words, device = words_of(tensor).clone(), tensor.device
    payload, values, room = (room_of(tensor.nbytes, device) for _ in range(3))
    num_bytes, number, _ = gpu_words.pack(codec, words, payload, tensor.dtype, None).tolist()
    bits = (words != 0).view(-1, 8) * torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], device=device)
    mask = bits.sum(1).to(torch.uint8)
    mask = torch.nn.functional.pad(mask, (0, sections(len(words)).offsets - len(mask)))
    num_values = int(gpu_zero_value.pack_masked(words, values, mask)[0])
    return Case(
        codec=codec,
        dtype=tensor.dtype,
        words=words,
        out=torch.empty_like(words),
        room=room,
        payload=payload[:num_bytes],
        mask=mask,
        values=values[:num_values],
        made_by=codec if number else "raw",
        num_warps=num_warps,
    )


def words_of(tensor: Tensor) -> Tensor:
    """The words of a contiguous tensor."""
    return tensor.view(-1).view(_INTEGERS[tensor.element_size()])


def room_of(num_bytes: int, device: torch.device) -> Tensor:
    """Bytes not yet written."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
