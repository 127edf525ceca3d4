"""Start the ranks of a run on this machine by torch's elastic launcher, and say which one failed and why.

One rank's failure must end all of them and be told as one sentence, so every rank leaves its own sentence in
the run folder and the launcher picks the cause among the consequences (law L7)."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ..compression.errors import ConfigError, TransportError
from .failure import TOLD_TO_END, cause, leave, read_failures

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

MOST_RANKS_PER_CORE = 4
"""More than this only take each other's time and memory."""

_LINGER_SECONDS = 2.0
"""How long a rank that merely lost its peer stays, so that the launcher sees the peer's own end first."""

_LAST_WORD_SECONDS = 1.0
"""How long a rank that is told to end may still take to say what it was waiting for."""

_AT_ONCE_SECONDS = 10.0
"""A rank that ends later than this after the first did not fail: it was stuck, and killed by the launcher."""

_PR_SET_PDEATHSIG = 1


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(ranks: int) -> int:
    """Return the threads of each of ``ranks`` local ranks when the user does not say."""
    return max(1, cores() // ranks)


def check_ranks(ranks: int) -> None:
    """Refuse more ranks than this machine can start.

    Raises: ConfigError: more than ``MOST_RANKS_PER_CORE`` for each core.
    """
    most = MOST_RANKS_PER_CORE * cores()
    if ranks > most:
        raise ConfigError(
            f"ranks={ranks} is more than this machine can start: its {cores()} cores take "
            f"{MOST_RANKS_PER_CORE} ranks each; lower ranks to {most}"
        )


def init(*, deadline: float = 60.0) -> None:
    """Join the ranks that torchrun's environment describes; in a process started plainly, do nothing.

    Args:   deadline: seconds until every rank must have joined.
    Raises: TransportError: there is no store to meet at, or a rank did not join; the sentence names it.
    """
    from torch.distributed.rendezvous import rendezvous

    from . import group

    if "RANK" not in os.environ or group.joined():
        return
    try:
        store, rank, ranks = next(iter(rendezvous("env://", timeout=datetime.timedelta(seconds=deadline))))
    except Exception as error:
        raise TransportError(
            f"rank {os.environ['RANK']} found no store to meet the others at within {deadline:g} s: {error}"
        ) from error
    group.join(store, rank=rank, ranks=ranks, deadline=deadline)


def start_ranks(
    module: str, arguments: Sequence[str], *, errors: Path, stages_of_rank: Sequence[Sequence[int]]
) -> None:
    """Run ``python -m module *arguments`` once for every rank and wait until all have ended.

    Args:   errors: the folder where ``run_rank`` leaves sentences; stages_of_rank: one entry for each rank.
    Raises: PenstockError: the first cause among the failures, as one sentence. SystemExit: Ctrl-C, SIGTERM.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    try:
        with (
            tempfile.TemporaryDirectory(prefix="penstock_") as logs,
            _quiet(),
            _surroundings(_loopback()),
        ):
            # -P and PYTHONPATH: the ranks find modules where this process does, the user's own included.
            elastic_launch(_launch_config(len(stages_of_rank), logs), sys.executable)(
                "-P", "-m", module, *arguments
            )
    except SignalException as stop:
        raise SystemExit(128 + stop.sigval) from None
    except ChildFailedError as failed:
        first = min(failure.timestamp for failure in failed.failures.values())
        ends = {
            rank: failure.exitcode
            for rank, failure in failed.failures.items()
            if failure.timestamp - first < _AT_ONCE_SECONDS
        }
        raise cause(ends, read_failures(errors), stages_of_rank=stages_of_rank) from None


def _launch_config(ranks: int, logs: str) -> LaunchConfig:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port of its own choice
        run_id=uuid.uuid4().hex,
        local_addr="localhost",  # a machine whose own name does not resolve must do as well
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=logs),
        monitor_interval=0.5,  # long enough for a peer to say what it was waiting for when a rank was killed
    )


def run_rank(work: Callable[[], None], errors: Path) -> None:
    """Do the work of one started rank and end at once; when it fails, leave a sentence in ``errors``."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_last_word, name="last-word", daemon=True).start()
    _end_with_launcher()
    try:
        work()
    except Exception as error:
        leave(errors, error)
        if isinstance(error, TransportError):
            time.sleep(_LINGER_SECONDS)
        _end(1)
    _end(0)


def _end(code: int) -> NoReturn:
    """End at once: a normal exit waits for transfers whose other end is gone, and torch may abort in it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _last_word() -> None:
    """End the rank a moment after SIGTERM, even while its main thread waits in a transfer."""
    signal.sigwait({signal.SIGTERM})
    time.sleep(_LAST_WORD_SECONDS)
    os._exit(TOLD_TO_END)


def _end_with_launcher() -> None:
    """Let the kernel end this rank when the launcher is gone, however it went (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _loopback() -> dict[str, str]:
    """What the ranks get beside this process's environment: its module path, and gloo's interface."""
    names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    surroundings = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if names and "GLOO_SOCKET_IFNAME" not in os.environ:
        surroundings["GLOO_SOCKET_IFNAME"] = names.pop()
    return surroundings


@contextlib.contextmanager
def _surroundings(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the elastic launcher's own account of a failure off the screen; ours is one sentence."""
    loggers = [
        logging.getLogger(name) for name in logging.root.manager.loggerDict if "distributed.elastic" in name
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
