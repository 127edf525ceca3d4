"""Facts that a figure needs beside it: command, hardware, versions, date."""

import datetime
import os
import platform
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .. import __version__


def circumstances(command: Sequence[str]) -> dict[str, Any]:
    """Return the facts of a figure that ``command`` measures now on this machine."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpus = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    cpu = next(cpus, platform.processor() or "unknown")
    python = platform.python_version()
    return {
        "command": shlex.join(command),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": {"cpu": cpu, "cores": os.cpu_count(), "machine": platform.machine()},
        "versions": {"penstock": __version__, "torch": str(torch.__version__), "python": python},
        "system": f"{platform.system()} {platform.release()}",
        "load_before": os.getloadavg(),
    }
