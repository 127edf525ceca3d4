"""One stage of a plan: its layers, and what they are predicted to take."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanStage:
    """One stage: its layers and parameters (names), and its predictions per micro-batch.

    ``num_parameters`` counts elements, ``memory_bytes`` is for all micro-batches in flight, of which each
    leaves ``saved_bytes`` for its backward, ``bytes_forward`` and ``bytes_backward`` are those of the tensors
    that pass the cut behind the stage, unpacked.
    """

    layers: tuple[str, ...]
    parameters: tuple[str, ...]
    num_parameters: int
    forward_seconds: float
    backward_seconds: float
    memory_bytes: int
    bytes_forward: int
    bytes_backward: int
    saved_bytes: int = 0
