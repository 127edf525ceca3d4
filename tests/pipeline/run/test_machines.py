"""A run on several machines: here two launchers on one, or one in each of two network namespaces."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import ranks_in
from reference import same_bits
from safetensors.torch import load_file
from shaped_links import ADDRESSES, DEVICE, joined, parse_link, why_not

from penstock import ConfigError
from penstock.conf.schema import TrainConfig
from penstock.pipeline.run.run_folder import step_of
from penstock.scripts import command

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

# Five steps an epoch of 40 samples each.
JOB = (
    "model=mlp model.hidden=[16,12] data._target_=own_digits.samples data.workers=0 batch_size=40"
    " micro_batches=3 epochs=2"
    " optimizer.momentum=0.5 scheduler=cosine seed=3 threads=1 deadline=60 codec=zero_value"
)
KEPT = f"{JOB} checkpoint.every=2 hydra.run.dir=run"
SECRET = "a secret of the run"
LINK = parse_link("1Gbit")
SUPPORT = Path(__file__).parents[2] / "support"


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_SECRET", SECRET)
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same training in one process."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    options = KEPT.replace("hydra.run.dir=run", f"hydra.run.dir={folder} ranks=1 stages=2")
    assert command.run(["train", *options.split()]) == 0
    return folder


class Machine:
    """A launcher, with what it printed in a file; ``prefix``: runs it in its namespace."""

    def __init__(self, typed, node, *, prefix=(), **surroundings):
        self.said = Path(f"node_{node}_{time.monotonic_ns()}.txt")
        command = [*prefix, sys.executable, "-m", "penstock", "train", *typed.split(), f"node={node}"]
        with self.said.open("w") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | surroundings
            )

    def end(self, seconds=240):
        """Wait for the end; return its exit code and the last line it printed."""
        code = self.process.wait(seconds)
        return code, self.said.read_text().splitlines()[-1:]

    def kill(self):
        self.process.kill()
        self.process.wait(30)


@contextlib.contextmanager
def machines(typed, *, nodes=(0, 1), prefixes=((), ()), host="127.0.0.1", **surroundings):
    """Start a run on two machines; end what is left of it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    typed = f"{typed} nodes=2 ranks=2 master={host}:{port}"
    with contextlib.ExitStack() as stack:

        def start(node):
            machine = Machine(typed, node, prefix=prefixes[node], **surroundings)
            stack.callback(machine.kill)
            return machine

        yield [*map(start, nodes), start]


