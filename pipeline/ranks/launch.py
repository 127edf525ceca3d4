"""Start the ranks of a run on this machine, and say which one failed and why.

One rank's failure must end all of them and be told as one sentence, so every rank leaves its own sentence in
the run folder and the launcher picks the cause among the consequences (law L7). Local ranks meet in a folder
that only their user may enter, and speak over the loopback device: no network reaches them."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ...compression.errors import ConfigError, TransportError
from . import rank as first
from .failure import cause, leave, read_failures
from .launched import MEETING, Launched, fresh
from .private import private_folder
from .processes import StartProcess, run_together, start_process
from .signals import Stopped

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from .world import World

MOST_RANKS_PER_CORE = 4
"""More than this only take each other's time and memory."""


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_ranks(ranks: int) -> int:
    """Return how many of ``ranks`` ranks are on this machine: all, unless a launcher says otherwise."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def threads_per_rank(ranks: int) -> int:
    """Return the threads of each of ``ranks`` ranks when the user does not say."""
    return max(1, cores() // local_ranks(ranks))


def local_rank() -> int:
    """Return the number of this rank among those of its machine, as its launcher says; 0 where none does."""
    return int(os.environ.get("LOCAL_RANK", 0))


def check_ranks(ranks: int) -> None:
    """Refuse more ranks than this machine can start, or other ones than a launcher did.

    Raises: ConfigError: more than ``MOST_RANKS_PER_CORE`` for each core.
    """
    if launched := Launched.of_environment():
        launched.check(ranks)
        return
    most = MOST_RANKS_PER_CORE * cores()
    if ranks > most:
        raise ConfigError(
            f"ranks={ranks} is more than this machine can start: its {cores()} cores take "
            f"{MOST_RANKS_PER_CORE} ranks each; lower ranks to {most}"
        )


def init(*, deadline: float = 60.0) -> World:
    """Join the ranks of a local run, or those that torchrun's environment describes; where a default process
    group is initialised, its ranks; started plainly, this process alone.

    Args:   deadline: seconds until every rank must have joined.
    Raises: TransportError: there is no store to meet at, or a rank did not join; the sentence names it.
    """
    from . import notices
    from .world import World, found

    world = World.default(deadline=deadline)
    if "RANK" not in os.environ or not world.is_alone:
        return world
    if os.environ["WORLD_SIZE"] == "1" and os.environ.pop(MEETING, None):
        return world  # nobody else comes
    try:
        store, rank, ranks = notices.bounded(lambda: _meeting(deadline), seconds=deadline + notices.MOMENT)
    except TransportError:
        raise
    except Exception as error:
        raise TransportError(
            f"rank {os.environ['RANK']} found no store to meet the others at within {deadline:g} s: {error}"
        ) from error
    return found(store, rank=rank, ranks=ranks, deadline=deadline)


def _meeting(deadline: float) -> tuple[Store, int, int]:
    """The store where the ranks meet, this rank, and how many there are."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    place = os.environ.pop(MEETING, None)  # what a rank starts itself does not meet there
    if place is None:
        store, rank, ranks = next(iter(rendezvous("env://", timeout=datetime.timedelta(seconds=deadline))))
        return fresh(store, rank=rank, ranks=ranks, deadline=deadline), rank, ranks
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # No number of users: a store that counts them removes its file with the last, and may abort the
    # process where another removes it meanwhile. The launcher removes the folder.
    store = dist.FileStore(str(Path(place) / "store"))  # pyright: ignore[reportPrivateImportUsage]
    return store, rank, ranks


def start_ranks(
    module: str,
    arguments: Sequence[str],
    *,
    errors: Path,
    stages_of_rank: Sequence[Sequence[int]],
    ends: Sequence[Sequence[str]] | None = None,
    device: str | None = None,
    start: StartProcess = start_process,
) -> None:
    """Run ``python -m module *arguments`` once for every rank and wait until all have ended.

    Args:   errors: the folder where ``run_rank`` leaves sentences; stages_of_rank: one entry for each rank.
            ends: for each rank, the command that runs another one where that rank shall be.
            device: the network device between the ranks; the loopback device where nothing is said.
            start: starts the process of a rank.
    Raises: PenstockError: the first cause among the failures, as one sentence. Stopped: the ranks were asked
            to stop, and did. No rank is left running, whatever is raised.
    """
    size = len(stages_of_rank)
    # -P and PYTHONPATH: the ranks find modules where this process does, the user's own included.
    command = [sys.executable, "-P", "-m", first.__name__, module, *arguments]
    with contextlib.ExitStack() as made:
        environment = os.environ | {
            "WORLD_SIZE": str(size),
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "GLOO_SOCKET_IFNAME": device or _loopback(),
            MEETING: _meeting_folder(made),
            first.LAUNCHER: str(os.getpid()),
        }
        found = run_together(
            (
                ([*end, *command], environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
                for rank, end in enumerate(ends or [()] * size)
            ),
            start=start,
        )
    if found.stopped:
        raise Stopped(found.stopped)
    if found.codes:
        raise cause(found, read_failures(errors), stages_of_rank=stages_of_rank)


def run_rank(work: Callable[[], None], errors: Path) -> None:
    """Do the work of one started rank and end at once; when it fails, leave a sentence in ``errors``."""
    try:
        work()
    except Stopped as stop:
        end(stop.code)
    except BaseException as error:  # SystemExit in a layer ends a run as any other does
        leave(errors, error)
        end(1)
    end(0)


def end(code: int) -> NoReturn:
    """End at once: a normal exit waits for transfers whose other end is gone, and torch may abort in it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def _meeting_folder(made: contextlib.ExitStack) -> str:
    """A folder for as long as ``made`` is open."""
    try:
        return str(made.enter_context(private_folder()))
    except OSError as error:
        raise TransportError(
            f"ranks meet in a temporary folder, and there is none ({error}); name one with TMPDIR"
        ) from error


def _loopback() -> str:
    """The network device that nobody outside this machine reaches."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if not names:
        raise TransportError("ranks speak over the loopback device, and this machine has none; take ranks=1")
    return names[0]
