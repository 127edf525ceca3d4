"""The layers of a network as blocks that a person can take in: by the modules they ran in, within stages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from itertools import groupby


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Layers ``start`` to ``end`` (exclusive), all of one stage."""

    name: str
    stage: int
    start: int
    end: int

    @property
    def layers(self) -> range:
        """Their numbers."""
        return range(self.start, self.end)


def blocks(
    names: Sequence[str], modules: Sequence[str], stages: Sequence[int], *, most: int
) -> tuple[Block, ...]:
    """The finest blocks of which there are at most ``most`` (a few more where there are many stages).

    They are layers; or runs of layers whose modules begin alike, by as many parts of their paths as fit; or
    several of these.

    Args:    names, modules, stages: of each layer, its name, the dotted path it ran in, its stage."""
    single = [
        Block(name=n, stage=s, start=i, end=i + 1) for i, (n, s) in enumerate(zip(names, stages, strict=True))
    ]
    if len(single) <= most:
        return tuple(single)
    deepest = max(module.count(".") + 1 for module in modules)
    for depth in range(deepest, 0, -1):
        found = list(_runs(names, modules, stages, depth))
        if len(found) <= most:
            return tuple(found)
    return tuple(_merged(_runs(names, modules, stages, 1), most))


def _runs(names: Sequence[str], modules: Sequence[str], stages: Sequence[int], depth: int) -> Iterator[Block]:
    def key(layer: int) -> tuple[int, str]:
        return stages[layer], ".".join(modules[layer].split(".")[:depth])

    for (stage, prefix), run in groupby(range(len(names)), key):
        layers = list(run)
        name = prefix if len(layers) > 1 and prefix else _between(names[layers[0]], names[layers[-1]])
        yield Block(name=name, stage=stage, start=layers[0], end=layers[-1] + 1)


def _merged(found: Iterator[Block], most: int) -> Iterator[Block]:
    """Neighbours of one stage together, as many as it takes."""
    runs = list(found)
    size = math.ceil(len(runs) / most)
    for stage, group in groupby(runs, lambda block: block.stage):
        same = list(group)
        for at in range(0, len(same), size):
            part = same[at : at + size]
            name = _between(part[0].name, part[-1].name)
            yield Block(name=name, stage=stage, start=part[0].start, end=part[-1].end)


def _between(first: str, last: str) -> str:
    return first if first == last else f"{first} .. {last}"
