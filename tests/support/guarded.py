"""Memory that ends at an unreadable page: one byte too far, read or written, kills the process."""

import ctypes
import mmap

import torch
from torch import Tensor

_libc = ctypes.CDLL(None, use_errno=True)


def guarded(num_bytes: int) -> Tensor:
    """``num_bytes`` zero bytes that end at an unreadable page; an unreadable page also lies before them."""
    page = mmap.PAGESIZE
    num_pages = -(-num_bytes // page) + 2
    memory = mmap.mmap(-1, num_pages * page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (0, num_pages - 1):
        assert _libc.mprotect(ctypes.c_void_p(base + guard * page), page, 0) == 0
    end = (num_pages - 1) * page
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[end - num_bytes : end]
