"""A few threads that read and write a file: several requests at a time, reads before writes.

A device answers several requests in the time of one; what the backward waits for goes before what only has to
leave; and who writes faster than the disk waits, so that what has not left yet cannot fill the memory.
Source: claims 2-4 of CN110032450B (a memory thread beside the training thread, a queue under a mutex and a
condition variable).
"""

from __future__ import annotations

import dataclasses
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from .tiers import Tiers

REQUEST_BYTES = 1 << 20
MOST_WAITING = 64 << 20  # bytes to be written
IDLE_SECONDS = 0.1
Done = Callable[[BaseException | None], None]


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One piece of work: ``run`` gets memory of its thread, ``REQUEST_BYTES`` from a page on; ``done`` is
    told what it raised, None for nothing, with the lock held. ``num_bytes``: what it keeps in memory."""

    run: Callable[[memoryview], None]
    done: Done
    num_bytes: int = 0


class IoThreads:
    """Threads with one queue of reads and one of writes; each starts when it is needed and ends when idle.

    ``changed`` is the lock of it all, and of those who use it: whatever ``done`` is told changes under it."""

    def __init__(self, name: str, *, depth: int, most_waiting: int, tiers: Tiers | None = None) -> None:
        """At most ``depth`` requests at a time; ``most_waiting``: bytes in memory that are to be written,
        which ``tiers`` count."""
        self.name, self.depth, self.most_waiting = name, depth, most_waiting
        self.changed, self._tiers = threading.Condition(threading.Lock()), tiers or Tiers()
        self.seconds_waited = 0.0  # of those who had something to write and no room
        self.waiting_bytes = self.most_waited_bytes = 0
        self._reads, self._writes = deque[Request](), deque[Request]()
        self._threads: set[threading.Thread] = set()
        self._num_busy, self._closing = 0, False

    def submit_writes(self, requests: Sequence[Request]) -> None:
        """Queue what is to be written; waits while too much waits already. Called without the lock."""
        num_bytes = sum(request.num_bytes for request in requests)
        with self.changed:
            if not self._has_room(num_bytes):
                began = time.perf_counter()
                self.changed.wait_for(lambda: self._has_room(num_bytes))
                self.seconds_waited += time.perf_counter() - began
            self._queue(self._writes, requests)
            self._tiers.device.add(num_bytes)  # whoever waited had counted it itself
            self._tiers.leaving.add(num_bytes)
            self.waiting_bytes += num_bytes
            self.most_waited_bytes = max(self.most_waited_bytes, self.waiting_bytes)

    def submit_reads(self, requests: Sequence[Request]) -> None:
        """Queue what is to be read, before all that is to be written. Called with the lock held."""
        self._queue(self._reads, requests)

    def cancel(self, requests: Iterable[Request]) -> int:
        """Take back the requests that no thread has begun; returns how many. Called with the lock held."""
        num = 0
        for request in requests:
            for queue in (self._reads, self._writes):
                if request in queue:
                    queue.remove(request)
                    self._ends(request)
                    num += 1
        if num:
            self.changed.notify_all()
        return num

    def drain(self) -> None:
        """Wait until nothing is queued or running."""
        with self.changed:
            self.changed.wait_for(lambda: not (self._reads or self._writes or self._num_busy))

    def close(self) -> None:
        """Do what is queued, and end the threads; a later request starts others."""
        with self.changed:
            threads, self._closing = list(self._threads), True
            self.changed.notify_all()
        for thread in threads:
            thread.join()
        self._closing = False

    def _ends(self, request: Request) -> None:
        self.waiting_bytes -= request.num_bytes
        self._tiers.device.add(-request.num_bytes)
        self._tiers.leaving.add(-request.num_bytes)

    def _has_room(self, num_bytes: int) -> bool:
        return not self.waiting_bytes or self.waiting_bytes + num_bytes <= self.most_waiting

    def _queue(self, queue: deque[Request], requests: Sequence[Request]) -> None:
        in_hand = len(self._reads) + len(self._writes) + self._num_busy
        while len(self._threads) < min(self.depth, in_hand + len(requests)):
            own = memoryview(mmap.mmap(-1, REQUEST_BYTES))  # here, where whoever asks hears of an error
            name = f"{self.name}-{len(self._threads)}"
            thread = threading.Thread(target=self._run, args=(own,), name=name)
            thread.start()  # before anything is queued that nobody would do
            self._threads.add(thread)
        queue.extend(requests)
        self.changed.notify_all()

    def _run(self, own: memoryview) -> None:
        try:
            self._work(own)
        finally:
            self._threads.discard(threading.current_thread())

    def _work(self, own: memoryview) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(self._awaited, timeout=IDLE_SECONDS)
                if not (self._reads or self._writes):
                    self._threads.discard(threading.current_thread())
                    return
                self._num_busy += 1
                request = (self._reads or self._writes).popleft()
            error: BaseException | None = None
            try:
                request.run(own)
            except BaseException as raised:  # raised again by whoever waits
                error = raised
            with self.changed:
                self._num_busy -= 1
                try:
                    request.done(error)
                finally:  # whatever that raises, nobody waits for what has ended
                    self._ends(request)
                    self.changed.notify_all()
            del request, error  # they hold what they were about

    def _awaited(self) -> bool:
        return bool(self._reads or self._writes or self._closing)
