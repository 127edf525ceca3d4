"""Folders that a killed process leaves in the directory for temporary files: the next one takes them away."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from typing import Any

import pytest

from penstock.pipeline.distributed.launcher import PREFIX, SECONDS, private_folder

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


@pytest.fixture(autouse=True)
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
