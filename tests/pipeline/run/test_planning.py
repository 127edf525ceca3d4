"""Planning of a run: all schedules are simulated and the best is chosen; replicas that were asked for."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import SMALL, refusal, same_model, trained
from profiles import NET, layer_of, profile_of, value_of

from penstock import ConfigError, Plan, PlanError, partition
from penstock.conf.schema import MemoryConfig, PlanConfig, ReplicasConfig, TrainConfig
from penstock.pipeline.run import build, early, planning
from penstock.pipeline.run.alternatives import alternatives, described, lower_bound
from penstock.pipeline.run.logs import shares_log
from penstock.pipeline.run.schedule_comparison import SYNCHRONOUS, candidate, compare
from penstock.pipeline.schedules import SCHEDULES
from penstock.scripts import command
from penstock.stages.plan.cluster import Cluster
from penstock.stages.units import show_seconds


def even(num_layers, *, forward=10, backward=20, size=400, saved=1000, passing=1000):
    """Equal layers; nothing crosses a cut but 1,000 bytes each way."""
    work: dict[str, Any] = {"forward": forward, "backward": backward, "size": size, "saved": saved}
    layers = [layer_of(f"l{i}", **work) for i in range(num_layers)]
    return profile_of(layers, [value_of(i, [i + 1], passing) for i in range(num_layers - 1)])


def rows(found):
    return {one.name: one for one in found.candidates}


def test_every_schedule_but_a_custom_one_is_compared_where_the_counts_suit_all():
    found = compare(even(4), stages=4, ranks=2, micro_batches=8)
    assert set(rows(found)) == set(SYNCHRONOUS) | {"async_1f1b stashed", "1f1b double_buffered"}
    assert set(SYNCHRONOUS) == set(SCHEDULES) - {"async_1f1b", "custom"}
    assert not found.left_out


def test_what_does_not_suit_is_left_out_with_the_reason_and_what_suits_nothing_refused():
    found = compare(even(3), stages=3, ranks=2, micro_batches=2)
    assert found.left_out.keys() == {"interleaved", "zbv", "dualpipev", "1f1b double_buffered"}
    assert "take a multiple, such as stages=4" in found.left_out["interleaved"]
    assert "take stages=4" in found.left_out["zbv"]
    assert "raise micro_batches to 3" in found.left_out["1f1b double_buffered"]
    with pytest.raises(PlanError, match="2 stages need at least as many layers"):
        compare(even(1), stages=2, micro_batches=2)


@pytest.mark.parametrize(
    ("stages", "ranks", "micro_batches"), [(2, 2, 2), (4, 2, 4), (3, 3, 5), (6, 3, 6), (4, 1, 3)]
)
def test_a_stream_is_full_whatever_the_counts(stages, ranks, micro_batches):
    found = compare(even(stages), stages=stages, ranks=ranks, micro_batches=micro_batches)
    one = rows(found)["async_1f1b stashed"]
    slowest = 0.030 * stages / ranks
    assert one.seconds == pytest.approx(micro_batches * slowest)
    assert one.bubble == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("exact", [False, True])
def test_replicas_are_compared_with_what_they_exchange(exact):
    found = compare(
        even(2), stages=2, ranks=3, micro_batches=6, replicas="auto", exact=exact, extra_in_flight=0
    )
    assert set(rows(found)) == {"gpipe", "1f1b", "zb_h1"}
    for one in found.candidates:
        planned = [stage.held_bytes for stage in one.plan.stages for _ in stage.ranks]
        assert list(one.memory) == planned, one.name
        assert sum(span.op == "U" for span in one.panel.spans) == 2  # of the two replicas
    assert "replicas=auto divides ranks over stages that each have ranks" in found.left_out["zbv"]


def test_memory_knows_the_optimizer_and_what_a_tier_leaves():
    layers = [layer_of(f"l{i}", size=400, saved=1000, packed=200) for i in range(2)]
    profile = profile_of(layers, [value_of(0, [1], 0)])
    found = rows(compare(profile, stages=2, micro_batches=6, optimizer_state=2.0, tier="packed"))
    assert found["gpipe"].memory == (4 * 400 + 2 * 1000 + 6 * 200,) * 2
    assert found["1f1b"].memory == (4 * 400 + 2 * 1000, 4 * 400 + 1000)
    assert found["async_1f1b stashed"].memory == (5 * 400 + 2 * 1000, 4 * 400 + 1000)
    assert found["1f1b double_buffered"].memory == (5 * 400 + 2 * 1000, 5 * 400 + 1000)
    for one in found.values():
        if one.plan.ranks == (0, 1):
            assert one.memory == tuple(stage.held_bytes for stage in one.plan.stages), one.name


def test_every_stage_counts_in_its_own_tier():
    layers = [layer_of(f"l{i}", saved=1000, packed=200) for i in range(2)]
    profile = profile_of(layers, [value_of(0, [1])])
    plan = partition(profile, stages=2, micro_batches=6, schedule="gpipe")
    stages = plan.stages[0], dataclasses.replace(plan.stages[1], tier="packed")
    frames = (6 + 2 + 2) * 1000  # in flight, posted ahead, and two more
    assert candidate(profile, dataclasses.replace(plan, stages=stages)).memory == (
        6000 + frames,
        3200 + frames,
    )


def test_an_option_names_the_optimizer_whose_memory_is_planned(tmp_path):
    job = "plan model=mlp model.hidden=[16] data.size=8 data.channels=1 threads=1 batch_size=8 cuts=[_1]"
    planned = {}
    for name in ("sgd", "adamw"):
        assert command.run([*job.split(), f"optimizer={name}", f"hydra.run.dir={name}"]) == 0
        planned[name] = json.loads((tmp_path / name / "plan.json").read_text())["stages"]
    for sgd, adamw in zip(planned["sgd"], planned["adamw"], strict=True):
        assert adamw["memory_bytes"] - sgd["memory_bytes"] == 4 * sgd["num_parameters"]


def test_the_fastest_synchronous_schedule_is_chosen_and_of_two_as_fast_the_smaller():
    found = compare(even(4), stages=4, micro_batches=8)
    fastest = min(found.candidates, key=lambda one: one.seconds)
    assert fastest.plan.streams
    others = [one for one in found.candidates if not one.plan.streams]
    assert found.chosen.seconds == pytest.approx(min(one.seconds for one in others))
    assert not found.chosen.plan.streams
    two = tuple(one for one in found.candidates if one.name in ("gpipe", "1f1b"))
    for candidates in (two, two[::-1]):
        assert dataclasses.replace(found, candidates=candidates).chosen.name == "1f1b"


def test_what_does_not_fit_is_not_chosen():
    free = compare(even(4, size=0, passing=0), stages=4, micro_batches=8)
    least = min(max(one.memory) for one in free.candidates if not one.plan.streams)
    tight = compare(even(4, size=0, passing=0), stages=4, micro_batches=8, memory=least * 105 // 100)
    assert "gpipe" in tight.left_out
    assert max(tight.chosen.memory) == least
    assert tight.chosen.fits
    almost = least * 105 // 100 - 1, 0, 0, 0  # within the budget, and not with its margin
    assert not dataclasses.replace(tight.chosen, memory=almost).fits
    with pytest.raises(PlanError, match="smallest budget"):
        compare(even(4), stages=4, micro_batches=8, memory=100)


# rank 0   F0 F1 at 0-20, B0 at 80 (F0 arrives at 30, its gradient at 80), F2 B1 F3, B2 at 180, B3 at 210-230
def test_tensors_take_their_time_on_a_slow_link():
    asks = {"stages": 2, "micro_batches": 4, "link": 400_000}  # 20 ms for 1,000 bytes
    assert rows(compare(even(2), **asks, extra_in_flight=0))["1f1b"].seconds == pytest.approx(0.230)
    found = compare(even(2), **asks)
    assert rows(found)["1f1b"].seconds == pytest.approx(0.190)  # one more in flight hides a round trip


OPTIONS: dict[str, Any] = {
    "stages": None,
    "cuts": None,
    "ranks": 2,
    "micro_batches": 8,
    "memory": None,
    "link": None,
}
OPTIONS |= {"optimizer_state": 1.0, "by_element": False, "extra_in_flight": 0, "recompute": False}


def test_the_best_other_plans_stand_beside_a_plan_shortest_first_and_none_that_does_not_fit():
    profile = even(8)
    plan = partition(profile, **OPTIONS)
    ours, found = alternatives(plan, profile, OPTIONS)
    assert ours is not None
    seconds = ours.seconds
    assert seconds == pytest.approx(candidate(profile, plan).seconds)
    assert [one.typed for one in found] == ["ranks=4", "ranks=3", "schedule=zbv"]
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    compared = [one for one in compare(profile, **OPTIONS).candidates if not one.plan.streams]
    more: dict[str, Any] = OPTIONS | {"ranks": 4}
    four = partition(profile, **more)
    assert found[0].seconds == pytest.approx(candidate(profile, four).seconds)
    lines = described(ours, profile, found)
    # 8 micro-batches of 8 layers of 30 ms on 2 ranks
    assert lower_bound(plan, profile) == pytest.approx(8 * 8 * 0.03 / 2)
    assert all(lower_bound(one.plan, profile) <= one.seconds for one in (ours, *compared))
    assert f"takes less than 960 ms ({0.96 / seconds - 1:+.0%})" in lines[0]
    assert lines[1] == "beside it:"
    assert (
        f"  ranks=4: {show_seconds(found[0].seconds)} ({found[0].seconds / seconds - 1:+.0%}), " in lines[2]
    )
    few = partition(profile, **{**OPTIONS, "ranks": 8, "micro_batches": 2})
    lines = described(candidate(profile, few), profile, [])
    assert lower_bound(few, profile) == pytest.approx(8 * 0.02)
    every = [one for one in compare(profile, **OPTIONS | {"ranks": 8, "micro_batches": 2}).candidates]
    assert all(lower_bound(few, profile) <= one.seconds for one in every if not one.plan.streams)
    assert lines[1].startswith("ranks that compute in less than half of a step: rank 0 (2")
    # a rank of 1f1b keeps 2 of 8 micro-batches, of gpipe all
    tight: dict[str, Any] = OPTIONS | {"memory": round(1.06 * max(candidate(profile, plan).memory))}
    names = [one.typed for one in alternatives(partition(profile, **tight), profile, tight)[1]]
    assert "schedule=gpipe" not in names
    assert "ranks=1" not in names
    assert names
    by_hand: dict[str, Any] = OPTIONS | {"cuts": ["l3"]}
    names = [one.typed for one in alternatives(partition(profile, **by_hand), profile, by_hand)[1]]
    assert not [name for name in names if name.startswith("ranks")]


def test_a_cluster_is_tried_in_other_orders_and_without_a_rank_that_holds_it_up():
    file = {
        "ranks": ["fast", "slow", "fast"],
        "devices": {"fast": {}, "slow": {"speed": 0.01}, "far": {}},
        "links": {"fast-slow": "1Gbit", "fast-fast": "1Gbit", "slow-far": "1Gbit"},
    }
    options: dict[str, Any] = OPTIONS | {"cluster": Cluster.of(file), "ranks": 3}
    profile = even(4)
    ours, found = alternatives(partition(profile, **options), profile, options, file=file)
    assert found[0].typed == "ranks: [fast, fast]"
    assert ours is not None
    assert found[0].seconds < ours.seconds / 10
    assert len({one.typed for one in found}) == len(found)
    chain = {**file, "ranks": ["fast", "slow", "far"]}  # nobody knows a link from fast to far
    options["cluster"] = Cluster.of(chain)
    typed = [
        one.typed for one in alternatives(partition(profile, **options), profile, options, file=chain)[1]
    ]
    assert "ranks: [far, slow, fast]" in typed
    assert not [name for name in typed if "fast, far" in name or "far, fast" in name]


def test_a_plan_is_made_from_a_profile_without_model_or_data(tmp_path, monkeypatch, capsys):
    job = "model=mlp model.hidden=[16,16,16] data.size=8 data.channels=1 threads=1 batch_size=32 ranks=2"
    assert command.run(["plan", *job.split(), "hydra.run.dir=first"]) == 0
    for home, name in ((planning, "trace"), (build, "model"), (build, "samples")):
        monkeypatch.setattr(home, name, None)
    torch.set_num_threads(2)
    again = f"{job.replace('threads=1 ', '')} profile=first/profile.json"
    assert command.run(["plan", *again.split(), "hydra.run.dir=again"]) == 0
    assert torch.get_num_threads() == 1  # those of the profile, for what is measured of the optimizer
    first, second = (Plan.load(f"{folder}/plan.json") for folder in ("first", "again"))
    assert second.cuts == first.cuts
    assert [x.forward_seconds for x in second.stages] == [x.forward_seconds for x in first.stages]
    capsys.readouterr()
    assert command.run(["plan", *again.split(), "micro_batches=4", "hydra.run.dir=twice"]) == 0
    assert (
        "of micro-batches of 4 samples: seconds and bytes are taken in proportion" in capsys.readouterr().err
    )
    twice = Plan.load("twice/plan.json")
    assert twice.stages[0].bytes_forward == 2 * first.stages[0].bytes_forward
    assert twice.input_shapes == ((8, *first.input_shapes[0][1:]),)
    for option, said in [
        ("threads=2", "was measured on cpu with threads=1, found device=cpu threads=2"),
        ("graph=true", "goes without; drop either"),
        ("profile=first/plan.json", "with the key penstock_profile, first/plan.json is not"),
        ("profile=none.json", "cannot read the profile none.json"),
    ]:
        assert said in refusal(f"{again} {option}", capsys, name="plan")


def test_a_budget_that_is_too_small_is_told_in_the_spelling_of_the_option(capsys):
    job = f"{SMALL} batch_size=20 memory.device=1KiB"
    said = refusal(job, capsys, name="plan")
    assert "memory.device=1KiB on each" in said
    assert " memory=" not in said
    assert "memory= has parts; write one, such as memory.device=5" in refusal(
        f"{SMALL} memory=5", capsys, name="plan"
    )


def test_schedule_auto_trains_by_the_shortest_and_says_which(capsys):
    job = f"{SMALL} batch_size=20 micro_batches=4 epochs=1 max_steps=2"
    trained(f"{job} ranks=1 stages=2 schedule=auto hydra.run.dir=chosen")
    trained(f"{job} ranks=1 stages=2 hydra.run.dir=plain")
    assert same_model("chosen", "plain")
    schedule = json.loads(Path("chosen/plan.json").read_text())["schedule"]
    assert schedule in SYNCHRONOUS
    assert f"schedule: {schedule}" in Path("chosen/config.yaml").read_text()
    assert "schedule=auto compares each" in refusal(f"{job} schedule=auto weights=stashed", capsys)


@pytest.mark.parametrize("option", ["prediction=true", "weights=stashed", "error_feedback=true"])
def test_plan_schedule_all_ignores_no_option(option, capsys):
    assert command.run(["plan", "model=mlp", "schedule=all", option]) == command.REFUSED
    assert f"with the weights it has, found {option.replace('true', 'True')}" in capsys.readouterr().err


def test_plan_schedule_all_shows_chooses_and_writes(capsys):
    job = "model=mlp model.hidden=[16,16,16] data.size=8 data.channels=1 threads=1 batch_size=32"
    options = f"{job} ranks=2 stages=4 schedule=all hydra.run.dir=run"
    assert command.run(["plan", *options.split()]) == 0
    out = capsys.readouterr().out.splitlines()
    assert any(line.endswith("beside it:") for line in out)
    (chosen,) = [line.split()[0] for line in out if line.endswith("<- chosen")]
    folder = Path("run")
    assert json.loads((folder / "plan.json").read_text())["schedule"] == chosen
    assert f"schedule: {chosen}" in (folder / "config.yaml").read_text()
    assert (folder / "schedules.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((folder / "schedules.json").read_text())["schedules"]
    assert [row["schedule"] for row in rows if row["chosen"]] == [chosen]
    assert out[-1] == "run/schedules.png"


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
        ("error_feedback", {"error_feedback": True}),
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
        with shares_log(pipe, path, tell=messages.append) as log_shares:
            for shares in courses[1:]:
                report: Any = SimpleNamespace(step=pipe.num_steps)
                pipe.num_steps += 1
                pipe.plan = plan.with_shares(shares)
                log_shares(report)

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
