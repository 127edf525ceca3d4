"""The processes of a run, as the system lists them."""

import os
import socket
import subprocess
import time


def children(process):
    """Return the processes that a process has started, the first one first."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
    return sorted(map(int, listed.stdout.split()))


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def ranks_in(folder):
    """Return the processes that still work on a run folder."""
    time.sleep(0.1)
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if str(folder) in line and str(os.getpid()) not in line]
