"""Bytes of each kind on a rank, by tier, and their limits.

Whoever makes, moves or frees bytes counts them, in any thread. A garbage collector may run a finalizer that
counts between the load and the store of ``+=``, in a thread that holds a lock of ours: so counting appends
to a deque and takes no lock that its own thread could hold already.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from ...compression.errors import ConfigError
from ..units import parse_bytes

Limit = int | None
_SECONDS = 0.1


class ByteCounter:
    """Bytes of one kind: ``now``, their ``peak`` since ``begin``, and ``limit``, which no ``add`` minds."""

    def __init__(self, limit: Limit = None, *, wider: tuple[ByteCounter, ...] = ()) -> None:
        """Start with none. What is counted here is counted in the ``wider`` ones too."""
        self.limit, self.wider = limit, wider
        self._now = self.peak = self._waiting = 0
        self._changes: deque[int] = deque()
        self._folding = threading.Lock()
        self._less = threading.Condition()

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
        for counter in self.wider:
            counter.add(num_bytes)

    def fits(self, num_bytes: int) -> bool:
        """Return whether so many bytes more keep to the limit."""
        return self.limit is None or self.now + num_bytes <= self.limit

    def wait(self, enough: Callable[[], bool]) -> None:
        """Wait until ``enough``, asked when there is less, and now and then: a collector tells nobody."""
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


MOST_PIECE_BYTES = 16 << 20
_PAGE = 4096


def piece_bytes(num_bytes: int) -> int:
    """Return the size of the pieces in which a tier off the device keeps a tensor, so that little of it is
    there while it is added to or updated: a quarter, at most 16 MiB; below 1 MiB: all."""
    if num_bytes < 1 << 20:
        return num_bytes
    return min(MOST_PIECE_BYTES, -(-num_bytes // (4 * _PAGE)) * _PAGE)


NAMES: Final = ("device", "packed", "host", "disk")
_ROOM = 2  # one part in so many of what a limit leaves free is for what is about to be saved


class Tiers:
    """Bytes of each tier of a rank, ``counters`` by its name.

    Attributes: device: all tensor bytes that are counted: those that never leave, what forwards saved,
                        parameters that come and go, and the frames of other tiers that lie there: on a CPU
                        of ``packed`` and ``host``, and those on disk until they are written.
                leaving: of these, what is on its way out.
                slots_bytes: of the allocation of ``Slots``; slots_live_bytes: the most in use at once."""

    def __init__(self, *, device: Limit = None, host: Limit = None, on_gpu: bool = False) -> None:
        """Limits in bytes; the disk keeps its own, by the bytes of its file."""
        self.device, self.disk, self.leaving = ByteCounter(device), ByteCounter(), ByteCounter()
        self.packed = ByteCounter(wider=(self.device,))
        self.host = ByteCounter(host, wider=() if on_gpu else (self.device,))
        self.counters: dict[str, ByteCounter] = {name: getattr(self, name) for name in NAMES}
        self.fixed = 0  # bytes of the device that never leave
        self.seconds_waited = 0.0
        self.slots_bytes = self.slots_live_bytes = 0

    def begin(self) -> None:
        """A step begins: the most is that of this step."""
        for counter in self.counters.values():
            counter.begin()

    def fix(self, num_bytes: int) -> None:
        """So many bytes of the device never leave: parameters, gradients, optimizer state, buffers."""
        self.fixed, before = num_bytes, self.fixed
        self.device.add(num_bytes - before)

    @property
    def peaks(self) -> dict[str, int]:
        """The most bytes of every tier in this step."""
        return {name: counter.peak for name, counter in self.counters.items()}

    @property
    def excess(self) -> int | None:
        """Bytes that are to leave the device; None: it has no limit. Half of what the limit leaves beside the
        fixed bytes is kept free for what the next layers save."""
        if (limit := self.device.limit) is None:
            return None
        return self.device.now - self.leaving.now - (limit - max(0, limit - self.fixed) // _ROOM)


PREFETCH_LAYERS = 4  # layers: "auto"; what is read within so many is brought back, and need not leave


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """Options of a rank for what leaves it for a while; no bit depends on them, and ranks may differ.

    Attributes:
        prefetch_layers: What is read within so many layers of the program is brought back. None: as far ahead
            as is of use.
        writeout_layers: What is not read within so many layers leaves; parameters of the last so many layers
            of a forward stay for its backward, where there is no limit. None: as far ahead as is of use.
        host: The most bytes of the tier ``host``, as ``"8GiB"``; None: no limit.

    Raises:
        ConfigError: Not a count.
        PlanError: No size in bytes.
    """

    prefetch_layers: int | None = None
    writeout_layers: int | None = None
    host: int | str | None = None

    def __post_init__(self) -> None:
        for name in ("prefetch_layers", "writeout_layers"):
            found = getattr(self, name)
            if found is not None and (type(found) is not int or found < 0):
                raise ConfigError(f"{name} counts layers from 0, or is None, found {found!r}; use 0 or more")
        if self.host is not None:
            parse_bytes(self.host, name="memory.host")

    @property
    def host_bytes(self) -> int | None:
        """The most bytes of the tier ``host``."""
        return None if self.host is None else parse_bytes(self.host, name="memory.host")


NO_OPTIONS = MemoryOptions()
