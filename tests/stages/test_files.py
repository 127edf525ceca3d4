"""Files are whole or not there: on a full disk, when the process is killed, and while others write them."""

import contextlib
import errno
import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from reports import PLAN, report
from safetensors.torch import load_file
from small_pipelines import pipeline_of

from penstock import ConfigError
from penstock.pipeline.run.checkpoints import keeping, write_model
from penstock.pipeline.run.logs import JsonLog
from penstock.pipeline.run.metrics import read_lines, step_line
from penstock.stages.files import refusing, save_json, save_picture, writing
from penstock.stages.safetensors_io import write_tensors

FULL = "No space left on device"
ELSEWHERE = "free space there, or choose another folder (a run's is hydra.run.dir=)"


@pytest.mark.parametrize("error", [None, ValueError("no"), KeyboardInterrupt(), OSError(errno.ENOSPC, FULL)])
def test_a_file_is_there_when_it_is_whole_and_else_the_old_one_and_nothing_beside(error, tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")

    def write():
        with writing(path) as part:
            assert part.suffix == ".part"
            part.write_text("new")
            assert path.read_text() == "old"
            if error is not None:
                raise error

    if error is None:
        write()
    else:
        with pytest.raises(ConfigError if isinstance(error, OSError) else type(error)):
            write()
    assert path.read_text() == ("old" if error else "new")
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_followed_and_a_device_written_as_it_is(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    save_json(tmp_path / "link", {"a": 1})
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "file").read_text()) == {"a": 1}
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor() as pool:
        read = pool.submit((tmp_path / "pipe").read_text)
        save_json(tmp_path / "pipe", {"a": 1})
        assert json.loads(read.result(timeout=10)) == {"a": 1}
    assert (tmp_path / "pipe").is_fifo()


def test_writers_of_one_file_do_not_mix(tmp_path):
    with writing(tmp_path / "a") as first:
        first.write_text("first")
        with writing(tmp_path / "a") as second:
            second.write_text("second, which is longer")
        assert (tmp_path / "a").read_text() == "second, which is longer"
    assert (tmp_path / "a").read_text() == "first"


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        *((errno.EDQUOT, "free space"), (errno.EACCES, "make it writable")),
        *((errno.ENOENT, "leave its folder where it is"), (errno.EIO, "see to it")),
    ],
)
def test_each_refusal_has_its_remedy(number, remedy):
    sentence = f"x.json .*{os.strerror(number)}.* {remedy}.* another folder"
    with pytest.raises(ConfigError, match=sentence), refusing("x.json"):
        raise OSError(number, os.strerror(number))


def test_plans_and_pictures_are_whole_too_and_a_missing_folder_is_one_sentence(tmp_path, monkeypatch):
    for save, name in ((PLAN.save, "plan.json"), (PLAN.draw, "plan.png")):
        save(tmp_path / name)
        whole = (tmp_path / name).read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda file: os.kill(os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                save(tmp_path / name)
        assert (tmp_path / name).read_bytes() == whole
        with pytest.raises(ConfigError, match=r"\(No such file or directory\)"):
            save(tmp_path / "gone" / name)
    assert len(list(tmp_path.iterdir())) == 2


def test_the_model_file_has_every_name_and_plain_strides(tmp_path):
    tied = torch.arange(6.0).view(2, 3)
    weights = {"token": tied, "head": tied, "turned": torch.arange(6.0).view(2, 3).T, "größe": tied[1]}
    weights |= {"number": torch.tensor(3), "none": torch.empty(0, 2, dtype=torch.float64)}
    kinds = (torch.bool, torch.bfloat16, torch.float16, torch.int8, torch.int16, torch.complex64)
    weights |= {str(kind): torch.tensor([[0, 1, 1]]).to(kind) for kind in (*kinds, torch.float8_e4m3fn)}
    write_tensors(tmp_path / "model.safetensors", weights)
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == weights.keys()
    for name, weight in weights.items():
        assert (loaded[name].dtype, loaded[name].shape) == (weight.dtype, weight.shape)
        assert loaded[name].equal(weight), name
        assert loaded[name].data_ptr() % weight.element_size() == 0


def save_big(path):
    pipe = pipeline_of(torch.nn.Linear(6, 3 << 16, bias=False), cuts=())  # more than 1 MiB
    with pytest.raises(ConfigError) as refused:
        write_model(pipe, path, before=lambda: None)
    return str(refused.value)


@pytest.mark.parametrize("without", ["room", "a folder"])
def test_weights_that_fit_nowhere_are_said_to_be_lost(without, small_disk, monkeypatch):
    def mkdtemp(prefix):
        raise OSError(errno.ENOSPC, FULL)

    monkeypatch.setattr("tempfile.tempdir", str(small_disk))
    if without == "a folder":
        monkeypatch.setattr("tempfile.mkdtemp", mkdtemp)
    error = save_big(small_disk / "model.safetensors")
    assert re.search(f"{FULL}.*; the trained weights are lost", error)
    assert not list(small_disk.iterdir())


def test_what_cannot_be_written_behind_the_weights_says_that_they_are_kept(small_disk):
    fill(small_disk)
    figure = pytest.importorskip("matplotlib.figure").Figure()
    for save in (lambda path: save_json(path, {"a": "b" * 9999}), lambda path: save_picture(path, figure)):
        with pytest.raises(ConfigError) as refused, keeping(Path("model.safetensors")):
            save(small_disk / "timeline")
        assert str(refused.value).endswith("; the trained weights are in model.safetensors")
        assert [path.name for path in small_disk.iterdir()] == ["filler"]


def fill(disk):
    """Leave no byte free on ``disk``; return the file that takes the room."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    return filler


@pytest.mark.parametrize("comes", [True, False])
def test_metrics_wait_for_room_and_lose_no_line_or_say_so(comes, small_disk):
    told, path = [], small_disk / "metrics.jsonl"
    with JsonLog(path, tell=told.append) as metrics:
        metrics.append(step_line(report(0)))
        filler = fill(small_disk)
        for step in range(1, 40):
            metrics.append(step_line(report(step)))
        written = [line["step"] for line in read_lines(path)]
        assert written == list(range(len(written)))
        assert 1 < len(written) < 40
        assert path.read_bytes().endswith(b"}\n")
        assert told == [f"{path} cannot be written ({FULL}); training goes on, {ELSEWHERE}"]
        if comes:
            filler.unlink()
    lines = [line["step"] for line in read_lines(path)]
    assert lines == list(range(40 if comes else len(written)))
    assert told[1:] == ([] if comes else [f"{path} lacks the last {40 - len(written)} of 40 lines"])


def test_half_a_last_line_is_left_out_and_a_damaged_one_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"st')
    assert [line["step"] for line in read_lines(path)] == [0, 1]
    path.write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is damaged"):
        read_lines(path)
