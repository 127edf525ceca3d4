"""``penstock cache``: a broker that is served, shown and ended, and what is refused in one sentence."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from brokers import Said, broker_thread, client, payload
from rich.console import Console

from penstock.pipeline.samples.cache.policy import Times
from penstock.scripts import cache, command

ORDER = range(100)
TIMES = Times(epoch=9.0, batch_io=0.4, sample_io=0.1, augmentation=0.1, training=0.2, hidden=0.0)


def cached(*typed, capfd):
    code = command.run(["cache", *typed])
    return code, *capfd.readouterr()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.sock"


def served(path, *typed):
    """``penstock cache serve`` in a process of its own, once it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "cache", "serve", f"socket={path}", *typed],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    return process, process.stdout.readline()


@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal_and_leaves_an_empty_folder(path, number, capfd):
    process, line = served(path, "capacity=8MiB", "policy=lru")
    try:
        assert line == f"{path}: 8 MiB for samples, policy=lru; Ctrl-C ends it\n"
        one = client(path)
        one.begin(0, ORDER, ORDER)
        one.use([1])
        assert one.store([1], [payload(1)]) == 1
        assert one.use([1])[0].payload == payload(1)
        code, out, err = cached("serve", f"socket={path}", capfd=capfd)
        assert (code, out) == (command.REFUSED, "")
        assert err == f"penstock: a broker listens at socket={path}; use that one, end it, or name another\n"
        process.send_signal(number)
        out, _ = process.communicate(timeout=10)
        assert (process.returncode, out) == (0, "the cache is closed; jobs go on without it\n")
        assert list(path.parent.iterdir()) == []
        assert one.use([1]) == [None]
        one.close()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.ranks
@pytest.mark.parametrize("policy", ["next_use", "gain", "lru", "never_evict", "static_split"])
def test_every_policy_gives_back_what_was_read(path, policy):
    """Two runs, three epochs, measured in the first, a cache of half the data: found is what was read."""
    process, _ = served(path, "capacity=400KiB", f"policy={policy}", "page=4KiB")
    try:
        told = Said()
        runs = [client(path, name, num_samples=80, tell=told) for name in ("a", "b")]
        hits = 0
        for epoch in range(3):
            order = [(index * 7 + epoch) % 80 for index in range(80)]
            following = None if epoch == 2 else [(index * 7 + epoch + 1) % 80 for index in range(80)]
            for run in runs:
                run.begin(epoch, order, following)
                if epoch == 1:
                    run.measured(TIMES)
            for at in range(0, 80, 4):
                for run in runs:
                    batch = order[at : at + 4]
                    found = run.use(batch)
                    assert all(
                        hit.payload == payload(index) for hit, index in zip(found, batch, strict=True) if hit
                    )
                    hits += sum(hit is not None for hit in found)
                    missing = [index for hit, index in zip(found, batch, strict=True) if hit is None]
                    run.store(missing, [payload(index) for index in missing])
        assert hits
        assert told == []
        for run in runs:
            run.close()
    finally:
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=10)
        assert out == "the cache is closed; jobs go on without it\n"


def shown(path, capfd):
    code, out, err = cached("status", f"socket={path}", capfd=capfd)
    assert (code, err) == (0, "")
    return re.sub(r" +", " ", out).splitlines()


def test_status_shows_the_jobs(path, capfd):
    with broker_thread(path):
        assert shown(path, capfd) == [
            "0 B of 400 KiB held in 0 samples, 400 KiB in the pool",
            "no job is connected",
        ]
        one = client(path, "sweep/lr=0.1", data="images", num_samples=100, epochs=4)
        one.begin(0, ORDER, ORDER)
        one.use([1, 2])
        one.store([1, 2], [payload(1), payload(2)])
        one.begin(1, ORDER, ORDER)
        one.use([1, 5])
        pool, heads, row = shown(path, capfd)
        assert pool == "24 KiB of 400 KiB held in 2 samples, 376 KiB in the pool"
        assert heads.split() == "job data epoch done connections hits of all from cache holds ends in".split()
        assert re.fullmatch(r"sweep/lr=0.1 images 2/4 2% 1 1 25.0% 9\.8 KiB 24 KiB \d+:\d\d", row.strip())
        one.close()