def until(condition, *, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def same_run(ours, theirs):
    a, b = (load_file(f"{folder}/model.safetensors") for folder in (ours, theirs))
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


def steps():
    with contextlib.suppress(OSError):
        return Path("run/metrics.jsonl").read_bytes().count(b"\n")
    return 0


def deadly(*, after=281):
    """Let rank 1, on the second machine, be killed at a sample."""
    Path("kill_0").touch()
    return {"VICTIM": "1", "AFTER": str(after)}


def test_two_machines_train_with_the_bits_of_one_process(whole):
    with machines(KEPT) as (first, second, _):
        assert first.end()[0] == 0, first.said.read_text()
        assert second.end() == (0, []), second.said.read_text()
    assert same_run("run", whole)
    assert not ranks_in(Path.cwd())


@pytest.mark.slow
def test_a_rank_lost_on_another_machine_is_started_again(whole):
    with machines(f"{KEPT} max_restarts=1", **deadly()) as (first, second, _):
        assert first.end()[0] == 0, first.said.read_text()
        assert second.end()[0] == 0, second.said.read_text()
        said = first.said.read_text()
    assert re.search(r"rank 1 \(stage 1\) was killed by SIGKILL.*; restart 1 of 1 goes on behind step", said)
    assert same_run("run", whole)


@pytest.mark.slow
def test_an_error_on_another_machine_is_told_on_both_and_not_tried_again():
    with machines(f"{KEPT} max_restarts=3", BY="NO_SIGNAL", **deadly()) as (first, second, _):
        ended = [first.end(), second.end()]
        assert "restart" not in first.said.read_text()
    for code, (said,) in ended:
        assert code == command.REFUSED
        assert re.match(r"penstock: rank 1.*AttributeError.*; its traceback is in .*/errors/rank1.json", said)
    assert Path("run/errors/rank1.json").exists()


@pytest.mark.slow
def test_a_machine_that_is_lost_and_comes_back_goes_on_with_the_run():
    slow = f"{KEPT} max_restarts=2 epochs=40 join_deadline=120"
    with machines(slow) as (first, second, start):
        until(lambda: steps() >= 5)
        second.kill()
        until(lambda: "restart 1 of 2 goes on behind step" in first.said.read_text())
        again = start(1)
        assert first.end()[0] == 0, first.said.read_text()
        assert again.end() == (0, []), again.said.read_text()
    assert steps() == 200
    options = KEPT.replace("run.dir=run", "run.dir=plain")
    assert command.run(["train", *options.split(), "epochs=40", "ranks=1", "stages=2"]) == 0
    assert same_run("run", "plain")


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_sigterm_at_either_machine_stops_both_behind_a_checkpoint(which):
    with machines(f"{KEPT} max_restarts=2 epochs=400 join_deadline=120") as (*both, _):
        until(lambda: steps() >= 5)
        both[which].process.send_signal(signal.SIGTERM)
        codes = [machine.end()[0] for machine in both]
        assert codes[0] == 143, both[0].said.read_text()
        assert codes[1] != 0
        assert "restart 1 of" not in both[0].said.read_text()
    assert "keeps a checkpoint" in both[0].said.read_text()
    assert max(map(step_of, Path("run/checkpoints").iterdir())) == steps()


@pytest.mark.slow
def test_the_first_machine_comes_back_too():
    slow = f"{KEPT} max_restarts=2 epochs=40 join_deadline=120 resume=auto"
    with machines(slow) as (first, second, start):
        until(lambda: steps() >= 5)
        first.kill()
        until(lambda: "node 0 has gone; waiting for it to come back" in second.said.read_text())
        again = start(0)
        assert again.end()[0] == 0, again.said.read_text()
        assert second.end()[0] == 0, second.said.read_text()
    assert steps() == 200


@pytest.mark.slow
def test_ctrl_c_on_either_machine_ends_both():
    for which in (0, 1):
        with machines(f"{JOB} hydra.run.dir=run_{which} epochs=400 max_restarts=2") as (*both, _):
            metrics = Path(f"run_{which}/metrics.jsonl")
            until(lambda metrics=metrics: metrics.exists() and metrics.stat().st_size > 1000)
            both[which].process.send_signal(signal.SIGINT)
            assert both[which].end(60)[0] == 130
            code, (said,) = both[1 - which].end(60)
            assert code == command.REFUSED
            assert "was stopped by" in said
    assert not ranks_in(Path.cwd())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "surroundings", "first_said", "second_said"),
    [
        ("", {"PENSTOCK_SECRET": "another one of 16"}, "node 1 of 2 did not come", "has another secret"),
        (
            "seed=4",
            {},
            "seed must be alike on all nodes, found nothing on node 0 and 4 on node 1",
            "seed must",
        ),
        ("", None, "node 1 of 2 did not come to master=127.0.0.1:", None),
    ],
    ids=["secret", "options", "missing"],
)
def test_a_machine_that_does_not_fit_is_told(more, surroundings, first_said, second_said):
    job = f"{KEPT.replace(' seed=3', '')} join_deadline=20"
    with machines(job, nodes=[0]) as (first, _):
        typed = " ".join(first.process.args[4:-1])
        second = None if surroundings is None else Machine(f"{typed} {more}", 1, **surroundings)
        code, (said,) = first.end()
        assert (code, first_said in said) == (command.REFUSED, True), said
        if second:
            code, (said,) = second.end()
            assert (code, second_said in said) == (command.REFUSED, True), said


