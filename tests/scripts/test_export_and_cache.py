"""``penstock export`` and ``penstock cache``: what each does, and what is refused in one sentence."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from brokers import broker_thread, client, payload
from cases import Case, pipeline_with_batches
from commands import answer
from reference import same_tree
from rich.console import Console
from safetensors.torch import load_file
from zoo import build

import penstock
from penstock.scripts import cache, command
from penstock.stages import safetensors_io

TIED = Case(model="gpt_tied", cuts=3, optimizer="adamw", steps=3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run folder with two checkpoints, and the states they were made of."""
    torch.manual_seed(0)
    run = tmp_path_factory.mktemp("trained") / "run"
    pipe, batches = pipeline_with_batches(TIED)
    states = {}
    for step, batch in enumerate(batches[:2], start=1):
        pipe.step(*batch)
        penstock.save(pipe, run / "checkpoints" / f"step_{step:08}")
        states[step] = {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}
    return run, states


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained[0], "run")
    return trained[1]


def harm(step):
    part = next(Path(f"run/checkpoints/step_{step:08}").glob("rank_0_*"))
    data = bytearray(part.read_bytes())
    length = 8 + int.from_bytes(data[:8], "little")
    data[length + json.loads(data[8:length])["model/token.weight"]["data_offsets"][0]] ^= 1
    part.write_bytes(data)


def test_the_file_is_that_of_a_finished_run_and_loads_strictly(run, capfd):
    code, out, err = answer("export run", capfd)
    assert (code, err) == (0, "")
    assert "model_step_2.safetensors: the model behind step 2, from run/checkpoints/step_00000002" in out
    found = load_file("model_step_2.safetensors")
    assert same_tree(found, run[2])
    safetensors_io.write_tensors(Path("finished.safetensors"), run[2])
    assert Path("finished.safetensors").read_bytes() == Path("model_step_2.safetensors").read_bytes()
    model, _ = build(TIED.model, TIED.dtype, 1)
    tied = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert len(tied) > len(list(model.parameters()))
    model.load_state_dict(found, strict=True)


def test_one_checkpoint_and_one_output_are_named(run, capfd):
    code, out, _ = answer("export run/checkpoints/step_00000001 output=one.safetensors", capfd)
    assert code == 0
    assert out.startswith("one.safetensors: the model behind step 1")
    assert same_tree(load_file("one.safetensors"), run[1])


def test_a_damaged_checkpoint_is_told_and_the_one_before_taken(run, capfd):
    harm(2)
    code, out, err = answer("export run", capfd)
    assert code == 0
    assert "is damaged" in err
    assert "the checkpoint before is taken" in err
    assert out.startswith("model_step_1.safetensors: the model behind step 1")
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["model_step_1.safetensors", "run"]
    harm(1)
    code, out, err = answer("export run output=new.safetensors", capfd)
    assert (code, out) == (command.REFUSED, "")
    assert "is damaged" in err.splitlines()[-1]
    assert not list(Path.cwd().glob("*.part"))
    assert not Path("new.safetensors").exists()


def test_no_more_than_one_tensor_is_held(run, capfd, monkeypatch):
    read, held = safetensors_io.TensorFile.read, []

    def watched(file, name):
        assert [one for one in held if one() is not None] == []
        tensor = read(file, name)
        held.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(safetensors_io.TensorFile, "read", watched)
    assert answer("export run", capfd)[0] == 0
    assert len(held) == len(run[2])


@pytest.mark.parametrize(
    ("typed", "subject"),
    [
        ("nowhere", "nowhere holds no checkpoint"),
        ("run", "model_step_2.safetensors is there already and is not written over"),
        ("run output=there", "there is there already and is not written over"),
        ("run output=no/folder/a", "no/folder/a cannot be written (No such file or directory)"),
    ],
)
def test_what_cannot_be_is_one_sentence(run, capfd, typed, subject):
    files = [Path("there"), Path("model_step_2.safetensors")]
    for file in files:
        file.write_text("mine")
    code, out, error = answer(f"export {typed}", capfd)
    assert (code, out, error.count("\n")) == (command.REFUSED, "", 1)
    assert subject in error
    assert [file.read_text() for file in files] == ["mine", "mine"]


ORDER = range(100)


def refusal(typed, capfd):
    code, out, error = answer(f"cache {typed}", capfd)
    assert (code, out, error.count("\n")) == (command.REFUSED, "", 1), error
    return error


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.sock"


