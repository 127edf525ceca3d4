"""Layers as blocks: the finest that are few enough, never over the end of a stage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.stages.planner.blocks import Block, blocks

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


def test_a_stage_ends_a_block():
    found = blocks(NAMES, MODULES, [0, 0, 1, 1, 1, 1, 1, 1], most=6)
    assert told(found)[1:3] == [("n1", 0, 1, 2), ("layer1.0", 1, 2, 4)]
    assert found[2] == Block(name="layer1.0", stage=1, start=2, end=4)


@given(
    st.lists(st.text("ab.", max_size=5), min_size=1, max_size=30),
    st.integers(1, 10),
    st.integers(0, 3),
)
def test_every_layer_is_in_one_block_of_its_stage(modules, most, num_cuts):
    stages = sorted(i * (num_cuts + 1) // len(modules) for i in range(len(modules)))
    found = blocks([str(i) for i in range(len(modules))], modules, stages, most=most)
    assert [layer for block in found for layer in block.layers] == [*range(len(modules))]
    for block in found:
        assert {stages[layer] for layer in block.layers} == {block.stage}
    assert len(found) <= most + num_cuts
