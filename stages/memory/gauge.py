"""How many bytes of a kind there are, counted by whoever makes, moves or frees them, in any thread.

A garbage collector may free a graph in the middle of anything, so that counting takes no lock that its own
thread could hold already."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

Limit = int | None
_SECONDS = 0.1


class Gauge:
    """Bytes of one kind: ``now``, and the most since ``begin``.

    ``limit``: what it shall not exceed; None: anything. A gauge keeps nobody from adding: who could wait for
    room asks ``wait``."""

    def __init__(self, limit: Limit = None, *, part_of: Gauge | None = None) -> None:
        """Start with none. What is counted here is counted in ``part_of`` too."""
        self.limit, self._part_of = limit, part_of
        self._now = self.peak = 0
        self._changes: deque[int] = deque()
        self._folding = threading.Lock()
        self._less = threading.Condition()
        self._waiting = 0

    @property
    def wider(self) -> tuple[Gauge, ...]:
        """Those of which it is a part."""
        return () if self._part_of is None else (self._part_of,)

    @property
    def now(self) -> int:
        """Bytes that there are."""
        self._fold()
        return self._now

    def begin(self) -> None:
        """Forget the most that there was."""
        self.peak = self.now

    def add(self, num_bytes: int) -> None:
        """There are so many bytes more, or less."""
        if not num_bytes:
            return
        self._changes.append(num_bytes)
        self._fold()
        if self._part_of is not None:
            self._part_of.add(num_bytes)

    def fits(self, num_bytes: int) -> bool:
        """Whether so many bytes more keep to the limit."""
        return self.limit is None or self.now + num_bytes <= self.limit

    def wait(self, enough: Callable[[], bool]) -> None:
        """Wait until ``enough``, asked again whenever there is less, and now and then: a collector that
        counts in the middle of it all tells nobody."""
        self._waiting += 1
        try:
            with self._less:
                while not self._less.wait_for(enough, timeout=_SECONDS):
                    pass
        finally:
            self._waiting -= 1

    def _fold(self) -> None:
        less = False
        while self._changes and self._folding.acquire(blocking=False):  # else whoever folds takes it along
            try:
                while self._changes:
                    change = self._changes.popleft()
                    self._now += change
                    self.peak, less = max(self.peak, self._now), less or change < 0
            finally:
                self._folding.release()
        if less and self._waiting:
            with self._less:
                self._less.notify_all()


class Share:
    """What one owner has in a gauge, who counts all of it anew and not what changed."""

    def __init__(self, gauge: Gauge) -> None:
        """Begin with none."""
        self._gauge, self.num_bytes = gauge, 0

    def set(self, num_bytes: int) -> None:
        """It has so many bytes now. One thread says so."""
        self.num_bytes, before = num_bytes, self.num_bytes
        self._gauge.add(num_bytes - before)
