"""Ranks started for real: they end together, and one sentence tells why (law L7)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock import ConfigError, PenstockError, StageError, TransportError
from penstock.pipeline import launch
from penstock.pipeline.launch import check_ranks, run_rank, start_ranks

ERRORS = Path("errors")
TWO = [[0], [1, 2]]


def act(what, errors):
    """What each of two started ranks runs: rank 1 ends as it is told, a moment after rank 0 has lost it."""
    if what == "end well":
        return
    if os.environ["RANK"] == "0":
        raise TransportError("rank 0 waited for the gradient of micro-batch 3")
    while not (errors / "rank0.json").exists():
        time.sleep(0.01)
    time.sleep(1.6)  # longer than a rank that is told to end still lives
    if what == "be killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "leave":
        os._exit(7)
    if what == "raise":
        raise StageError("rank 1, stage 1, forward of micro-batch 2: the sky fell")
    raise ValueError("no such thing")


def start(what, folder, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    started = time.monotonic()
    start_ranks("test_launch", [what, str(folder)], errors=folder / ERRORS, stages_of_rank=TWO)
    return time.monotonic() - started


@pytest.mark.ranks
def test_ranks_that_end_well_raise_nothing_and_leave_nothing(tmp_path, monkeypatch):
    before = dict(os.environ)
    start("end well", tmp_path, monkeypatch)
    assert not list(tmp_path.iterdir())
    assert {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")} == before


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("what", "kind", "told"),
    [
        ("be killed", TransportError, "rank 1 (stages 1, 2) was killed by SIGKILL; .*; rank 0 waited"),
        ("leave", TransportError, "rank 1 (stages 1, 2) ended with exit code 7"),
        ("raise", PenstockError, "rank 1, stage 1, forward of micro-batch 2: the sky fell"),
        ("have a bug", PenstockError, "rank 1: ValueError: no such thing"),
    ],
)
def test_the_cause_is_told_and_not_its_consequence(what, kind, told, tmp_path, monkeypatch, capfd):
    before = time.monotonic()
    with pytest.raises(PenstockError, match=told.replace("(", r"\(").replace(")", r"\)")) as failed:
        start(what, tmp_path, monkeypatch)
    assert type(failed.value) is kind
    assert time.monotonic() - before < 60
    assert "Traceback" not in "".join(capfd.readouterr())


MORTAL = """
import time
from penstock.pipeline import launch
launch._end_with_launcher()
print("ready", flush=True)
time.sleep(60)
"""
LAUNCHER = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", sys.argv[1]]).pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's promise is Linux's")
def test_a_rank_ends_with_its_launcher():
    command = [sys.executable, "-c", LAUNCHER, MORTAL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        assert launcher.stdout.readline() == "ready\n"
        launcher.kill()
    deadline = time.monotonic() + 10
    while _runs(pid):
        assert time.monotonic() < deadline, "the rank outlived its launcher"
        time.sleep(0.05)


TOLD_TO_END = """
import os, signal, time
from pathlib import Path
from penstock.pipeline import launch
def work():
    os.kill(os.getpid(), signal.SIGTERM)
    print("last word", flush=True)
    time.sleep(60)
launch.run_rank(work, Path("errors"))
"""


def test_a_rank_that_is_told_to_end_has_a_last_word():
    ended = subprocess.run([sys.executable, "-c", TOLD_TO_END], stdout=subprocess.PIPE, text=True, timeout=30)
    assert (ended.stdout, ended.returncode) == ("last word\n", 128 + signal.SIGTERM)


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_more_ranks_than_the_machine_starts_are_refused(monkeypatch):
    monkeypatch.setattr(launch, "cores", lambda: 3)
    check_ranks(12)
    with pytest.raises(ConfigError, match=r"ranks=13 .* 3 cores .* lower ranks to 12"):
        check_ranks(13)


def test_threads_share_the_cores_and_are_at_least_one(monkeypatch):
    monkeypatch.setattr(launch, "cores", lambda: 6)
    assert [launch.threads_per_rank(ranks) for ranks in (1, 2, 4, 6, 12)] == [6, 3, 1, 1, 1]


def test_cores_are_those_this_process_may_use():
    assert 1 <= launch.cores() <= (os.cpu_count() or 1)


if __name__ == "__main__":
    left = Path(sys.argv[2]) / ERRORS
    run_rank(lambda: act(sys.argv[1], left), left)
