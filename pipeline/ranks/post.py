"""Where threads of one process leave things for each other: messages between two, and what all shall see.

A message is copied once, from the sender's buffer into the receiver's, by whoever of the two comes second."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import Work
from torch.utils.weak import WeakTensorKeyDictionary

from ...stages.device import is_gpu
from .signals import Stopped

Key = tuple[Any, ...]


class Post:
    """What threads leave for each other, by keys that name the group, the place and the number.

    Attributes: ended: why nobody waits any more; "" as long as they do."""

    def __init__(self) -> None:
        self.ended, self.store = "", HashStore()
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
        """The block in which a signal calls ``tell`` with its number."""
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
        """Note that ``rank`` trains ``model``; the name of a parameter that another one does, "" if none."""
        with self._changed:
            for name, parameter in model.named_parameters():
                if self._holds.setdefault(parameter, rank) != rank:
                    return name
        return ""

    def match(self, key: Key, letter: Letter) -> None:
        """Bring the halves of a message together, in the order in which they come."""
        with self._changed:
            self._check()
            waiting = self._halves.setdefault(key, deque())
            if not waiting or waiting[0].sends == letter.sends:
                return waiting.append(letter)
            other = waiting.popleft()
        letter.meet(other)
        with self._changed:
            letter.there = other.there = True
            self._changed.notify_all()

    def leave(self, key: Key, item: Any, readers: int) -> None:
        """Put down what so many will ``take``."""
        with self._changed:
            self._check()
            self._left[key] = item, readers
            self._changed.notify_all()

    def take(self, key: Key, seconds: float) -> Any:
        """What somebody left, when it is there."""
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

    def meet(self, other: Letter) -> None:
        """Copy; no mode of torch sees it."""
        sent, into = (self.buffer, other.buffer) if self.sends else (other.buffer, self.buffer)
        assert sent.nbytes <= into.nbytes, "a receiver knows the most that may come"
        ctypes.memmove(into.data_ptr(), sent.data_ptr(), sent.nbytes)  # other threads run meanwhile

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait until it has gone over."""
        seconds = timeout.total_seconds() if timeout else self.seconds
        self.post.wait_for(lambda: self.there, seconds, "send" if self.sends else "recv")
        return True
