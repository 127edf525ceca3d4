"""What is drawn of the dependencies: boxes, circles and arrows, before they have places on a page.

A box is a layer, or a block of layers where there are many: then what only this block reads is one circle of
a kind, and of the rest each value is a circle of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from .blocks import Block, blocks
from .dependencies import FORWARD, UPDATE, Dependencies

MOST_BOXES = 60
VALUE, GRADIENT, SAVED = "value", "gradient", "saved"
WEIGHT_GRADIENT = "weight gradient"
_OF_WEIGHTS = {"parameter": "parameter", "gradient": WEIGHT_GRADIENT, "optimizer": "optimizer"}
_SLOTS = {**_OF_WEIGHTS, "version": "optimizer", "saved": SAVED, "buffer": "buffer"}


@dataclasses.dataclass(frozen=True, slots=True)
class Circle:
    """Data of one kind that belong to a box; ``number``: of the one value or gradient that it is, else -1.

    ``is_input``: nobody made it."""

    box: int
    slot: str
    number: int
    num_bytes: int
    is_input: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Arrow:
    """From a circle into a box (``enters``), or back; a compute arrow goes from box ``circle`` to ``box``."""

    style: str
    circle: int
    box: int
    enters: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Drawing:
    """Circles and boxes by number, and the arrows between them."""

    boxes: tuple[Block, ...]
    circles: tuple[Circle, ...]
    arrows: tuple[Arrow, ...]


def drawing(found: Dependencies, stages: Sequence[int], *, most: int = MOST_BOXES) -> Drawing:
    """What is drawn of ``found`` with about ``most`` boxes; ``stages``: of each layer, its stage."""
    boxes = blocks(found.layers, found.modules, stages, most=most)
    box_of = {layer: number for number, box in enumerate(boxes) for layer in box.layers}
    sizes: dict[tuple[int, str, int], int] = {}
    keys: dict[int, tuple[int, str, int]] = {}
    for number, key in _keys(found, boxes, box_of):
        keys[number] = key
        sizes[key] = sizes.get(key, 0) + found.data[number].num_bytes
    at = {key: place for place, key in enumerate(sizes)}
    inputs = {number for number, data in enumerate(found.data) if data.layer < 0}
    circles = tuple(Circle(*key, size, key[2] in inputs) for key, size in sizes.items())
    arrows = _arrows(found, box_of, {number: at[key] for number, key in keys.items()})
    shown = [arrow for arrow in arrows if not _within(arrow, boxes, circles)]
    return Drawing(boxes, circles, tuple(dict.fromkeys(shown)))


def _keys(
    found: Dependencies, boxes: Sequence[Block], box_of: Mapping[int, int]
) -> Iterator[tuple[int, tuple[int, str, int]]]:
    """For each datum that is drawn: its box, its slot there, and its number where it is a circle alone."""
    near: dict[int, set[int]] = {}
    saved, of_weights = set[int](), set[int]()
    for edge in found.edges:
        near.setdefault(edge.data, set()).add(box_of[edge.layer])
        if edge.way == UPDATE:
            of_weights.add(edge.data)
        elif edge.way != FORWARD and edge.enters:
            saved.add(edge.data)
    for number, data in enumerate(found.data):
        home = box_of[data.layer] if data.layer >= 0 else min(near.get(number, {0}))
        if data.kind not in (VALUE, GRADIENT) or number in of_weights:
            yield number, (home, _SLOTS[data.kind], -1)
        elif len(boxes[home].layers) == 1 or near.get(number, {home}) != {home}:
            yield number, (home, data.kind, number)
        elif data.kind == VALUE and number in saved:
            yield number, (home, SAVED, -1)


def _arrows(found: Dependencies, box_of: Mapping[int, int], at: Mapping[int, int]) -> Iterator[Arrow]:
    for edge in found.edges:
        if edge.way != UPDATE and edge.data in at:
            yield Arrow(f"{edge.way} data", at[edge.data], box_of[edge.layer], edge.enters)
    for _, source, target in found.compute:
        if box_of[source] != box_of[target]:
            yield Arrow("compute", box_of[source], box_of[target])


def _within(arrow: Arrow, boxes: Sequence[Block], circles: Sequence[Circle]) -> bool:
    """Whether an arrow says only that layers of one block read what others of it made."""
    if arrow.style == "compute" or len(boxes[arrow.box].layers) == 1:
        return False
    circle = circles[arrow.circle]
    if circle.box != arrow.box or circle.number < 0 or circle.is_input:
        return False
    return (circle.slot, arrow.style, arrow.enters) in (
        (VALUE, "forward data", True),
        (GRADIENT, "backward data", False),
    )
