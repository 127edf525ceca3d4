"""Memory of frames: no more is kept than they need, and buffers that come back are lent again."""

import ctypes
import mmap
import sys

import pytest
import torch
from tensors import decoded

from penstock.compression.buffers import SMALL_BYTES, Pool, cut, new_bytes, size_class
from penstock.compression.codec import encode


def resident_bytes(memory: torch.Tensor) -> int:
    """Bytes of the whole pages within ``memory`` that the process really has."""
    first = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_pages = (memory.data_ptr() + memory.numel() - first) // mmap.PAGESIZE
    pages = (ctypes.c_ubyte * num_pages)()
    num_bytes = ctypes.c_size_t(num_pages * mmap.PAGESIZE)
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(first), num_bytes, pages)
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_small_frames_do_not_share_the_memory_they_were_made_in() -> None:
    tensors = [torch.full((100,), float(i)) for i in (1, 2)] + [torch.zeros(1 << 16)]
    for tensor, frame in zip(tensors, [encode(tensor) for tensor in tensors], strict=True):
        back = decoded(frame)
        assert back.tolist() == tensor.tolist()
        assert frame.untyped_storage().nbytes() <= frame.numel() + 64 < 1 << 14


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
    back = decoded(encode(tensor, codec))
    assert torch.equal(back.view(torch.int32), tensor.view(torch.int32))


def test_a_buffer_that_came_back_is_lent_again() -> None:
    pool = Pool()
    first, second = pool.take(100_000), pool.take(100_000)
    assert first.data_ptr() != second.data_ptr()
    pool.give(first)
    assert pool.take(99_000).data_ptr() == first.data_ptr()
    assert pool.num_bytes == first.numel() + second.numel()


def test_buffers_are_aligned_and_no_longer_than_they_must() -> None:
    for num_bytes in (0, 1, 4096, 4097, 65_537, 1_000_000, 3 << 20):
        buffer = Pool().take(num_bytes)
        assert num_bytes <= buffer.numel() <= max(4096, num_bytes * 9 / 8 + 4096)
        assert buffer.data_ptr() % 64 == 0
    sizes = [size_class(n) for n in range(1 << 20, 1 << 21, 777)]
    assert len(set(sizes)) <= 9  # near lengths share a class
    assert sizes == sorted(sizes)
    assert all(size_class(size) == size for size in sizes)


def test_a_buffer_that_was_not_lent_is_not_taken_back() -> None:
    pool = Pool()
    buffer = pool.take(10)
    pool.give(buffer)
    with pytest.raises(AssertionError, match="once"):
        pool.give(buffer)
    with pytest.raises(AssertionError, match="lent"):
        Pool().give(pool.take(10))
