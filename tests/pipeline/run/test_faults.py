"""Whatever is killed, stopped or cut off ends the run with a sentence that names it, and no process stays."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from faults import ended, started
from processes import ranks_in

pytestmark = [pytest.mark.slow, pytest.mark.ranks]

RUN = "checkpoint.every=1 hydra.run.dir=run"


def failed(process, folder, *, seconds=90):
    """The last line of a run that fails, which must have left no process and nothing half written."""
    code, out, error, _ = ended(process, seconds=seconds)
    assert code == 2, out + error
    assert not ranks_in(folder / "run")
    assert not list((folder / "run").rglob("*.part"))
    return error.splitlines()[-1]


@pytest.mark.parametrize(
    ("fault", "more", "told"),
    [
        ("1 forward 9 SIGKILL", "ranks=2", r"rank 1 \(stage 1\) was killed by SIGKILL; .*did not arrive"),
        ("0 forward 9 SIGKILL", "ranks=2", r"rank 0 \(stage 0\) was killed by SIGKILL"),
        (
            "1 forward 9 SIGSTOP",
            "ranks=2 deadline=15",
            r"rank 1 \(stage 1\) was stopped or hangs: .*; rank 0, stage 0, backward of micro-batch 0, "
            r"step \d: the gradient of \w+ of micro-batch 0, [\d,]+ bytes from stage 1 to stage 0, did not "
            r"arrive from rank 1 within 15 s: ",
        ),
        (
            "2 forward 1 SIGSTOP",
            "ranks=3 deadline=15",
            r"rank 2 \(stage 2\) was stopped or hangs: .* within 15 s",
        ),
        (
            "1 update 3 SIGSTOP",
            "ranks=2 deadline=15 clip.norm=1",
            r"rank 1 \(stage 1\) was stopped .*rank 0 lost the group of ranks in the report of a step "
            r"\([\d,]+ bytes of each\) within 15 s: rank 1 did not answer",
        ),
        ("1 test 2 SIGSTOP", "ranks=2 deadline=15", r"rank 1 \(stage 1\) was stopped .* within 15 s"),
    ],
)
def test_a_rank_that_is_killed_or_stopped_is_named_in_the_last_line(fault, more, told, tmp_path):
    begun = time.monotonic()
    said = failed(started(tmp_path, f"{more} {RUN}", fault=fault), tmp_path)
    print(f"{fault} {more}: {time.monotonic() - begun:.1f} s in all: {said}")
    assert re.match(f"penstock: {told}", said), said


def children(process):
    """The processes that a process has started, the first one first."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
    return sorted(map(int, listed.stdout.split()))


def test_a_rank_that_is_stopped_before_the_ranks_meet_is_named(tmp_path):
    process = started(tmp_path, f"ranks=2 deadline=15 {RUN}")
    until = time.monotonic() + 60
    while len(ranks := children(process)) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(ranks[1], signal.SIGSTOP)
    told = r"penstock: rank 1 \(stage 1\) was stopped or hangs: .*rank 1 of 2 did not join within 15 s"
    assert re.match(told, said := failed(process, tmp_path)), said


def test_ranks_go_with_a_launcher_that_is_killed(tmp_path):
    process = started(tmp_path, f"ranks=2 {RUN} epochs=100000", fault="0 forward 9 SIGKILL@launcher")
    assert ended(process)[0] == -signal.SIGKILL
    until = time.monotonic() + 30
    while left := ranks_in(tmp_path / "run"):
        assert time.monotonic() < until, left


def test_a_worker_of_a_loader_that_dies_is_named_with_its_rank(tmp_path):
    said = failed(started(tmp_path, f"ranks=2 {RUN}", LOADER="1"), tmp_path)
    told = r"penstock: rank [01]: train sample \d+ cannot be read: \w+: .*; its traceback is in "
    assert re.match(told, said), said


def test_the_traceback_of_a_rank_is_a_file_away_or_on_the_terminal(tmp_path):
    for more, shown in (
        ("ranks=2", False),
        ("ranks=2 traceback=true", True),
        ("ranks=1 traceback=true", True),
    ):
        fault = f"{'0' if '=1' in more else '1'} forward 5 raise"
        code, _, error, _ = ended(started(tmp_path, f"{more} stages=2 hydra.run.dir=run", fault=fault))
        assert code == 2
        last = error.splitlines()[-1]
        told = (
            r"penstock: rank (\d), stage \d, forward of micro-batch \d, step \d: layer \w+: ValueError: sky; "
        )
        found = re.fullmatch(told + r"its traceback is in (.*/run/errors/rank\d.json)", last)
        assert found, last
        assert "come_to" in Path(found[2]).read_text()
        assert ("come_to" in error) == shown
        assert (error.count("\n") == 1) != shown
