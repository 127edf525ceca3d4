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

from ...compression.pool import Frame, Pool
from ..tracing.layers import Layer
from .counts import Counts
from .framed import Framed, place
from .held import Held
from .hooks import Hooks, Weights
from .keeper import Keeper
from .known import Known
from .store import Store


class Resident:
    """Saved tensors stay on the device, as autograd keeps them: the double of ``Saved`` that does nothing."""

    layer: Layer | None = None
    bytes_raw = bytes_kept = num_packs = num_unpacks = 0

    def forward(
        self, micro_batch: int, entered: Mapping[int, Any], keep: Iterable[Tensor] = ()
    ) -> contextlib.AbstractContextManager[None]:
        """No hooks."""
        return contextlib.nullcontext()

    def leave(
        self, micro_batch: int, came: Mapping[int, Frame], went: Mapping[int, tuple[Tensor, Frame]]
    ) -> None:
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

    def __init__(self, entered: Mapping[int, Any]) -> None:
        tensors = {number: item for number, item in entered.items() if isinstance(item, Tensor)}
        self.entered = {number: place(tensor) for number, tensor in tensors.items()}
        self.helds: list[weakref.ref[Held]] = []
        self.keys: list[object] = []

    def took(self, held: Held) -> None:
        """One more storage."""
        self.helds.append(weakref.ref(held))
        self.keys.append(held.key)

    def alive(self) -> list[Held]:
        """The storages that the graph still holds, in the order in which they were saved."""
        return [held for reference in self.helds if (held := reference()) is not None]

    def framed(self, came: Mapping[int, Frame], went: Mapping[int, tuple[Tensor, Frame]]) -> list[Framed]:
        """The frames of the values that came in and went out, with their places: the newer ones first."""
        made = [Framed(frame, place(tensor), True) for tensor, frame in went.values()]
        return made + [Framed(came[n], here, False) for n, here in self.entered.items() if n in came]


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
        self, micro_batch: int, entered: Mapping[int, Any], keep: Iterable[Tensor] = ()
    ) -> Iterator[None]:
        """The block in which the layers of ``micro_batch`` run.

        Args:    entered: the values by number, as the layers get them.
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

    def leave(
        self, micro_batch: int, came: Mapping[int, Frame], went: Mapping[int, tuple[Tensor, Frame]]
    ) -> None:
        """Begin to move what the forward of ``micro_batch`` saved; waits where the thread is behind.

        What these frames have is not packed again, the store holds the same frame.

        Args:    came: by number, the frames of values that entered.
                 went: by number, tensors and the frames that were made of them since."""
        self._keeper.worker.check()
        run = self._forwards[micro_batch]
        helds = run.alive()
        inputs = {
            look.layer.node: look.size
            for held in helds
            for look in held.looks
            if look.layer is not None and look.dtype.is_floating_point
        }
        framed = run.framed(came, went)
        for held in helds:
            found = next((one for one in framed if one.covers(held)), None)
            if found is not None:
                found.frame.hold()
            self._keeper.worker.submit(functools.partial(self._pack, weakref.ref(held), found, inputs))

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
        self, reference: weakref.ref[Held], framed: Framed | None, inputs: Mapping[fx.Node, tuple[int, ...]]
    ) -> None:
        held, flat = reference(), None
        if held is not None and not (held.dropped or held.expected):  # else gone, or asked for again already
            flat = held.flat()
        if framed is not None and (flat is None or not framed.tells(flat)):
            framed = framed.frame.release()
        if held is None:
            return
        if flat is None:
            self._keeper.stays(held)
        elif framed is None:
            self._keeper.pack(held, None, self._known.shrink(flat, held.looks, inputs))
        else:
            held.shift = framed.place.start
            self._keeper.pack(held, framed.frame)

    def _bring(self, micro_batch: int) -> None:
        run = self._forwards.get(micro_batch)
        for held in reversed(run.alive() if run is not None else []):
            held.bring_ahead()
