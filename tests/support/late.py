"""A device on the CPU that does everything late: what a GPU may do, and rarely does, it does all the time.

Computing runs where it is called, as its own kernels follow each other on a GPU; packing, unpacking and
copies run in threads, a stream each, after delays of their own. Their results do not exist until the
computing waits for them; buffers and pinned memory hold garbage as soon as they are given back. So a wait
that is missing, or a buffer that is used too early, is an error or another bit, not a race that nobody sees.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from penstock.compression.codec import decode, pack_into
from penstock.compression.frame import header_bytes, read_header, write_header
from penstock.pipeline.distributed import gpu_transport
from penstock.stages.device import Device
from penstock.stages.worker import Stream, Work, Worker

GARBAGE = 0xA5
USES: dict[int, list[LateWork]] = {}  # by the place of a buffer: what was submitted with it since it was lent


class LateWork(Work):
    """Work that a thread does; its value is there when somebody has waited for it."""

    def __init__(self, device):
        self._device, self._ended, self._error = device, threading.Event(), None
        self.told = False  # whether the host knows that it is done; wait_for tells only the device

    def run(self, task, after):
        """In the stream's thread."""
        try:
            for other in after:
                other.over()
            time.sleep(self._device.delay())
            self._value = task()
        except BaseException as error:
            self._error = error
        self._ended.set()

    def over(self):
        """Wait, as another stream does: no thread of the host is held up by that."""
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def wait(self):
        if threading.current_thread() is threading.main_thread() and not self.done:
            self._device.host_waits += 1
        self.over()
        self.told = True

    @property
    def value(self):
        assert self._ended.is_set(), "a result was read before anybody waited for it"
        return self._value

    @property
    def done(self):
        self.told = self.told or self._ended.is_set()
        return self.told


class Past(Work):
    """A point that the computing has reached."""

    def __init__(self):
        super().__init__(None)

    def over(self):
        """Nothing to wait for."""


class LateStream(Stream):
    """A thread that does its work in order, some time."""

    def __init__(self, device):
        self._device, self._worker = device, Worker("late-stream", depth=1 << 20)

    def submit(self, task, *, after=(), reads=()):
        behind = any(isinstance(other, Past) for other in after)
        assert behind or not reads, "what was computed is read behind the point that computing has reached"
        work = LateWork(self._device)
        self._device.submitted.append(work)
        for tensor in _tensors(task):
            USES.setdefault(_place(tensor), []).append(work)
        self._worker.submit(lambda: work.run(task, list(after)))
        return work


class LateDevice(Device):
    """Delays of up to ``most`` seconds before each work, by ``seed``; ``host_waits`` of the main thread."""

    is_gpu = True

    def __init__(self, seed=0, *, most=2e-3):
        super().__init__()
        self._random, self._most, self.host_waits = random.Random(seed), most, 0
        self.submitted: list[LateWork] = []

    @property
    def kernels(self):
        return LateKernels

    def delay(self):
        """Often none, so that others overtake."""
        return self._most * self._random.choice((0, 0, 0.1, 1)) * self._random.random()

    def stream(self):
        return LateStream(self)

    def reached(self):
        return Past()

    def wait_for(self, work: Any):
        work.over()

    def synchronize(self):
        works, self.submitted = self.submitted, []
        for work in works:
            work.over()

    def pinned(self, num_bytes):
        return torch.full((num_bytes + 64,), GARBAGE, dtype=torch.uint8)[:num_bytes]


class LateKernels:
    """The CPU's codecs by the methods of ``gpu/frames.py``: a header is the host's, a buffer has none."""

    @staticmethod
    def pack(tensor, buffer, codec, *, requires_grad, mask=None):
        bitmap = None if mask is None else whole_frame(*mask)
        return buffer[: pack_into(tensor, buffer, codec=codec, requires_grad=requires_grad, mask=bitmap)]

    @staticmethod
    def header_of(work):
        work.wait()
        return read_header(work.value)

    @staticmethod
    def unpack(header, buffer, *, mask=None):
        bitmap = None if mask is None else whole_frame(*mask)
        return decode(whole_frame(header, buffer), mask=bitmap), torch.zeros(1, dtype=torch.int32)


def whole_frame(header, buffer):
    """The frame in a buffer, with its header, which is the host's."""
    frame = buffer[: header_bytes(len(header.sizes)) + header.payload_bytes].clone()
    write_header(frame, header)
    return frame


def _tensors(what):
    """The tensors of a task: those among its arguments and in its closure."""
    if isinstance(what, torch.Tensor):
        yield what
    elif isinstance(what, functools.partial):
        yield from _tensors((what.func, *what.args, *what.keywords.values()))
    elif isinstance(what, tuple):
        for part in what:
            yield from _tensors(part)
    elif isinstance(what, types.FunctionType):
        yield from _tensors(tuple(cell.cell_contents for cell in what.__closure__ or ()))


@contextlib.contextmanager
def garbage() -> Iterator[None]:
    """Fill what is given back with garbage; by then the host was told that all is done that uses it."""
    take, give = gpu_transport.DevicePool.take, gpu_transport.DevicePool.give

    def take_unused(pool, num_bytes):
        buffer = take(pool, num_bytes)
        USES.pop(_place(buffer), None)
        return buffer

    def give_garbage(pool, buffer):
        used = USES.pop(_place(buffer), ())
        assert all(work.told for work in used), "a buffer was given back while the device may still use it"
        buffer.fill_(GARBAGE)
        give(pool, buffer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_transport.DevicePool, "take", take_unused)
        patch.setattr(gpu_transport.DevicePool, "give", give_garbage)
        yield


def _place(tensor):
    return tensor.untyped_storage().data_ptr()
