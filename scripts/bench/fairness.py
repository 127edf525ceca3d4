"""What must hold before two sides are compared: they train the same, over a link of a known rate.

A ratio of two things that do not do the same work says nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from ...compression.errors import PenstockError
from ...pipeline.ranks.world import World
from .harness import timed
from .shaped_links import Link

TOLERANCE, TOLERANCE_RANDOM = 1e-3, 0.2
"""How far the first losses of two sides may lie apart, relatively; dropout draws other numbers."""

_PROBE_SECONDS, _LEAST_BYTES, _MOST_BYTES = 0.5, 1 << 20, 1 << 25


def refuse_other_losses(found: Mapping[str, float], *, random: bool) -> None:
    """Refuse to race sides that do not train the same thing: whatever the schedule, the weights do not differ
    in the first step.

    Raises: PenstockError: a first loss is another one, but for rounding (or for what random layers draw).
    """
    (first, expected), *others = found.items()
    for name, one in others:
        if not math.isclose(one, expected, rel_tol=TOLERANCE_RANDOM if random else TOLERANCE):
            raise PenstockError(
                f"all sides must train the same, and their first losses are {expected:.6f} with {first} and "
                f"{one:.6f} with {name}; this is a fault of the bench or of torch's stages with this model"
            )


def measured_rate(world: World, link: Link) -> float | None:
    """Bits per second that two ranks really get through the link, both ways at once; None with more ranks."""
    if world.size != 2:
        return None
    wanted = int(link.rate / 8 * _PROBE_SECONDS) if link.rate else _MOST_BYTES
    num_bytes = min(max(wanted, _LEAST_BYTES), _MOST_BYTES)
    ours, theirs = torch.zeros(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)

    def pass_both_ways() -> None:
        transfers = world.irecv(theirs, 1 - world.rank, tag=0), world.isend(ours, 1 - world.rank, tag=0)
        for transfer in transfers:
            transfer.wait()
        world.barrier()

    probe = timed(pass_both_ways, 1)
    probe()  # the first one also opens the connection and its window
    return 8 * num_bytes / probe()


def is_random(model: nn.Module) -> bool:
    """Whether a layer draws numbers, which torch's stages draw otherwise than ours."""
    return any(getattr(module, "p", 0) for module in model.modules() if "Drop" in type(module).__name__)
