"""Nothing unsafe comes in: what a stranger reaches of a local run, and what he can do there."""

import ast
import contextlib
import datetime
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkout import ROOT, files
from processes import free_port

JOB = "train model=mlp model.hidden=[8] data=fake data.size=4 data.num_samples=64 ranks=2 batch_size=8"
JOB += " micro_batches=2 epochs=100000 deadline=20 hydra.run.dir=run"

LISTENS = "0A"


class Bomb:
    """Pickled, it leaves a file where it is loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return Path.touch, (self.canary,)


def processes_of(root: int) -> list[int]:
    """A process and all that it started."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [root]
    for one in found:
        found += [pid for pid, parent in parents.items() if parent == one]
    return found


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """(address, port) of every socket that listens in one of the processes."""
    inodes = set()
    for entry in (entry for pid in pids for entry in Path(f"/proc/{pid}/fd").glob("*")):
        with contextlib.suppress(OSError):  # closed meanwhile
            inodes.add(os.readlink(entry))
    found = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
                packed = struct.pack(f"={len(words)}I", *words)
                found.add((socket.inet_ntop(family, packed), int(port, 16)))
    return found


def texts_of_a_stranger(canary: Path) -> list[bytes]:
    """Garbage, what torch's store understands (its greeting, then "set" and "get"), and next to nothing."""
    bomb = pickle.dumps(Bomb(canary))
    keys = [b"torch.rendezvous.none", b"penstock/joined/0", b"failed/1", b"/torch.rendezvous.state"]
    text = {data: struct.pack("<Q", len(data)) + data for data in (*keys, bomb)}
    store = b"\x00" + struct.pack("<I", 0x3C85F7CE)
    store += b"".join(b"\x01" + text[key] + text[bomb] for key in keys)
    store += b"".join(b"\x03" + text[key] for key in keys)
    return [bytes(range(256)) * 64, store, bomb, b"\xff" * 8, b"GET / HTTP/1.1\r\n\r\n", b"\x00"]


def pester(port: int, texts: list[bytes]) -> list[socket.socket]:
    """Send every text on a connection of its own and leave all of them open, one that says nothing too."""
    held = []
    for said in [b"", *texts]:
        with contextlib.suppress(OSError):
            held.append(connection := socket.create_connection(("127.0.0.1", port), timeout=5))
            connection.sendall(said)
    return held


def steps_of(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for(met, process, *, seconds=120):
    """Until ``met()`` or the end of the process; whether it was met."""
    until = time.monotonic() + seconds
    while not (done := met()) and process.poll() is None:
        assert time.monotonic() < until, "the run neither goes on nor ends"
        time.sleep(0.1)
    return done


@pytest.fixture
def run(tmp_path):
    """A local run of two ranks."""
    command = [sys.executable, "-m", "penstock.scripts.command", *JOB.split()]
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, text=True, **pipes) as process:
        yield process
        process.kill()


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("when", ["while the ranks meet", "while they train"])
def test_a_stranger_reaches_nothing_and_executes_nothing(when, run, tmp_path):
    folder, canary = tmp_path / "run", tmp_path / "canary"
    texts, seen, held = texts_of_a_stranger(canary), set(), []

    def visit():
        found = listening(processes_of(run.pid)) - seen
        assert all(address in ("127.0.0.1", "::1") for address, _ in found), f"open to the network: {found}"
        seen.update(found)
        for _, port in found:
            held.extend(pester(port, texts))

    def trained():
        if when == "while the ranks meet":
            visit()
        return steps_of(folder) > 2

    goes_on = wait_for(trained, run)
    visit()
    assert seen, "the ranks have connections, so somebody listened"
    if goes_on:
        before = steps_of(folder)
        goes_on = wait_for(lambda: steps_of(folder) > before + 10, run)
    assert goes_on or when == "while the ranks meet", run.stderr.read()
    run.send_signal(signal.SIGINT)
    error = run.communicate(timeout=60)[1]
    for connection in held:
        connection.close()
    assert not canary.exists()
    assert error.startswith("penstock: ")
    assert error.count("\n") == 1
    assert run.returncode == (130 if goes_on else 2)


def overwrite(port: int, bomb: bytes, *, of: str) -> int:
    """Write over keys in a store of torchrun as they come, then delete them; return how often.

    Args: of: a part of their names."""
    visits = 0
    with contextlib.suppress(RuntimeError):  # the store has gone, and the run with it
        limit = datetime.timedelta(seconds=60)
        store: Any = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        until = time.monotonic() + 15
        while time.monotonic() < until:
            for key in {*store.list_keys(), "penstock/sign/0", "penstock/sign/1"}:
                if of in key:
                    store.set(key, bomb)
                    visits += 1
            time.sleep(0.01)
        for key in store.list_keys():
            store.delete_key(key)
    return visits


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("when", ["while the agents meet", "while the ranks meet", "while they train"])
def test_a_stranger_in_the_store_of_torchrun_executes_nothing(when, tmp_path):
    """He may stop the run, or change what it learns."""
    folder, canary = tmp_path / "run", tmp_path / "canary"
    texts, bomb, held = texts_of_a_stranger(canary), pickle.dumps(Bomb(canary)), []
    port = free_port()
    agent = f"-m torch.distributed.run --nnodes 2 --master-addr 127.0.0.1 --master-port {port}".split()
    agents, words = [], JOB.replace(" ranks=2", "").split()
    try:
        for number in range(2):
            command = [sys.executable, *agent, f"--node-rank={number}", "-m", "penstock", *words]
            with (tmp_path / f"said_{number}").open("w") as file:
                agents.append(subprocess.Popen(command, cwd=tmp_path, stdout=file, stderr=file))
        if when == "while they train":
            assert wait_for(lambda: steps_of(folder) > 2, agents[0])
        assert overwrite(port, bomb, of="penstock" if "ranks" in when else "")
        held = pester(port, texts)
        before = steps_of(folder)
        wait_for(lambda: steps_of(folder) > before + 10, agents[0])
    finally:
        for pid in [pid for one in agents if one.poll() is None for pid in processes_of(one.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in agents:
            process.wait(30)
        for connection in held:
            connection.close()
    assert not canary.exists()


UNPICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}


def unpickling(source: str) -> list[str]:
    """Parts of a file that may execute what it reads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            found += [*names & UNPICKLES]
        elif isinstance(node, ast.Attribute):
            of_torch = node.attr == "load" and ast.unparse(node.value) in ("torch", "th")
            objects = node.attr.endswith(("_object", "_object_list")) and node.attr != "to_object"
            found += [ast.unparse(node)] if of_torch or objects else []
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found += [] if ast.unparse(node.value) == "False" else [ast.unparse(node)]
    return found


def test_no_file_of_ours_unpickles():
    ours = [file for file in files() if file.suffix == ".py" and file.parts[0] != "tests"]
    assert len(ours) > 100
    for file in ours:
        assert unpickling((ROOT / file).read_text()) == [], file
    unsafe = "from pickle import loads; import dill; torch.load(path); dist.broadcast_object_list(x)"
    assert all(unpickling(line) for line in [*unsafe.split("; "), "np.load(path, allow_pickle=True)"])
