"""Frames keep no more memory than they need, however they were made."""

from __future__ import annotations

import ctypes
import mmap
import sys

import pytest
import torch

from penstock.compression.codec import decode, encode
from penstock.compression.memory import SMALL_BYTES, cut, new_bytes


def resident_bytes(memory: torch.Tensor) -> int:
    """Bytes of the whole pages within ``memory`` that the process really has."""
    first = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_pages = (memory.data_ptr() + memory.numel() - first) // mmap.PAGESIZE
    pages = (ctypes.c_ubyte * num_pages)()
    num_bytes = ctypes.c_size_t(num_pages * mmap.PAGESIZE)
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(first), num_bytes, pages)
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_small_frames_do_not_share_the_memory_they_were_made_in() -> None:
    tensors = [torch.full((100,), float(i)) for i in (1, 2)]
    frames = [encode(tensor) for tensor in tensors]
    for tensor, frame in zip(tensors, frames, strict=True):
        back = decode(frame)
        assert back is not None
        assert back.tolist() == tensor.tolist()
        assert frame.untyped_storage().nbytes() <= frame.numel() + 64


@pytest.mark.parametrize("num_bytes", [SMALL_BYTES + 1, 3 << 20])
def test_a_frame_of_middle_size_is_copied_where_that_saves_a_ninth(num_bytes: int) -> None:
    whole = new_bytes(num_bytes).fill_(1)
    assert cut(whole, num_bytes - 1, of=num_bytes).data_ptr() == whole.data_ptr()
    part = cut(whole, 5000, of=num_bytes)
    assert part.untyped_storage().nbytes() <= 5000 + 64
    assert part.tolist() == [1] * 5000


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which pages a process has")
def test_a_long_frame_gives_back_the_pages_behind_it() -> None:
    num_bytes = 20 << 20
    whole = new_bytes(num_bytes).fill_(1)
    assert resident_bytes(whole) > num_bytes - 2 * mmap.PAGESIZE
    part = cut(whole, 5000, of=num_bytes)
    assert part.data_ptr() == whole.data_ptr()
    assert part.tolist() == [1] * 5000
    assert resident_bytes(whole) <= 2 * mmap.PAGESIZE


@pytest.mark.parametrize("codec", ["raw", "zero_value"])
def test_a_long_tensor_comes_back_from_a_frame_that_begins_a_longer_storage(codec: str) -> None:
    tensor = torch.zeros(5 << 20)
    tensor[::1000] = torch.randn(len(tensor[::1000]))
    back = decode(encode(tensor, codec))
    assert back is not None
    assert torch.equal(back.view(torch.int32), tensor.view(torch.int32))