def start(*typed, **more):
    """``penstock cache TYPED`` in a process of its own."""
    line, pipe = [sys.executable, "-m", "penstock", "cache", *typed], subprocess.PIPE
    return subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, **more)


def knock(path):
    """Connect until nobody listens: a signal may come while a connection is taken."""
    with contextlib.suppress(OSError):
        while True:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))


@pytest.mark.ranks
@pytest.mark.parametrize(("number", "policy"), [(signal.SIGINT, "lru"), (signal.SIGTERM, "next_use")])
def test_it_serves_until_a_signal_and_leaves_an_empty_folder(path, number, policy, capfd):
    process = start("serve", f"socket={path}", "capacity=8MiB", f"policy={policy}")
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(f"{path}: 8 MiB for samples, policy={policy}; ")
        one = client(path)
        one.begin(0, ORDER, ORDER)
        one.use([1])
        assert one.store([1], [payload(1)]) == 1
        assert one.use([1])[0].payload == payload(1)
        assert f"a broker listens at socket={path}" in refusal(f"serve socket={path}", capfd)
        knocking = threading.Thread(target=knock, args=[path])
        knocking.start()
        time.sleep(0.01)
        process.send_signal(number)
        out, error = process.communicate(timeout=10)
        knocking.join()
        assert (process.returncode, error) == (0, "")
        assert "the cache is closed; jobs go on without it" in out
        assert list(path.parent.iterdir()) == []
        assert one.use([1]) == [None]
        one.close()
    finally:
        process.kill()
        process.communicate()


def shown(path, capfd):
    code, out, err = answer(f"cache status socket={path}", capfd)
    assert (code, err) == (0, "")
    return re.sub(r" +", " ", out).splitlines()


def test_status_shows_the_jobs(path, capfd):
    with broker_thread(path):
        pool, jobs = shown(path, capfd)
        assert pool == "0 B of 400 KiB held in 0 samples, 400 KiB in the pool"
        assert jobs == "no job is connected"
        one = client(path, "[/bold]lr=0.1", data="images", num_samples=100, epochs=4)
        one.begin(0, ORDER, ORDER)
        one.use([1, 2])
        one.store([1, 2], [payload(1), payload(2)])
        one.begin(1, ORDER, ORDER)
        one.use([1, 5])
        pool, heads, row = shown(path, capfd)
        assert pool == "24 KiB of 400 KiB held in 2 samples, 376 KiB in the pool"
        assert heads.split() == "job data epoch done connections hits of all from cache holds ends in".split()
        assert re.fullmatch(r"\[/bold\]lr=0.1 images 2/4 2% 1 1 25.0% 9\.8 KiB 24 KiB \d+:\d\d", row.strip())
        one.close()


@pytest.mark.ranks
def test_the_live_view_is_drawn_anew_until_ctrl_c(path, monkeypatch):
    with broker_thread(path) as broker:
        serve, asked, until = broker._serve, [], time.monotonic() + 60
        monkeypatch.setattr(broker, "_serve", lambda *given: asked.append(given) or serve(*given))
        process = start("status", f"socket={path}", "live=true", env={**os.environ, "TERM": "dumb"})
        while len(asked) < 3 and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=10)
        assert (process.returncode, error) == (0, "")
        assert "no job is connected" in out
        assert len(asked) >= 3


def test_a_view_says_what_is_not_known():
    job = {
        "job": "a", "run": "1", "data": "d", "epoch": -1, "epochs": 3, "progress": 0.0, "connections": 1,
        "uses": 0, "hits": 0, "hit_bytes": 0, "held_bytes": 0, "finish_seconds": None,
    }  # fmt: skip
    console = Console(width=110)
    with console.capture() as caught:
        console.print(cache.view({"capacity": 1024, "held_bytes": 0, "entries": 0, "jobs": [job]}))
    assert caught.get().split()[-10:] == "0/3 0% 1 0 - 0 B 0 B -".split()


def test_a_broker_that_is_stopped_or_away_is_one_sentence(path, capfd, monkeypatch):
    error = refusal(f"status socket={path}", capfd)
    assert f"no broker listens at {path} (No such file or directory); start one by penstock cache" in error
    monkeypatch.setattr(cache, "_WAIT_SECONDS", 0.1)
    with broker_thread(path) as broker:
        monkeypatch.setattr(broker, "_serve", lambda one: (time.sleep(0.5), one.close()))
        assert f"the broker at {path} does not answer" in refusal(f"status socket={path}", capfd)
