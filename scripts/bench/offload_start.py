"""A run of ``penstock bench offload`` in a process of its own: how it is started, and its first moments.

It takes its cores and enters its memory group before anything large is imported, so that all it needs counts
there and all its threads stay there.

``python -m`` this file is that process."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...compression.errors import TransportError
from .memory_group import MemoryGroup, memory_group

TOLD, FOUND, STEPS = "told.json", "found.json", "steps"


def run(
    folder: Path,
    task: str,
    told: Mapping[str, Any],
    *,
    limit: int | None = None,
    cores: Sequence[int] | None = None,
    environment: Mapping[str, str],
    deadline: float,
) -> dict[str, Any]:
    """Run ``task`` of ``offload_turn`` in a new process; return what it found.

    Args:    folder: what it reads and writes. told: its arguments, for JSON.
             limit: bytes above its start. cores: the only ones that it and its threads run on.
    Returns: with ``killed`` in the place of a result where the system ended it for its memory, and the number
             of ``steps`` that it had done.
    Raises:  TransportError: it ended without a result, or took longer than ``deadline`` seconds."""
    for name in (FOUND, STEPS):
        (folder / name).unlink(missing_ok=True)
    words = dict(told) | {"task": task, "limit": limit, "cores": cores}
    with contextlib.ExitStack() as stack:
        group = None if limit is None else stack.enter_context(memory_group())
        words["group"] = str(group.path) if group else None
        (folder / TOLD).write_text(json.dumps(words))
        code = _ended(folder, os.environ | dict(environment), deadline)
        killed = bool(group and group.num_killed)
    if (folder / FOUND).exists():
        return json.loads((folder / FOUND).read_text())
    if killed:
        steps = folder / STEPS
        return {"killed": True, "steps": int(steps.read_text()) if steps.exists() else 0}
    raise TransportError(f"a run ended without a result (exit code {code}); look at its output above")


def _ended(folder: Path, environment: Mapping[str, str], deadline: float) -> int:
    """Start the process, and return its exit code."""
    command = [sys.executable, "-m", __name__, str(folder)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        return process.wait(deadline)
    except subprocess.TimeoutExpired as error:
        raise TransportError(
            f"a run took longer than deadline={deadline:g} seconds; raise it, or take a smaller job"
        ) from error
    finally:
        process.kill()
        process.wait()


def main(folder: Path) -> None:
    """Do what the folder says, and leave there what was found."""
    told = json.loads((folder / TOLD).read_text())
    group = told["group"] and MemoryGroup(Path(told["group"]))
    if group:
        group.enter()
    if told["cores"]:
        os.sched_setaffinity(0, told["cores"])
    tasks = importlib.import_module(".offload_turn", __package__).TASKS
    found = tasks[told["task"]](folder, told, group)
    part = folder / f"{FOUND}.part"
    part.write_text(json.dumps(found))
    part.rename(folder / FOUND)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
