"""Ranks started for real: they end together, and one sentence tells why (law L7)."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import leaving
import pytest
from processes import wait_for_the_end

from penstock import ConfigError, PenstockError, TransportError
from penstock.pipeline.distributed import launcher, rank
from penstock.pipeline.distributed.failure import Lost
from penstock.pipeline.distributed.launcher import PREFIX, SECONDS, check_ranks, private_folder, start_ranks


TWO = [[0], [1, 2]]


def start(what, folder, monkeypatch, *, which="1"):
    """Two ranks of which one ends so; what they leave lies in ``folder / "errors"``."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    errors = folder / "errors"
    start_ranks("endings", [what, str(errors), which], errors=errors, stages_of_rank=TWO)


@pytest.mark.ranks
def test_ranks_that_end_well_raise_nothing_and_leave_nothing(tmp_path, monkeypatch):
    before = dict(os.environ)
    start("end well", tmp_path, monkeypatch)
    assert not list(tmp_path.iterdir())
    assert dict(os.environ) == before


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("what", "which", "kind", "told"),
    [
        ("be killed", "1", Lost, r"rank 1 \(stages 1, 2\) was killed by SIGKILL; .*; rank 0: a neighbour"),
        ("stop", "1", Lost, r"rank 1 \(stages 1, 2\) was stopped or hangs: .*; rank 0: a neighbour waited"),
        ("stop", "0", Lost, r"rank 0 \(stage 0\) was stopped or hangs: .*; rank 1: a neigh"),
        ("exit", "1", PenstockError, "rank 1: SystemExit: 3; its traceback is in"),
        ("raise", "1", PenstockError, "rank 1, stage 1, forward of micro-batch 2: the sky fell"),
        ("have a bug", "1", PenstockError, "rank 1: ValueError: no such thing"),
    ],
)
def test_the_cause_is_told_and_not_its_consequence(what, which, kind, told, tmp_path, monkeypatch, capfd):
    before = time.monotonic()
    with pytest.raises(PenstockError, match=f"^{told}") as failed:
        start(what, tmp_path, monkeypatch, which=which)
    assert type(failed.value) is kind
    assert time.monotonic() - before < 60
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.ranks
def test_what_a_rank_started_and_left_ends_with_it(tmp_path, monkeypatch):
    with pytest.raises(Lost, match=r"rank 1 \(stages 1, 2\) ended with exit code 7"):
        start("leave a child", tmp_path, monkeypatch)
    wait_for_the_end(int((tmp_path / "child").read_text()))


SLOW = r"""
import os, time
os.write(1, b"%d\n" % os.getpid())  # in one piece: another rank writes there, too
time.sleep(60)  # as long as an import may take
"""
LAUNCHER = """
from pathlib import Path
from penstock.pipeline.distributed.launcher import start_ranks
start_ranks("slow_to_import", [], errors=Path("errors"), stages_of_rank=[[0], [1]])
"""


@pytest.mark.ranks
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's promise is Linux's")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_ranks_that_still_import_end_with_their_launcher(number, tmp_path):
    (tmp_path / "slow_to_import.py").write_text(SLOW)
    command = [sys.executable, "-c", LAUNCHER]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path
    ) as launcher:
        assert launcher.stdout is not None
        pids = [int(launcher.stdout.readline()) for _ in range(2)]
        launcher.send_signal(number)
    wait_for_the_end(*pids)


def test_a_rank_whose_launcher_went_before_it_could_be_tied_ends_at_once():
    command = [sys.executable, "-m", "penstock.pipeline.distributed.rank", "nothing"]
    gone = os.environ | {rank.LAUNCHER: "1" if os.getpid() != 1 else "2"}
    ended = subprocess.run(command, env=gone, capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "")


@pytest.mark.ranks
def test_a_rank_that_cannot_be_started_is_one_sentence_and_leaves_none(tmp_path):
    with pytest.raises(TransportError, match=r"^nowhere could not be started: No such file"):
        start_ranks("time", [], errors=tmp_path, stages_of_rank=TWO, ends=[["sleep", "60", ";"], ["nowhere"]])


def test_ranks_that_find_no_folder_to_meet_in_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(TransportError, match=r"temporary folder, and there is none .*; name one with TMPDIR"):
        start_ranks("time", [], errors=tmp_path, stages_of_rank=TWO)


def test_more_ranks_than_the_machine_starts_are_refused(monkeypatch):
    monkeypatch.setattr(launcher, "cores", lambda: 3)
    check_ranks(12)
    with pytest.raises(ConfigError, match=r"ranks=13 .* 3 cores .* lower ranks to 12"):
        check_ranks(13)


def test_threads_share_the_cores_and_are_at_least_one(monkeypatch):
    monkeypatch.setattr(launcher, "cores", lambda: 6)
    assert [launcher.threads_per_rank(ranks) for ranks in (1, 2, 4, 6, 12)] == [6, 3, 1, 1, 1]


def test_cores_are_those_this_process_may_use():
    assert 1 <= launcher.cores() <= (os.cpu_count() or 1)


@pytest.mark.slow
@pytest.mark.ranks
def test_groups_start_and_end_again_and_again_without_an_abort():
    command = [sys.executable, str(Path(leaving.__file__)), "10"]
    options = {"env": os.environ | {"GLOO_SOCKET_IFNAME": launcher._loopback()}, "timeout": 240}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert (ended.stdout, ended.stderr) == ("{0: 20}\n", "")


HOLD = """
from penstock.pipeline.distributed.launcher import private_folder
with private_folder() as folder:
    print(folder, flush=True)
    input()
"""


def holder() -> Any:
    command, pipe = [sys.executable, "-c", HOLD], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)


def age(path):
    then = path.stat().st_mtime - SECONDS - 1
    os.utime(path, (then, then))


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_folder_goes_with_its_block_and_others_may_not_enter(temporary):
    with private_folder() as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not any(temporary.iterdir())


def test_a_file_system_without_locks_has_folders_too(temporary, monkeypatch):
    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with private_folder() as left:
        age(left)
        with private_folder() as folder:
            assert {*temporary.iterdir()} == {left, folder}  # nobody can tell that it is left over
    assert not any(temporary.iterdir())


def test_the_next_takes_away_what_a_killed_process_left_and_nothing_else(temporary):
    with holder() as killed, holder() as alive:
        left, lives = (temporary / one.stdout.readline().strip() for one in (killed, alive))
        (left / "config.yaml").write_text("x")
        new, weights = temporary / f"{PREFIX}new", temporary / "penstock_weights_x"
        for path in (new, weights):
            path.mkdir()
        for path in (left, lives, weights):
            age(path)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        with private_folder() as folder:
            assert {*temporary.iterdir()} == {folder, lives, new, weights}
        alive.communicate("\n")
    assert alive.returncode == 0
    assert not lives.exists()