@pytest.mark.slow
def test_checkpoints_want_one_folder(tmp_path):
    """The second machine sees another folder by the same name: a mount of its own."""
    apart = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {tmp_path}/runs && exec "$@"', "sh"]
    (tmp_path / "runs").mkdir()
    tried = subprocess.run([*apart, "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(f"no mounts of one's own here: {tried.stderr.decode()}")
    with machines(f"{KEPT}s/one", prefixes=((), apart)) as (first, second, _):
        for machine in (first, second):
            code, (said,) = machine.end()
            assert code == command.REFUSED
            assert "node 1: all ranks write a checkpoint into one folder" in said


@pytest.fixture
def hosts():
    """Two network namespaces, joined by a link: how to run a command in each."""
    if reason := why_not(LINK):
        pytest.skip(reason)
    with joined(LINK) as ends:
        yield ends


def switch(hosts, way):
    subprocess.run([*hosts[0], "ip", "link", "set", DEVICE, way], check=True)


def listening(host):
    """The addresses that anybody listens at there."""
    shown = subprocess.run([*host, "cat", "/proc/net/tcp"], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in shown.splitlines()[1:]]
    found = {row[1].partition(":")[0] for row in rows if row[3] == "0A"}
    return {socket.inet_ntoa(bytes.fromhex(address)[::-1]) for address in found}


@pytest.mark.slow
def test_two_hosts_train_with_the_same_bits_and_listen_where_they_must(hosts, whole):
    job = f"{KEPT} epochs=40"
    with machines(job, prefixes=hosts, host=ADDRESSES[0]) as (first, second, _):
        until(lambda: steps() >= 5)
        assert [listening(host) for host in hosts] == [{ADDRESSES[0]}, {ADDRESSES[1]}]
        assert first.end()[0] == 0, first.said.read_text()
        assert second.end()[0] == 0, second.said.read_text()
    assert steps() == 200


@pytest.mark.slow
def test_a_cable_that_is_pulled_for_ten_seconds_ends_nothing(hosts, whole):
    with machines(KEPT, prefixes=hosts, host=ADDRESSES[0]) as (first, second, _):
        until(lambda: steps() >= 2)
        switch(hosts, "down")
        time.sleep(10)
        done = steps()
        switch(hosts, "up")
        assert done < 10
        assert first.end()[0] == 0, first.said.read_text()
        assert second.end()[0] == 0, second.said.read_text()
    assert same_run("run", whole)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("nodes=2 node=2 master=a:1", "node=2 must be below nodes=2"),
        ("nodes=2", "nodes=2 meet at an address of node 0, and there is none; add master=HOST:PORT"),
        ("nodes=2 node=1", "nodes=2 meet at an address of node 0, and there is none; add master=HOST:PORT"),
        ("node=1", "node=1 must be below nodes=1"),
        ("nodes=2 node=x master=a:1", "node=x does not fit"),
        ("master=a:1", "master=a:1 is where several nodes meet; add nodes="),
        ("nodes=2 master=a", "master=a must be HOST:PORT"),
        ("nodes=2 master=a:70000", "master=a:70000 must be HOST:PORT"),
        ("nodes=2 ranks=3 master=a:1", "ranks=3 are shared evenly by nodes=2"),
        ("nodes=2 master=192.0.2.1:29500", "master=192.0.2.1:29500 must be a free port at an address"),
        ("nodes=2 master=a:1 join_deadline=0", "join_deadline=0.0 must be above 0"),
        ("nodes=2 node=1 master=a:1 --multirun", "--multirun is several runs"),
        (
            "nodes=2 node=1 master=127.0.0.1:1 join_deadline=1",
            "node 0 did not answer at master=127.0.0.1:1 within 1 s: Connection refused",
        ),
    ],
)  # fmt: skip
def test_machines_that_cannot_meet_are_refused(options, said, capfd):
    assert command.run(["train", *JOB.split(), *options.split()]) == command.REFUSED
    (line,) = capfd.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize("node", [0, 1])
def test_a_secret_is_asked_for(node, capfd, monkeypatch):
    monkeypatch.setenv("PENSTOCK_SECRET", "short")
    typed = f"{JOB} nodes=2 node={node} master=127.0.0.1:29500"
    assert command.run(["train", *typed.split()]) == command.REFUSED
    assert "a secret of 16 characters or more in PENSTOCK_SECRET, found 5" in capfd.readouterr().err


def test_threads_are_those_of_one_machine():
    assert TrainConfig(ranks=4, nodes=2, master="a:1").local_ranks == 2
    with pytest.raises(ConfigError, match="min_ranks=1 does not go with nodes=2"):
        TrainConfig(ranks=2, nodes=2, master="a:1", min_ranks=1, max_restarts=1)
