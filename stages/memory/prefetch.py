"""The memory thread of a rank: what a forward saved leaves by layer, and is back before its layer's backward.

The training thread queues every layer that it comes to, and signals; this thread takes them in turn, writes
out what is not read within ``writeout_layers``, and brings back what is read within ``prefetch_layers``. Of a
burst of layers it decides at the last one. It only decides: packing and the store have threads of their own.

    training thread -> memory thread -> packing thread -> I/O thread -> store
                                     -> reading thread <--------------- store

Where the device has a limit, only so much leaves as is too much, what is read last first; nothing is brought
back ahead of its time that has no room; and the training thread waits between two layers while there is no
room for one more and something is on its way out.
"""

import bisect
import functools
import itertools
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from ...compression.buffers import Frame
from ..device import is_gpu
from ..tracing.layers import Layer
from ..worker import Worker
from .byte_budget import NO_OPTIONS, PREFETCH_LAYERS, MemoryOptions, Tiers
from .packer import LayerAwareCompressor, SavedTensorPacker, WireFrame
from .saved_storage import SavedStorage
from .slots import Slots

NEVER = 1 << 62  # not in this program: in a later step, or nobody knows


class Pass(NamedTuple):
    """The layers of ``stage`` run on ``micro_batch``: forward in ascending order, else (``reads``) back."""

    stage: int
    micro_batch: int | None
    reads: bool = False


class Timeline:
    """Positions count layers; a pass takes as many as its stage has (``num_layers``), and one at least."""

    def __init__(self, program: Sequence[Pass] = (), num_layers: Mapping[int, int] | None = None) -> None:
        self.program, self._num_layers = tuple(program), dict(num_layers or {})
        lengths = [max(1, self._num_layers.get(one.stage, 1)) for one in self.program]
        self.starts = list(itertools.accumulate(lengths, initial=0))[:-1]  # of each pass
        parts = zip(self.starts, lengths, self.program, strict=True)
        self._reads = [(start, start + length, one) for start, length, one in parts if one.reads]
        self.passes = [(one.stage, one.reads) for one in self.program]  # a stream numbers micro-batches on
        self.reads_once = len({(one.stage, one.micro_batch) for *_, one in self._reads}) == len(self._reads)

    def position(self, start: int, stage: int, layer: int, *, reads: bool) -> int:
        """Position of ``layer`` in a pass of ``stage`` that begins at ``start``."""
        return start + (max(0, self._num_layers.get(stage, 0) - 1 - layer) if reads else layer)

    def readings(self, now: int) -> Iterator[tuple[int, Pass]]:
        """The passes that read what was saved, from the one that runs at ``now`` on, and where they begin."""
        return ((start, one) for start, end, one in self._reads if end > now)

    def next_reading(self, stage: int, micro_batch: int, now: int) -> int:
        """Position of the next pass that reads what ``stage`` saved of ``micro_batch``, or NEVER."""
        wanted = stage, micro_batch
        return next((s for s, one in self.readings(now) if (one.stage, one.micro_batch) == wanted), NEVER)


SentFrames = Mapping[int, tuple[Tensor, Frame]]


class Evicted(NamedTuple):
    """A storage that was given to the packer, and the number of the layer that reads it first."""

    layer: int
    storage: weakref.ref[SavedStorage]
    key: object


