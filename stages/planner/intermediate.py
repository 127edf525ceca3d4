"""Intermediate data of a step: every storage that autograd keeps for a backward, as it was seen.

Source: resource management of a training step, S1 and S11-S13 (kinds and sizes of intermediate data by layer,
        dependencies inside a layer and to its neighbours), S3 (a reference count for each)."""

from __future__ import annotations

import dataclasses

FEATURES, INDEX, MASK, STATISTIC, CAST, OTHER = (
    "feature map",
    "index",
    "mask",
    "statistic",
    "cast",
    "other",
)
KINDS = (FEATURES, INDEX, MASK, STATISTIC, CAST, OTHER)
"""What an intermediate is: a feature map; integers, such as where a pooling found its maximum; a mask, of
bits or of a dropout; numbers of a normalization, fewer than the layer's values; a parameter's copy in the
dtype of autocast; none of these."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Intermediate:
    """One storage that layers save for their backward: ``num_bytes`` of it, and its first tensor's shape.

    ``maker``: the layer that made it, -1 for an input; ``savers``: the layers that saved it, ascending, by
    which it is saved first at the forward of the first, and read last at the backward of the same. ``order``:
    its place among what that layer saved first. ``value``: the value that lies in it, "" for none.
    ``readers``: nodes of the backward that read it. ``zeros``: the share of its elements that are zero."""

    maker: int
    savers: tuple[int, ...]
    order: int
    value: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    readers: int
    zeros: float

    @property
    def layer(self) -> int:
        """The layer that saved it first: its bytes count there."""
        return self.savers[0]

    @property
    def inside(self) -> bool:
        """Whether it depends on one layer alone: nobody else made it, and nobody else saved it."""
        return self.savers == (self.maker,)
