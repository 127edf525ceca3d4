"""A group of ranks that are threads of one process: collectives and messages through the memory they share.

For a collective each rank leaves a copy, which the others read; sums go in the order of ranks, so all have
the same bits. Ending wakes everybody who waits, which gloo between threads does not: its connections close
with the last reference to a group (torch 2.15), and the traceback of a rank that failed holds one."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import ProcessGroup, ReduceOp, Work
from torch.utils.weak import WeakTensorKeyDictionary

from ...stages.device import is_gpu
from .processes import Stopped

Key = tuple[Any, ...]


class Post:
    """Mailbox of threads, by keys that name the group, the place and the number."""

    def __init__(self) -> None:
        self.ended, self.store = "", HashStore()  # why nobody waits any more; "" as long as they do
        self._changed = threading.Condition()
        self._halves: dict[Key, deque[Letter]] = {}
        self._left: dict[Key, tuple[Any, int]] = {}
        self._holds = WeakTensorKeyDictionary()
        self._listeners: list[Callable[[int], None]] = []

    def end(self, why: str) -> None:
        """Wake everybody; who waits for what is not there yet, now or later, gets ``why``."""
        with self._changed:
            self.ended = self.ended or why
            self._changed.notify_all()

    @contextlib.contextmanager
    def hearing(self, tell: Callable[[int], None]) -> Iterator[None]:
        """Have a signal call ``tell`` with its number in the block."""
        self._listeners.append(tell)
        try:
            yield
        finally:
            self._listeners.remove(tell)

    def hear(self, number: int) -> None:
        """Tell those who listen of a signal; raises Stopped where nobody does."""
        for tell in (listeners := list(self._listeners)):
            tell(number)
        if not listeners:
            raise Stopped(number)

    def claim(self, model: nn.Module, rank: int) -> str:
        """Note that ``rank`` trains ``model``; return a parameter that another one trains, "" if none."""
        with self._changed:
            for name, parameter in model.named_parameters():
                if self._holds.setdefault(parameter, rank) != rank:
                    return name
        return ""

    def match(self, key: Key, letter: Letter) -> Letter:
        """Bring the halves of a message together, in the order in which they come; return ``letter``."""
        with self._changed:
            self._check()
            waiting = self._halves.setdefault(key, deque())
            if not waiting or waiting[0].sends == letter.sends:
                waiting.append(letter)
                return letter
            other = waiting.popleft()
        sent, into = (letter, other) if letter.sends else (other, letter)
        assert sent.buffer.nbytes <= into.buffer.nbytes, "a receiver knows the most that may come"
        # No mode of torch sees it, and other threads run meanwhile.
        ctypes.memmove(into.buffer.data_ptr(), sent.buffer.data_ptr(), sent.buffer.nbytes)
        with self._changed:
            letter.there = other.there = True
            self._changed.notify_all()
        return letter

    def leave(self, key: Key, item: Any, readers: int) -> None:
        """Put down what so many will ``take``."""
        with self._changed:
            self._check()
            self._left[key] = item, readers
            self._changed.notify_all()

    def take(self, key: Key, seconds: float) -> Any:
        """Wait for an item, and remove it."""
        with self._changed:
            self.wait_for(lambda: key in self._left, seconds, "what all ranks do together")
            item, readers = self._left.pop(key)
            if readers > 1:
                self._left[key] = item, readers - 1
        return item

    def wait_for(self, there: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait until something is ``there``; raises RuntimeError, as gloo does, where it does not come."""
        with self._changed:
            self._changed.wait_for(lambda: there() or bool(self.ended), seconds)
            if not there():
                self._check()
                raise RuntimeError(f"Timed out waiting {seconds * 1000:.0f}ms for {what}")

    def _check(self) -> None:
        if self.ended:
            raise RuntimeError(f"Connection closed by peer: {self.ended}")


class Letter(Work):
    """One half of a message: a buffer that is sent, or one to receive into, which may be longer."""

    def __init__(self, post: Post, buffer: torch.Tensor, seconds: float, *, sends: bool) -> None:
        super().__init__()
        assert buffer.is_contiguous(), "frames are packed"
        assert not is_gpu(buffer.device), "frames travel on the host"
        self.post, self.buffer, self.seconds, self.sends, self.there = post, buffer, seconds, sends, False

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait until it has gone over."""
        seconds = timeout.total_seconds() if timeout else self.seconds
        self.post.wait_for(lambda: self.there, seconds, "send" if self.sends else "recv")
        return True


# Each method of a ProcessGroup has several forms; ours is the one that torch.distributed calls.
# pyright: reportIncompatibleMethodOverride=false


class Together(Work):
    """Collective of several ranks, done by the first that waits for it."""

    def __init__(self, do: Callable[[float], None], seconds: float) -> None:
        super().__init__()
        self.do, self.seconds, self.done = do, seconds, False

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Do it, once."""
        if not self.done:
            with torch.no_grad():
                self.do(timeout.total_seconds() if timeout else self.seconds)
            self.done = True
        return True