class SavedRun:
    """The saved tensors of one forward, from its first layer to the end of its backward."""

    def __init__(
        self, stage: int, micro_batch: int, *, packer: SavedTensorPacker, compressor: LayerAwareCompressor
    ) -> None:
        self.stage, self.micro_batch = stage, micro_batch
        self.packer, self._compressor, self._numbers = packer, compressor, dict[Layer | None, int]()
        self._keys: deque[object] = deque()
        self._wires: dict[object, WireFrame] = {}
        self.waiting: dict[object, weakref.ref[SavedStorage]] = {}  # what has not left, in order of saving
        self.left: list[Evicted] = []  # the others by layer; only the memory thread changes it
        self.reading = -1  # the layer whose backward runs, by number
        self.lock = threading.Lock()  # what the memory thread decides, and the end of it all
        self.closed = False  # the forward is over

    def add(self, storage: SavedStorage) -> None:
        """A storage whose first tensor was saved now."""
        storage.number = len(self._keys)
        self._keys.append(storage.key)
        self.waiting[storage.key] = weakref.ref(storage)

    def begins(self, layer: Layer) -> int:
        """``layer`` runs next; returns its number, in running order."""
        return self._numbers.setdefault(layer, len(self._numbers))

    def close(self, sent: SentFrames) -> None:
        """The forward is over; frames were made of the tensors that it ``sent``."""
        frames = [WireFrame.of(item, frame) for item, frame in sent.values()]
        for storage in self.alive() if frames else ():
            wire = next((frame for frame in frames if frame.covers(storage)), None)
            if wire is not None:
                wire.frame.hold()
                self._wires[storage.key] = wire
        self.closed = True

    def resident(self) -> list[SavedStorage]:
        """Those that have not left and that the graph still holds, in the order of saving."""
        found = [reference() for reference in self.waiting.copy().values()]
        return [storage for storage in found if storage is not None]

    def first_read(self, storage: SavedStorage) -> int:
        """The number of the last layer that saved a part of ``storage``: its backward comes first."""
        return max(self.number(view.layer) for view in list(storage.views))

    def number(self, layer: Layer | None) -> int:
        """The number of a layer of the stage, in running order."""
        return self._numbers.get(layer, 0)

    def leave(self, storage: SavedStorage, layer: int) -> None:
        """Give ``storage``, which ``layer`` reads first, to the packer."""
        del self.waiting[storage.key]
        if not storage.transition("evicting", only_from="resident"):
            return
        wire = self._wires.pop(storage.key, None)
        bisect.insort(self.left, Evicted(layer, weakref.ref(storage), storage.key), key=lambda one: one.layer)
        self.packer.queue(storage, wire=wire, compress=self._compressor.compress)

    def alive(self) -> list[SavedStorage]:
        """The storages that the graph still holds, in the order of a backward."""
        found = [one.storage() for one in reversed(list(self.left))]
        return [*reversed(self.resident()), *(storage for storage in found if storage is not None)]

    def drop(self) -> None:
        """Forget everything: after the backward, or when the step failed."""
        with self.lock:
            for storage in self.alive():
                storage.transition("dropped")
            for key in self._keys:
                self.packer.store.drop(key)
        wires, self._wires = self._wires, {}
        for wire in wires.values():
            wire.frame.release()


WAKES = 4 << 20  # bytes that a forward saves until the thread decides again
BEHIND = 64 << 20  # bytes that may wait to be packed until the training thread waits too
SOON = 1  # layers: what is read within so many comes whether it has room or not
NOBODY: Mapping[int, int] = MappingProxyType({})


