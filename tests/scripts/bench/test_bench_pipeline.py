"""penstock bench pipeline: links that are really shaped, pairs of runs, rows, and one tiny race."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import penstock
from penstock import ConfigError, PenstockError, PlanError
from penstock.conf.bench import BenchPipelineConfig
from penstock.pipeline.ranks import launch
from penstock.scripts import command, usage
from penstock.scripts.bench import contest, fairness, harness, link_race, race
from penstock.scripts.bench import shaped_links as links
from penstock.scripts.bench.shaped_links import switch_off
from penstock.scripts.bench.torch_pipelines import stages_of

pytestmark = pytest.mark.slow  # what it tests is a tool of maintainers

SHAPED = links.parse_link("20Mbit")


@pytest.fixture
def somewhere_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return tmp_path


def shaped_or_skip() -> links.Link:
    if reason := links.why_not(SHAPED):
        pytest.skip(f"no shaped links here: {reason}")
    return SHAPED


def gone(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "State:\tZ" in status.read_text()


# Links


def test_a_link_is_the_loopback_device_or_a_rate():
    assert links.parse_link("loopback", delay=3).rate is None
    assert links.parse_link("100Mbit", burst="16KiB", delay=3) == links.Link(
        name="100Mbit", rate=1e8, burst=16384, delay=3
    )
    with pytest.raises(PlanError, match="links=fast is not a rate"):
        links.parse_link("fast")


def test_the_commands_that_shape_a_link():
    assert [shlex.join(line) for line in links.setup(SHAPED, (7, 8), user=False)] == [
        "nsenter --target 7 --net ip link add penstock0 type veth peer name penstock0 netns 8",
        *(
            f"nsenter --target {holder} --net {line}"
            for holder, address in ((7, "10.77.0.1"), (8, "10.77.0.2"))
            for line in (
                f"ip address add {address}/24 dev penstock0",
                "ip link set lo up",
                "ip link set penstock0 up",
                "tc qdisc add dev penstock0 root tbf rate 20000000bit burst 65536b latency 400ms",
            )
        ),
    ]


def test_a_delay_comes_before_the_bucket_and_people_who_are_not_root_have_a_user_namespace():
    lines = [shlex.join(line) for line in links.setup(replace(SHAPED, delay=2.5), (7, 8), user=True)]
    assert all(line.startswith("nsenter --target") and " --user " in line for line in lines)
    queues = [line.partition("penstock0 ")[2] for line in lines if " tc " in line]
    assert queues == 2 * [
        "root handle 1: netem delay 2.5ms limit 100000",
        "parent 1:1 handle 2: tbf rate 20000000bit burst 65536b latency 400ms",
    ]


def test_a_link_that_cannot_be_had_says_why(monkeypatch):
    assert links.why_not(links.parse_link("loopback")) is None
    monkeypatch.setenv("PATH", "/nowhere")
    reason = links.why_not(SHAPED)
    assert reason is not None
    assert "this machine lacks unshare" in reason


LISTEN = """
import socket
with socket.create_server(("10.77.0.1", 29000)) as server:
    print("ready", flush=True)
    connection = server.accept()[0]
    while connection.recv(1 << 20):
        pass
    connection.send(b"!")
"""
SEND = """
import socket, time
with socket.create_connection(("10.77.0.1", 29000)) as connection:
    began = time.perf_counter()
    connection.sendall(bytes(500_000))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
    print(time.perf_counter() - began)
"""


def test_a_shaped_link_holds_its_rate_and_leaves_nothing():
    link = shaped_or_skip()
    with links.joined(link) as (first, second):
        holders = [int(end[2]) for end in (first, second)]
        listening = [*first, sys.executable, "-c", LISTEN]
        with subprocess.Popen(listening, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            sent = subprocess.run(
                [*second, sys.executable, "-c", SEND], capture_output=True, text=True, check=True, timeout=30
            )
    fastest = (8 * 500_000 - 8 * 65536) / 20e6  # a full bucket goes at once
    assert fastest < float(sent.stdout) < 20 * fastest
    assert all(map(gone, holders))


def test_offload_of_a_device_that_is_not_there_is_told():
    told = switch_off("nowhere0")
    assert told.keys() == {"tso", "gso", "gro"}
    assert all(state.startswith("unknown (") for state in told.values())


# Ranks


RANK = """
import os, pathlib, sys, time
from penstock.pipeline.ranks.launch import run_rank

def work():
    pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo" and os.environ["WORLD_SIZE"] == "2"
    if sys.argv[2] == "fail" and os.environ["RANK"] == "1":
        raise ValueError("a bad cut")
    time.sleep(100)

