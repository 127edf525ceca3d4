"""replicas.count= and replicas.exact=: what they make of ranks and stages, and what is refused of them."""

import dataclasses
from typing import Any

import pytest

from penstock import Plan
from penstock.compression.errors import ConfigError, PlanError
from penstock.conf.parts import ReplicasConfig
from penstock.conf.schema import PlanConfig, TrainConfig
from penstock.pipeline.run import early
from penstock.pipeline.run.resume import check
from penstock.scripts import command


def config(count, kind: Any = PlanConfig, **given) -> Any:
    names = {field.name for field in dataclasses.fields(ReplicasConfig)} & set(given)
    replicas = {name: given.pop(name) for name in names}
    return kind(replicas=ReplicasConfig(count=count, **replicas), **given)


def test_ranks_are_shared_by_the_replicas_of_every_stage():
    assert config(2, ranks=4).num_stages == 2
    assert config(2, ranks=2).num_stages == 1
    assert config([2, 1], ranks=3).num_stages == 2
    assert config(2, ranks=6, cuts=["a", "b"]).num_stages == 3
    assert PlanConfig(ranks=4).num_stages == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"count": [2, 1], "ranks": 3, "stages": 3}, "a number for each of 2 stages, found 3 stages"),
        (
            {"count": [2, 1], "ranks": 4},
            "found ranks=4 for replicas.count=\\[2, 1\\] of 2 stages; take ranks=3",
        ),
        ({"count": 2, "ranks": 3}, "found ranks=3 for replicas.count=2 of 1 stages; take ranks=2"),
        ({"count": 0}, "replicas.count=0 must be a number from 1"),
        ({"count": [2, -1], "ranks": 1}, "must be a number from 1, or a list of such"),
        ({"count": "auto"}, "replicas.count=auto must be"),
        ({"count": []}, "replicas.count=\\[\\] must be"),
        (
            {"count": 2, "ranks": 4, "min_ranks": 3, "max_restarts": 1, "kind": TrainConfig},
            "replicas.count=2, which shrinks by replicas.shrink=true",
        ),
        ({"count": 1, "shrink": True, "kind": TrainConfig}, "found replicas.count=1; add replicas.count="),
        (
            {"count": 2, "shrink": True, "shares": "replay", "log": "x", "ranks": 2, "kind": TrainConfig},
            "with as many replicas, found replicas.shrink=true",
        ),
        (
            {"count": 2, "shrink": True, "nodes": 2, "master": "a:1", "ranks": 4, "kind": TrainConfig},
            "fewer ranks than others, found nodes=2",
        ),
    ],
)
def test_counts_that_do_not_suit_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        config(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schedule": "async_1f1b", "weights": "stashed"}, "no moment at which they could"),
        ({"weights": "double_buffered"}, "no moment at which they could"),
        ({"schedule": "interleaved"}, "stages have replicas under gpipe and 1f1b"),
        ({"micro_batches": 1}, "each replica of a stage gets a micro-batch at least"),
    ],
)
def test_what_needs_no_torch_is_refused_at_once(options, said):
    with pytest.raises(PlanError, match=said):
        early.check(config(2, ranks=4, **options))


@pytest.mark.parametrize(
    ("count", "exact", "told"), [(2, True, 0), (2, False, 1), (1, False, 0)], ids=["exact", "sums", "one"]
)
def test_a_run_goes_on_with_other_replicas_and_says_where_bits_may_differ(count, exact, told):
    said = []
    made = config(count, exact=exact, kind=TrainConfig, ranks=2)
    notes = {"config": {**vars(made), "replicas": {"count": [1, 1], "exact": False}}}
    for name in ("memory", "checkpoint", "clip"):
        notes["config"][name] = vars(getattr(made, name))
    check(made, notes, said.append)
    assert len(said) == told


def test_a_plan_says_its_replicas_and_train_takes_them_from_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    job = "model=mlp model.hidden=[16,12] data.size=8 data.channels=1 batch_size=48 micro_batches=4 threads=1"
    asked = "ranks=3 replicas.count=[1,2] replicas.exact=true"
    assert command.run(["plan", *job.split(), *asked.split(), "hydra.run.dir=run"]) == 0
    plan = Plan.load("run/plan.json")
    assert (plan.replicas, plan.exact, plan.num_ranks) == ((1, 2), True, 3)
    assert "replicas [1, 2] that add as one" in capsys.readouterr().out
    found = TrainConfig(plan="run/plan.json", model={}, micro_batches=4, batch_size=48)
    early.load_plan(found, [])
    assert (found.ranks, found.stages, found.replicas.count, found.replicas.exact) == (3, 2, [1, 2], True)
    with pytest.raises(ConfigError, match=r"replicas.count=2 contradicts plan=run/plan.json"):
        early.load_plan(config(2, kind=TrainConfig, ranks=2, plan="run/plan.json"), ["replicas.count=2"])