class MemoryThread:
    """Moves the saved tensors of all stages of a process, each of so many layers (``num_layers``)."""

    def __init__(
        self, options: MemoryOptions = NO_OPTIONS, *, num_layers: Mapping[int, int] = NOBODY,
        tiers: Tiers | None = None,
    ) -> None:  # fmt: skip
        self.tiers = tiers or Tiers()
        self.slots = Slots(self.tiers)
        self._prefetch = PREFETCH_LAYERS if options.prefetch_layers is None else options.prefetch_layers
        self.turns_ahead = 1 if options.prefetch_layers is None else options.prefetch_layers
        is_limited = self.tiers.device.limit is not None  # then no room is promised to parameters
        self.turns_staying = 0 if is_limited else options.writeout_layers or 0
        self._writeout = self._prefetch if options.writeout_layers is None else options.writeout_layers
        self._num_layers = num_layers
        self._worker = Worker("penstock-memory-thread", depth=2)
        self._settled = threading.Condition()
        self._runs: dict[tuple[int, int], SavedRun] = {}
        self._timeline = Timeline()
        self._step = self._start = self._now = self._behind = 0
        self._saved = self._seen = 0  # bytes that forwards saved, and those of them that the thread has seen
        self._largest = 0  # bytes of what was saved so far
        self._due = False  # one of the layers that the thread took is reason to decide

    def begin(self, program: Sequence[Pass]) -> None:
        """A step begins that runs ``program``."""
        if tuple(program) != self._timeline.program:  # most steps run that of the one before
            before, self._timeline = self._timeline, Timeline(program, self._num_layers)
            if self._timeline.passes != before.passes:
                self.slots.clear()
        self._step += 1
        self._start = self._now = 0

    def end(self) -> None:
        """A step ended."""
        self.slots.place()

    def at(self, number: int) -> None:
        """Pass ``number`` of the program begins."""
        self._start = self._timeline.starts[number]
        if self._runs:
            self._queue(self._start, decide=True)

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
        self._largest = max(self._largest, num_bytes)

    def layer_begins(self, run: SavedRun, layer: int, *, reads: bool = False) -> None:
        """The forward of ``run`` has come to its layer number ``layer``; wait while the device is full."""
        position = self._timeline.position(self._start, run.stage, layer, reads=reads)
        self._queue(position, decide=reads and bool(run.left))
        if self._is_full():
            self._wait_for_room()

    def reads(self, run: SavedRun, layer: int) -> None:
        """The backward of ``run`` has come to what its layer number ``layer`` saved."""
        run.reading = layer
        self.layer_begins(run, layer, reads=True)

    def asked_for(self, run: SavedRun, storage: SavedStorage) -> None:
        """The backward of ``run`` reads ``storage``, which nothing has brought."""
        self._set_aside(run, storage, self._timeline, self._start)

    def closed(self) -> None:
        """A forward is over; waits while more waits to be packed than memory should hold."""
        self._queue(None, decide=True)
        if self._waiting() > BEHIND:
            with self._settled:
                self._settled.wait_for(lambda: self._waiting() <= BEHIND or self._worker.failed)

    def check(self) -> None:
        """Raise again what the thread raised."""
        self._worker.check()

    def close(self) -> None:
        """End the thread."""
        self._worker.close()
        self.slots.clear()

    def _is_full(self) -> bool:
        return not self.tiers.device.fits(self._largest)

    def _wait_for_room(self) -> None:
        began, leaving = time.perf_counter(), self.tiers.leaving
        while self._is_full():
            self._queue(None, decide=True)
            self._worker.wait()
            before = leaving.now
            if not before or self._worker.failed:
                break
            leaving.wait(lambda before=before: leaving.now < before or not self._is_full())
        self.tiers.seconds_waited += time.perf_counter() - began

    def _waiting(self) -> int:
        """Bytes that found no room to be packed, or that nobody has looked at."""
        return self._behind + self._saved - self._seen

    def _queue(self, position: int | None, *, decide: bool) -> None:
        """Give the thread a layer, or None to have it look where it is; ``decide``: a reason to do so."""
        self._worker.submit_first(functools.partial(self._take, position, self._step, decide))

    def _packed(self) -> None:
        if self._behind:  # another storage may leave
            self._queue(None, decide=True)

    def _take(self, position: int | None, step: int, decide: bool) -> None:
        """Take a layer from the queue; at the last one of a burst decide, where one of them is a reason."""
        if position is not None and step == self._step:
            self._now = position
        self._due = self._due or decide or self._saved - self._seen >= WAKES
        if self._due and not self._worker.num_urgent:
            self._due = False
            self._decide()

    def _decide(self) -> None:
        now, timeline, behind, saved = self._now, self._timeline, 0, self._saved
        try:
            behind = self._leave(timeline, now)
            self._bring(timeline, now)
        except BaseException:
            behind = 0  # nobody waits for what will not leave
            raise
        finally:
            with self._settled:  # whoever waits looks for an error
                self._behind, self._seen = behind, saved
                self._settled.notify_all()
        if behind and any(run.packer.packing.has_room for run in list(self._runs.values())):
            self._queue(None, decide=True)  # room came meanwhile, and whoever made it saw nobody behind

    def _leave(self, timeline: Timeline, now: int) -> int:
        """Let leave what is far from being read; returns the bytes of what found no room in the queue."""
        # 1. without a limit all that is far from being read leaves, with one as much as is too much
        excess, behind = self.tiers.excess, 0
        excess = math.inf if excess is None else excess
        if excess <= 0:
            return 0
        candidates: list[tuple[int, SavedRun, SavedStorage, int]] = []  # with the layers until it is read
        for run in list(self._runs.values()):
            start = timeline.next_reading(run.stage, run.micro_batch, now)
            with run.lock:
                for storage in run.resident():
                    layer = run.first_read(storage)
                    read = start if start == NEVER else timeline.position(start, run.stage, layer, reads=True)
                    # in the forward only what nothing else holds: nobody can write to it, and it is freed
                    if read - now > self._writeout and (run.closed or storage.alone):
                        candidates.append((read - now, run, storage, layer))
        # 2. what is read last goes first; what the packing has no room for is counted
        candidates.sort(key=lambda one: -one[0])
        for _, run, storage, layer in candidates:
            if excess <= 0:
                break
            excess -= storage.num_bytes
            if run.packer.packing.has_room:
                with run.lock:
                    run.leave(storage, layer)
            else:
                behind += storage.num_bytes
        return behind

    def _bring(self, timeline: Timeline, now: int) -> None:
        """Bring back what is read soon, in the order in which it is read, as far as it has room."""
        # now        away <= SOON                    away <= prefetch_layers
        #  |  comes, with or without room  |  comes while there is room  |  waits in the store
        device, coming = self.tiers.device, 0
        for start, one in timeline.readings(now):
            run = None if one.micro_batch is None else self._runs.get((one.stage, one.micro_batch))
            if run is None:
                continue
            batch: list[weakref.ref[SavedStorage]] = []
            with run.lock:
                while run.left and run.left[-1].storage() is None:  # read, and let go of by the graph
                    run.packer.store.drop(run.left.pop().key)
                for left in reversed(run.left):
                    storage = left.storage()
                    away = timeline.position(start, run.stage, left.layer, reads=True) - now
                    if away < 0 or storage is None:
                        continue
                    has_room = away <= SOON or device.fits(coming + storage.num_bytes)
                    if away > self._prefetch or not has_room:
                        run.packer.bring(batch)
                        return
                    storage.transition("resident", only_from="evicting")
                    if storage.state == "offloaded":
                        self._set_aside(run, storage, timeline, start)
                    if storage.transition("loading", only_from="offloaded"):
                        coming += storage.num_bytes
                        batch.append(left.storage)
            run.packer.bring(batch)

    def _set_aside(self, run: SavedRun, storage: SavedStorage, timeline: Timeline, start: int) -> None:
        # A limit leaves no room for slots, and on a GPU torch's allocator keeps memory itself. Where several
        # passes read what a forward saved, nobody knows when it is let go of.
        if self.tiers.device.limit is not None or is_gpu(storage.device) or not timeline.reads_once:
            return
        first = timeline.position(start, run.stage, run.first_read(storage), reads=True)
        last_layer = min(run.number(view.layer) for view in list(storage.views))
        last = timeline.position(start, run.stage, last_layer, reads=True)
        lower = first - max(self._prefetch, SOON)
        key = start, run.stage, storage.number
        storage.space = functools.partial(self.slots.take, key, lower, last + 1, storage.num_bytes)