run_rank(work, pathlib.Path(sys.argv[1], "errors"))
"""


def pids(folder: Path) -> list[int]:
    files = [folder / str(rank) for rank in (0, 1)]
    return [int(text) for file in files if file.exists() and (text := file.read_text())]


@pytest.mark.ranks
def test_a_rank_that_fails_ends_all_and_says_why(somewhere_else):
    (somewhere_else / "a_rank.py").write_text(RANK)
    began = time.monotonic()
    with pytest.raises(PenstockError, match="rank 1: ValueError: a bad cut"):
        run_ranks(somewhere_else, "fail")
    assert time.monotonic() - began < 30
    assert len(pids(somewhere_else)) == 2
    assert all(map(gone, pids(somewhere_else)))


@pytest.mark.ranks
def test_ctrl_c_leaves_no_rank(somewhere_else):
    (somewhere_else / "a_rank.py").write_text(RANK)

    def interrupt_later(*_):
        if len(pids(somewhere_else)) < 2:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
        else:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt_later)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            run_ranks(somewhere_else, "sleep")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert all(map(gone, pids(somewhere_else)))


def run_ranks(folder: Path, what: str) -> None:
    launch.start_ranks("a_rank", [str(folder), what], errors=folder / "errors", stages_of_rank=[[0], [1]])


# The race


def test_runs_take_turns_and_pairs_are_neighbours():
    order: list[str] = []

    def run(name):
        return lambda: order.append(name) or float(len(order))

    sides = {
        ("a", "rival"): run("t"),
        ("a", "own"): run("a"),
        ("b", "rival"): run("t"),
        ("b", "own"): run("b"),
    }
    taken = harness.alternate(sides, 2)
    assert "".join(order) == "tatbtatb"
    assert list(taken.values()) == [[1, 5], [2, 6], [3, 7], [4, 8]]
    assert harness.medians(taken)["b", "own"] == 6


def test_runs_end_when_they_have_taken_long_enough_but_one_there_is():
    now = iter(range(100))
    assert harness.alternate({"a": lambda: 1}, 9, seconds=3, clock=lambda: next(now)) == {"a": [1, 1, 1]}
    assert harness.alternate({"a": lambda: 1}, 9, seconds=0) == {"a": [1]}


@pytest.mark.parametrize(("seconds_per_step", "steps"), [(0.5, 8), (0.39, 10), (0.01, 10), (3.9, 1), (9, 1)])
def test_a_run_has_the_steps_that_fit(seconds_per_step, steps):
    assert race.steps_in(4.0, seconds_per_step=seconds_per_step, most=10) == steps


def test_two_sides_that_do_not_train_the_same_are_refused():
    fairness.refuse_other_losses({"torch": 2.3, "raw": 2.3001, "auto": 2.3}, random=False)
    fairness.refuse_other_losses({"torch": 2.3, "raw": 2.5}, random=True)
    for found, random in ((2.31, False), (3.3, True), (float("nan"), True)):
        with pytest.raises(PenstockError, match=r"first losses are 2\.3.* with torch .* with auto"):
            fairness.refuse_other_losses({"torch": 2.3, "raw": 2.3, "auto": found}, random=random)


class Residual(nn.Module):
    """Values that skip over layers, a buffer, and perhaps one layer that is used twice."""

    def __init__(self, *, tied: bool = False):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        if tied:
            self.third = self.first
        self.register_buffer("shift", torch.randn(4))

    def forward(self, x):
        x = self.first(x + self.shift)
        y = self.second(x).relu()
        return self.third(x + y) * x + self.shift


def plan_of(model, cuts, x):
    profile = penstock.measure(penstock.trace(model, (x,)), (x,), repeats=1)
    return penstock.partition(profile, cuts=cuts, micro_batches=2)


@pytest.mark.parametrize("cuts", [["first"], ["second"], ["relu"], ["first", "second", "relu", "third"]])
def test_torchs_stages_have_the_layers_of_the_plan_and_the_bits_of_the_model(cuts):
    model, x = Residual(), torch.randn(3, 4)
    stages = stages_of(model, plan := plan_of(model, cuts, x))
    names = [[node.name for node in stage.graph.nodes] for stage in stages]  # pyright: ignore[reportAttributeAccessIssue,reportGeneralTypeIssues]
    for given, made in zip(plan.stages, names, strict=True):
        assert [name for name in made if name in given.layers] == list(given.layers)
    values = x
    for stage in stages:
        values = stage(*values) if isinstance(values, tuple) else stage(values)
    assert torch.equal(values.view(torch.int32), model(x).view(torch.int32))
    of_stages = [id(parameter) for stage in stages for parameter in stage.parameters()]
    assert sorted(of_stages) == sorted(map(id, model.parameters()))


def test_a_parameter_of_two_stages_is_refused_on_torchs_side():
    model, x = Residual(tied=True), torch.randn(3, 4)
    with pytest.raises(PlanError, match=r"share no parameter, and first\.weight is used"):
        stages_of(model, plan_of(model, ["relu"], x))


# Rows


def measured() -> dict:
    num_bytes = {
        "bytes_raw_forward": 100.0,
        "bytes_sent_forward": 50.0,
        "bytes_raw_backward": 90.0,
        "bytes_sent_backward": 60.0,
        "flew": 0,
        "simulated_seconds": None,
    }
    auto = num_bytes | {"flew": 1, "simulated_seconds": 1.5}
    return {
        "raw": {"rival": [2.0, 4.0, 8.0], "penstock": [1.0, 4.0, 2.0], **num_bytes},
        "zip, auto in flight": {"rival": [1.0, 1.0, 1.0], "penstock": [4.0, 1.0, 2.0], **auto},
    }


def results() -> dict:
    x = torch.randn(3, 4)
    plan = plan_of(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)), ["1"], x)
    rows = link_race.rows_of(measured(), [("raw", 0), ("zip", "auto")], plan=plan, batch_size=8)
    common = {"link": "20Mbit", "bound_samples_per_second": 16.0}
    facts = {"offload": {"tso": "off"}, "congestion_control": "bbr", "rate_measured": 19e6}
    shaped = contest.link_facts(SHAPED, facts)
    refused = contest.link_facts(links.parse_link("5Mbit"), {}, why_not="no permission")
    job = {"model": "net", "cuts": ["_1"], "ranks": 2, "batch_size": 8, "micro_batches": 2}
    return {"links": [shaped, refused], "rows": [common | row for row in rows], "job": job, "threads": 1}


def test_ratios_are_those_of_pairs_and_not_of_medians():
    torch_row, raw, packed = results()["rows"]
    assert raw["speedup_of_pairs"] == [2.0, 1.0, 4.0]
    assert raw["speedup"] == 2.0  # of medians it would be 2.0 as well with 4 and 2: so the other row
    assert packed["speedup_of_pairs"] == [0.25, 1.0, 0.5]
    assert packed["speedup"] == 0.5
    assert raw["samples_per_second"] == 4.0
    assert torch_row["samples_per_second"] == 8 / 1.5  # the median of 1, 1, 1, 2, 4, 8
    assert torch_row["bytes_raw_forward"] == 2 * 3 * 5 * 4  # micro-batches x samples x features x bytes
    assert torch_row["bytes_sent_backward"] == torch_row["bytes_raw_backward"]
    assert {row["bound_samples_per_second"] for row in (torch_row, raw, packed)} == {16.0}


def test_the_wire_ratio_is_that_of_the_slower_direction():
    for row in results()["rows"][1:]:
        assert (row["ratio_forward"], row["ratio_backward"]) == (2.0, 1.5)
        assert row["ratio_slower_direction"] == 1.5


def test_the_table_shows_every_row_and_says_what_was_not_shaped():
    console = Console(width=harness.WIDTH)
    with console.capture() as said:
        console.print(link_race.shown(results()))
    lines = said.get().splitlines()
    assert "net cut after _1, 2 micro-batches of 4, 2 ranks of 1 thread" in lines[0]
    shown = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [row[:4] for row in shown] == [
        ["20Mbit", "torch 1F1B", "-", "-"],
        ["20Mbit", "penstock", "raw", "+0"],
        ["20Mbit", "penstock", "zip", "+1 auto"],
        ["5Mbit", "could not be shaped", "see below", ""],
    ]
    assert shown[1][7] == "-"
    assert shown[2][4:9] == ["4.0", "0.50", "0.25-1.00", "0.75", "3.00"]
    assert shown[2][9:] == ["50 B (2.00x)", "60 B (1.50x)", "1.50x"]
    shaped, refused = map(link_race.describe, results()["links"])
    assert "tbf rate 20 Mbit/s burst 64 KiB latency 400 ms, delay 0 ms, 19 Mbit/s measured" in shaped
    assert "congestion control bbr, tso off" in shaped
    assert refused == "5Mbit: could not be shaped and was not raced on: no permission"


def test_the_picture_has_a_bar_for_every_row():
    made = link_race.figure(results())
    (axes,) = made.axes
    assert [bar.get_height() for bar in axes.patches] == [  # pyright: ignore[reportAttributeAccessIssue]
        row["samples_per_second"] for row in results()["rows"]
    ]
    assert "samples per second" in axes.get_ylabel()
    assert [label.get_text() for label in axes.get_xticklabels()] == ["20Mbit"]
    assert {"torch 1F1B", "raw", "zip, auto in flight"} <= set(axes.get_legend_handles_labels()[1])


def test_a_picture_of_nothing_raced_has_no_legend():
    (axes,) = link_race.figure(results() | {"rows": []}).axes
    assert axes.get_legend() is None


# The command


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("codecs=[raw,zip]", "zip"),
        ("codecs=[raw,raw]", "codecs=[raw,raw] must name one or more, each once"),
        ("codecs=[]", "codecs=[]"),
        ("links=[fast]", "links=fast is not a rate"),
        ("links=[loopback,100Mbit] ranks=3", "ranks=3: a shaped link joins 2; leave 100Mbit out"),
        ("burst=big", "burst=big"),
        ("ranks=1", "ranks=1 must be 2 or more"),
        ("repeats=0", "repeats=0"),
        ("extra_in_flight=[-1]", "extra_in_flight=-1 must be auto, or 0 or more"),
        ("delay=-1", "delay=-1"),
        ("batch_size=10 micro_batches=4", "batch_size=10 is no multiple of micro_batches=4"),
        ("cuts=[a,b]", "ranks=2 needs 1 cuts, found 2"),
        ("codec=raw", "there is no option codec"),
        ("threads=0", "threads=0"),
        ("model=mlp optimizer.lr=-1", "optimizer.lr=-1"),
        ("data.num_samples=64", "batch_size=128 leaves no batch"),
        ("data=image_folder", "data.root= must be given"),
        ("model=mlp cuts=[nowhere]", "nowhere"),
    ],
)
def test_a_refusal_is_one_sentence(typed, told, capfd, somewhere_else):
    assert command.run(["bench", "pipeline", *typed.split()]) == 2
    out, error = capfd.readouterr()
    assert out == ""
    assert error.startswith("penstock: ")
    assert told in error
    assert error.count("\n") == 1
    assert not [path for path in somewhere_else.rglob("*") if path.is_file()]


def test_every_option_has_its_meaning_in_the_help(capfd):
    assert command.run(["bench", "pipeline", "--help"]) == 0
    text = capfd.readouterr().out
    assert usage.meanings(BenchPipelineConfig).keys() == vars(BenchPipelineConfig()).keys()
    for name in ("codecs=[raw,zero_value", "links=[loopback,1Gbit", "extra_in_flight=[0,auto]", "repeats=5"):
        assert name in text
    with pytest.raises(ConfigError, match="seconds=nan"):
        BenchPipelineConfig(seconds=float("nan"))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("link", ["loopback", "100Mbit"])
def test_a_tiny_race_leaves_its_results_and_a_picture(link, somewhere_else, capfd):
    if link != "loopback":
        shaped_or_skip()
    job = f"model=mlp model.hidden=[16] data=fake data.size=4 data.num_samples=32 links=[{link}] codecs=[raw]"
    job += " extra_in_flight=[1] batch_size=8 micro_batches=2 warmup=1 steps=1 repeats=2 hydra.run.dir=run"
    assert command.run(["bench", "pipeline", *job.split()]) == 0
    out, error = capfd.readouterr()
    assert out.splitlines()[-2:] == ["run/results.json", "run/results.png"]
    assert error == ""
    found = json.loads((somewhere_else / "run" / "results.json").read_text())
    assert {"command", "date", "hardware", "versions", "system", "threads", "job", "links"} < found.keys()
    assert found["command"].startswith("penstock bench pipeline model=mlp")
    theirs, ours = found["rows"]
    assert (theirs["side"], ours["side"], ours["codec"], ours["extra_in_flight"]) == (
        "torch",
        "penstock",
        "raw",
        1,
    )
    assert len(ours["speedup_of_pairs"]) == 2
    for way in ("forward", "backward"):
        assert ours[f"bytes_raw_{way}"] == theirs[f"bytes_raw_{way}"] == theirs[f"bytes_sent_{way}"] > 0
    facts = found["links"][0]
    assert (facts["link"], facts["shaped"]) == (link, link != "loopback")
    assert abs(facts["first_loss_torch"] - facts["first_loss_penstock"]) < 1e-5
    assert (somewhere_else / "run" / "results.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(os.listdir(somewhere_else / "run")) == ["plan.json", "results.json", "results.png"]
