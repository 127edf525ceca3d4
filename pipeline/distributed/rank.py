"""Entry point of a started rank: it is tied to its launcher before anything heavy is imported.

``python -m penstock.pipeline.distributed.rank MODULE ARGUMENT ...`` then runs MODULE as the program."""

import ctypes
import os
import runpy
import signal
import sys

LAUNCHER = "PENSTOCK_LAUNCHER"
"""The environment variable with the launcher's process id."""

_PR_SET_PDEATHSIG = 1


def tie_to_launcher() -> None:
    """End with the launcher, however it goes (the kernel sees to it, on Linux), and leave Ctrl-C to it.

    The kernel's promise holds for the thread that started this process, which waits for it until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[LAUNCHER]):
        os._exit(1)  # it went before the kernel could be told


if __name__ == "__main__":
    tie_to_launcher()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
