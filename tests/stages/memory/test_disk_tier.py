"""The tier disk as people meet it: an offload, a pipeline, and a disk that fails in the middle of a step."""

import errno
import os
from typing import Any

import law
import pytest
from cases import OPTIMIZERS, Case, plan_of
from disks import lent_bytes, refusing
from reference import same_bits
from zoo import build, cross_entropy

import penstock
from penstock.compression.errors import StageError

CASE = Case(model="gpt_relu", cuts=3, ranks=1, tier="disk", schedule="gpipe")


@pytest.fixture(autouse=True)
def everything_leaves(monkeypatch):
    law.everything_leaves(monkeypatch)


def pipe_on(folder):
    model, batches = build(CASE.model, CASE.dtype)
    options = {"disk": penstock.DiskOptions(path=folder), "memory": penstock.MemoryOptions(prefetch_layers=1)}
    settings = {"loss": cross_entropy, "optimizer": OPTIMIZERS["plain"]}
    return penstock.Pipeline(model, plan_of(CASE)[0], **settings, **options), batches


def weights_of(pipe):
    return [p.detach() for stage in pipe.update.parameters.values() for _, p in stage]


def test_stages_share_one_disk_that_the_pipeline_closes(tmp_path):
    pipe, batches = pipe_on(tmp_path)
    pipe.step(*batches[0])
    assert pipe.disk is not None
    assert len(pipe.stages) == 3
    assert pipe.disk.bytes_written > 0
    pipe.disk.drain()  # of what was fetched and not needed
    assert lent_bytes(pipe.disk) == 0  # all frames were dropped
    assert pipe.disk.folder == tmp_path
    file = pipe.disk._file._file
    pipe.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


@pytest.mark.parametrize(("what", "number"), [("write", errno.ENOSPC), ("read", errno.EIO)])
def test_a_disk_that_fails_ends_the_step_with_one_error_and_leaves_the_weights(
    what, number, tmp_path, monkeypatch
):
    pipe, batches = pipe_on(tmp_path)
    pipe.step(*batches[0])
    before = [p.clone() for p in weights_of(pipe)]
    disk: Any = pipe.disk
    get = disk.get

    def get_from_disk(*args):
        disk._threads.drain()  # what was not written yet is taken from memory
        return get(*args)

    monkeypatch.setattr(disk, "get", get_from_disk)
    monkeypatch.setattr(disk._file, what, refusing(number))
    with pytest.raises(StageError, match=f"could not be .* disk of {tmp_path}, found {os.strerror(number)}"):
        pipe.step(*batches[1])
    assert all(same_bits(a, b) for a, b in zip(before, weights_of(pipe), strict=True))
    pipe.close()
    assert list(tmp_path.iterdir()) == []
