"""The picture of the dependencies: layers as boxes in columns by stage, data as circles that grow with their
bytes; down the page goes the forward, up the backward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from ..plan.plan_picture import BACKWARD_COLOR, FORWARD_COLOR, LINE, RANKS
from ..units import shortened_name, show_bytes
from .dependencies import FORWARD, UPDATE, Dependencies

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MOST_BOXES = 60
VALUE, GRADIENT, SAVED = "value", "gradient", "saved"
WEIGHT_GRADIENT = "weight gradient"
COMPUTE = "compute"  # the style of an arrow from box to box
_OF_WEIGHTS = {"parameter": "parameter", "gradient": WEIGHT_GRADIENT, "optimizer": "optimizer"}
_SLOTS = {**_OF_WEIGHTS, "version": "optimizer", "saved": SAVED, "buffer": "buffer"}


class Circle(NamedTuple):
    """Data of one kind that belong to a box; ``number``: of the one value or gradient that it is, else -1."""

    box: int
    slot: str
    number: int
    num_bytes: int
    is_input: bool


class Arrow(NamedTuple):
    """From a circle into a box (``enters``), or back; a compute arrow goes from box ``circle`` to ``box``."""

    style: str
    circle: int
    box: int
    enters: bool = True


class Drawing(NamedTuple):
    """Circles and boxes by number, and the arrows between them."""

    boxes: tuple[Block, ...]
    circles: tuple[Circle, ...]
    arrows: tuple[Arrow, ...]


def drawing(found: Dependencies, stages: Sequence[int], *, most: int = MOST_BOXES) -> Drawing:
    """Return what is drawn of ``found`` with about ``most`` boxes; ``stages``: of each layer, its stage."""
    boxes = blocks(found.layers, found.modules, stages, most=most)
    box_of = {layer: number for number, box in enumerate(boxes) for layer in box.layers}
    keys = dict(_keys(found, boxes, box_of))
    sizes: dict[tuple[int, str, int], int] = {}
    for number, key in keys.items():
        sizes[key] = sizes.get(key, 0) + found.data[number].num_bytes
    places = {key: place for place, key in enumerate(sizes)}
    inputs = {number for number, data in enumerate(found.data) if data.layer < 0}
    circles = tuple(Circle(*key, size, key[2] in inputs) for key, size in sizes.items())
    arrows = [
        Arrow(f"{edge.way} data", places[keys[edge.data]], box_of[edge.layer], edge.enters)
        for edge in found.edges
        if edge.way != UPDATE and edge.data in keys
    ]
    pairs = ((box_of[source], box_of[target]) for _, source, target in found.compute)
    arrows += [Arrow(COMPUTE, *pair) for pair in pairs if pair[0] != pair[1]]
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


def _within(arrow: Arrow, boxes: Sequence[Block], circles: Sequence[Circle]) -> bool:
    """Return whether an arrow says only that layers of one block read what others of it made."""
    inner = ((VALUE, "forward data", True), (GRADIENT, "backward data", False))
    if arrow.style == COMPUTE or len(boxes[arrow.box].layers) == 1:
        return False
    circle = circles[arrow.circle]
    is_own = circle.box == arrow.box and circle.number >= 0 and not circle.is_input
    return is_own and (circle.slot, arrow.style, arrow.enters) in inner


WIDE, HIGH, PITCH = 1.15, 0.17, 8.0  # half of a box, and from column to column
Place = tuple[float, float]


def positions(drawn: Drawing) -> list[Place]:
    """Return the middles of the boxes: a stage has a row for each generation of its forward, and columns for
    boxes that do not wait for each other."""
    import networkx

    graph = networkx.DiGraph()
    graph.add_nodes_from(range(len(drawn.boxes)))
    forward = [a for a in drawn.arrows if a.style == COMPUTE and a.circle < a.box]
    graph.add_edges_from((arrow.circle, arrow.box) for arrow in forward)
    places, left = dict[int, Place](), 0
    for stage in dict.fromkeys(box.stage for box in drawn.boxes):
        own = graph.subgraph([number for number, box in enumerate(drawn.boxes) if box.stage == stage])
        rows = [sorted(row) for row in networkx.topological_generations(own)]
        for y, row in enumerate(rows):
            places |= {number: ((left + x) * PITCH, -float(y)) for x, number in enumerate(row)}
        left += max(map(len, rows))
    return [places[number] for number in range(len(drawn.boxes))]


STYLES: Mapping[str, Mapping[str, Any]] = {
    "forward data": {"color": FORWARD_COLOR, "linestyle": "solid", "linewidth": 1.0},
    "backward data": {"color": BACKWARD_COLOR, "linestyle": "dashed", "linewidth": 1.0},
    COMPUTE: {"color": LINE, "linestyle": "dotted", "linewidth": 1.2},
}
# By slot: where it lies beside its box, its colour (of Okabe and Ito), what the legend says of it.
SLOTS: Mapping[str, tuple[float, float, str, str]] = {
    VALUE: (-0.45, -0.5, "#56B4E9", "value"),
    GRADIENT: (0.45, -0.5, "#F0E442", "gradient of a value"),
    SAVED: (1.95, 0.0, "#009E73", "saved inside"),
    "parameter": (-1.95, 0.0, "#0072B2", "parameters"),
    WEIGHT_GRADIENT: (-2.65, 0.0, "#D55E00", "gradients of parameters"),
    "optimizer": (-3.35, 0.0, "#CC79A7", "optimizer state, old versions"),
    "buffer": (2.75, 0.0, "#999999", "buffers"),
}


def figure(drawn: Drawing, *, title: str) -> Figure:
    """Boxes in columns, the first stage on the left; arrows of three styles, and a legend."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    places = positions(drawn)
    last, deepest = max(x for x, _ in places), -min(y for _, y in places)
    size = max(7.0, 5.2 * (last / PITCH + 1)), 2.2 + 0.62 * (deepest + 1)
    picture = Figure(figsize=size, layout="constrained")
    picture.suptitle(title, fontsize=11, fontweight="bold")
    axes = picture.subplots()
    axes.set_xlim(-4.3, last + 3.7)
    axes.set_ylim(-deepest - 0.95, 1.5)
    axes.axis("off")
    # 1. boxes, and over the first of each stage its number
    patches, middle = list[FancyBboxPatch](), dict[str, Any](ha="center", va="center")
    for stage, (x, _) in {
        b.stage: at for b, at in reversed([*zip(drawn.boxes, places, strict=True)])
    }.items():
        axes.text(x, 1.15, f"stage {stage}", fontsize=12, fontweight="bold", **middle)
    for box, (x, y) in zip(drawn.boxes, places, strict=True):
        look: Any = {"boxstyle": "round,pad=0,rounding_size=0.06", "fc": RANKS[box.stage % 2], "ec": LINE}
        patches.append(FancyBboxPatch((x - WIDE, y - HIGH), 2 * WIDE, 2 * HIGH, zorder=3, **look))
        axes.add_patch(patches[-1])
        name = box.name if len(box.layers) == 1 else f"{box.name} ({len(box.layers)})"
        axes.text(x, y, shortened_name(name, 22), fontsize=7.5, family="monospace", zorder=4, **middle)
    # 2. circles beside their boxes; an input of the model lies over the box that reads it first
    most = max((circle.num_bytes for circle in drawn.circles), default=1) or 1
    centres, areas = list[Place](), list[float]()
    for circle in drawn.circles:
        (x, y), (right, up, _, _) = places[circle.box], SLOTS[circle.slot]
        x, y = x + right, y - up if circle.is_input else y + up
        centres.append((x, y))
        areas.append(12 + 150 * math.sqrt(circle.num_bytes / most))
        axes.text(x, y - 0.14, show_bytes(circle.num_bytes), fontsize=5.5, color=LINE, ha="center", va="top")
    colors = [SLOTS[circle.slot][2] for circle in drawn.circles]
    axes.scatter(*zip(*centres, strict=True), s=areas, c=colors, edgecolors=LINE, linewidths=0.5, zorder=4)
    # 3. arrows, slightly bent, so that they hide neither their way back nor the boxes between their ends
    for arrow in drawn.arrows:
        is_compute, head = arrow.style == COMPUTE, places[arrow.box]
        tail = places[arrow.circle] if is_compute else centres[arrow.circle]
        ends = [(tail, patches[arrow.circle] if is_compute else None), (head, patches[arrow.box])]
        (begin, behind), (end, ahead) = ends if arrow.enters else ends[::-1]
        bend = f"arc3,rad={0.08 if abs(tail[1] - head[1]) <= 1 else 0.2}"
        axes.add_patch(
            FancyArrowPatch(
                begin, end, patchA=behind, patchB=ahead, shrinkA=0, shrinkB=0, arrowstyle="-|>",
                connectionstyle=bend, mutation_scale=7, zorder=2, **STYLES[arrow.style],
            )
        )  # fmt: skip
    dot: Any = {"linestyle": "none", "marker": "o", "markersize": 6, "markeredgecolor": LINE}
    lines = [Line2D([], [], label=name, **style) for name, style in STYLES.items()]
    dots = [Line2D([], [], label=name, markerfacecolor=color, **dot) for _, _, color, name in SLOTS.values()]
    picture.legend(handles=[*lines, *dots], loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return picture


class Block(NamedTuple):
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

    They are layers; or runs of layers whose modules begin alike, as deep as it fits; or several of these.

    Args:    names, modules, stages: of each layer, its name, the dotted path it ran in, its stage."""
    numbered = enumerate(zip(names, stages, strict=True))
    found = [Block(name, stage, layer, layer + 1) for layer, (name, stage) in numbered]
    deepest = max(module.count(".") + 1 for module in modules)
    for depth in range(deepest, 0, -1) if len(found) > most else ():
        paths = [".".join(module.split(".")[:depth]) for module in modules]
        found = []
        for (stage, path), run in groupby(range(len(names)), lambda i, paths=paths: (stages[i], paths[i])):
            layers = list(run)
            name = path if len(layers) > 1 and path else _between(names[layers[0]], names[layers[-1]])
            found.append(Block(name, stage, layers[0], layers[-1] + 1))
        if len(found) <= most:
            break
    size = math.ceil(len(found) / most)  # neighbours of one stage together, as many as it takes
    groups = [list(group) for _, group in groupby(found, lambda block: block.stage)]
    parts = [group[at : at + size] for group in groups for at in range(0, len(group), size)]
    ends = ((part[0], part[-1]) for part in parts)
    return tuple(Block(_between(a.name, b.name), a.stage, a.start, b.end) for a, b in ends)


def _between(first: str, last: str) -> str:
    return first if first == last else f"{first} .. {last}"
