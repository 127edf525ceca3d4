import csv

import torch
from profiles import measured
from torch import nn

import penstock
from penstock.pipeline.models import GPT
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


def test_the_sums_are_those_of_the_plan_and_small_rows_are_told_together():
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
    for most in (20, MOST_ROWS):
        lines = [line.split() for line in table(found, most=most)[1:-3]]
        assert len(found) > most >= len(lines) - 6
        for number in range(3):
            *_, smaller, total = [line for line in lines if line[0] == str(number)]
            assert (smaller[1], total[1]) == ("smaller", "total")
            assert int(total[2]) == sum(row.stage == number and row.group == SAVED for row in found)
