"""Processes that live and end together: when one fails, all end, and how each of them ended is known.

torch's elastic launcher meets at a store that every machine of the network may write to, and gives a process
that hangs half a minute; here nothing listens."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from ...compression.errors import TransportError

ASKING = (signal.SIGTERM, signal.SIGUSR1)

SAME_SECONDS = 1.0  # signals this close are one request: a batch system and a launcher both send it


class Stopped(KeyboardInterrupt):
    """A signal told this process to end; ``number`` is the signal's."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def code(self) -> int:
        """Exit code of a shell for that signal: 130 for Ctrl-C, 143 for SIGTERM, 138 for SIGUSR1."""
        return 128 + self.number


@contextlib.contextmanager
def heard(tell: Callable[[int], None]) -> Iterator[None]:
    """Have a signal of ``ASKING`` call ``tell`` with its number; the same one again means what it did before.

    Only the main thread hears; signals that this process ignores it goes on ignoring."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in ASKING}
    first: dict[int, float] = {}

    def hear(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - first.setdefault(number, now) > SAME_SECONDS:
            _restore(before)
            then = before[signal.Signals(number)]
            then(number, frame) if callable(then) else os.kill(os.getpid(), number)
        elif now == first[number]:
            tell(number)

    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, hear)
    try:
        yield
    finally:
        _restore(before)


def _restore(handlers: dict[signal.Signals, Callable[[int, FrameType | None], object] | int]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


_LAST_WORDS_SECONDS = 2.0  # for the others to say what they were waiting for, once one has failed
_GRACE_SECONDS = 1.0  # for a process to end when it is told to; one that does not has stopped or hangs
_POLL_SECONDS = 0.05
_END = signal.SIGUSR2  # tells a process to end: nobody handles it, as a rank does SIGTERM, or ignores it

Process = subprocess.Popen[bytes]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Exits of processes, by their number."""

    codes: Mapping[int, int]  # of those that failed by themselves, in their order; negative for a signal
    stuck: Sequence[int]  # those that did not end on request; first those that were stopped
    asked: Sequence[int] = ()  # the signals that were passed on to them

    @property
    def stopped(self) -> int:
        """Return the signal for which all ended that did not end well, else 0."""
        for number in ASKING:  # one that does not listen yet dies of what is passed on to it
            expected = {128 + number, -number} if number in self.asked else {128 + number}
            if self.codes and set(self.codes.values()) <= expected:
                return number
        return 0


def start_process(command: Sequence[str], environment: Mapping[str, str]) -> Process:
    """Start a command with the environment; raises TransportError where it could not be."""
    try:
        # In a session of its own, a process does not hear Ctrl-C and has nothing to say of it; we end it.
        return subprocess.Popen(command, env=environment, start_new_session=True)
    except OSError as error:
        raise TransportError(f"{command[0]} could not be started: {error.strerror or error}") from error


def run_together(starts: Iterable[tuple[Sequence[str], Mapping[str, str]]]) -> Ends:
    """Run a process for each (command, environment), wait, and leave none behind, whatever is raised.

    What asks this process to stop (``ASKING``) is passed on to them, who know where they can."""
    processes, asked = list[Process](), list[int]()

    def pass_on(number: int) -> None:
        asked.append(number)
        for process in processes:  # not to what they started: a loader's worker would die of it
            process.send_signal(number)

    try:
        for command, environment in starts:
            processes.append(start_process(command, environment))
        with heard(pass_on):
            codes = _wait(processes)
        return Ends(codes=codes, stuck=_tell_to_end(processes), asked=asked)
    finally:
        for process in processes:
            if _code(process) is None:
                _signal(process, signal.SIGKILL)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel may hold it for a dead disk
                process.wait(_GRACE_SECONDS)


def _wait(processes: Sequence[Process]) -> dict[int, int]:
    """Wait for all, or a moment longer than the first failure; return the exit codes of failures."""
    until, codes = float("inf"), {}
    while time.monotonic() < until:
        alive = False
        for number, process in enumerate(processes):
            code = _code(process)
            alive |= code is None
            if code and number not in codes:
                codes[number] = code
                until = min(until, time.monotonic() + _LAST_WORDS_SECONDS)
        if not alive:
            break
        time.sleep(_POLL_SECONDS)
    return codes


def _code(process: Process) -> int | None:
    """Return the exit code, None while it runs; what it left, such as a loader's workers, ends with it."""
    # Until it is reaped nobody else gets its number, by which they are found.
    if process.returncode is None and hasattr(os, "waitid"):
        with contextlib.suppress(ChildProcessError):
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                _signal(process, signal.SIGKILL)
    return process.poll()


def _tell_to_end(processes: Sequence[Process]) -> list[int]:
    """End those that still run; return the numbers of those that do not heed it."""
    alive = {number: process for number, process in enumerate(processes) if _code(process) is None}
    for process in alive.values():
        _signal(process, _END)
    until = time.monotonic() + _GRACE_SECONDS
    while alive and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
        alive = {number: process for number, process in alive.items() if _code(process) is None}
    # What is large takes its time to end; what somebody stopped never does, so it comes first.
    return sorted(alive, key=lambda number: not _is_stopped(alive[number].pid))


def _is_stopped(pid: int) -> bool:
    """True if a process is held by SIGSTOP or a debugger (Linux only)."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def _signal(process: Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
