"""replicas.count= and replicas.exact=: what they make of ranks and stages, and what is refused of them."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import SMALL, refusal, same_model, trained
from profiles import NET

from penstock import Plan
from penstock.compression.errors import ConfigError
from penstock.conf.parts import MemoryConfig, ReplicasConfig
from penstock.conf.schema import PlanConfig, TrainConfig
from penstock.pipeline.partition.partition import partition
from penstock.pipeline.run import early
from penstock.pipeline.run.logs import SharesLog
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


@pytest.mark.parametrize(("count", "exact", "told"), [(2, True, 0), (2, False, 1), (1, False, 0)])
def test_a_run_goes_on_with_other_replicas_and_says_where_bits_may_differ(count, exact, told):
    said = []
    made = config(count, exact=exact, kind=TrainConfig, ranks=2)
    notes = {"config": {**vars(made), "replicas": {"count": [1, 1], "exact": False}}}
    for name in ("memory", "checkpoint", "clip"):
        notes["config"][name] = vars(getattr(made, name))
    check(made, notes, said.append)
    assert len(said) == told


SMALL_PLAN = f"{SMALL.replace(' seed=3', '')} batch_size=48 micro_batches=4"


def test_a_plan_says_its_replicas_and_train_takes_them_from_it(capsys):
    asked = f"{SMALL_PLAN} ranks=3 replicas.count=[1,2] replicas.exact=true hydra.run.dir=run"
    assert command.run(["plan", *asked.split()]) == 0
    plan, said = Plan.load("run/plan.json"), capsys.readouterr().out
    assert (plan.replicas, plan.exact, plan.num_ranks) == ((1, 2), True, 3)
    assert "replicas [1, 2] that add as one" in said
    assert "replicas.shares" not in said
    found = TrainConfig(plan="run/plan.json", model={}, micro_batches=4, batch_size=48)
    early.load_plan(found, [])
    assert (found.ranks, found.stages, found.replicas.count, found.replicas.exact) == (3, 2, [1, 2], True)
    contradicting: list[tuple[str, dict[str, Any]]] = [
        ("replicas.count", {"replicas": ReplicasConfig(count=2), "ranks": 2}),
        ("schedule", {"schedule": "gpipe"}),
        ("micro_batches", {"micro_batches": 8}),
        ("codec", {"codec": "raw"}),
        ("memory.tier", {"memory": MemoryConfig(tier="host")}),
        ("memory.weights", {"memory": MemoryConfig(weights="host")}),
        ("prediction", {"prediction": True}),
    ]
    for key, given in contradicting:
        with pytest.raises(ConfigError, match=f"{key}=.* contradicts plan=run/plan.json with {key}="):
            early.load_plan(TrainConfig(plan="run/plan.json", **given), [f"{key}=..."])
    for key in ("link", "memory.device"):
        with pytest.raises(ConfigError, match=f"{key}= is for making a plan"):
            early.load_plan(TrainConfig(plan="run/plan.json"), [f"{key}=1GiB"])
    plan.with_shares([(), (3, 1)]).save("shared.json")
    given = {"count": [1, 2], "kind": TrainConfig, "ranks": 3, "plan": "shared.json", "micro_batches": 4}
    for asked, found in [("even", [1, 3, 1]), ("measured", "measured"), ([5, 3, 1], [5, 3, 1])]:
        typed = [] if asked == "even" else ["replicas.shares=..."]
        made = config(shares=asked, **given, batch_size=48)
        early.load_plan(made, typed)
        assert made.replicas.shares == found
    for asked in ("even", [1, 1, 1]):
        with pytest.raises(ConfigError, match=r"plan=shared.json with replicas.shares=\[1, 3, 1\]"):
            early.load_plan(config(shares=asked, **given, batch_size=48), ["replicas.shares=..."])


JOB = (
    f"{SMALL} batch_size=200 micro_batches=6 epochs=2 checkpoint.every=3 optimizer.momentum=0.5"
    " replicas.count=2 ranks=2"
)


def logged_shares(folder):
    """The steps from which on a run had other shares, and these."""
    rows = map(json.loads, Path(folder, "shares.jsonl").read_text().splitlines())
    return [(row["step"], row["shares"]) for row in rows]


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_logs_its_shares_and_resumes_with_them():
    early = "checkpoints/step_00000003"
    trained(f"{JOB} replicas.shares=measured max_steps=9 hydra.run.dir=run")
    assert logged_shares("run")[0] == (0, [[1, 1]])
    *_, at_resume = [shares for step, shares in logged_shares("run") if step <= 3]
    trained(f"{JOB} replicas.shares=measured max_steps=9 hydra.run.dir=on resume=run/{early}")
    assert logged_shares("on")[0] == (3, at_resume)
    trained(f"{JOB} replicas.exact=true replicas.shares=[5,1] max_steps=9 hydra.run.dir=exact")
    assert logged_shares("exact") == [(0, [[5, 1]])]
    trained(f"{JOB} ranks=1 replicas.count=1 max_steps=9 hydra.run.dir=one resume=exact/{early}")
    assert same_model("one", "exact")


def test_a_resumed_run_keeps_the_logged_shares_before_it_and_repeats_none(tmp_path):
    plan = partition(NET, replicas=[2, 1], micro_batches=4, codec="raw")
    path, messages = tmp_path / "shares.jsonl", []

    def log(first, courses):
        """Train from step ``first`` on, with the shares of ``courses`` after each step."""
        pipe: Any = SimpleNamespace(plan=plan.with_shares(courses[0]), num_steps=first)
        pipe.world = SimpleNamespace(is_alone=False)
        with SharesLog(pipe, path, tell=messages.append) as log:
            for shares in courses[1:]:
                report: Any = SimpleNamespace(step=pipe.num_steps)
                pipe.num_steps += 1
                pipe.plan = plan.with_shares(shares)
                log.after(report)

    even, more, most = ([(1, 1), (1,)], [(2, 1), (1,)], [(3, 1), (1,)])
    log(0, [even, more, more, even, most])
    written = [[1, 1], [2, 1], [1, 1], [3, 1]]
    assert [shares[0] for _, shares in logged_shares(tmp_path)] == written
    assert messages[0] == "shares of replicas behind step 1: stage 0 [2, 1]"
    log(3, [more, more])  # of a checkpoint at step 3, where the log says even
    assert logged_shares(tmp_path)[1:] == [(1, [[2, 1], [1]])]
    with path.open("a") as file:
        file.write('{"step": 4, "sha')  # a kill
    log(5, [more, most])
    assert [(step, shares[0]) for step, shares in logged_shares(tmp_path)] == [
        (0, [1, 1]), (1, [2, 1]), (6, [3, 1])
    ]  # fmt: skip
    path.write_text('[1]\n"x"\n')
    log(5, [more])
    assert logged_shares(tmp_path) == [(5, [[2, 1], [1]])]


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_that_do_not_help_are_left_out_where_that_is_allowed(capfd):
    job = SMALL_PLAN.replace("micro_batches=4", "micro_batches=2")  # two replicas get a micro-batch
    asked = f"{job} ranks=4 stages=1 replicas.count=auto epochs=1 max_steps=2"
    assert "found ranks=4 for 1 stages and micro_batches=2; raise micro_batches" in refusal(asked, capfd)
    trained(f"{asked} replicas.idle=true hydra.run.dir=run")
    plan, said = Plan.load("run/plan.json"), "".join(capfd.readouterr())
    assert plan.num_ranks < 4
    assert f"ranks={plan.num_ranks} of 4: no way to give more of them work" in said
