"""Full and read-only disks, and files that were damaged later: no training ends, and nobody is misled."""

import os
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cases import Case, pipeline_with_batches, plan_file
from reference import same_tree

import penstock
from penstock.conf.parts import CheckpointConfig
from penstock.pipeline.run.checkpoints import Checkpoints
from penstock.pipeline.run.run_folder import RunFolder

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


def test_a_disk_that_becomes_read_only_ends_no_training_and_is_told_once(disk, undisturbed):
    folder, remount = disk
    with Run(folder, keep=1) as run:
        assert run.steps(1) == [1]
        remount("ro")
        assert run.steps(2) == [1]
        (said,) = run.said
        assert "(Read-only file system)" in said
        remount("rw")
        assert run.steps(1) == [4]
        assert len(run.said) == 1
        remount("ro")
        assert same_tree(end_of(run), undisturbed)
        assert len(run.said) == 2
        remount("rw")


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


def test_one_of_this_moment_is_there_when_it_was_asked_for(tmp_path):
    with Run(tmp_path, every=4) as run:
        run.steps(2)
        run.kept.now()
        run.kept.now()
        assert run.whole() == [2]
        run.kept.after(run.pipe.step(*run.batches[2]))
        run.kept.after(run.pipe.step(*run.batches[3]))
        run.kept.now()
        assert run.whole() == [2, 4]
