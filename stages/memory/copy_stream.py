"""The stream on which saved tensors are packed and copied, beside the stream that computes.

On a GPU the computation never waits for what leaves, and for what comes back only where it was asked for too
late. A CPU has no streams: there the threads of the packer are what runs beside the computation.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


class CopyStream:
    """The stream of a CPU: everything runs where it is called, so nothing needs to be ordered."""

    def event(self) -> torch.cuda.Event | None:
        """Return the point that the computation has reached: what is there now may be read behind it."""
        return None

    def run(self, event: torch.cuda.Event | None = None) -> contextlib.AbstractContextManager[None]:
        """Run the block on this stream, behind ``event``; at the end of the block its work is done."""
        return contextlib.nullcontext()

    def record(self, tensor: Tensor) -> None:
        """Tell the allocator that the computation uses ``tensor``, which was made on this stream."""


class CudaCopyStream(CopyStream):
    """A stream of its own; only the thread that called ``run`` waits for it, never the computing stream."""

    def __init__(self, device: torch.device) -> None:
        """Make the stream of ``device``."""
        self._device, self._stream = device, torch.cuda.Stream(device)

    def event(self) -> torch.cuda.Event:
        """Return an event recorded on the stream that computes."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextlib.contextmanager
    def run(self, event: torch.cuda.Event | None = None):
        """Run the block on this stream behind ``event``, and wait for the stream.

        So the caller may free what the block has read, and may read what it has made."""
        if event is not None:
            self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def record(self, tensor: Tensor) -> None:
        """Keep the memory, which belongs to this stream, until the computation is through with it."""
        tensor.record_stream(torch.cuda.current_stream(self._device))
