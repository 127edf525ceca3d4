"""A named thread that does tasks in the order in which they were submitted.

The training thread goes on with the next layer meanwhile; the codecs' kernels run without Python's lock.
Source: claim 2 of CN110032450B (a training thread and a memory thread that share one queue).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

Task = Callable[[], None]


class Worker:
    """A thread that starts with the first task and ends when it was idle for a while, or by ``close``.

    A backward may come long after its forward, or never: nobody would be there to end a thread that waits.
    """

    def __init__(self, name: str, *, depth: int = 8, idle_seconds: float = 0.1) -> None:
        """At most ``depth`` tasks wait; what they are about is still held, so the queue bounds memory too."""
        self.name, self._depth, self._idle_seconds = name, depth, idle_seconds
        self._changed = threading.Condition()
        self._tasks: deque[Task] = deque()
        self._thread: threading.Thread | None = None
        self._busy = self._closing = False
        self._error: BaseException | None = None

    def submit(self, task: Task) -> None:
        """Queue ``task``; waits while the queue is full."""
        with self._changed:
            self._changed.wait_for(lambda: self.has_room)
            self._put(task, self._tasks.append)

    def try_submit(self, task: Task) -> None:
        """Queue ``task`` if there is room: for what is only done ahead of its time."""
        with self._changed:
            if self.has_room:
                self._put(task, self._tasks.append)

    def submit_first(self, task: Task) -> None:
        """Put ``task`` before all others, whether there is room or not."""
        with self._changed:
            self._put(task, self._tasks.appendleft)

    def check(self) -> None:
        """Raise again what a task raised."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def drain(self) -> None:
        """Wait until nothing is queued or running, then ``check``."""
        with self._changed:
            self._changed.wait_for(lambda: not self._tasks and not self._busy)
        self.check()

    def close(self) -> None:
        """Do what is queued, and end the thread; a later task starts another."""
        with self._changed:
            thread, self._closing = self._thread, True
            self._changed.notify_all()
        if thread is not None:
            thread.join()
        self._closing = False

    @property
    def has_room(self) -> bool:
        """Whether a task can be queued without a wait."""
        return len(self._tasks) < self._depth

    @property
    def failed(self) -> bool:
        """Whether a task raised something that nobody has been told yet."""
        return self._error is not None

    def _put(self, task: Task, add: Callable[[Task], None]) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._work, name=self.name)
            thread.start()  # it waits for the lock; where none can be started, nothing is queued
            self._thread = thread
        add(task)
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._tasks or self._closing, timeout=self._idle_seconds)
                if not self._tasks:
                    self._thread = None
                    return
                self._busy, task = True, self._tasks.popleft()
                self._changed.notify_all()
            try:
                task()
            except BaseException as error:  # raised again by whoever waits
                self._error = self._error or error
            del task  # it holds what it was about
