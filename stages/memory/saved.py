"""What a stage's forward saved leaves when the micro-batch has gone on, and is back before its backward.

The program says when: after the forward ``leave``, ahead of the backward ``fetch``, before it ``ready``,
after it ``drop``. What was packed for the wire, or came packed, is not packed again.
Source: claims A5, A6 and A8-A10 of CN115016937A (unload after the forward, fetch before the backward).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, fx, nn

from ...compression.codec import CODECS
from ...compression.frame import read_header
from ...compression.pool import Frame, Pool
from ..layers import Layer
from .counts import Counts
from .held import Held, Writes
from .hooks import Hooks, Weights
from .keeper import Keeper
from .known import Known
from .store import Store


class Resident:
    """Saved tensors stay on the device, as autograd keeps them: the double of ``Saved`` that does nothing."""

    layer: Layer | None = None
    bytes_raw = bytes_kept = num_packs = num_unpacks = 0

    def forward(
        self, micro_batch: int, entered: Iterable[Any], keep: Iterable[Tensor] = ()
    ) -> contextlib.AbstractContextManager[None]:
        """No hooks."""
        return contextlib.nullcontext()

    def leave(self, micro_batch: int, frames: Mapping[tuple[int, int], Frame]) -> None:
        """Nothing leaves."""

    def fetch(self, micro_batch: int) -> None:
        """Nothing left."""

    def ready(self, micro_batch: int) -> None:
        """It always is."""

    def drop(self, micro_batch: int) -> None:
        """Autograd drops it."""

    def wait(self) -> None:
        """Nothing is on its way."""

    def close(self) -> None:
        """There is no thread."""


class _Forward:
    """What one micro-batch saved: its storages, their keys in the store, and the values that came in."""

    def __init__(self, entered: Iterable[Any]) -> None:
        tensors = [item for item in entered if isinstance(item, Tensor)]
        self.entered = {tensor.untyped_storage()._cdata: Writes(tensor) for tensor in tensors}
        self.helds: list[weakref.ref[Held]] = []
        self.keys: list[object] = []

    def took(self, held: Held) -> None:
        """One more storage."""
        self.helds.append(weakref.ref(held))
        self.keys.append(held.key)

    def alive(self) -> list[Held]:
        """The storages that the graph still holds, in the order in which they were saved."""
        return [held for reference in self.helds if (held := reference()) is not None]

    def frame_of(self, held: Held, frames: Mapping[tuple[int, int], Frame]) -> Frame | None:
        """One more hold on a frame that has everything the graph reads of ``held``; None if there is none."""
        writes = self.entered.get(held.original.cdata)
        if writes is not None and writes.found:  # a layer wrote into what came in: its frame is old
            return None
        first, end = min(look.start for look in held.looks), max(look.end for look in held.looks)
        for (address, num_bytes), frame in frames.items():
            shift = address - held.place
            if shift <= first and end <= shift + num_bytes and _is_whole(frame):
                held.shift = shift
                return frame.hold()
        return None


class Saved(Counts):
    """What the micro-batches of one stage save, on its way to a store and back."""

    def __init__(
        self,
        store: Store,
        *,
        keep: Iterable[Tensor],
        codec: str,
        min_bytes: int,
        modules: Mapping[str, nn.Module],
    ) -> None:
        """Save into ``store``, packed with ``codec``.

        Args:    keep: the stage's parameters and buffers, which pass through untouched.
                 min_bytes: smaller storages pass through too.
                 modules: those that the stage's layers call, by path: what they prove is used.
        """
        self.layer: Layer | None = None  # which runs now: set before each
        self._min_bytes, self._known = min_bytes, Known(modules)
        self._weights = Weights(keep)
        self._keeper = Keeper(store, codec=codec, pool=Pool(), num_ahead=0)
        self._forwards: dict[int, _Forward] = {}

    @contextlib.contextmanager
    def forward(
        self, micro_batch: int, entered: Iterable[Any], keep: Iterable[Tensor] = ()
    ) -> Iterator[None]:
        """The block in which the layers of ``micro_batch`` run.

        Args:    entered: the values as the layers get them; a frame is used again only for one of them that
                 no layer wrote to.
                 keep: tied parameters of other stages among them."""
        run = self._forwards[micro_batch] = _Forward(entered)
        more = list(keep)
        weights = self._weights.also(more) if more else self._weights
        hooks = Hooks(
            self._keeper,
            weights=weights,
            min_bytes=self._min_bytes,
            took=run.took,
            layer=lambda: self.layer,
        )
        try:
            with hooks.entered():
                yield
        finally:
            self.layer = None

    def leave(self, micro_batch: int, frames: Mapping[tuple[int, int], Frame]) -> None:
        """Begin to move what the forward of ``micro_batch`` saved; waits where the thread is behind.

        Args:    frames: by ``place`` of their tensors, those that came from upstream or were made for
                 downstream; what they have is not packed again, the store holds the same frame."""
        self._keeper.worker.check()
        run = self._forwards[micro_batch]
        helds = run.alive()
        inputs = {
            look.layer.node: look.size
            for held in helds
            for look in held.looks
            if look.layer is not None and look.dtype.is_floating_point
        }
        for held in helds:
            frame = run.frame_of(held, frames)
            self._keeper.worker.submit(functools.partial(self._pack, weakref.ref(held), frame, inputs))

    def fetch(self, micro_batch: int) -> None:
        """Begin to bring back what ``micro_batch`` saved, last saved first; returns at once."""
        for held in self._forwards[micro_batch].alive():
            held.expected = True
        self._keeper.worker.urge(functools.partial(self._bring, micro_batch))

    def ready(self, micro_batch: int) -> None:
        """Wait until everything that ``micro_batch`` saved is in memory; raises what the thread raised."""
        helds = self._forwards[micro_batch].alive()
        for held in helds:
            held.expected = True  # what has not left yet need not
        for held in reversed(helds):
            held.bring()
        self._keeper.worker.check()

    def drop(self, micro_batch: int) -> None:
        """Forget what ``micro_batch`` saved: after its backward, or when the step failed."""
        run = self._forwards.pop(micro_batch, None)
        if run is None:
            return
        for held in run.alive():
            held.dropped = True
        for key in run.keys:
            self._keeper.store.drop(key)

    def close(self) -> None:
        """Drop everything and end the thread."""
        for micro_batch in list(self._forwards):
            self.drop(micro_batch)
        self._keeper.close()

    def wait(self) -> None:
        """Wait until everything that was to leave has left, for those who count."""
        self._keeper.worker.drain()

    def _pack(
        self, reference: weakref.ref[Held], frame: Frame | None, inputs: Mapping[fx.Node, tuple[int, ...]]
    ) -> None:
        held = reference()
        if held is None or held.dropped or held.expected:  # gone, or asked for again before it left
            if frame is not None:
                frame.release()
            if held is not None:
                self._keeper.stays(held)
            return
        flat, shrunk = held.flat(), None
        if frame is None and flat is not None:
            shrunk = self._known.shrink(flat, held.looks, inputs)
        self._keeper.pack(held, frame, shrunk)

    def _bring(self, micro_batch: int) -> None:
        run = self._forwards.get(micro_batch)
        for held in reversed(run.alive() if run is not None else []):
            held.bring_ahead()


def _is_whole(frame: Frame) -> bool:
    """Whether a frame has every byte of its tensor's memory: no gaps, no bitmap elsewhere, no loss."""
    header = read_header(frame.buffer)
    whole = header.dtype is not None and not header.flags and header.codec in CODECS
    return whole and header.geometry.order == "dense"
