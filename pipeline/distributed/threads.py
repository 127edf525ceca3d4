"""Ranks as threads of one process: a named thread for each, which end together.

A process for each rank is the default: threads share the interpreter's lock, and a layer that crashes takes
all of them. Their frames stay in one memory, and one process has loaded the interpreter and torch once.
What threads share and processes do not:

    generators         torch's for each device, Python's and NumPy's: ``seeds.TURN``. A random layer is
                       seeded, runs and puts the states back in one turn; so do initial values, samples that
                       are read here, and trials of optimizers
    recording a model  exchanges methods of torch: one at a time, and other threads' calls pass it by
    numbers of threads of torch, OpenMP and MKL: each thread has its own; it begins with its starter's
    grad mode, autocast, hooks on saved tensors, profilers: each thread has its own
    deterministic and default dtype, warning filters, folder, environment: one, which nobody here changes
    signals            the main thread hears them, and tells the ranks (``groups.hearing``)
    memory             what a report tells of the process is told by each rank"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from ...compression.errors import ConfigError, Disagreement, PenstockError, TransportError
from .failure import cause, leave, read_failures
from .process_group import MOMENT, World
from .processes import Ends, Stopped, heard
from .thread_group import Post, ThreadGroup

_LAST_WORDS_SECONDS = 2 * MOMENT  # for a thread whose wait has ended to find out why

T = TypeVar("T")


def in_threads(function: Callable[[World], T], *, ranks: int, deadline: float = 60.0) -> list[T]:
    """Call ``function(world)`` in so many threads at once, each a rank of its own; they are gone at the end.

    A Pipeline in it takes that ``world=world`` and a model that no other thread has. What draws from torch's
    own generator (``torch.randn``) is done before, or with a ``torch.Generator``: it would draw among layers.

    Args:
        function: Called with the World of its thread.
        ranks: Number of threads.
        deadline: Seconds that a wait for all of them may take, and the others once one has failed.

    Returns:
        What the calls return, by rank.

    Raises:
        Exception: That of the first call that failed by itself; the others end, too.
    """
    if ranks < 1:
        raise ConfigError(f"ranks={ranks} must be 1 or more: each is a thread")
    return run_threads(worlds_of(ranks, deadline=deadline), function)


def worlds_of(ranks: int, *, deadline: float) -> list[World]:
    """Return the worlds of so many threads, by rank."""
    return [World(group, deadline=deadline) for group in ThreadGroup.create(ranks, deadline=deadline)]


def start_threads(
    work: Callable[[World], None],
    *,
    errors: Path,
    stages_of_rank: Sequence[Sequence[int]],
    deadline: float,
) -> None:
    """Do the work of all ranks of a run, each a thread; arguments and errors are those of ``start_ranks``."""
    worlds = worlds_of(len(stages_of_rank), deadline=deadline)

    def rank(world: World) -> None:
        try:
            work(world)
        except Stopped:
            raise
        except BaseException as error:
            leave(errors, error, rank=world.rank)
            raise

    # A signal that asks to stop goes to those who listen; before anybody does, it stops all.
    with heard(_post_of(worlds[0]).hear):
        try:
            run_threads(worlds, rank)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            ends = Ends(codes={}, stuck=[])
            raise cause(ends, read_failures(errors), stages_of_rank=stages_of_rank) from error


def run_threads(worlds: Sequence[World], function: Callable[[World], T]) -> list[T]:
    """Call ``function`` as ``in_threads`` does, in worlds that were made together."""
    post, num_threads, results = _post_of(worlds[0]), torch.get_num_threads(), dict[int, T]()
    ended: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()

    def run(world: World) -> None:
        error = None
        try:
            torch.set_num_threads(num_threads)
            torch.get_num_threads()  # torch keeps a thread's number from here on
            results[world.rank] = function(world)
            world.close()
        except BaseException as found:  # SystemExit in a layer ends a run as any other does
            error = found
            text = str(found) if isinstance(found, PenstockError) else f"{type(found).__name__}: {found}"
            text = text if text.startswith(f"rank {world.rank}") else f"rank {world.rank}: {text}"
            if not isinstance(found, TransportError | Stopped):
                with contextlib.suppress(Exception):
                    world.notices.post_failure(text)
            post.end(text)
        ended.put((world.rank, error))

    threads = [
        threading.Thread(target=run, args=(world,), name=f"rank{world.rank}", daemon=True) for world in worlds
    ]
    seconds, errors, left = worlds[0].deadline, list[BaseException](), set(range(len(worlds)))
    try:
        for thread in threads:
            thread.start()
        until = float("inf")
        while left:
            wait = None if until == float("inf") else max(0.0, until - time.monotonic())
            rank, error = ended.get(timeout=wait)
            left.discard(rank)
            threads[rank].join()
            if error is not None:
                errors.append(error)
                until = min(until, time.monotonic() + seconds + _LAST_WORDS_SECONDS)
    except queue.Empty:
        names = ", ".join(threads[rank].name for rank in sorted(left))
        errors[0].add_note(f"{names} did not end within {seconds:g} s, and may still run")
    except BaseException as stop:  # Ctrl-C
        post.end(f"{type(stop).__name__} ended all ranks")
        for thread in threads:
            if thread.ident is not None:
                thread.join(seconds + _LAST_WORDS_SECONDS)
        raise
    if errors:
        raise min(errors, key=_distance)
    return [results[world.rank] for world in worlds]


def _post_of(world: World) -> Post:
    assert isinstance(world.group, ThreadGroup), "made by worlds_of"
    return world.group.post


def _distance(error: BaseException) -> int:
    """Distance from the cause: 0 a rank's own error, then another rank's refusal, then a lost rank."""
    return 2 if isinstance(error, TransportError) else int(isinstance(error, Disagreement))
