"""A frame on a device: its payload may still be written, and may be read after its last holder let go.

So a buffer goes back to its pool behind the work that uses it, and what only the device knows of a frame, its
length and its codec, is asked for by whoever cannot go on without."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...compression.buffers import Frame, Pool, new_bytes
from ...compression.frame import Header, header_bytes
from ...stages.device import Device
from ...stages.work import Work


class DevicePool(Pool):
    """Buffers on a device, or pinned ones beside it: one is lent again when the work that uses it is done."""

    def __init__(self, device: Device, *, pinned: bool = False) -> None:
        """Start empty."""
        super().__init__()
        self._device, self._pinned, self._making = device, pinned, device.stream()
        self._behind: deque[tuple[Sequence[Work[Any]], Callable[[], None]]] = deque()

    def take(self, num_bytes: int) -> Tensor:
        """Lend a buffer that no work uses any more."""
        for _ in range(len(self._behind)):
            self._settle(*self._behind.popleft())
        return super().take(num_bytes)

    def give_behind(self, works: Sequence[Work[Any]], give: Callable[[], None]) -> None:
        """Call ``give``, which gives a buffer back, when ``works`` are done; by ``take`` at the latest."""
        self._settle(works, give)

    def _settle(self, works: Sequence[Work[Any]], give: Callable[[], None]) -> None:
        if all(work.done for work in works):
            give()
        else:
            self._behind.append((works, give))

    def _new(self, size: int) -> Tensor:
        self._sizes.append(size)
        if self._pinned:
            return self._device.pinned(size)
        # On a stream where nothing else was: what computing has freed may still be read by what is queued.
        made = self._making.submit(lambda: new_bytes(size, self._device.torch))
        made.wait()
        return made.value


class DeviceFrame(Frame):
    """A packed tensor in a buffer on a device, behind room for its header.

    ``written`` is the work that writes it, ``uses`` all that works with its buffer."""

    __slots__ = ("_header", "_told", "uses", "written")

    pool: DevicePool

    def __init__(
        self,
        buffer: Tensor,
        pool: DevicePool,
        written: Work[Any],
        *,
        header: Header | None = None,
        told: Callable[[Work[Any]], Header] | None = None,
    ) -> None:
        """Hold ``buffer``, lent by ``pool``.

        Args:    header: what it says of itself, where that is known.
                 told: gives it else, from ``written``, for which it waits if need be."""
        super().__init__(buffer, 0, pool)
        self.written, self.uses = written, [written]
        self._header, self._told = header, told
        if header is not None:
            self.num_bytes = header_bytes(len(header.sizes)) + header.payload_bytes

    @property
    def header(self) -> Header:
        """What it says of itself; waits where only the device knows."""
        if self._header is None:
            assert self._told is not None, "a frame without a header asks for it"
            header = self._told(self.written)
            self.num_bytes = header_bytes(len(header.sizes)) + header.payload_bytes
            self._header, self._told = header, None
        return self._header

    def release(self) -> None:
        """Let go of the frame, once per holder."""
        assert self._holders, "a frame is released once per holder"
        if self._holders.pop():
            self.pool.give_behind(self.uses, lambda: self.pool.give(self.buffer))
