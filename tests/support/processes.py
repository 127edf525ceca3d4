"""The processes of a run, as the system lists them."""

import os
import socket
import subprocess
import time
from pathlib import Path


def children(process):
    """Return the processes that a process has started, the first one first."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
    return sorted(map(int, listed.stdout.split()))


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def runs(pid):
    """True unless a process has ended, collected or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_the_end(*pids):
    until = time.monotonic() + 20
    while any(map(runs, pids)):
        assert time.monotonic() < until, "a process outlived the one that it belongs to"
        time.sleep(0.05)


def ranks_in(folder):
    """Return the processes that still work on a run folder."""
    time.sleep(0.1)
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if str(folder) in line and str(os.getpid()) not in line]
