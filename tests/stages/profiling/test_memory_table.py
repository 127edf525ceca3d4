"""The table of what fills the memory: literals, sums that are those of the plan, and layers as blocks."""

import csv
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import measured
from torch import nn

import penstock
from penstock.pipeline.models import GPT
from penstock.stages.profiling.blocks import Block, blocks
from penstock.stages.profiling.memory_table import MOST_ROWS, SAVED, Row, rows, save, table

X = torch.tensor([[1.0, 0, 2, 0, 3, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]])


def small():
    made = nn.Sequential(nn.Linear(6, 4, bias=False), nn.ReLU(), nn.MaxPool1d(2), nn.Linear(2, 2, bias=False))
    for parameter in made.parameters():
        nn.init.constant_(parameter, 0.5)
    nn.init.constant_(next(made.parameters())[1:3], -0.5)
    return made


def planned(model, x, **options):
    """The profile of a model, its plan, and the stage of each layer."""
    profile = measured(model, x)[1]
    plan = penstock.partition(profile, micro_batches=2, **options)
    return profile, plan, [number for number, stage in enumerate(plan.stages) for _ in stage.layers]


TABLE = """\
stage  layer  data                    shape        bytes  zeros  saved  read      shared
    0  0 _0   feature map             3x6 float32   72 B    50%  F0     B0        input
    0  0 _0   parameters              24            96 B
    0  0 _0   gradients               24            96 B
    0  0 _0   optimizer state         24           192 B
    0  0 _0   old versions            24            96 B
    0  1 _1   feature map             3x4 float32   48 B    67%  F1     B2 to B1  _2 (stage 1)
    0  total  2 saved, weights 480 B               120 B    57%
    1  2 _2   index                   3x1x2 int64   48 B    50%  F2     B2
    1  3 _3   feature map             3x2 float32   24 B    33%  F3     B3        _2
    1  3 _3   parameters              4             16 B
    1  3 _3   gradients               4             16 B
    1  3 _3   optimizer state         4             32 B
    1  total  2 saved, weights 64 B                 72 B    44%"""


def test_literals_of_a_small_network():
    profile, _, stages = planned(small(), X, cuts=["_1"])
    lines = table(rows(profile, stages, optimizer_state=2.0, old_versions=[1, 1, 0, 0]))
    assert [line.split() for line in lines[:-3]] == [line.split() for line in TABLE.splitlines()]


def test_the_file_has_every_row_and_every_field(tmp_path):
    profile, _, stages = planned(small(), X, cuts=["_1"])
    found = rows(profile, stages)
    save(tmp_path / "memory.csv", found)
    with (tmp_path / "memory.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [*read[0]] == [*Row.__dataclass_fields__]
    assert [{name: str(getattr(row, name)) for name in read[0]} for row in found] == read


def test_the_sums_are_those_of_the_plan_and_the_rest_is_folded():
    model = GPT(
        vocabulary=61, length=16, width=48, heads=4, layers=2, dropout=0.0, activation="relu", tied=False
    )
    profile, plan, stages = planned(model, torch.randint(61, (4, 16)), stages=3)
    found = rows(profile, stages, optimizer_state=1.0)
    for number, stage in enumerate(plan.stages):
        own = [row for row in found if row.stage == number]
        assert sum(row.num_bytes for row in own if row.group == SAVED) == stage.saved_bytes
        for kind in ("parameters", "gradients", "optimizer state"):
            assert sum(row.num_bytes for row in own if row.kind == kind) == 4 * stage.num_parameters
    assert len(found) > MOST_ROWS
    for most in (20, MOST_ROWS):
        lines = [line.split() for line in table(found, most=most)]
        assert len(lines) <= most + 6
        totals = [line for line in lines if line[1:2] == ["total"]]
        assert [int(line[0]) for line in totals] == [0, 1, 2]
        assert sum(int(line[2]) for line in totals) == len(profile.intermediates)
        words = " ".join(" ".join(line) for line in lines[1:-3]).replace(",", " ").split()
        counted = [int(number) for number, word in pairwise(words) if word in KINDS]
        assert sum(counted) == len(profile.intermediates)


KINDS = ("feature", "statistic", "statistics", "index", "indices", "mask", "masks", "cast", "casts", "other")


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


@given(st.lists(st.text("ab.", max_size=5), min_size=1, max_size=30), st.integers(1, 10), st.integers(0, 3))
def test_every_layer_is_in_one_block_of_its_stage(modules, most, num_cuts):
    stages = sorted(i * (num_cuts + 1) // len(modules) for i in range(len(modules)))
    found = blocks([str(i) for i in range(len(modules))], modules, stages, most=most)
    assert [layer for block in found for layer in block.layers] == [*range(len(modules))]
    for block in found:
        assert {stages[layer] for layer in block.layers} == {block.stage}
    assert len(found) <= most + num_cuts