class ThreadGroup(ProcessGroup):
    """A rank's end of a group of threads, as torch.distributed's functions take it; all have one ``key``."""

    def __init__(self, post: Post, rank: int, size: int, *, deadline: float, key: Key = ()) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue] (torch 2.14's stubs know another one)
        self.post, self.seconds, self.place, self.key = post, deadline, rank, key
        self.ranks, self._counts, self._number = range(size), Counter[Key](), 0

    @staticmethod
    def create(ranks: int, *, deadline: float) -> list[ThreadGroup]:
        """Return the ends of a new group, by rank; any wait takes ``deadline`` seconds at most."""
        post = Post()
        return [ThreadGroup(post, rank, ranks, deadline=deadline) for rank in range(ranks)]

    def part(self, ranks: Sequence[int]) -> ThreadGroup:
        """Return this rank's end of a group of some of the ranks; each of them asks, and nobody else."""
        chosen = tuple(ranks)
        self._counts[chosen] += 1
        key, place = (*self.key, chosen, self._counts[chosen]), chosen.index(self.place)
        return ThreadGroup(self.post, place, len(chosen), deadline=self.seconds, key=key)

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int) -> Work:
        """Begin to send; the buffer is the receiver's to read until it has ended."""
        letter = Letter(self.post, tensors[0], self.seconds, sends=True)
        return self.post.match((self.key, self.place, dstRank, tag), letter)

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> Work:
        """Begin to receive."""
        letter = Letter(self.post, tensors[0], self.seconds, sends=False)
        return self.post.match((self.key, srcRank, self.place, tag), letter)

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        """Everybody's tensor, by rank."""

        def fill(all_of: list[torch.Tensor]) -> None:
            for row, theirs in zip(output_tensors[0], all_of, strict=True):
                row.copy_(theirs)

        return self._all(input_tensors[0], fill)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        """The sum (or largest) over the ranks, in their order, in place."""
        return self._all(tensors[0], lambda all_of: tensors[0].copy_(_reduced(all_of, opts)))

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        """The same on one rank; the others keep what they have."""
        root = opts.rootRank
        reads = self.place == root
        then = (lambda all_of: tensors[0].copy_(_reduced(all_of, opts))) if reads else None
        return self._all(tensors[0], then, of=(root,))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        """Copy the tensors of one rank to all."""
        root = opts.rootRank
        mine = tensors[0] if self.place == root else None
        return self._all(mine, lambda sent: tensors[0].copy_(sent[0]), by=(root,))

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        """A piece for each of what one rank has."""
        root, piece = opts.rootRank, output_tensors[0]
        mine = torch.stack(list(input_tensors[0])) if self.place == root else None
        return self._all(mine, lambda sent: piece.copy_(sent[0][self.place]), by=(root,))

    def barrier(self, opts: Any = None) -> Work:
        """Wait for everybody."""
        return self._all(torch.empty(0), lambda all_of: None)

    def getBackendName(self) -> str:
        """Name of the backend for torch."""
        return "threads"

    def _all(
        self,
        mine: torch.Tensor | None,
        then: Callable[[list[torch.Tensor]], object] | None,
        *,
        by: Sequence[int] | None = None,
        of: Sequence[int] | None = None,
    ) -> Work:
        """Leave a copy of ``mine`` for ranks ``of``, and pass those ``by`` ranks to ``then``; None: all."""
        self._number += 1
        number = self._number
        if mine is not None:
            self.post.leave((self.key, number, self.place), mine.detach().clone(), len(of or self.ranks))

        def do(seconds: float) -> None:
            if then is not None:
                then([self.post.take((self.key, number, source), seconds) for source in by or self.ranks])

        return Together(do, self.seconds)


def _reduced(tensors: Sequence[torch.Tensor], opts: Any) -> torch.Tensor:
    """Reduce in the order of ranks."""
    asked = ReduceOp.SUM if opts is None else opts.reduceOp
    if asked == ReduceOp.SUM:  # no tuple or dict: torch's type compares by this side alone
        return functools.reduce(torch.add, tensors)
    if asked == ReduceOp.MAX:
        return functools.reduce(torch.maximum, tensors)
    raise ValueError(f"ranks that are threads add up, or take the largest, found {asked}")
