"""The run folder: one run's alone, whose files are whole or not there, whatever becomes of its disk."""

import contextlib
import errno
import fcntl
import os
import re
import resource
import shutil
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cases import Case, pipeline_with_batches, plan_file
from ranks import context
from reference import same_tree
from reports import PLAN

import penstock
from penstock import ConfigError, Plan
from penstock.conf.schema import CheckpointConfig, TrainConfig
from penstock.pipeline.run.checkpoints import Checkpoints
from penstock.pipeline.run.run_folder import RunFolder
from penstock.stages.files import save_json


@pytest.fixture
def folder(tmp_path):
    return RunFolder(path=tmp_path / "run")


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


def test_a_file_system_without_locks_is_told(folder, monkeypatch):
    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with folder.claim() as missing:
        assert missing is not None
        assert "run is on a file system without locks (No locks available)" in missing


def test_a_folder_that_was_removed_or_is_another_runs_is_not_written_into(folder):
    removed = pytest.raises(ConfigError, match="run was removed during this run")
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


CASE = Case(model="mlp", cuts=2, optimizer="adamw", scheduler=True, steps=6)


class Run:
    """Steps and their checkpoints, as ``penstock train`` has them; ``said``: what a person was told."""

    def __init__(self, folder, *, every=1, keep=9, plan=None):
        self.pipe, self.batches = pipeline_with_batches(CASE, plan)
        self.said, self.folder = [], RunFolder(path=Path(folder))
        options = CheckpointConfig(every=every, keep=keep)
        self.kept = Checkpoints(self.pipe, self.folder.checkpoints, options, tell=self.said.append)

    def __enter__(self):
        self.kept.__enter__()
        return self

    def __exit__(self, *error):
        self.kept.__exit__(*error)

    def steps(self, number):
        for _ in range(number):
            self.kept.after(self.pipe.step(*self.batches[self.pipe.num_steps]))
        self.kept.settle()
        return self.whole()

    def whole(self):
        """The steps of the checkpoints that are there, each of them read to its end."""
        found = self.folder.whole_checkpoints()
        for folder in found:
            penstock.load(Run(self.folder.path / "other").pipe, folder)
        return sorted(int(folder.name[5:]) for folder in found)


@pytest.fixture
def disk(tmp_path):
    """A run's folder for checkpoints on a file system of its own, which takes two of them and not three."""
    with Run(tmp_path / "measure") as run:
        run.steps(1)
    (part,) = (tmp_path / "measure").rglob("*.safetensors")
    pages = -(-part.stat().st_size // 4096) + 2  # and the index
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={(2 * pages + 1) * 4}k", "none", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system of its own can be mounted by root only, and not in every container")
    yield (
        tmp_path / "run",
        lambda options: subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True),
    )
    subprocess.run(["umount", "-l", str(folder)], check=True)


def end_of(run):
    run.steps(CASE.steps - run.pipe.num_steps)
    return run.pipe.state_dict()


@pytest.fixture
def undisturbed(tmp_path):
    with Run(tmp_path / "undisturbed", every=99) as run:
        return end_of(run)


def test_a_disk_that_is_full_ends_no_training_and_is_told_once(disk, undisturbed):
    folder, remount = disk
    with Run(folder) as run:
        assert run.steps(2) == [1, 2]
        assert run.said == []
        assert run.steps(2) == [1, 2]
        (said,) = run.said
        assert "a checkpoint was not written, those before stay" in said
        assert "(No space left on device)" in said
        assert not list(folder.rglob("*.part"))
        remount("size=64m")
        assert run.steps(1) == [1, 2, 5]
        assert run.said == [said]
        assert same_tree(end_of(run), undisturbed)
        assert run.whole() == [1, 2, 5, 6]


def on_a_small_rank(plan_path, folder):
    run = Run(folder, plan=penstock.Plan.load(plan_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with run:
        for limit in (limits[0], 512, limits[0]):
            if run.pipe.rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            run.kept.after(run.pipe.step(*run.batches[run.pipe.num_steps]))
            run.kept.now()
    return run.said, run.pipe.num_steps


def test_what_one_rank_cannot_write_all_leave_and_rank_0_tells(ranks, tmp_path):
    said = ranks.run(on_a_small_rank, plan_file(CASE, tmp_path), str(tmp_path / "run"), ranks=2)
    assert [steps for _, steps in said] == [3, 3]
    (told,), _ = said[0]
    assert "rank 1: " in told
    assert "(File too large); free space there" in told
    kept = RunFolder(path=tmp_path / "run").whole_checkpoints()
    assert [path.name for path in kept] == ["step_00000003", "step_00000001"]
    assert len(list((tmp_path / "run").rglob("*.safetensors"))) == 4
    assert not list((tmp_path / "run").rglob("*.part"))


def test_checkpoints_of_steps_that_a_run_goes_back_over_are_removed(tmp_path):
    with Run(tmp_path) as run:
        assert run.steps(2) == [1, 2]
    with Run(tmp_path) as run:
        assert run.whole() == []


def test_no_step_waits_for_the_disk_and_names_follow_their_bytes(tmp_path, monkeypatch):
    done, main = [], threading.current_thread()
    sync, root = os.fsync, str(tmp_path)

    def fsync(file):
        path = os.readlink(f"/proc/self/fd/{file}")
        if path.startswith(root):
            assert threading.current_thread() is not main
            done.append(("sync", kind_of(path)))
        sync(file)

    def kind_of(path):
        name = Path(path).name
        return "part" if "safetensors" in name else "index" if "index" in name else name

    def renamed(event, args):
        if event == "os.rename" and str(args[1]).startswith(root):
            done.append(("rename", kind_of(args[1])))

    monkeypatch.setattr(os, "fsync", fsync)
    sys.addaudithook(renamed)
    with Run(tmp_path) as run:
        run.steps(1)
    assert done == [
        ("sync", "part"), ("rename", "part"), ("sync", "step_00000001"), ("sync", "checkpoints"),
        ("sync", "index"), ("rename", "index"), ("sync", "step_00000001"),
    ]  # fmt: skip
