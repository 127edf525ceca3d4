"""The second run of a forward, on what the first received, for what autograd saves of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ..memory.saved import NoOffload
from ..memory.tensor_view import copied
from ..tracing.layers import Parts
from .receive import Receive
from .route import Route
from .walk import walk


def entered(
    received: Mapping[int, Any],
    route: Route,
    *,
    anchor: torch.Tensor,
    gradients: dict[int, torch.Tensor],
) -> dict[int, Any]:
    """What was received, as the layers get it: neither leaf nor view; ``gradients`` is filled by number."""
    values = dict(received)
    for number in route.asks:
        if (item := values[number]).requires_grad:
            values[number] = Receive.apply(anchor, item.detach(), gradients, number)
    return values


class Again:
    """Runs the layers of one forward again: made ahead of the first run, called ahead of the backward.

    Args:       received: what entered; of what the layers write to a copy is kept.
                moved: names of layers whose modules are not set as they were when traced, at the first run.
                saved: is told of the layers as they run again.
    Attributes: tied: parameters of other stages among what is kept."""

    def __init__(
        self,
        received: Mapping[int, Any],
        parts: Parts,
        *,
        route: Route,
        anchor: torch.Tensor,
        seed: Callable[[str], int],
        generators: Sequence[torch.Generator],
        moved: Collection[str],
        saved: NoOffload,
    ) -> None:
        known = route.record.values
        self._kept = {n: copied(item) if known[n].writers else item for n, item in received.items()}
        self._parts, self._route, self._anchor = parts, route, anchor
        self._options: Any = {"seed": seed, "generators": generators, "moved": moved, "saved": saved}
        self.tied = [self._kept[number] for number in route.tied]

    def __call__(self) -> None:
        """Run them; the graph that this makes is nobody's."""
        values = entered(self._kept, self._route, anchor=self._anchor, gradients={})
        walk(values, self._parts, route=self._route, **self._options)
