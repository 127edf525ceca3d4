"""Processes that live and end together: when one fails, all end, and how each of them ended is known.

torch's elastic launcher would start them as well. It meets at a store that every machine of the network may
write to and that is unpickled, and it gives a process that hangs half a minute; here nothing listens."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from ...compression.errors import TransportError

_LAST_WORDS_SECONDS = 2.0
"""How long the others may take to say what they were waiting for, once one has failed."""

_GRACE_SECONDS = 1.0
"""How long a process may take to end when it is told to; one that does not has stopped or hangs."""

_POLL_SECONDS = 0.05

Process = subprocess.Popen[bytes]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """How processes ended, by their number.

    Attributes:
        codes: exit codes of those that failed by themselves, in their order; negative for a signal.
        stuck: those that did not end when they were told to; first those that were stopped.
    """

    codes: Mapping[int, int]
    stuck: Sequence[int]


def run_together(
    starts: Iterable[tuple[Sequence[str], Mapping[str, str]]],
    *,
    called_off: Callable[[], bool] = lambda: False,
) -> Ends:
    """Run a process for each (command, environment), wait, and leave none behind, whatever is raised.

    Args:   called_off: whether all shall end, though none of them has failed; asked again and again.
    Raises: TransportError: one could not be started.
    """
    processes: list[Process] = []
    try:
        for command, environment in starts:
            processes.append(_start(command, environment))
        codes = _wait(processes, called_off)
        left = codes or any(process.poll() is None for process in processes)
        return Ends(codes=codes, stuck=_tell_to_end(processes) if left else [])
    finally:
        _kill(processes)


def _start(command: Sequence[str], environment: Mapping[str, str]) -> Process:
    try:
        # In a session of its own, a process does not hear Ctrl-C and has nothing to say of it; we end it.
        return subprocess.Popen(command, env=environment, start_new_session=True)
    except OSError as error:
        raise TransportError(f"{command[0]} could not be started: {error.strerror or error}") from error


def _wait(processes: Sequence[Process], called_off: Callable[[], bool]) -> dict[int, int]:
    """Wait for all, or a moment longer than the first failure; return the exit codes that tell of one."""
    until, codes = float("inf"), {}
    while time.monotonic() < until:
        alive = False
        for number, process in enumerate(processes):
            code = process.poll()
            alive |= code is None
            if code and number not in codes:
                codes[number] = code
                until = min(until, time.monotonic() + _LAST_WORDS_SECONDS)
        if not alive:
            break
        if until == float("inf") and called_off():
            until = time.monotonic() + _LAST_WORDS_SECONDS
        time.sleep(_POLL_SECONDS)
    return codes


def _tell_to_end(processes: Sequence[Process]) -> list[int]:
    """End those that still run; return the numbers of those that do not heed it."""
    alive = {number: process for number, process in enumerate(processes) if process.poll() is None}
    for process in alive.values():
        _signal(process, signal.SIGTERM)
    until = time.monotonic() + _GRACE_SECONDS
    while alive and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
        alive = {number: process for number, process in alive.items() if process.poll() is None}
    # What is large takes its time to end; what somebody stopped never does, so it comes first.
    return sorted(alive, key=lambda number: not _is_stopped(alive[number]))


def _is_stopped(process: Process) -> bool:
    """Whether the process is held by SIGSTOP or a debugger, where the system tells (Linux)."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def _kill(processes: Sequence[Process]) -> None:
    for process in processes:
        if process.poll() is None:
            _signal(process, signal.SIGKILL)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel may hold it for a dead disk
            process.wait(_GRACE_SECONDS)


def _signal(process: Process, number: signal.Signals) -> None:
    """Signal a process and those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
