"""Ranks that a launcher such as torchrun started: who they are, and a part of its store for them alone."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ...compression.errors import ConfigError, TransportError
from . import rank as first
from .failure import cause, leave, read_failures
from .processes import Stopped, run_together

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from .process_group import World


PREFIX = "penstock_run_"
SECONDS = 60  # of age, from which a folder without a lock is left over, and not one that is being made


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Yield a folder that only this user may enter; it goes with the block. OSError: TMPDIR takes none."""
    # 1. What killed processes left is removed.
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another process sweeps, or it is another user's
            folder = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                status = os.fstat(folder)
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if status.st_uid == os.getuid() and time.time() - status.st_mtime > SECONDS:
                    shutil.rmtree(left)
            finally:
                os.close(folder)
    # 2. A folder with a lock is held.
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as path:
        folder = os.open(path, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield Path(path)
        finally:
            os.close(folder)


MEETING = "PENSTOCK_MEETING"  # the environment variable with the folder where ranks of a local run meet
_PAUSE = 0.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """This process among those that the launcher started."""

    rank: int
    ranks: int

    @staticmethod
    def of_environment() -> Launched | None:
        """Read the launcher's variables of the environment; None in a process, or a rank, that we started."""
        if MEETING in os.environ or not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
            return None
        rank, ranks = os.environ["RANK"], os.environ["WORLD_SIZE"]
        if not (rank.isdecimal() and ranks.isdecimal() and int(rank) < int(ranks)):
            raise ConfigError(
                f"a launcher sets RANK to a number below WORLD_SIZE, found RANK={rank} WORLD_SIZE={ranks}; "
                "unset both, and penstock starts ranks of its own"
            )
        return Launched(rank=int(rank), ranks=int(ranks))


def fresh(store: Store, *, rank: int, ranks: int, deadline: float) -> Store:
    """Return the part of ``store`` that only these processes share, and none that was restarted.

    A launcher may keep one store through restarts of its processes and changes of their number, so each of
    them gives a new sign, and rank 0 answers to that sign alone: it names a part of the store that is new.
    Raises: TransportError: a rank gives no sign, or rank 0 no answer, within ``deadline`` seconds."""
    from torch.distributed.distributed_c10d import PrefixStore

    until, own = time.monotonic() + deadline, secrets.token_hex(8)
    left = set(range(1, ranks)) if rank == 0 else {0}
    store.set(f"penstock/sign/{rank}", own)
    while left:
        if rank and store.check([key := f"penstock/answer/{rank}/{own}"]):
            own = store.get(key).decode()
            store.set(f"penstock/heard/{own}/{rank}", "")
            break
        for other in sorted(left) if rank == 0 else ():
            if store.check([key := f"penstock/sign/{other}"]):
                store.set(f"penstock/answer/{other}/{store.get(key).decode()}", own)
            left -= {other} if store.check([f"penstock/heard/{own}/{other}"]) else set()
        if left and time.monotonic() > until:
            raise TransportError(
                f"rank {', '.join(map(str, sorted(left)))} of {ranks} did not join within {deadline:g} s; "
                "see why it did not start"
            )
        time.sleep(_PAUSE)
    return PrefixStore(f"penstock/{own}", store)


MOST_RANKS_PER_CORE = 4  # more only take each other's time and memory


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
    """Refuse more ranks than this machine can start, or other ones than a launcher did."""
    most, launched = MOST_RANKS_PER_CORE * cores(), Launched.of_environment()
    if launched and ranks != launched.ranks:
        raise ConfigError(
            f"the launcher started {launched.ranks} processes (WORLD_SIZE={launched.ranks}), and the run has "
            f"ranks={ranks}; start as many as it has ranks, or leave ranks= out"
        )
    if ranks > most and not launched:
        raise ConfigError(
            f"ranks={ranks} is more than this machine can start: its {cores()} cores take "
            f"{MOST_RANKS_PER_CORE} ranks each; lower ranks to {most}"
        )


def init(*, deadline: float = 60.0) -> World:
    """Join the ranks of a local run, or those that torchrun's environment describes; where a default process
    group is initialised, its ranks; started plainly, this process alone.

    Args:
        deadline: Seconds until every rank must have joined.

    Returns:
        The ranks.

    Raises:
        TransportError: There is no store to meet at, or a rank did not join; the sentence names it."""
    from .process_group import MOMENT, World, bounded, init_group

    world = World.default(deadline=deadline)
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys() or not world.is_alone:
        return world
    if os.environ["WORLD_SIZE"] == "1" and (os.environ.pop(MEETING, None) or "MASTER_ADDR" not in os.environ):
        return world  # nobody else comes
    try:
        store, rank, ranks = bounded(lambda: _meeting(deadline), seconds=deadline + MOMENT)
    except TransportError:
        raise
    except Exception as error:
        if "EADDRINUSE" in str(error):
            raise TransportError(
                f"MASTER_PORT={os.environ.get('MASTER_PORT')} is in use on this machine, so that rank 0 "
                "cannot listen there; set another MASTER_PORT, the same for all ranks"
            ) from error
        raise TransportError(
            f"rank {os.environ['RANK']} found no store to meet the others at within {deadline:g} s: {error}"
        ) from error
    return init_group(store, rank=rank, ranks=ranks, deadline=deadline)


def check_joined(world: World) -> World:
    """Refuse ranks that a launcher started and that would each train alone; return ``world``."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if world.is_alone and "RANK" in os.environ and ranks != "1":
        raise ConfigError(
            f"this process is rank {os.environ['RANK']} of WORLD_SIZE={ranks} and has joined no others; call "
            "penstock.init() first, or let Pipeline.of do it"
        )
    return world


def _meeting(deadline: float) -> tuple[Store, int, int]:
    """Return the store where the ranks meet, this rank, and how many there are."""
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
) -> None:
    """Run ``python -m module *arguments`` once for every rank and wait until all have ended.

    Args:   errors: the folder where ``run_rank`` leaves sentences; stages_of_rank: one entry for each rank.
            ends: for each rank, the command that runs another one where that rank shall be.
            device: the network device between the ranks; None: the loopback device.
    Raises: PenstockError: the first cause among failures. Stopped: the ranks were asked to stop, and did."""
    size, loopback = len(stages_of_rank), [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if not (device or loopback):
        raise TransportError("ranks speak over the loopback device, and this machine has none; take ranks=1")
    # -P and PYTHONPATH: the ranks find modules where this process does, the user's own included.
    command = [sys.executable, "-P", "-m", first.__name__, module, *arguments]
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(private_folder())
        except OSError as error:
            raise TransportError(
                f"ranks meet in a temporary folder, and there is none ({error}); name one with TMPDIR"
            ) from error
        environment = os.environ | {
            "WORLD_SIZE": str(size),
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "GLOO_SOCKET_IFNAME": device or loopback[0],
            MEETING: str(folder),
            first.LAUNCHER: str(os.getpid()),
        }
        exits = run_together(
            ([*end, *command], environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank, end in enumerate(ends or [()] * size)
        )
    if exits.stopped:
        raise Stopped(exits.stopped)
    if exits.codes:
        raise cause(exits, read_failures(errors), stages_of_rank=stages_of_rank)


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
