"""``penstock cache``: a broker that is served, shown and ended, and what is refused in one sentence."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from brokers import broker_thread, client, payload
from commands import answer
from rich.console import Console

from penstock.scripts import cache, command

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
