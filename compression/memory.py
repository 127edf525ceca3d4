"""Memory that frames and tensors are made in: new, or the caller's.

Every tensor starts at the address mod 64 that its header says, so memory begins at a multiple of 64. Long
memory is new to the process each time, and its page faults take longer than the packing: so the system is
asked for huge pages, as NumPy asks, and what is behind a frame is given back page by page, not by a copy.

Source: madvise(2), MADV_HUGEPAGE and MADV_DONTNEED.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .errors import CodecError
from .frame import ALIGNMENT, check_memory

_CPU = torch.device("cpu")
SMALL_BYTES = 1 << 18  # up to here a frame is made in kept memory and copied out: memory is taken once
_LARGE_BYTES = 16 << 20


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
        # Torch's own memory begins at such a multiple; a size that others ask for too is found again sooner.
        storage = torch.UntypedStorage(num_bytes or ALIGNMENT, device=device)
        if storage.data_ptr() % ALIGNMENT:
            storage = torch.UntypedStorage(num_bytes + ALIGNMENT, device=device)
    except RuntimeError as error:
        raise CodecError(f"a frame needs {num_bytes} bytes of memory, there is none: {error}") from error
    address = storage.data_ptr()
    if num_bytes >= _LARGE_BYTES and device == _CPU and sys.platform == "linux":
        _advise(address, num_bytes, mmap.MADV_HUGEPAGE)
    return storage, -address % ALIGNMENT


def new_bytes(num_bytes: int, device: torch.device = _CPU) -> Tensor:
    """New memory as a 1-D uint8 tensor."""
    storage, first = memory(num_bytes, device)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, first, (num_bytes,), (1,))


def view_at(address: int, num_bytes: int) -> memoryview:
    """The bytes at an address, which somebody else keeps alive."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def cut(whole: Tensor, length: int, *, of: int) -> Tensor:
    """The first ``length`` bytes of a frame's room of ``of`` bytes, which keep no other memory.

    Args:    whole: from ``new_bytes``, or a thread's ``Scratch``, which is copied.
    """
    if of > SMALL_BYTES:
        if length * 9 >= of * 8:
            return whole[:length]
        if of >= _LARGE_BYTES and sys.platform == "linux":
            if _advise(whole.data_ptr() + length, of - length, mmap.MADV_DONTNEED):
                return whole[:length]
    frame = new_bytes(length)
    ctypes.memmove(frame.data_ptr(), whole.data_ptr(), length)
    return frame


def _advise(address: int, num_bytes: int, advice: int) -> bool:
    """Tell the system what the whole pages of a range are for; returns whether it took the advice."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = (address + num_bytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    return num_bytes <= 0 or not _madvise()(first, num_bytes, advice)


@lru_cache(maxsize=1)
def _madvise() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
