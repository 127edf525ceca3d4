"""What a rank holds, in bytes: the one formula of the search for cuts, of a schedule on paper, and of a step.

It says how often the bytes of some layers are there at once; everybody multiplies their own bytes, predicted
or measured."""

from __future__ import annotations

import dataclasses
import math

from ...compression.names import HOST

MOVING = 2  # micro-batches whose saved tensors, or versions whose weights, are there: one is read, one moves
AWAY = ("host", "disk")  # tiers that take what they keep off a device that is no CPU
GONE = ("disk",)  # tiers that take it off every device


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """How often the bytes of layers are there: their parameters, what a micro-batch saves as it is, and that
    packed; what entered with it, where the rest is made again. ``largest``: of the parameters of the layer
    that has most, where layers have theirs only while they run."""

    parameters: float
    saved: int
    packed: int
    entered: int = 0
    largest: float = 0

    def of(
        self, *, parameters: int = 0, saved: int = 0, packed: int = 0, entered: int = 0, largest: int = 0
    ) -> int:
        """Bytes in all; ``packed``: what is left of ``saved`` when it is packed."""
        kept = self.saved * saved + self.packed * packed + self.entered * entered
        return math.ceil(self.parameters * parameters + self.largest * largest) + kept


def copies(
    in_flight: int,
    *,
    old_versions: int = 0,
    optimizer_state: float | None = None,
    tier: str = "device",
    weights_tier: str = "device",
    parameters_tier: str = "device",
    recompute: bool = False,
    device: str = HOST,
) -> Copies:
    """What is there with so many micro-batches in flight, on a rank that computes on ``device``.

    The weights, their gradients, ``optimizer_state`` (bytes that the optimizer keeps for each of theirs;
    None: one, as SGD with momentum) and the old versions: dense floats, which hardly shrink, so packing is
    taken to save nothing of them. What micro-batches saved: in the tier "device" all of it; elsewhere that of
    ``MOVING`` micro-batches as it is, and of the others what is left of it packed. A tier that is ``AWAY``
    leaves nothing of the others on a device, but on a CPU its memory is the rank's own, unless it is ``GONE``
    from there too. With ``recompute`` it is what one of them saved, and what entered with all of them. With
    ``parameters_tier`` what belongs to the parameters is there for ``MOVING`` layers, and what waits where
    the tier leaves it on the device.
    """
    here = in_flight if tier == "device" else min(in_flight, MOVING)
    if recompute:
        here = min(in_flight, 1)
    leaves = GONE if device == HOST else AWAY
    versions = min(old_versions, MOVING) if weights_tier in leaves else old_versions
    state = 1.0 if optimizer_state is None else optimizer_state
    packed = 0 if recompute or tier in leaves else in_flight - here
    entered = in_flight if recompute else 0
    whole = 2 + state
    if parameters_tier == "device":
        return Copies(parameters=whole + versions, saved=here, packed=packed, entered=entered)
    waits = 0 if parameters_tier in leaves else whole
    near = MOVING * whole
    return Copies(parameters=waits, saved=here, packed=packed, entered=entered, largest=near)
