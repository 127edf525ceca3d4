"""Memory that a tensor is decoded into: new, or the caller's.

Every tensor starts at the address mod 64 that its header says, so memory begins at a multiple of 64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import CodecError
from .frame import ALIGNMENT, check_memory

_CPU = torch.device("cpu")


def lent(buffer: Tensor, needed: int, item_bytes: int) -> tuple[torch.UntypedStorage, int]:
    """The caller's memory for a tensor: a storage, and where in it the buffer begins."""
    check_memory(buffer)
    first = int(buffer.storage_offset())
    if buffer.numel() < needed or buffer.data_ptr() % ALIGNMENT or first % item_bytes:
        found = f"{buffer.numel()} bytes at {buffer.data_ptr() % ALIGNMENT} mod {ALIGNMENT}"
        raise CodecError(f"this tensor needs {needed} bytes at a multiple of {ALIGNMENT}, found {found}")
    return buffer.untyped_storage(), first


def memory(num_bytes: int, device: torch.device = _CPU) -> tuple[torch.UntypedStorage, int]:
    """New memory, and where in it a multiple of 64 is.

    A storage is left as it is where deterministic algorithms would fill ``torch.empty``.
    """
    try:
        storage = torch.UntypedStorage(num_bytes + ALIGNMENT, device=device)
    except RuntimeError as error:
        raise CodecError(f"a frame needs {num_bytes} bytes of memory, there is none: {error}") from error
    return storage, -storage.data_ptr() % ALIGNMENT


def new_bytes(num_bytes: int, device: torch.device = _CPU) -> Tensor:
    """New memory as a 1-D uint8 tensor."""
    storage, first = memory(num_bytes, device)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, first, (num_bytes,), (1,))
