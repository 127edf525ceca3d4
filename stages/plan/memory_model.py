"""Bytes that a rank holds: the one formula of the search for cuts, of a schedule on paper, and of a
step.

It says how often the bytes of some layers are there at once; everybody multiplies their own bytes,
predicted or measured."""

import dataclasses
import math
from collections.abc import Sequence

from ...compression.names import HOST
from ..memory.byte_budget import piece_bytes

POSTED = 2  # receives that are posted ahead on a channel
MOVING = 2  # runs of layers, or versions whose weights, are there in a tier: one is read, one moves
NEIGHBOURS = 3  # layers of a mirror that prefetches: one that runs, one before it, one that comes
AWAY = ("host", "disk")  # tiers that take what they keep off a device that is no CPU
GONE = ("disk",)  # tiers that take it off every device


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Number of copies of the bytes of layers: their parameters, what a micro-batch saves as it is, and that
    packed; what entered with it, where the rest is made again. ``near``: what the layers save that are near
    the one that runs, where the rest leaves. ``largest``: of the parameters of the layer that has most, where
    layers have theirs only while they run; ``pieces``: of a piece of them, where they are updated so. Then
    those of its ``neighbours`` may be there, too, and those that are ``staying``. ``in_flight``:
    micro-batches that have gone forward and not back."""

    in_flight: int
    parameters: float
    saved: int
    packed: int = 0
    near: int = 0
    entered: int = 0
    largest: float = 0
    pieces: float = 0
    staying: float = 0

    def of(
        self,
        *,
        parameters: int = 0,
        saved: int = 0,
        packed: int = 0,
        near: int | None = None,
        entered: int = 0,
        largest: int = 0,
        neighbours: int = 0,
        staying: int = 0,
    ) -> int:
        """Bytes in all; ``packed``: what is left of ``saved`` packed; ``near``: the most of it that layers
        near each other save, None: all; ``neighbours``: the most parameters of ``NEIGHBOURS`` layers, 0 where
        layers wait for theirs; ``staying``: those of layers that keep theirs."""
        kept = self.saved * saved
        if self.near:  # where layers are few, nothing is far
            kept = min(kept, self.near * (saved if near is None else near) + self.packed * packed)
        kept += math.ceil(self.staying * staying)
        if self.largest:
            piece = piece_bytes(largest)
            backward = max(neighbours, largest) + largest + piece  # a gradient comes, and is added to another
            update = self.largest * largest
            if self.pieces and piece < largest:  # replicas add up whole gradients ahead of it
                update = max(self.pieces * piece, (1 + self.largest - self.pieces) * largest)
            kept += max(math.ceil(update), backward)
        return math.ceil(self.parameters * parameters) + kept + self.entered * entered

    def frames(self, *, entering: int = 0, leaving: int = 0, inside: int = 0, replicas: int = 1) -> int:
        """About the most bytes of frames, of values and their gradients.

        Those that enter from another rank, or leave for one, are there for every micro-batch in flight, for
        receives that are posted ahead on the channels of so many ``replicas``, and for what is read, or not
        known to have left. Inside of the rank there are those in flight, and two more."""
        few = self.in_flight + 2
        return (few + POSTED * replicas) * (entering + leaving) + few * inside


def copies(
    in_flight: int,
    *,
    old_versions: int = 0,
    optimizer_state: float | None = None,
    tier: str = "device",
    weights_tier: str = "device",
    parameters_tier: str = "device",
    recompute: bool | Sequence[str] = False,
    exchanged: float = 0,
    by_element: bool = False,
    device: str = HOST,
) -> Copies:
    """Return what is there with so many micro-batches in flight, on a rank that computes on ``device``.

    Weights, gradients, ``optimizer_state`` (bytes that the optimizer keeps for each of theirs; None: one) and
    old versions hardly shrink: packing is taken to save nothing of them. Of what micro-batches saved, the
    tier "device" has all; another ``MOVING`` runs of near layers as it is, and of all layers what is left
    packed. A tier that is ``AWAY`` leaves nothing of that on a device; a CPU's memory is the rank's own,
    unless it is ``GONE`` from there too. With ``recompute`` it is what one of them saved, and what entered
    with all; where only parts of the model run again, what one part saved, and what is left of all as if
    packed. With ``parameters_tier`` the parameters of neighbours are there, with a gradient of the largest
    layer and a piece of one, or in an update all that belongs to a layer: to a piece of it, where the
    optimizer updates ``by_element``. ``exchanged``: how often the parameters' bytes are there for replicas to
    sum up gradients."""
    here = min(in_flight, 1) if recompute is True else in_flight
    moves = not recompute and tier != "device"
    leaves = GONE if device == HOST else AWAY
    versions = min(old_versions, MOVING) if weights_tier in leaves else old_versions
    state = 1.0 if optimizer_state is None else optimizer_state
    there = {"in_flight": in_flight, "saved": here, "entered": in_flight if recompute else 0}
    if moves:
        there |= {"near": min(in_flight, MOVING), "packed": 0 if tier in leaves else in_flight}
    elif here and recompute and recompute is not True:
        there |= {"near": 1, "packed": in_flight}
    whole = 2 + state + exchanged
    if parameters_tier == "device":
        return Copies(parameters=whole + versions, **there)
    if parameters_tier not in leaves:
        return Copies(parameters=whole + old_versions, largest=whole, **there)  # versions wait where it waits
    pieces = 2 + state if by_element and device == HOST and not old_versions else 0  # else they come whole
    return Copies(parameters=0, largest=whole, pieces=pieces, staying=whole, **there)


def exchanges(counts: Sequence[int], *, exact: bool) -> int:
    """Count the copies of a stage's parameters beside the gradients while replicas, of so many micro-batches
    each, sum these up: a flat buffer; where the sum is ``exact``, one for each micro-batch, and the sum."""
    if len(counts) == 1:
        return 0
    return max(counts) + 1 if exact else 1
