"""The memory thread of a rank: what a forward saved leaves by layer, and is back before its layer's backward.

The training thread says which layer is done, by position in the program of the step; this thread, which
shares a queue under a mutex and a condition variable with it, writes out what is not read within
``writeout_layers`` and brings back what is read within ``prefetch_layers``. It only decides: packing and the
store have threads of their own.

    training thread -> memory thread -> packing thread -> I/O thread -> store
                                     -> reading thread <--------------- store

Source: claims 2-4 of CN110032450B (a training and a memory thread, so many layers ahead and behind)."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ..worker import Worker
from .options import NO_OPTIONS, MemoryOptions
from .packer import SavedTensorPacker, bring_fetched
from .saved_run import SavedRun
from .saved_storage import SavedStorage
from .timeline import NEVER, Pass, Timeline

WAKES = 4 << 20  # bytes that a forward saves until the thread looks again
NEAR = 4  # "auto": layers; what is read within so many is brought back, and need not leave
BEHIND = 64 << 20  # bytes that may wait to be packed until the training thread waits too
NOBODY: Mapping[int, int] = MappingProxyType({})


class MemoryThread:
    """Moves the saved tensors of all stages of a process.

    Args:    num_layers: of every stage, in layers."""

    def __init__(
        self, options: MemoryOptions = NO_OPTIONS, *, num_layers: Mapping[int, int] = NOBODY
    ) -> None:
        self._prefetch = NEAR if options.prefetch_layers is None else options.prefetch_layers
        self._writeout = self._prefetch if options.writeout_layers is None else options.writeout_layers
        self._num_layers = num_layers
        self._worker = Worker("penstock-memory-thread", depth=2)
        self._settled = threading.Condition()
        self._runs: dict[tuple[int, int], SavedRun] = {}
        self._timeline = Timeline()
        self._start = self._now = self._behind = 0
        self._saved = self._seen = 0  # bytes that forwards saved, and of them those that the thread has looked at
        self._asked = False  # whether the thread will look again

    def begin(self, program: Sequence[Pass]) -> None:
        """A step begins that runs ``program``."""
        self._timeline, self._start, self._now = Timeline(program, self._num_layers), 0, 0

    def at(self, number: int) -> None:
        """Pass ``number`` of the program begins."""
        self._start = self._now = self._timeline.start(number)
        if self._runs:
            self._wake()

    def add(self, run: SavedRun) -> None:
        """A forward begins."""
        self._runs[run.stage, run.micro_batch] = run
        run.packer.packed = self._packed

    def remove(self, run: SavedRun) -> None:
        """A backward is over."""
        self._runs.pop((run.stage, run.micro_batch), None)

    def saved(self, num_bytes: int) -> None:
        """A forward saved so many bytes more."""
        self._saved += num_bytes

    def layer_begins(self, run: SavedRun, layer: int) -> None:
        """The forward of ``run`` has come to its layer number ``layer``."""
        self._now = self._timeline.position(self._start, run.stage, layer, reads=False)
        if self._saved - self._seen >= WAKES:
            self._wake()

    def reads(self, run: SavedRun, layer: int) -> None:
        """The backward of ``run`` has come to what its layer number ``layer`` saved."""
        run.reading = layer
        self._now = self._timeline.position(self._start, run.stage, layer, reads=True)
        if run.left:
            self._wake()

    def closed(self) -> None:
        """A forward is over; waits while more waits to be packed than memory should hold."""
        self._wake()
        if self._waiting() > BEHIND:
            with self._settled:
                self._settled.wait_for(lambda: self._waiting() <= BEHIND or self._worker.failed)

    def check(self) -> None:
        """Raise again what the thread raised."""
        self._worker.check()

    def drain(self) -> None:
        """Wait until what may leave has left, and what was asked for is back."""
        with self._settled:
            self._wake()
            self._settled.wait_for(lambda: not (self._asked or self._behind) or self._worker.failed)
        self._worker.drain()

    def close(self) -> None:
        """End the thread."""
        self._worker.close()

    def _waiting(self) -> int:
        """Bytes that found no room to be packed, or that nobody has looked at."""
        return self._behind + self._saved - self._seen

    def _wake(self) -> None:
        if not self._asked:
            self._asked = True
            self._worker.submit_first(self._look)

    def _packed(self) -> None:
        """A storage was packed, so another may leave."""
        if self._behind:
            self._wake()

    def _look(self) -> None:
        self._asked = False
        now, timeline, behind, saved = self._now, self._timeline, 0, self._saved
        try:
            for run in list(self._runs.values()):
                with run.lock:
                    behind += 0 if run.wanted else self._leave(run, timeline, now)
            self._bring(timeline, now)
        finally:
            with self._settled:  # whoever waits looks for an error
                self._behind, self._seen = behind, saved
                self._settled.notify_all()
        if behind and any(run.packer.packing.has_room for run in list(self._runs.values())):
            self._wake()  # room came while this looked, and whoever made it saw nobody behind

    def _leave(self, run: SavedRun, timeline: Timeline, now: int) -> int:
        """Let leave what is far from being read; returns the bytes of what found no room in the queue."""
        starts, stays, behind = timeline.next_reading(run.stage, run.micro_batch, now), [], 0
        for _ in range(len(run.waiting)):
            storage = (reference := run.waiting.popleft())()
            if storage is None:
                continue
            layer = run.first_read(storage)
            read = starts if starts == NEVER else timeline.position(starts, run.stage, layer, reads=True)
            if read - now <= self._writeout or not run.may_leave(storage):
                stays.append(reference)
            elif run.packer.packing.has_room:
                run.leave(storage, layer)
            else:
                behind += storage.num_bytes
                stays.append(reference)
        run.waiting.extendleft(reversed(stays))
        return behind

    def _bring(self, timeline: Timeline, now: int) -> None:
        """Bring back what is read soon, in the order in which it is read."""
        for start, one in timeline.readings(now):
            run = None if one.micro_batch is None else self._runs.get((one.stage, one.micro_batch))
            if run is None:
                continue
            batch: list[weakref.ref[SavedStorage]] = []
            with run.lock:
                run.forget_read()
                for left in reversed(run.left):
                    storage = left.storage()
                    away = timeline.position(start, run.stage, left.layer, reads=True) - now
                    if away < 0 or storage is None:
                        continue
                    if away > self._prefetch:
                        fetch(run.packer, batch)
                        return
                    storage.transition("resident", only_from="leaving")
                    if storage.transition("coming", only_from="away"):
                        batch.append(left.storage)
            fetch(run.packer, batch)


def fetch(packer: SavedTensorPacker, storages: Sequence[weakref.ref[SavedStorage]]) -> None:
    """Bring back ``storages``, which are on their way now, one after the other."""
    if storages:
        packer.reading.submit(functools.partial(bring_fetched, storages))
