"""Picture of the dependencies: every layer in a box, three styles of arrows, and no more boxes
than a page takes."""

import pytest
import torch
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from profiles import measured
from torch import nn
from zoo import build

from penstock.stages.profiling.dependencies import dependencies
from penstock.stages.profiling.graph_picture import MOST_BOXES, Arrow, draw, drawing, figure


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
    told = [(c.box, c.slot, c.num_bytes, c.is_input) for c in drawn.circles]
    assert told == [
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


def test_the_figure_draws_all_of_it_in_three_styles(residual, tmp_path):
    stages = [0] * 10 + [1] * (len(residual.layers) - 10)
    drawn = drawing(residual, stages)
    assert len(drawn.boxes) == len(residual.layers) < MOST_BOXES
    (axes,) = figure(drawn, title="a network").axes
    boxes = [p for p in axes.patches if isinstance(p, FancyBboxPatch)]
    arrows = [p for p in axes.patches if isinstance(p, FancyArrowPatch)]
    assert (len(boxes), len(arrows)) == (len(drawn.boxes), len(drawn.arrows))
    assert {p.get_linestyle() for p in arrows} == {"solid", "dashed", "dotted"}
    draw(tmp_path / "graph.png", residual, stages, title="a network")
    assert (tmp_path / "graph.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
