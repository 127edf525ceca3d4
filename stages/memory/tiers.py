"""The tiers of a rank, which all its stages, policies and micro-batches share: how full each is, within what.

On a CPU the frames of the tiers ``packed`` and ``host`` lie in the rank's own memory, and so count as its
device's, too; those on disk only until they are written.
Source: claims A5 and A6 of CN115016937A (offload memory); step S2 of the resource management of distributed
        deep learning (device memory and host memory as one pool of resources)."""

from __future__ import annotations

from typing import Final

from .gauge import Gauge, Limit, Share

NAMES: Final = ("device", "packed", "host", "disk")
_ROOM = 2  # one part in so many of what a limit leaves free is for what is about to be saved


class Tiers:
    """How many bytes each tier of a rank has.

    Attributes: device: all tensor bytes that are counted: those that never leave, what forwards saved,
                        parameters that come and go, and the frames of other tiers that lie there.
                leaving: of these, what is on its way out."""

    def __init__(self, *, device: Limit = None, host: Limit = None, on_gpu: bool = False) -> None:
        """Limits in bytes; the disk keeps its own, by the bytes of its file."""
        self.device = Gauge(device)
        self.packed = Gauge(part_of=self.device)
        self.host = Gauge(host, part_of=None if on_gpu else self.device)
        self.disk, self.leaving = Gauge(), Gauge()
        gauges = self.device, self.packed, self.host, self.disk
        self._named: dict[str, Gauge] = dict(zip(NAMES, gauges, strict=True))
        self._fixed = Share(self.device)
        self.seconds_waited = 0.0

    def named(self, tier: str) -> Gauge:
        """The gauge of a tier by its name."""
        return self._named[tier]

    def begin(self) -> None:
        """A step begins: the most is that of this step."""
        for gauge in self._named.values():
            gauge.begin()

    def fix(self, num_bytes: int) -> None:
        """So many bytes of the device never leave: parameters, gradients, optimizer state, buffers."""
        self._fixed.set(num_bytes)

    @property
    def fixed(self) -> int:
        """Bytes that never leave."""
        return self._fixed.num_bytes

    @property
    def peaks(self) -> dict[str, int]:
        """The most bytes of every tier in this step."""
        return {name: gauge.peak for name, gauge in self._named.items()}

    @property
    def too_much(self) -> int | None:
        """Bytes that are to leave the device, those on their way not counted; None: it has no limit.

        Half of what the limit leaves beside the fixed bytes is kept free for what the next layers save."""
        limit = self.device.limit
        if limit is None:
            return None
        return self.device.now - self.leaving.now - (limit - max(0, limit - self.fixed) // _ROOM)
