"""The processes of a run, as the system lists them."""

import os
import subprocess
import time


def ranks_in(folder):
    """Return the processes that still work on a run folder."""
    time.sleep(0.1)
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if str(folder) in line and str(os.getpid()) not in line]
