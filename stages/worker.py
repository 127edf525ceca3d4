"""Threads and streams that do tasks in the order in which they were submitted, beside the training thread."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


class Work(Generic[T]):
    """Work of a stream, and the ``value`` it returns, to be read behind ``wait``; this one is done."""

    def __init__(self, value: T) -> None:
        self.value = value

    def wait(self) -> None:
        """Let this thread wait until it is done."""

    @property
    def done(self) -> bool:
        """Return whether nobody need wait for it."""
        return True


class Stream:
    """Does what is submitted, in that order, beside the computing; that of a CPU does it at once."""

    def submit(
        self, task: Callable[[], T], *, after: Iterable[Work[Any]] = (), reads: Iterable[Tensor] = ()
    ) -> Work[T]:
        """Do ``task`` behind the work ``after``, without a wait; what it ``reads`` stays until it is done."""
        return Work(task())

    def run(self, after: Work[Any] | None = None) -> contextlib.AbstractContextManager[None]:
        """The block that runs on this stream, behind ``after``; at the end of the block its work is done."""
        return contextlib.nullcontext()


Task = Callable[[], None]


class Worker:
    """Threads that start with the first tasks and end when they were idle for a while, or by ``close``: a
    backward may come long after its forward, or never, and nobody would end a thread that waits."""

    def __init__(self, name: str, *, depth: int = 8, num_threads: int = 1, idle_seconds: float = 0.1) -> None:
        """At most ``depth`` tasks wait; what they hold is in memory, so the queue bounds that, too."""
        self.name, self._depth, self._num_threads, self._idle_seconds = name, depth, num_threads, idle_seconds
        self._changed = threading.Condition()
        self._urgent, self._tasks = deque[Task](), deque[Task]()
        self._threads: set[threading.Thread] = set()
        self._num_busy, self._closing = 0, False
        self._error: BaseException | None = None

    def submit(self, task: Task) -> None:
        """Queue ``task``; waits while the queue is full."""
        with self._changed:
            self._changed.wait_for(lambda: self.has_room)
            self._put(task, self._tasks)

    def submit_first(self, task: Task) -> None:
        """Queue ``task`` before all that ``submit`` queued, whether there is room or not."""
        with self._changed:
            self._put(task, self._urgent)

    def check(self) -> None:
        """Raise again what a task raised."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Wait until nothing is queued or running."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._urgent or self._tasks or self._num_busy))

    def drain(self) -> None:
        """Wait until nothing is queued or running, then ``check``."""
        self.wait()
        self.check()

    def close(self) -> None:
        """Do what is queued, and end the threads; a later task starts others."""
        with self._changed:
            threads, self._closing = list(self._threads), True
            self._changed.notify_all()
        for thread in threads:
            thread.join()
        self._closing = False

    @property
    def has_room(self) -> bool:
        """Return whether a task can be queued without a wait."""
        return len(self._tasks) < self._depth

    @property
    def num_urgent(self) -> int:
        """Tasks of ``submit_first`` that wait."""
        return len(self._urgent)

    @property
    def failed(self) -> bool:
        """Return whether a task raised something that nobody has been told yet."""
        return self._error is not None

    def _put(self, task: Task, queue: deque[Task]) -> None:
        num_tasks = len(self._urgent) + len(self._tasks) + self._num_busy + 1
        if len(self._threads) < min(self._num_threads, num_tasks):
            thread = threading.Thread(target=self._work, name=self.name)
            thread.start()  # it waits for the lock; where none can be started, nothing is queued
            self._threads.add(thread)
        queue.append(task)
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._urgent or self._tasks or self._closing, timeout=self._idle_seconds
                )
                if not (self._urgent or self._tasks):
                    self._threads.discard(threading.current_thread())
                    return
                task = (self._urgent or self._tasks).popleft()
                self._num_busy += 1
                self._changed.notify_all()
            try:
                task()
            except BaseException as error:  # raised again by whoever waits
                self._error = self._error or error
            del task  # it holds what it was about
            with self._changed:
                self._num_busy -= 1
                self._changed.notify_all()
