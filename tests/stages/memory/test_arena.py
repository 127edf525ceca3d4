"""Offsets by lifetimes: as low as can be, never in each other's way, and refusals."""

from __future__ import annotations

import csv
import functools
import itertools
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.compression.errors import PlanError
from penstock.stages.memory.arena import max_live, place
from penstock.stages.memory.fitter import Fitter

Triple = tuple[int, int, int]
# In seconds: A 0.3, B 1.3, C 0.1, D 1.3, E 5.2, F 0.2.
CASES = [pytest.param(name, marks=[pytest.mark.slow] if name in "BDE" else []) for name in "ABCDEF"]


def held(buffers: Sequence[Triple], offsets: Sequence[int]) -> int:
    """How high they reach; fails where two lie in each other's way."""
    assert all(type(offset) is int and offset >= 0 for offset in offsets)
    laid = list(zip(buffers, offsets, strict=True))
    for ((low, up, size), at), ((low_2, up_2, size_2), at_2) in itertools.combinations(laid, 2):
        assert not (low < up_2 and low_2 < up and at < at_2 + size_2 and at_2 < at + size)
    return max((at + size for (_, _, size), at in laid), default=0)


def optimum(buffers: Sequence[Triple]) -> int:
    """The least height, by every order in which buffers can be dropped on each other."""
    best = sum(size for *_, size in buffers)
    for order in itertools.permutations(buffers):
        laid: list[tuple[Triple, int]] = []
        for low, up, size in order:  # each rests on what lies under it
            at = max((b + s for (x, y, s), b in laid if x < up and low < y), default=0)
            laid.append(((low, up, size), at))
        best = min(best, max(at + size for (_, _, size), at in laid))
    return best


def cut(seed: int, count: int, *, width: int = 1000, height: int = 1024) -> list[Triple]:
    """A rectangle cut into ``count`` from edge to edge: there is a placement without a gap."""
    chance = random.Random(seed)
    pieces = [(0, width, 0, height)]
    while len(pieces) < count:
        low, up, bottom, top = pieces.pop(chance.randrange(len(pieces)))
        if chance.random() < 0.5 and up - low > 1:
            at = chance.randrange(low + 1, up)
            pieces += [(low, at, bottom, top), (at, up, bottom, top)]
        elif top - bottom > 1:
            at = chance.randrange(bottom + 1, top)
            pieces += [(low, up, bottom, at), (low, up, at, top)]
        else:
            pieces.append((low, up, bottom, top))
    chance.shuffle(pieces)
    return [(low, up, top - bottom) for low, up, bottom, top in pieces]


@st.composite
def triples(draw: st.DrawFn, most: int, size: int = 9) -> list[Triple]:
    found = []
    for _ in range(draw(st.integers(0, most))):
        low = draw(st.integers(-3, 7))
        found.append((low, draw(st.integers(low + 1, 8)), draw(st.integers(0, size))))
    return found


def test_literals() -> None:
    assert place([]) == []
    assert place([(0, 1, 5)]) == [0]
    assert place([(0, 1, 5), (1, 2, 5)]) == [0, 0]
    assert sorted(place([(0, 2, 5), (1, 3, 7)])) in ([0, 5], [0, 7])
    assert place([(0, 9, 0), (0, 9, 0)], limit=0) == [0, 0]


@pytest.mark.slow
def test_where_every_greedy_order_is_too_high() -> None:
    buffers = [(0, 7, 2), (0, 3, 6), (3, 5, 4), (5, 7, 7), (0, 4, 3), (3, 7, 4), (1, 2, 3)]
    with pytest.raises(PlanError, match=r"nothing was found: 14 bytes live at once, .* found has 15"):
        place(buffers, 14, work=1)
    assert held(buffers, place(buffers, 14)) == held(buffers, place(buffers)) == 14


