"""The run folder: one run's alone, whose files are whole or not there, and never another run's."""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import stat

import pytest
import torch
from ranks import context
from reports import PLAN

from penstock import ConfigError, Plan, PlanError
from penstock.conf.schema import TrainConfig
from penstock.pipeline.run.run_folder import RunFolder
from penstock.stages.files import save_json


@pytest.fixture
def folder(tmp_path):
    return RunFolder(path=tmp_path / "run")


def test_the_configuration_comes_back_as_it_was_saved(tmp_path):
    folder = RunFolder(path=tmp_path)
    config = TrainConfig(model={"_target_": "my.Net", "widths": [1, 2]}, stages=2, threads=3, max_steps=7)
    config.clip.norm = 0.5
    folder.save(config, PLAN)
    again = folder.read_config()
    assert again.versions["torch"] == str(torch.__version__)
    assert again.settings["device"] == "cpu"
    again.versions, again.settings = {}, {}
    assert again == config
    assert Plan.load(folder.plan) == PLAN
    assert folder.plan_picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["summary.json", "model.safetensors"])
def test_what_a_run_achieved_is_not_written_over(name, folder):
    with folder.claim():
        save_json(folder.path / name, {"steps": 1})
    refused(folder, r"run already holds .* another folder")
    assert [path.name for path in folder.path.iterdir()] == [name]


def test_a_claimed_folder_is_gone_only_when_it_is_empty(folder):
    with folder.claim() as missing:
        assert missing is None
        assert [path.name for path in folder.path.iterdir()] == [".lock"]
    assert not folder.path.exists()
    with folder.claim():
        folder.config.touch()
    assert [path.name for path in folder.path.iterdir()] == ["config.yaml"]


def hold(path, pipe):
    with RunFolder(path=path).claim():
        pipe.send("holds")
        pipe.recv()


@contextlib.contextmanager
def holder_of(folder):
    """Another process that holds ``folder``, and what ends it well."""
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(folder.path, theirs))
    process.start()
    assert ours.recv() == "holds"

    def end():
        ours.send("ends")
        process.join()

    yield process, end
    process.kill()
    process.join()


def refused(folder, told):
    with pytest.raises(ConfigError, match=told), folder.claim():
        pass


def test_a_second_run_is_refused_while_the_first_lives_however_that_ends(folder):
    with holder_of(folder) as (first, _):
        for _ in range(2):  # the refused one did not break the lock
            refused(folder, f"in use by another run, pid {first.pid} on {socket.gethostname()}; wait")
        lock = folder.path / ".lock"
        lock.write_text("\x1b[2J send money")  # what a stranger wrote is not shown
        refused(folder, "use by another run; wait until it ends")
        first.kill()
        first.join()
        with folder.claim():
            assert lock.read_text() == f"pid {os.getpid()} on {socket.gethostname()}"
    assert not folder.path.exists()


def test_a_lock_that_was_opened_before_its_holder_removed_it_is_no_lock(folder, monkeypatch):
    flock, opened = fcntl.flock, []
    with holder_of(folder) as (_, end):

        def wait_for_the_first(file, how):
            if not opened:
                end()  # between opening and locking, the first ends and the file is gone
            opened.append(os.fstat(file).st_ino)
            flock(file, how)

        monkeypatch.setattr(fcntl, "flock", wait_for_the_first)
        with folder.claim():
            assert len(opened) == 2
            assert (folder.path / ".lock").stat().st_ino == opened[-1]


def test_a_file_system_without_locks_is_told(folder, monkeypatch):
    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with folder.claim() as missing:
        assert missing is not None
        assert "run is on a file system without locks (No locks available)" in missing


def test_a_folder_that_was_removed_or_is_another_runs_is_not_written_into(folder):
    removed = pytest.raises(ConfigError, match="run was removed while this run wrote into it")
    with folder.claim():
        mark = folder.mark()
        folder.check(mark)
        shutil.rmtree(folder.path)
        with removed:
            folder.check(mark)
        with holder_of(folder), removed:
            folder.check(mark)


def test_temporary_files_of_a_killed_run_go_and_those_of_other_programs_stay(folder):
    folder.errors.mkdir(parents=True)
    ours = [folder.path / "model.safetensors.0123abcd.part", folder.errors / "rank_0.json.4567cdef.part"]
    theirs = folder.path / "film.mkv.part"
    for path in (*ours, theirs):
        path.touch()
    with folder.claim():
        assert [path.exists() for path in (*ours, theirs)] == [False, False, True]
        ours[0].touch()
    assert not ours[0].exists()


def test_an_unfinished_run_is_taken_over_in_so_many_words(tmp_path):
    folder, told = RunFolder(path=tmp_path), []
    folder.begin(told.append)
    assert not told
    folder.errors.mkdir()
    (folder.errors / "rank0.json").write_text("{}")
    for path in (folder.metrics, folder.trace, folder.timeline, folder.plan):
        path.touch()
    folder.begin(told.append)
    (sentence,) = told
    left = "metrics.jsonl, timeline.png, timeline.json, errors/rank0.json"
    assert sentence == f"{tmp_path} is taken over from a run that did not finish, without its {left}"
    assert sorted(tmp_path.rglob("*")) == [folder.errors, folder.plan]


def test_what_ranks_are_told_lies_where_nobody_else_can_write(folder, tmp_path, monkeypatch):
    with folder.private() as told:
        assert stat.S_IMODE(told.path.stat().st_mode) == 0o700
        told.tell(TrainConfig(max_steps=3), PLAN)
        assert (told.read_config().max_steps, Plan.load(told.plan)) == (3, PLAN)
    assert not told.path.exists()
    assert not folder.path.exists()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    nowhere = r"a temporary folder \(TMPDIR\) cannot be written \(No such file or directory\)"
    with pytest.raises(ConfigError, match=nowhere), folder.private():
        pass


def test_what_failing_ranks_left_is_kept_in_the_run_folder(folder):
    def fail(errors):
        errors.mkdir()
        (errors / "rank0.json").write_text("{}")
        raise PlanError(f"its traceback is in {errors / 'rank0.json'}")

    with pytest.raises(PlanError) as failed, folder.private() as told:
        fail(told.errors)
    assert str(failed.value) == f"its traceback is in {folder.errors / 'rank0.json'}"
    assert (folder.errors / "rank0.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("file", "(File exists); move"),
        ("file/run", "(Not a directory); move"),
        ("n" * 300, "(File name too long); shorten its name"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused_with_its_path(name, told, tmp_path):
    (tmp_path / "file").touch()
    refused(RunFolder(path=tmp_path / name), re.escape(f"{tmp_path / name} cannot be written {told}"))


def test_a_folder_of_somebody_else_is_refused(folder, tmp_path):
    tmp_path.chmod(0o500)
    if root := os.geteuid() == 0:  # who may write everywhere
        os.seteuid(65534)
    try:
        refused(folder, r"\(Permission denied\); make it writable")
    finally:
        if root:
            os.seteuid(0)
