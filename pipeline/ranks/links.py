"""How fast the links between ranks are, measured over the group that carries the frames."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence

import torch

from ...compression.errors import TransportError
from .notices import of_gloo
from .world import World

SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)  # bytes of the probes
ENOUGH = 0.03  # seconds after which a probe has told the rate
TAG = 1 << 20  # apart from those of frames


def measured_rates(
    world: World, links: Sequence[tuple[int, int]], *, deadline: float
) -> dict[tuple[int, int], float]:
    """Bytes per second of each link (source, target), one after another; collective, the same on every rank.

    Probes grow until one takes long enough; the rate is that between the last two, so that neither latency
    nor the burst that a shaped link lets pass counts.
    """
    mine = [[*link, _probe(world, link, deadline)] for link in links if world.rank in link]
    rows = [row for rows in world.all_gather_json(mine) for row in rows]
    return {(source, target): rate for source, target, rate in rows if rate}


def _probe(world: World, link: tuple[int, int], deadline: float) -> float | None:
    """Both ends of a link pass probes there and a note back; the rate is known to the source, else None."""
    source, target = link
    here, seconds = world.rank == source, 0.0
    before = (0, 0.0)
    rate = None
    for size in SIZES:
        data = torch.zeros(size, dtype=torch.uint8)
        note = torch.zeros(1)
        began = time.perf_counter()
        _pass(world, data, link, deadline)
        _pass(world, note, (target, source), deadline)
        seconds = time.perf_counter() - began
        rate = (size - before[0]) / max(seconds - before[1], 1e-6)
        before = (size, seconds)
        note[0] = seconds > ENOUGH
        _pass(world, note, link, deadline)
        if note[0]:
            break
    return rate if here else None


def _pass(world: World, tensor: torch.Tensor, link: tuple[int, int], deadline: float) -> None:
    """Send ``tensor`` along the link, or receive it there, and wait until that is done."""
    source, target = link
    here = world.rank == source
    try:
        work = world.isend(tensor, target, tag=TAG) if here else world.irecv(tensor, source, tag=TAG)
        work.wait(datetime.timedelta(seconds=deadline))
    except RuntimeError as error:
        reason = world.notices.peer_failures() or of_gloo(error)
        raise TransportError(
            f"rank {world.rank} could not measure its link with rank {target if here else source} "
            f"within {deadline:g} s: {reason}"
        ) from error
