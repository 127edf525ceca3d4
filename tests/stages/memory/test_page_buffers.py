"""Buffers that begin at a page: lent again only when no tensor knows them."""

import gc

import pytest

from penstock.stages.memory.page_buffers import PageBuffers


@pytest.mark.parametrize("num_bytes", [1, 4096, 4097, 1 << 20, 3_000_001])
def test_a_buffer_begins_at_a_page_and_is_whole_pages(num_bytes):
    buffer = PageBuffers().take(num_bytes)
    assert buffer.data_ptr() % 4096 == buffer.numel() % 4096 == 0
    assert buffer.numel() >= num_bytes


def test_a_buffer_is_back_when_its_last_view_is_gone():
    pool = PageBuffers()
    buffer = pool.take(10_000)
    address, view = buffer.data_ptr(), buffer[100:200].view(5, 20)
    del buffer
    gc.collect()
    other = pool.take(10_000)
    assert other.data_ptr() != address
    assert pool.num_idle_bytes == 0
    view.fill_(7)
    assert view.sum() == 700
    del view
    gc.collect()
    assert pool.num_idle_bytes == other.numel()
    assert pool.take(10_000).data_ptr() == address


def test_few_bytes_wait_for_the_next():
    pool = PageBuffers(most_idle=100_000)
    buffers = [pool.take(40_960) for _ in range(5)]
    del buffers
    gc.collect()
    assert pool.num_idle_bytes == 81_920
