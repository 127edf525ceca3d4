"""Where buffers lie in one allocation, by their lifetimes: what is never there at once may share a place.

First several greedy orders; where the best of them is more than ``CLOSE`` above what lives at once, or above
the limit, a search that misses nothing within its work.
Source: steps S3 and S6 and claims 4-5 of the resource management of distributed deep learning.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ...compression.errors import PlanError
from .fitter import MOST_BUFFERS, Fitter

CLOSE = 0.005  # of what lives at once: a greedy placement within that is taken
WORK = 30_000_000_000  # of the search in all, in steps of a loop: below two minutes on a slow core
_ROUND = 100_000_000  # of the first try of an order; each round has four times as much as the one before
_MOST_BYTES = 1 << 61
_ORDERS = ("AWT", "TWA", "TAW", "WAT", "ZWT", "LWA")  # by what first, then, then; see ``_keys``


class Buffer(NamedTuple):
    """When it is there, ``upper`` exclusive, and its bytes."""

    lower: int
    upper: int
    size: int


def place(
    buffers: Sequence[tuple[int, int, int]], limit: int | None = None, *, work: int = WORK
) -> list[int]:
    """Offsets of ``buffers``, in the order given, so that none of them overlap in time and in place.

    Args:    buffers: (lower, upper, size) each, ``upper`` exclusive; times and bytes have any unit.
             limit: no buffer may end above it; None: as low as is found.
             work: what the search may do in all; the same work finds the same.
    Raises:  PlanError: numbers that are none or too large, or nothing was found below ``limit``."""
    given = [_checked(buffer) for buffer in buffers]
    if limit is not None and (not _is_whole(limit) or limit < 0):
        raise PlanError(f"a limit is a whole number of bytes from 0 on, found {limit!r}; pass None for none")
    sized = [index for index, buffer in enumerate(given) if buffer.size]
    if sum(given[index].size for index in sized) > _MOST_BYTES:
        raise PlanError(f"buffers have at most {_MOST_BYTES} bytes together, found more; correct their sizes")
    offsets = [0] * len(given)
    if sized:
        for index, offset in zip(sized, _Placing([given[i] for i in sized], work).run(limit), strict=True):
            offsets[index] = offset
    return offsets


def max_live(buffers: Sequence[tuple[int, int, int]]) -> int:
    """The most bytes that are there at once: no placement has fewer."""
    changes = sorted(change for low, up, size in buffers for change in ((low, size), (up, -size)) if size)
    by_time = itertools.groupby(changes, key=lambda change: change[0])
    steps = itertools.accumulate(sum(change for _, change in group) for _, group in by_time)
    return max(steps, default=0)


def _is_whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and -(1 << 63) <= number < 1 << 63


def _checked(buffer: tuple[int, int, int]) -> Buffer:
    if len(buffer) != 3 or not all(map(_is_whole, buffer)):
        rule = "a buffer is three whole numbers of at most 64 bits: lower, upper, size"
        raise PlanError(f"{rule}, found {buffer!r}; pass no bool and no float")
    found = Buffer(*buffer)
    if found.lower >= found.upper or found.size < 0:
        raise PlanError(f"a buffer has lower < upper and a size from 0 on, found {buffer!r}; correct it")
    return found


class _Placing:
    """One call of ``place``: what was found so far, and the work that is left."""

    def __init__(self, buffers: list[Buffer], work: int) -> None:
        self.buffers, self.work = buffers, work
        self.unit = math.gcd(*(buffer.size for buffer in buffers))
        times = sorted({time for buffer in buffers for time in buffer[:2]})
        at = {time: section for section, time in enumerate(times)}
        self.sections = [Buffer(at[low], at[up], size // self.unit) for low, up, size in buffers]
        self.live = max_live(self.sections)
        self.best: list[int] = []
        self.least = _MOST_BYTES

    def run(self, limit: int | None) -> list[int]:
        """Offsets of all, in bytes."""
        goal = self.live if limit is None else limit // self.unit
        enough = goal if limit is not None else int(self.live * (1 + CLOSE))
        for order in self._orders():
            self._take(_greedy(self.sections, order))
            if self.least <= enough:
                break
        proven = self.live - 1  # nothing fits below it
        fitter = Fitter(self.sections, self.live) if len(self.buffers) <= MOST_BUFFERS else None
        if self.least > enough and goal >= self.live and fitter is not None:
            work = self.work if limit is not None else self.work // 8
            proven = self._search(fitter, goal, work, proven)
        if self.least > enough and fitter is not None:  # without a limit, or to say what there is
            proven = self._lower(fitter, self.work // 8, enough, proven)
        if limit is not None and self.least > goal:
            raise PlanError(self._refusal(limit, proven >= goal))
        return [offset * self.unit for offset in self.best]

    def _refusal(self, limit: int, proven: bool) -> str:
        why = "nothing fits" if proven or limit < self.live * self.unit else "nothing was found"
        least, live = self.least * self.unit, self.live * self.unit
        return (
            f"buffers are placed below the limit of {limit} bytes, {why}: {live} bytes live at once, "
            f"the least placement found has {least}; raise the limit to {least}, or keep less"
        )

    def _take(self, offsets: list[int]) -> None:
        most = max(offset + buffer.size for offset, buffer in zip(offsets, self.sections, strict=True))
        if most < self.least:
            self.best, self.least = offsets, most

    def _search(self, fitter: Fitter, goal: int, work: int, proven: int) -> int:
        """Try to fit all below ``goal``; what is proven not to do, afterwards."""
        share, left = _ROUND, work
        orders = list(self._orders())
        chance = random.Random(0)
        while left > 0:
            for order in orders:
                allowed = min(share, left)
                found, offsets, used = fitter.run(order, goal, allowed)
                left -= used
                if found > 0:
                    self._take(offsets)
                    return proven
                if found == 0:
                    return max(proven, goal)
                if left <= 0:
                    return proven
            share *= 4
            orders = [*self._orders(), *(self._shaken(chance) for _ in range(4))]
        return proven

    def _lower(self, fitter: Fitter, work: int, enough: int, proven: int) -> int:
        """Halve what lies between the least found and what cannot be, until it is ``enough``."""
        open_from = max(self.live, proven + 1)
        while open_from < self.least and self.least > enough:
            middle = (open_from + self.least - 1) // 2
            before = self.least
            known = self._search(fitter, middle, work // 16, proven)
            proven = max(proven, known)
            if self.least == before:
                open_from = middle + 1
        return proven

    def _keys(self) -> dict[str, list[float]]:
        """What orders go by: width, size, area, the most that lives beside it, and the beginning."""
        ends = max(buffer.upper for buffer in self.sections)
        live = np.zeros(ends + 1, dtype=np.int64)
        for low, up, size in self.sections:
            live[low:up] += size
        widths = [float(up - low) for low, up, _ in self.buffers]
        sizes = [float(buffer.size) for buffer in self.sections]
        return {
            "W": widths,
            "Z": sizes,
            "A": [width * size for width, size in zip(widths, sizes, strict=True)],
            "T": [float(live[low:up].max()) for low, up, _ in self.sections],
            "L": [-float(low) for low, *_ in self.buffers],
        }

    def _orders(self) -> Iterator[list[int]]:
        keys = self._keys()
        for order in _ORDERS:
            yield self._sorted([keys[name] for name in order])

    def _shaken(self, chance: random.Random) -> list[int]:
        keys = self._keys()
        names = chance.choice(_ORDERS[:4])
        shaken = [[number * chance.uniform(0.8, 1.25) for number in keys[name]] for name in names]
        return self._sorted(shaken)

    def _sorted(self, keys: list[list[float]]) -> list[int]:
        ranked: Callable[[int], tuple[float, ...]] = lambda i: (*(-key[i] for key in keys), i)  # noqa: E731
        return sorted(range(len(self.sections)), key=ranked)


def _greedy(buffers: list[Buffer], order: list[int]) -> list[int]:
    """Each in turn at the lowest place that is free as long as it lives."""
    lower = np.array([buffer.lower for buffer in buffers])
    upper = np.array([buffer.upper for buffer in buffers])
    size = np.array([buffer.size for buffer in buffers])
    at = np.full(len(buffers), -1)
    for index in order:
        beside = np.flatnonzero((at >= 0) & (lower < upper[index]) & (lower[index] < upper))
        beside = beside[np.argsort(at[beside], kind="stable")]
        tops = np.maximum.accumulate(np.concatenate(([0], at[beside] + size[beside])))
        begins = np.concatenate((at[beside], [_MOST_BYTES * 2]))
        at[index] = tops[np.argmax(begins - tops >= size[index])]
    return at.tolist()
