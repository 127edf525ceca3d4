"""One storage between its forward and its backward: it leaves once, as one frame, and all saved tensors that
shared it share it again when it is back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...compression.errors import StageError
from ...compression.frame import ALIGNMENT, DTYPE_NUMBERS
from ...compression.geometry import geometry
from ..device import CPU, KINDS, device_of
from ..torch_private import (
    is_zero_tensor,
    num_storage_holders,
    preserve_version_counter,
    storage_behind,
    version_of,
)
from ..tracing.layers import Layer
from ..worker import Stream
from .byte_budget import Tiers


class Bytes(NamedTuple):
    """Bytes of a saved storage."""

    storage: torch.UntypedStorage
    origin: int  # of byte 0 in ``storage``, may be negative
    in_slot: bool = False  # of ``Slots``, which counts them


Space = Callable[[], Tensor | None]
"""Takes the memory that was set aside for a storage, 1-D uint8 at a multiple of 64; None: there is none."""
Restore = Callable[[Space], Bytes]


def no_space() -> None:
    """Nothing was set aside."""


class TensorView(NamedTuple):
    """The place of a tensor in its storage, and the layer that saved it (None: not known)."""

    layer: Layer | None
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int  # byte of the storage where its first element lies

    @property
    def num_bytes(self) -> int:
        """Bytes from its first element to behind its last, gaps included."""
        return geometry(self.size, self.stride, self.dtype.itemsize).span * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Byte of the storage behind its last element."""
        return self.start + self.num_bytes

    def over(self, memory: Bytes) -> Tensor:
        """Return the tensor over ``memory``; StageError if that was cut short: torch would make it longer."""
        storage, origin, _ = memory
        if origin + self.end > storage.nbytes():
            raise StageError(
                "what the forward saved must keep its memory until its backward, found a storage of "
                f"{self.end} bytes or more that was resized to {storage.nbytes()}; do not free what a "
                "layer saved"
            )
        first = (origin + self.start) // self.dtype.itemsize
        return empty(self.dtype, storage.device).set_(storage, first, self.size, self.stride)


