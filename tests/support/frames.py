"""Frames with any header."""

import math
import struct
import zlib
from collections.abc import Sequence

import torch

from penstock.compression.frame import DTYPE_NUMBERS


def crafted(
    *,
    magic: bytes = b"PNST",
    version: int = 1,
    codec: int = 0,
    dtype: int = DTYPE_NUMBERS[torch.float32],
    flags: int = 0,
    sizes: Sequence[int] = (3,),
    strides: Sequence[int] = (1,),
    address: int = 0,
    requires_grad: int = 0,
    payload: int | None = None,
    checksum: int = 0,
    padding: bytes = b"",
    room: int = 4096,
) -> torch.Tensor:
    """A frame with any header, its CRC32 right; written a second way, from the text of the format."""
    num_dims = len(sizes)
    start = magic + struct.pack("<H6B", version, codec, dtype, flags, num_dims, address, requires_grad)
    payload = math.prod(sizes) * 4 if payload is None else payload
    rest = struct.pack(f"<{2 + 2 * num_dims}Q", payload, checksum, *sizes, *strides)
    length = (len(start) + 4 + len(rest) + 63) // 64 * 64
    rest = rest + padding + bytes(length - len(start) - 4 - len(rest) - len(padding))
    text = start + struct.pack("<I", zlib.crc32(start + rest)) + rest
    return torch.frombuffer(bytearray(text + bytes(min(payload, room))), dtype=torch.uint8)
