"""Pages and where the bytes of a sample lie in them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.data.cache.core import Pages
from penstock.pipeline.data.cache.wire import pages_of, pieces


@pytest.mark.parametrize(("num_bytes", "needed"), [(0, 1), (1, 1), (10, 1), (11, 2), (20, 2), (21, 3)])
def test_a_sample_takes_whole_pages_and_an_empty_one_a_page(num_bytes, needed):
    assert pages_of(num_bytes, 10) == needed


def test_pages_are_taken_once_and_side_by_side_where_they_are_free():
    pages: Any = Pages(5, 10)
    first, second = (pages.reserve(("d", index), 20, b"") for index in range(2))
    assert (list(first.pages), list(second.pages)) == ([0, 1], [2, 3])
    assert pages.reserve(("d", 2), 20, b"") is None
    assert pages.num_free == 1
    pages.free(("d", 0))
    assert list(pages.reserve(("d", 3), 30, b"").pages) == [0, 1, 4]


def test_pages_side_by_side_are_one_piece():
    assert pieces([3, 4, 7], 25, 10) == [(30, 50), (70, 75)]


@given(st.permutations(range(12)), st.integers(0, 60))
def test_the_pieces_are_the_bytes_one_by_one(order, num_bytes):
    slow = [order[at // 5] * 5 + at % 5 for at in range(num_bytes)]
    assert [at for start, end in pieces(order, num_bytes, 5) for at in range(start, end)] == slow
