"""Picture of the dependencies: every layer in a box, three styles of arrows, and no more boxes
than a page takes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from profiles import measured
from torch import nn
from zoo import build

from penstock.stages.profiling.dependencies import dependencies
from penstock.stages.profiling.graph_picture import MOST_BOXES, Arrow, blocks, drawing, figure


@pytest.fixture(scope="module")
def residual():
    """The dependencies of a network with two residual blocks."""
    model, batches = build("residual")
    return dependencies(*measured(model, batches[0][0][:4]), optimizer_state=1.0)


def test_boxes_circles_and_arrows_of_a_small_network():
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Dropout(), nn.Linear(3, 2))
    drawn = drawing(dependencies(*measured(mlp, torch.randn(5, 4)), optimizer_state=1.0), [0, 0, 1, 1])
    assert [(box.name, box.stage) for box in drawn.boxes] == [("_0", 0), ("_1", 0), ("_2", 1), ("_3", 1)]
    drawn_circles = [(c.box, c.slot, c.num_bytes, c.is_input) for c in drawn.circles]
    assert drawn_circles == [
        (0, "value", 80, True),
        *((0, "value", 60, False), (1, "value", 60, False), (2, "value", 60, False), (3, "value", 40, False)),
        *((0, "gradient", 60, False), (1, "gradient", 60, False), (2, "gradient", 60, False)),
        (3, "gradient", 40, False),
        (2, "saved", 60, False),
        *((0, "parameter", 60, False), (0, "weight gradient", 60, False), (0, "optimizer", 60, False)),
        *((3, "parameter", 32, False), (3, "weight gradient", 32, False), (3, "optimizer", 32, False)),
    ]
    compute = [(arrow.circle, arrow.box) for arrow in drawn.arrows if arrow.style == "compute"]
    assert sorted(compute) == [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)]
    assert Arrow("backward data", 9, 2, True) in drawn.arrows  # the dropout's mask
    assert Arrow("forward data", 9, 2, False) in drawn.arrows


def test_a_block_shows_what_crosses_it_and_sums_what_it_keeps(residual):
    drawn = drawing(residual, [0] * len(residual.layers), most=8)
    assert [box.name for box in drawn.boxes] == ["_0", "_1", "_2", "3", "4", "_5", "_6", "_7"]
    (kept,) = [c for c in drawn.circles if c.box == 3 and c.slot == "saved"]
    inside = [d for d in residual.data if d.kind == "saved" and d.layer in drawn.boxes[3].layers]
    assert kept.num_bytes > sum(one.num_bytes for one in inside) > 0
    own = {n for n, d in enumerate(residual.data) if d.kind == "value" and d.layer in drawn.boxes[3].layers}
    shown = {c.number for c in drawn.circles if c.box == 3 and c.slot == "value"}
    assert shown < own
    (made,) = shown  # what the block returns
    (place,) = [n for n, c in enumerate(drawn.circles) if c.number == made]
    told = {(a.style, a.box, a.enters) for a in drawn.arrows if a.style != "compute" and a.circle == place}
    assert told == {
        *(("forward data", 3, False), ("forward data", 4, True)),
        *(("backward data", 3, True), ("backward data", 4, True)),
    }  # nothing of what the layers of a block read of each other


def test_the_figure_draws_all_of_it_in_three_styles(residual):
    stages = [0] * 10 + [1] * (len(residual.layers) - 10)
    drawn = drawing(residual, stages)
    assert len(drawn.boxes) == len(residual.layers) < MOST_BOXES
    (axes,) = figure(drawn, title="a network").axes
    boxes = [p for p in axes.patches if isinstance(p, FancyBboxPatch)]
    arrows = [p for p in axes.patches if isinstance(p, FancyArrowPatch)]
    assert (len(boxes), len(arrows)) == (len(drawn.boxes), len(drawn.arrows))
    assert {p.get_linestyle() for p in arrows} == {"solid", "dashed", "dotted"}


MODULES = ["stem", "layer1.0.a", "layer1.0.b", "layer1.0", "layer1.1.a", "layer1.1.b", "", "head"]
NAMES = [f"n{i}" for i in range(len(MODULES))]


def told(found):
    return [(block.name, block.stage, block.start, block.end) for block in found]


@pytest.mark.parametrize(
    ("most", "wanted"),
    [
        (8, [(f"n{i}", 0, i, i + 1) for i in range(8)]),
        (
            7,
            [("n0", 0, 0, 1), ("layer1.0", 0, 1, 4), ("layer1.1", 0, 4, 6), ("n6", 0, 6, 7), ("n7", 0, 7, 8)],
        ),
        (4, [("n0", 0, 0, 1), ("layer1", 0, 1, 6), ("n6", 0, 6, 7), ("n7", 0, 7, 8)]),
        (2, [("n0 .. layer1", 0, 0, 6), ("n6 .. n7", 0, 6, 8)]),
    ],
)
def test_literals(most, wanted):
    assert told(blocks(NAMES, MODULES, [0] * 8, most=most)) == wanted


@given(st.lists(st.text("ab.", max_size=5), min_size=1, max_size=30), st.integers(1, 10), st.integers(0, 3))
def test_every_layer_is_in_one_block_of_its_stage(modules, most, num_cuts):
    stages = sorted(i * (num_cuts + 1) // len(modules) for i in range(len(modules)))
    found = blocks([str(i) for i in range(len(modules))], modules, stages, most=most)
    assert [layer for block in found for layer in block.layers] == [*range(len(modules))]
    for block in found:
        assert {stages[layer] for layer in block.layers} == {block.stage}
    assert len(found) <= most + num_cuts