@settings(max_examples=150, deadline=None)
@given(triples(6))
def test_a_few_buffers_lie_as_low_as_any_order_can_lay_them(buffers: list[Triple]) -> None:
    assert held(buffers, place(buffers)) == (optimum(buffers) if buffers else 0)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(triples(7, size=30))
def test_seven_buffers_lie_as_low_as_any_order_can_lay_them(buffers: list[Triple]) -> None:
    assert held(buffers, place(buffers)) == (optimum(buffers) if buffers else 0)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(triples(7), st.integers(0, 40))
def test_a_limit_holds_or_is_refused_with_the_least_there_is(buffers: list[Triple], limit: int) -> None:
    least = held(buffers, place(buffers))
    if least <= limit:
        assert held(buffers, place(buffers, limit)) <= limit
    else:
        with pytest.raises(
            PlanError, match=rf"nothing fits: .* found has {least}; raise the limit to {least}"
        ):
            place(buffers, limit)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(triples(30, size=1 << 40))
def test_many_never_lie_in_each_others_way(buffers: list[Triple]) -> None:
    assert held(buffers, place(buffers, work=10**7)) >= max_live(buffers)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(triples(7, size=6).filter(lambda found: any(size for *_, size in found)), st.integers(0, 3))
def test_compiled_the_search_finds_what_python_finds(buffers: list[Triple], more: int) -> None:
    sized = [(low + 3, up + 3, size) for low, up, size in buffers if size]
    live = max_live(sized)
    fitter, order = Fitter(sized, live), list(range(len(sized)))
    run = functools.partial(fitter.run, order, live + more, 3000)
    assert run() == run(compiled=False)


@pytest.mark.slow
@pytest.mark.parametrize("count", [5, 20, 60, 120])
@pytest.mark.parametrize("seed", range(3))
def test_pieces_of_a_rectangle_fit_into_it(count: int, seed: int) -> None:
    buffers = cut(seed, count)
    assert held(buffers, place(buffers, limit=1024)) == 1024
    assert held(buffers, place(buffers)) <= 1024 * 1.005


@pytest.mark.slow
def test_the_same_work_finds_the_same() -> None:
    buffers = cut(5, 80)
    assert place(buffers, limit=1024) == place(buffers, limit=1024)


@pytest.mark.slow
def test_without_work_it_says_that_nothing_was_found() -> None:
    buffers = cut(0, 120)
    with pytest.raises(PlanError, match="nothing was found: 1024 bytes live at once"):
        place(buffers, 1024, work=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_hard_case_fits(corpora: Path, name: str) -> None:
    with (corpora / "minimalloc" / f"{name}.1048576.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    buffers = [(int(row["lower"]), int(row["upper"]), int(row["size"])) for row in rows]
    assert held(buffers, place(buffers, limit=1048576)) <= 1048576


@pytest.mark.parametrize(
    ("buffers", "found"),
    [
        ([(1, 1, 4)], r"lower < upper .* found \(1, 1, 4\)"),
        ([(2, 1, 4)], r"lower < upper .* found \(2, 1, 4\)"),
        ([(0, 1, -4)], r"size from 0 on, found \(0, 1, -4\)"),
        ([(0, 1, True)], "no bool"),
        ([(False, 1, 4)], "no bool"),
        ([(0, 1, 4.0)], "no float"),
        ([(0, 1)], "three whole numbers"),
        ([(0, 1, 1 << 63)], "at most 64 bits"),
        ([(-(1 << 63) - 1, 1, 1)], "at most 64 bits"),
        ([(0, 1, 1 << 61), (0, 1, 1)], "bytes together"),
    ],
)
def test_refusals(buffers: Iterable[Any], found: str) -> None:
    with pytest.raises(PlanError, match=found):
        place(list(buffers))


@pytest.mark.slow
@pytest.mark.parametrize("limit", [-1, 2.0, True, 1 << 63])
def test_a_limit_is_a_number_of_bytes(limit: Any) -> None:
    with pytest.raises(PlanError, match="a limit is a whole number"):
        place([(0, 1, 2)], limit)
