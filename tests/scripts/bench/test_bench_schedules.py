"""penstock bench pipeline schedule=..., bench convergence: who races whom, what is shown."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F

import penstock
from penstock import ConfigError
from penstock.conf.bench import BenchPipelineConfig
from penstock.conf.convergence import BenchConvergenceConfig
from penstock.pipeline.schedules import SCHEDULES, schedule_named
from penstock.pipeline.schedules.instruction import Instruction, Op
from penstock.pipeline.schedules.messages import Message, StepMessages
from penstock.pipeline.schedules.simulate import durations
from penstock.pipeline.schedules.span import Span
from penstock.scripts import command, usage
from penstock.scripts.bench import (
    cache_bench,
    checkpoint_bench,
    codecs_bench,
    contest,
    contestants,
    convergence,
    harness,
    instruction_cost,
    link_race,
    offload_bench,
    race,
    replicas_bench,
    schedules,
)
from penstock.scripts.bench.torch_pipelines import CLASSES, TorchPipeline

pytestmark = pytest.mark.slow  # what it tests is a tool of maintainers


@pytest.fixture
def somewhere_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(6, 6) if i % 2 == 0 else nn.ReLU() for i in range(7)))


def plan_of(schedule: str, *, stages: int, ranks: int, micro_batches: int = 4, **policy) -> penstock.Plan:
    example = (torch.randn(2, 6),)
    profile = penstock.measure(penstock.trace(net(), example), example, repeats=1)
    cuts = ["_1", "_3", "_5"] if stages == 4 else ["_3"]
    return penstock.partition(
        profile,
        cuts=cuts,
        ranks=ranks,
        schedule=schedule,
        micro_batches=micro_batches,
        codec="raw",
        **policy,
    )


def sgd(named):
    return torch.optim.SGD(named, lr=0.1)


def batch(samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(samples, 6, generator=generator), torch.randint(6, (samples,), generator=generator)


# Who races


def test_all_stands_for_every_one_and_names_for_themselves():
    assert list(contestants.entrants("all")) == list(contestants.ENTRANTS)
    assert {one.schedule for one in contestants.ENTRANTS.values()} <= set(SCHEDULES)
    assert list(contestants.entrants(["zbv", "1f1b"])) == ["zbv", "1f1b"]
    assert list(contestants.entrants("gpipe")) == ["gpipe"]


def test_a_rival_that_nobody_asked_for_runs_beside():
    assert list(contestants.rivals(contestants.entrants(["async_1f1b", "gpipe_x2"]))) == ["1f1b", "gpipe"]
    assert contestants.rivals(contestants.entrants(["async_1f1b", "1f1b"])) == {}


@pytest.mark.parametrize(("asked", "told"), [("fast", "schedule=fast"), ([], "[]"), (["zbv", "zbv"], "once")])
def test_names_that_cannot_be_raced_are_refused(asked, told):
    with pytest.raises(ConfigError) as refused:
        contestants.entrants(asked)
    assert told in str(refused.value)


def test_schedules_are_raced_on_the_first_of_each_default_or_on_the_one_that_was_named():
    config = BenchPipelineConfig(schedule="all")
    assert (config.codecs, config.extra_in_flight, config.links) == (["raw"], [0], ["loopback"])
    config = BenchPipelineConfig(schedule=["zbv"], codecs=["zero_value"], links=["1Gbit"])
    assert (config.codecs, config.links) == (["zero_value"], ["1Gbit"])
    with pytest.raises(ConfigError, match=r"one of codecs, found codecs=\[raw,auto\]"):
        BenchPipelineConfig(schedule="all", codecs=["raw", "auto"])
    assert len(BenchPipelineConfig().links) == 5


def test_a_stage_a_rank_takes_every_second_cut():
    config = BenchPipelineConfig(schedule="all", cuts=["a", "b", "c"])
    assert contest.cuts_of(config, 4) == ["a", "b", "c"]
    assert contest.cuts_of(config, 2) == ["b"]
    assert contest.cuts_of(BenchPipelineConfig(cuts=["b"]), 2) == ["b"]
    with pytest.raises(ConfigError, match="4 stages need 3 cuts, found 1; give 3"):
        contest.cuts_of(BenchPipelineConfig(cuts=["b"]), 4)


# Bubbles


def two_ranks(num_micro_batches: int) -> StepMessages:
    """Two stages that pass one value per micro-batch down and its gradient up."""
    programs = schedule_named("1f1b")([[0], [1]], num_micro_batches)
    receives, sends = {}, {}
    for m in range(num_micro_batches):
        down, up = Message(Op.F, m, 0, 0, 1, ranks=(0, 1)), Message(Op.B, m, 0, 1, 0, ranks=(1, 0))
        sends[Instruction(0, Op.F, m)] = receives[Instruction(1, Op.F, m)] = (down,)
        sends[Instruction(1, Op.B, m)] = receives[Instruction(0, Op.B, m)] = (up,)
    return StepMessages(programs=programs, receives=receives, sends=sends)


# stage 0   F0 F1 .. .. B0 B0 F2 B1 B1 .. B2 B2         at F = 1, B = 2
# stage 1   .. F0 B0 B0 F1 B1 B1 F2 B2 B2
def test_the_simulated_bubble_of_1f1b_by_hand():
    seconds = {(0, "F"): 1.0, (1, "F"): 1.0, (0, "B"): 2.0, (1, "B"): 2.0}
    on_paper = race.simulated(two_ranks(3), seconds, rate=None, stream=False)
    assert on_paper == pytest.approx([1 - 9 / 12, 1 - 9 / 12])


def test_a_rank_of_a_stream_waits_only_for_the_busiest():
    seconds = {(0, "F"): 1.0, (1, "F"): 2.0, (0, "B"): 2.0, (1, "B"): 4.0}
    assert race.simulated(two_ranks(3), seconds, rate=None, stream=True) == pytest.approx([0.5, 0.0])


def test_durations_are_medians_without_waiting():
    def span(start, waiting, end, op="F"):
        return Span(rank=0, stage=0, op=op, micro_batch=0, start=start, waiting=waiting, end=end)

    spans = [span(0, 1, 4), span(4, 0, 5, "B"), span(0, 0, 2), span(0, 0, 30)]
    assert durations(spans) == {(0, "F"): 3, (0, "B"): 1}


# Versions, and the cost of an instruction


def versions(plan: penstock.Plan, *, stream: bool) -> list[tuple[int, float, int]]:
    """Live versions, all their bytes in units of one, and the bytes of one, of every stage."""
    pipe = penstock.Pipeline(net(), plan, loss=F.cross_entropy, optimizer=sgd)
    side = race.Ours(pipe, [batch()], stream=stream)
    for _ in range(3):
        side.take_step()
    sizes = {name: parameter.nbytes for name, parameter in net().named_parameters()}
    found = side.versions(sizes)
    return [(s["num_live"], s["num_bytes"] / s["parameter_bytes"], s["parameter_bytes"]) for s in found]


def test_versions_are_counted_at_their_peak():
    plan = plan_of("async_1f1b", stages=4, ranks=4, weights="stashed")
    assert versions(plan, stream=True) == [(n, n, 4 * (36 + 6)) for n in (4, 3, 2, 1)]


def test_a_synchronous_schedule_has_one_version():
    assert versions(plan_of("zb_h1", stages=2, ranks=2), stream=False) == 2 * [(1, 1, 2 * 4 * (36 + 6))]


def test_the_cost_of_an_instruction_is_that_of_a_step_less_the_work_itself(monkeypatch):
    monkeypatch.setattr(instruction_cost, "STEPS", 2)
    found = instruction_cost.instruction_cost(stages=3, micro_batches=4, repeats=3)
    assert (found["ranks"], found["stages"], found["instructions"]) == (1, 3, 3 * (4 + 4 + 1))
    assert len(found["microseconds_of_runs"]) == 3
    assert found["microseconds_direct"] > 0
    monkeypatch.setattr(instruction_cost, "_steps", lambda pipe, batch: (27e-3 + 27e-5, 1.0))
    monkeypatch.setattr(instruction_cost, "timed", lambda step, times, clock: lambda: 27e-5)
    found = instruction_cost.instruction_cost(stages=3, micro_batches=4, repeats=3)
    assert found["microseconds"] == pytest.approx(1000)
    assert found["microseconds_direct"] == pytest.approx(10)


# Torch's side


def torch_and_ours() -> dict[str, tuple[float | None, float, list[bool]]]:
    """By schedule the first loss of torch and of ours, and which parameters of this rank agree after two
    steps."""
    return {schedule: both(schedule, contestants.ENTRANTS[schedule].stages_per_rank) for schedule in CLASSES}


def both(schedule: str, stages_per_rank: int) -> tuple[float | None, float, list[bool]]:
    plan, model = plan_of(schedule, stages=2 * stages_per_rank, ranks=2), net()
    theirs = TorchPipeline(model, plan, loss=F.cross_entropy, optimizer=sgd)
    pipe = penstock.Pipeline(net(), plan, loss=F.cross_entropy, optimizer=sgd)
    first = theirs.step(*batch()), pipe.step(*batch()).loss
    theirs.step(*batch())
    pipe.step(*batch())
    mine = pipe.update.named
    same = [torch.allclose(dict(model.named_parameters())[name], mine[name], atol=1e-6) for name in mine]
    return *first, same


@pytest.mark.slow
@pytest.mark.ranks
def test_torchs_schedules_train_what_ours_do(ranks):
    of_ranks = ranks.run(torch_and_ours, ranks=2)
    for schedule in CLASSES:
        found = [of_rank[schedule] for of_rank in of_ranks]
        theirs = [loss for loss, _, _ in found if loss is not None]
        assert theirs == pytest.approx([found[0][1]], rel=1e-5), schedule
        assert found[0][2] + found[1][2] == 8 * [True], schedule


# Rows, the table, the picture


def results() -> dict:
    versions = [{"num_live": n, "num_bytes": n * 2048, "parameter_bytes": 2048} for n in (2, 1)]
    common = {"num_stages": 2, "bubble": [0.1, 0.3], "bubble_simulated": [0.05, 0.25], "versions": versions}
    measured = {
        "zb_h1": {"rival": [2.0, 4.0, 8.0], "penstock": [1.0, 4.0, 2.0], **common},
        "async_1f1b": {"rival": [1.0, 1.0, 1.0], "penstock": [4.0, 1.0, 2.0], **common},
    }
    job = {"model": "net", "ranks": 2, "batch_size": 8, "micro_batches": 4, "codec": "raw"}
    rows = [schedules.row_of(name, found, 8) for name, found in measured.items()]
    return {"rows": rows, "job": job, "threads": 1, "link": {"link": "loopback"}}


def test_rows_hold_ratios_of_pairs_and_who_the_rival_was():
    against_torch, against_ours = results()["rows"]
    assert against_torch["speedup_of_pairs"] == [2.0, 1.0, 4.0]
    assert against_torch["speedup"] == 2.0
    assert against_torch["samples_per_second"] == 4.0
    assert against_torch["rival_samples_per_second"] == 2.0
    assert (against_torch["rival"], against_torch["rival_class"]) == (
        "torch",
        "ScheduleInterleavedZeroBubble",
    )
    assert (against_ours["rival"], against_ours["rival_class"]) == ("1f1b", None)
    assert (against_ours["schedule"], against_ours["weights"]) == ("async_1f1b", "stashed")


def test_the_table_has_a_line_for_every_row():
    console = Console(width=harness.WIDTH)
    with console.capture() as said:
        console.print(schedules.shown(results()))
    lines = said.get().splitlines()
    assert "net, 4 micro-batches of 2, 2 ranks of 1 thread, codec raw, loopback" in lines[0]
    shown = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert shown[1] == [
        "async_1f1b", "2", "4.0", "1f1b", "8.0", "0.50", "0.25-1.00", "10 30 %", "5 25 %", "2 1  6 KiB",
    ]  # fmt: skip


def test_the_picture_has_bars_for_both_sides_and_dots_for_both_bubbles():
    speeds, dots = schedules.figure(results()).axes
    heights = [bar.get_height() for bar in speeds.patches]  # pyright: ignore[reportAttributeAccessIssue]
    assert heights == [4.0, 4.0, 2.0, 8.0]  # ours, torch's, our 1f1b
    drawn = [torch.as_tensor(group.get_offsets()) for group in dots.collections]  # lines have one offset
    assert [float(points[0, 1]) for points in drawn if len(points) == 2] == pytest.approx([10, 5, 30, 25])
    assert [label.get_text() for label in dots.get_xticklabels()] == [
        "zb_h1\n2 stages",
        "async_1f1b\nstashed\n2 stages",
    ]


PUBLISHED = sorted((Path(__file__).resolve().parents[3] / "docs" / "results").glob("*.json"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_what_was_published_can_be_shown_again(path):
    found, topic = json.loads(path.read_text()), path.stem.partition("_")[0]
    shows = {
        "pipeline": link_race,
        "schedules": schedules,
        "convergence": convergence,
        "codecs": codecs_bench,
        "checkpoint": checkpoint_bench,
        "offload": offload_bench,
        "cache": cache_bench,
        "replicas": replicas_bench,
    }
    assert shows[topic].figure(found).axes
    if topic in ("pipeline", "schedules"):
        assert shows[topic].shown(found).row_count == len(found["rows"])


# The command


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("pipeline schedule=fast", "schedule=fast cannot be raced; known are all, gpipe"),
        ("pipeline schedule=all codecs=[raw,auto]", "one of codecs"),
        ("pipeline schedule=all links=[fast]", "links=fast is not a rate"),
        ("pipeline schedule=zbv model=mlp cuts=[_1]", "4 stages need 3 cuts, found 1"),
        ("convergence policies=[lucky]", "policies=[lucky] holds lucky"),
        ("convergence sets=[mnist]", "sets holds mnist"),
        ("convergence seeds=[1,1]", "seeds=[1, 1] must name one or more, each once"),
        ("convergence points=0", "points=0 must be 1 or more"),
        ("convergence async_lr=-1", "async_lr=-1"),
        ("convergence fashion_mnist.root=/nowhere", "/nowhere"),
    ],
)
def test_a_refusal_is_one_sentence(typed, told, capfd, somewhere_else):
    assert command.run(["bench", *typed.split()]) == 2
    out, error = capfd.readouterr()
    assert out == ""
    assert error.startswith("penstock: ")
    assert told in error
    assert error.count("\n") == 1
    assert not [path for path in somewhere_else.rglob("*") if path.is_file()]


@pytest.mark.slow
@pytest.mark.ranks
def test_a_tiny_race_of_schedules_leaves_its_results_and_a_picture(somewhere_else, capfd):
    job = "model=mlp model.hidden=[8,8,8] data=fake data.size=4 data.num_samples=32 schedule=[zbv,async_1f1b]"
    job += " batch_size=8 micro_batches=4 warmup=1 steps=1 repeats=2 hydra.run.dir=run"
    assert command.run(["bench", "pipeline", *job.split()]) == 0
    out, error = capfd.readouterr()
    assert error == ""
    assert out.splitlines()[-2:] == ["run/results.json", "run/results.png"]
    found = json.loads((somewhere_else / "run" / "results.json").read_text())
    assert {"command", "date", "hardware", "versions", "threads", "job", "link", "load_after"} < found.keys()
    zbv, stream = found["rows"]
    assert (zbv["name"], zbv["ranks_of_stages"], zbv["rival"]) == ("zbv", [0, 1, 1, 0], "torch")
    assert [stage["num_live"] for stage in stream["versions"]] == [2, 1]
    assert list(found["link"]["first_losses"]) == ["zbv", "1f1b"]
    for row in (zbv, stream):
        assert all(0 < bubble < 1 for bubble in row["bubble"])
        assert len(row["bubble_simulated"]) == len(row["num_instructions"]) == 2
        assert len(row["speedup_of_pairs"]) == 2
    assert [one["ranks"] for one in found["overhead"]] == [1, 2]
    assert found["overhead"][1]["microseconds_of_torch_steps"] > 0
    assert (somewhere_else / "run" / "results.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(os.listdir(somewhere_else / "run")) == ["plans", "results.json", "results.png"]


# Convergence


def convergence_config(**settings) -> BenchConvergenceConfig:
    conf = Path(str(command.__file__)).parent.parent / "conf"
    from omegaconf import OmegaConf

    def group_of(path: str) -> dict:
        return OmegaConf.to_container(OmegaConf.load(conf / path))  # type: ignore[return-value]

    return BenchConvergenceConfig(
        model=group_of("model/mlp.yaml") | {"hidden": [8, 8, 8]},
        optimizer=group_of("optimizer/sgd.yaml"),
        scheduler=group_of("scheduler/cosine.yaml"),
        digits=group_of("data/digits.yaml"),
        cuts=["_1", "_3", "_5"],
        **settings,
    )


def test_a_run_is_tested_at_the_points_and_its_updates_are_those_of_its_policy():
    config = convergence_config(batch_size=16, micro_batches=4, digits_steps=6, points=3, test_samples=20)
    found = convergence.train_one(config, ("digits", "stashed", 0))
    assert found["samples"] == [32, 64, 96]
    assert found["updates"] == 24
    assert found["lr"] == 0.01 / 4
    assert len(found["accuracy"]) == len(found["loss"]) == 3
    assert found["accuracy"] == [round(20 * share) / 20 for share in found["accuracy"]]
    plain = convergence.train_one(config, ("digits", "synchronous", 0))
    assert (plain["updates"], plain["lr"]) == (6, 0.01)
    assert plain["loss"] != found["loss"]


def test_the_last_step_is_always_tested():
    assert convergence.stops_of(176, 8) == {22, 44, 66, 88, 110, 132, 154, 176}
    assert convergence.stops_of(3, 8) == {1, 2, 3}


def test_a_curve_is_the_mean_of_its_seeds_and_their_range():
    runs = [
        {"set": "digits", "policy": policy, "seed": seed, "samples": [8, 16], "accuracy": [0.1 * seed, least]}
        for seed, least in ((1, 0.5), (3, 0.75))
        for policy in ("latest", "synchronous")
    ]
    found = convergence.curves(runs, "digits")
    assert list(found) == ["synchronous", "latest"]
    assert found["latest"]["mean"] == pytest.approx([0.2, 0.625])
    assert (found["latest"]["least"], found["latest"]["most"][1]) == ([pytest.approx(0.1), 0.5], 0.75)
    (axes,) = convergence.figure({"runs": runs, "job": {"model": "net"}}).axes
    assert [text.get_text() for text in axes.texts] == ["synchronous 1f1b 62.5", "async, no stashing 62.5"]
    low, high = (text.xy[1] for text in axes.texts)  # pyright: ignore[reportAttributeAccessIssue]
    assert high - low >= 0.05  # though their lines end at one place


def test_every_option_of_convergence_has_its_meaning_in_the_help(capfd):
    assert command.run(["bench", "convergence", "--help"]) == 0
    assert usage.meanings(BenchConvergenceConfig).keys() == vars(BenchConvergenceConfig()).keys()
    assert "digits_steps=176" in capfd.readouterr().out