@pytest.mark.ranks
def test_the_live_view_is_drawn_anew_until_ctrl_c(path):
    with broker_thread(path):
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "cache", "status", f"socket={path}", "live=true"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "TERM": "dumb"},
        )  # fmt: skip
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
        assert (process.returncode, err) == (0, "")
        assert "no job is connected" in out


def test_a_view_says_what_is_not_known():
    job = {
        "job": "a", "run": "1", "data": "d", "epoch": -1, "epochs": 3, "progress": 0.0, "connections": 1,
        "readers": 4, "uses": 0, "hits": 0, "hit_bytes": 0, "held_bytes": 0, "finish_seconds": None,
    }  # fmt: skip
    console = Console(width=110)
    with console.capture() as caught:
        console.print(cache.view({"capacity": 1024, "held_bytes": 0, "entries": 0, "jobs": [job]}))
    assert (
        caught.get().split()[-10:] == ["a", "d", "0/3", "0%", "1/4", "0", "-", "0", "B", "0", "B", "-"][-10:]
    )


def test_a_broker_that_is_stopped_or_away_is_one_sentence(path, capfd, monkeypatch):
    code, out, err = cached("status", f"socket={path}", capfd=capfd)
    assert (code, out) == (command.REFUSED, "")
    assert err == (
        f"penstock: no broker listens at {path} (No such file or directory); start one by penstock cache "
        "serve, or name its socket=\n"
    )
    monkeypatch.setattr(cache, "_WAIT_SECONDS", 0.1)
    with broker_thread(path) as broker:
        monkeypatch.setattr(broker, "_serve", lambda *_: time.sleep(0.5))
        code, out, err = cached("status", f"socket={path}", capfd=capfd)
        assert (code, out) == (command.REFUSED, "")
        assert err == f"penstock: the broker at {path} does not answer; it was stopped, or hangs\n"


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("", "penstock cache takes serve or status, found none"),
        ("sevre", "penstock cache takes serve or status, found sevre"),
        ("serve capcity=1GiB", "penstock cache serve has no option capcity=1GiB; did you mean capacity=?"),
        (
            "serve --force",
            "penstock cache serve has no option --force; known are capacity=, policy=, page=, socket=",
        ),
        ("serve capacity=", "capacity= has no value; write capacity=4GiB"),
        ("serve capacity=much", "capacity=much is not a size in bytes"),
        ("serve page=2MiB", "page=2MiB does not fit: a page has 512 B to 1 MiB"),
        ("status live=yes", "live=yes does not fit: live takes true or false"),
        ("status capacity=1GiB", "penstock cache status has no option capacity=1GiB"),
    ],
)
def test_what_cannot_be_is_one_sentence(typed, told, capfd):
    code, out, err = cached(*typed.split(), capfd=capfd)
    assert (code, out) == (command.REFUSED, "")
    assert told in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("capacity=900TiB", "capacity=900 TiB does not fit"),
        ("capacity=1KiB", "capacity=1 KiB is less than a page of 16 KiB"),
        ("policy=belady", "belady"),
    ],
)
def test_what_cannot_be_served_leaves_no_socket(path, typed, told, capfd):
    code, out, err = cached("serve", f"socket={path}", typed, capfd=capfd)
    assert (code, out) == (command.REFUSED, "")
    assert told in err
    assert len(err.splitlines()) == 1
    assert list(path.parent.iterdir()) == []


def test_help_and_refusals_do_not_wait_for_torch():
    script = (
        "import sys; from penstock.scripts import command;"
        "typed = (['--help'], ['serve', 'help'], ['serve', 'page=1'], ['status', 'socket=/nowhere/socket']);"
        "codes = [command.run(['cache', *rest]) for rest in typed];"
        "assert 'torch' not in sys.modules; sys.exit(codes != [0, 0, 2, 2])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "capacity=4GiB" in done.stdout
