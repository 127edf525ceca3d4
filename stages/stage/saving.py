"""What becomes of what a stage's forwards save, and of its parameters: kept, moved to a store, made again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from ..memory.mirror import Mirror
from ..memory.mirrored import Mirrored, MirroredFilter, MirrorWalk
from ..memory.recomputed import RecomputedActivations
from ..memory.saved import NoOffload, SavedActivations
from ..memory.store import Store
from ..memory.thread import MemoryThread

Saved = SavedActivations | NoOffload


def saving(
    store: Store | None,
    mirror: Mirror | None,
    *,
    tensors: Sequence[Tensor],
    modules: Mapping[str, nn.Module],
    codec: str,
    min_bytes: int,
    recompute: bool,
    stage: int,
    thread: MemoryThread | None,
) -> tuple[Saved, NoOffload]:
    """What the walks of a stage's forwards tell, and what those walks tell that keep nothing for a backward.

    Args:    store: of saved tensors, packed with ``codec`` from ``min_bytes`` on; ``mirror``: of parameters.
             tensors: the stage's parameters and buffers. ``thread``: moves what ``stage`` saves."""
    told = None if mirror is None else MirroredFilter(tensors, mirror)
    saved: Saved = NoOffload()
    if store is not None:
        saved = SavedActivations(
            store,
            keep=tensors,
            codec=codec,
            min_bytes=min_bytes,
            modules=modules,
            stage=stage,
            thread=thread,
            parameters=told,
        )
    elif recompute:
        saved = RecomputedActivations(tensors, told)
    if mirror is None or told is None:
        return saved, NoOffload()
    return Mirrored(saved, mirror, told), MirrorWalk(mirror)
