"""Buffers that come back are lent again."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from penstock import CodecError
from penstock.compression.pool import Pool, size_class


def test_a_buffer_that_came_back_is_lent_again() -> None:
    pool = Pool()
    first, second = pool.take(100_000), pool.take(100_000)
    assert first.data_ptr() != second.data_ptr()
    pool.give(first)
    assert pool.take(99_000).data_ptr() == first.data_ptr()
    assert pool.num_bytes == first.numel() + second.numel()


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 4097, 65_537, 1_000_000, 3 << 20])
def test_buffers_are_aligned_and_long_enough(num_bytes: int) -> None:
    buffer = Pool().take(num_bytes)
    assert num_bytes <= buffer.numel()
    assert buffer.numel() <= max(4096, num_bytes * 9 / 8 + 4096)
    assert buffer.data_ptr() % 64 == 0


def test_near_lengths_share_a_class() -> None:
    sizes = [size_class(n) for n in range(1 << 20, 1 << 21, 777)]
    assert len(set(sizes)) <= 9
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


def test_buffers_lie_in_memory_whatever_torch_makes_by_default() -> None:
    with torch.device("meta"):
        assert Pool().take(100).is_cpu
    with FakeTensorMode(), pytest.raises(CodecError):
        Pool().take(100)
