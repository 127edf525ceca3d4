"""Host memory as a tier, and the lanes on which bytes come and go beside the computation.

On a GPU a lane is a stream of its own: the computation never waits for what leaves, and for what comes back
only where it was asked for too late. On a CPU, host memory is where the tensors are: the frames stay.
Source: claims A6, A9 and A10 of CN115016937A (node to CPU memory and back, packed on the way).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from ...compression.pool import Frame, Pool
from .store import Fresh, PackedStore


class Lane(Protocol):
    """Where the packing of a device's tensors runs."""

    def mark(self) -> torch.cuda.Event | None:
        """The point in the computation that was reached: what is there now may be read behind it."""
        ...

    def aside(self, mark: torch.cuda.Event | None = None) -> contextlib.AbstractContextManager[None]:
        """Run the block beside the computation, behind ``mark``; at its end, it is done."""
        ...

    def use(self, tensor: Tensor) -> None:
        """Hand to the computation a tensor that was made aside."""
        ...


class CpuLane:
    """The CPU works in order; what is beside the computation is the thread."""

    def mark(self) -> None:
        """No order to keep."""

    def aside(self, mark: torch.cuda.Event | None = None) -> contextlib.AbstractContextManager[None]:
        """Run the block as it is."""
        return contextlib.nullcontext()

    def use(self, tensor: Tensor) -> None:
        """Nothing to tell."""


class CudaLane:
    """A stream of its own; only the thread that packs waits for it, never the stream that computes."""

    def __init__(self, device: torch.device) -> None:
        """Make the stream of ``device``."""
        self._device, self._stream = device, torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        """An event on the stream that computes."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextlib.contextmanager
    def aside(self, mark: torch.cuda.Event | None = None) -> Iterator[None]:
        """Run the block on the lane's stream behind ``mark``, and wait for that stream.

        So the caller may free what the block has read, and may read what it has made.
        """
        if mark is not None:
            self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def use(self, tensor: Tensor) -> None:
        """Keep the memory, which belongs to the lane's stream, until the computation is through with it."""
        tensor.record_stream(torch.cuda.current_stream(self._device))


class Slabs(Pool):
    """Pinned host buffers, which a GPU copies from and to by itself; pinning is slow, so they are kept."""

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self._lock = threading.RLock()  # a graph that the garbage collector frees gives back in any thread

    def _new(self, size: int) -> Tensor:
        self._num_bytes += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class HostStore(PackedStore):
    """Frames in host memory; those made on a GPU are copied into pinned slabs, and back when asked for.

    Called on a lane (``Lane.aside``), which orders the copies: a slab is read before it is written again.
    """

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self._slabs, self._fresh = Slabs(), Fresh()
        self._devices: dict[Hashable, torch.device] = {}
        self._back: dict[Hashable, Frame] = {}

    def takes_away(self, device: torch.device) -> bool:
        """From a GPU."""
        return device.type == "cuda"

    def put(self, key: Hashable, frame: Frame) -> None:
        """Copy a frame from a GPU into a slab; keep a frame on the CPU as it is."""
        if frame.buffer.is_cuda:
            slab = self._slabs.take(frame.num_bytes)
            slab[: frame.num_bytes].copy_(frame.buffer[: frame.num_bytes], non_blocking=True)
            self._devices[key] = frame.buffer.device
            frame.release()
            frame = Frame(slab, frame.num_bytes, self._slabs)
        super().put(key, frame)

    def fetch(self, key: Hashable) -> None:
        """Begin to copy a frame back to its GPU."""
        if key in self._devices and key not in self._back:
            slab = self._frames[key]
            buffer = torch.empty(slab.num_bytes, dtype=torch.uint8, device=self._devices[key])
            buffer.copy_(slab.buffer[: slab.num_bytes], non_blocking=True)
            self._back[key] = Frame(buffer, slab.num_bytes, self._fresh)

    def get(self, key: Hashable) -> Frame:
        """The frame on the device where it was made; the copy in the slab stays."""
        self.fetch(key)
        return self._back.pop(key, None) or super().get(key)

    def drop(self, key: Hashable) -> None:
        """Let go of a frame, and of its copy."""
        self._back.pop(key, None)
        self._devices.pop(key, None)
        super().drop(key)