def view_of(tensor: Tensor, layer: Layer | None = None) -> TensorView:
    """Return how ``tensor``, saved by ``layer``, lies in its storage."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    return TensorView(layer, tensor.dtype, tuple(tensor.size()), tensor.stride(), start)


def is_elements(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is nothing but elements in memory, on a device that we know."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type in KINDS
        and tensor.dtype in DTYPE_NUMBERS
        and not (tensor.is_nested or tensor.is_conj() or tensor.is_neg() or is_zero_tensor(tensor))
        and tensor.data_ptr() % tensor.itemsize == 0
    )


def row_view(num_elements: int, dtype: torch.dtype) -> TensorView:
    """Return the view of a row of elements from the first byte on."""
    return TensorView(None, dtype, (num_elements,), (1,), 0)


def empty(dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """Return a tensor without elements; torch.empty itself warns of dtypes that it calls experimental."""
    return torch.empty(0, dtype=torch.uint8, device=device).view(dtype)


def new_bytes(num_bytes: int, address: int, device: torch.device = CPU) -> Bytes:
    """Return new memory that begins at ``address`` mod 64, not cleared."""
    storage = torch.UntypedStorage(num_bytes, device=device)
    if storage.data_ptr() % ALIGNMENT != address:
        storage = torch.UntypedStorage(num_bytes + ALIGNMENT, device=device)
    return Bytes(storage, (address - storage.data_ptr()) % ALIGNMENT)


def bytes_around(start: int, tensor: Tensor) -> Bytes:
    """Return the bytes of a storage of which ``tensor`` is the part from byte ``start`` on."""
    storage = tensor.untyped_storage()
    return Bytes(storage, tensor.data_ptr() - storage.data_ptr() - start)


StorageState = Literal["resident", "evicting", "offloaded", "loading", "dropped"]
TRANSITIONS: dict[StorageState, tuple[StorageState, ...]] = {
    "resident": ("evicting", "offloaded", "dropped"),
    "evicting": ("resident", "offloaded", "dropped"),
    "offloaded": ("loading", "dropped"),
    "loading": ("resident", "dropped"),
    "dropped": (),
}


def refuse_written(saved: int, now: int) -> None:
    """Raise StageError if a saved tensor was written to: torch checks only what it saved without hooks."""
    if now != saved:
        raise StageError(
            "what the forward saved must not be written to before its backward, found a tensor at version "
            f"{now} that was saved at version {saved}; clone it before the in-place operation"
        )


class WriteCounter:
    """Counts the writes to a tensor (torch's version) without keeping its memory."""

    __slots__ = ("_probe", "_version")

    def __init__(self, tensor: Tensor) -> None:
        probe = tensor.detach()  # shares the count, and keeps it when its memory is exchanged
        probe.data = empty(tensor.dtype, tensor.device)
        self._probe, self._version = probe, version_of(tensor)

    @property
    def changed(self) -> bool:
        """Return whether the tensor, or another that shares its count, was written to since."""
        return version_of(self._probe) != self._version

    def counts(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` shares this count and saw no write: one more is made and undone."""
        if self.changed or version_of(tensor) != self._version:
            return False
        with preserve_version_counter(tensor):
            torch.autograd.graph.increment_version(tensor)
            return self.changed

    def counted(self, tensor: Tensor) -> Tensor:
        """Return what ``tensor`` has as a tensor that shares this count: whoever writes to it is found."""
        shares = self._probe.detach()
        shares.data = tensor
        return shares

    def refuse(self) -> None:
        """Raise StageError if there was a write."""
        refuse_written(self._version, version_of(self._probe))


class SavedStorage:
    """The bytes of one storage, and the saved tensors that view it; it lives as long as the graph.

                     offload                        stored
        +-----------------------> evicting -----------------------+
        |                             |                           v
     resident <------ kept -----------+                       offloaded
      ^   |                                                      ^ |
      |   +-------- every view was read, store has it -----------+ | fetch, or a read
      |                                                            v
      +---------------------- brought back --------------------- loading

     each of them ---- drop ----> dropped, for good

    resident   the bytes are in memory, and in the store too if they were there before
    evicting   queued for the packer, or on the way; the bytes are still in memory, and may be read
    offloaded  only the store has the bytes
    loading    wanted back: a thread or the backward brings them, whoever comes first

    The training thread, the packer's and autograd's share it: all changes go through ``transition``.
    """

    def __init__(
        self, tensor: Tensor, *, stream: Stream, previous: Callable[[], SavedStorage | None],
        tiers: Tiers | None = None,
    ) -> None:  # fmt: skip
        """Begin resident, with the storage of ``tensor``, which moves on ``stream``. ``previous`` gives what
        was saved before it, while that lives; ``tiers`` count its bytes while they are in memory."""
        storage = tensor.untyped_storage()
        self.key, self.previous, self.stream = object(), previous, stream
        self.number = 0  # among those that its forward saved
        self.space = cast("Space", no_space)  # set aside for it
        self.num_bytes, self._pointer = storage.nbytes(), storage.data_ptr()
        self.dtype, self.device = tensor.dtype, tensor.device
        self.original = StorageWeakRef(storage)  # while this lives, its number is not given to another
        self.writes, self.views = WriteCounter(tensor), list[TensorView]()
        self.event = device_of(self.device).reached()
        self.state: StorageState = "resident"
        self._lock, self._tiers, self._counted = threading.RLock(), tiers or Tiers(), 0
        self._has(Bytes(storage, 0))
        self._last = self.original, 0, False  # where the bytes were when they were last in memory
        self._unread, self._given_up = set[int](), set[int]()
        self._restore: Restore | None = None  # from the store; None: it was never stored

    def add(self, tensor: Tensor, layer: Layer | None) -> int:
        """Add one more saved tensor that views this storage; returns its number."""
        self._unread.add(len(self.views))
        self.views.append(view_of(tensor, layer))
        return len(self.views) - 1

    @property
    def alone(self) -> bool:
        """Return whether nothing but the graph holds the memory: no tensor, no view, no NumPy array."""
        memory = self._bytes  # of which somebody else's is not resizable
        return memory is not None and memory.storage.resizable() and num_storage_holders(memory.storage) == 1

    def same_memory(self, storage: torch.UntypedStorage) -> bool:
        """Return whether ``storage``, this one, has the memory that it had: it may be resized."""
        return storage.nbytes() == self.num_bytes and storage.data_ptr() == self._pointer

    def flat(self) -> Tensor | None:
        """Return the whole storage as one row of elements; None if it is not to leave or got other memory."""
        memory = self._bytes
        if self.state != "evicting" or memory is None or not self.same_memory(memory.storage):
            return None
        dtype = torch.uint8 if self.num_bytes % self.dtype.itemsize else self.dtype
        return row_view(self.num_bytes // dtype.itemsize, dtype).over(memory)

    def transition(self, state: StorageState, *, only_from: StorageState | None = None) -> bool:
        """Go to ``state``; with ``only_from`` nothing happens in another state. Returns whether it went."""
        with self._lock:
            if only_from not in (None, self.state):
                return False
            if state not in TRANSITIONS[self.state]:
                allowed = ", ".join(TRANSITIONS[self.state]) or "nowhere"
                raise StageError(
                    f"a saved storage that is {self.state} goes to {allowed}, found {state}; offload "
                    "and drop a micro-batch once each"
                )
            before, self.state = self.state, state
            if state in ("offloaded", "dropped"):
                self._has(None)
            self._tiers.leaving.add(self.num_bytes * ((state == "evicting") - (before == "evicting")))
            return True

    def stored(self, restore: Restore) -> bool:
        """The store has its frame, which ``restore`` brings back; False: the storage was dropped
        meanwhile."""
        with self._lock:
            self.transition("offloaded", only_from="evicting")
            self._restore = restore
            return self.state != "dropped"

    def bring(self) -> None:
        """Have the bytes in memory, unless they were read and let go of since ``loading`` began."""
        with self._lock:
            if self.state == "loading":
                self._bring()

    def read(self, number: int) -> Tensor:
        """Return the saved tensor ``number``; the bytes go again when every view was read once."""
        with self._lock:
            tensor = self.views[number].over(self._bring())
            self._was_read(number)
        device_of(self.device).use(tensor)
        return tensor

    def give_up(self, number: int) -> None:
        """The saved tensor ``number`` is not read again."""
        with self._lock:
            self._given_up.add(number)
            if len(self._given_up) == len(self.views):
                self._has(None)
            self._was_read(number)

    def __del__(self) -> None:  # with its graph, whoever lets go of that
        self._tiers.leaving.add(-self.num_bytes * (self.state == "evicting"))
        self._has(None)

    def _has(self, memory: Bytes | None) -> None:
        before, self._bytes = self._counted, memory
        self._counted = 0 if memory is None or memory.in_slot else self.num_bytes
        self._tiers.device.add(self._counted - before)

    def _was_read(self, number: int) -> None:
        self._unread.discard(number)
        if not self._unread:  # the next pass over the same graph reads all of them again
            self._unread = set(range(len(self.views))) - self._given_up
            if self._restore is not None:
                self.transition("offloaded", only_from="resident")

    def _bring(self) -> Bytes:
        if self.state == "dropped":
            raise StageError("a micro-batch has one backward, its saved tensors were dropped after it")
        if (memory := self._bytes) is None:
            self.transition("loading", only_from="offloaded")
            assert self._restore is not None, "what is offloaded was stored"
            reference, origin, in_slot = self._last
            storage = storage_behind(reference)  # somebody may still hold the bytes
            memory = self._restore(self.space) if storage is None else Bytes(storage, origin, in_slot)
            self._has(memory)
            self._last = StorageWeakRef(memory.storage), memory.origin, memory.in_slot
            self.transition("resident")
        return memory
