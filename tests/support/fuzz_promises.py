"""A fuzz of ``decode_received``: whatever a frame says, its receiver gets what was promised, or CodecError.

The same mutations as for ``decode``, on frames that promises were made for; promises of other frames, other
masks and what an earlier frame left in the receive buffer among them. The process may take 2 GiB more address
space than it has at the start (RLIMIT_AS: what torch maps at import is not counted), and no promise here is
worth a thousandth of that, so an answer that memory is missing is a finding too.

    python tests/support/fuzz_frames.py --promises --seconds 600 --seed 0
"""

from __future__ import annotations

import resource
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from fuzz_frames import Fuzz, seeds
from mutations import MOST_FRAME_BYTES, mutated
from torch import Tensor

from penstock.compression.codec import decode, decode_received, encode
from penstock.compression.errors import CodecError
from penstock.compression.frame import MASKED, frame_bytes, read_header
from penstock.compression.masked import CODECS_WITH_BITMAP
from penstock.compression.promise import Promise, written_by

LIMIT_BYTES = 2 << 30
MOST_SPREAD = 64  # what gaps may make of the bytes promised where strides are not


class Sent(NamedTuple):
    """A frame on its way: its bytes, what its receiver was promised, and the mask that it has."""

    frame: bytes
    promise: Promise
    mask: bytes | None = None


@contextmanager
def limited(num_bytes: int = LIMIT_BYTES) -> Iterator[None]:
    """At most ``num_bytes`` of address space more than now."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (num_pages * resource.getpagesize() + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def sent() -> list[Sent]:
    """Frames of every codec, dtype and kind of geometry with their promises, values and gradients."""
    found = []
    for number, frame in enumerate(seeds()):
        header = read_header(_bytes(frame))
        if header.dtype is None:
            sizes, strides, dtype = (4, 5), None, torch.float32
        else:
            sizes, strides, dtype = header.sizes, header.strides, header.dtype
        back = header.dtype is None or number % 3 == 0
        found.append(
            Sent(frame, Promise(sizes, dtype, None if back else strides, written_by(header.codec), none=back))
        )
    return found + _masked()


def _masked() -> list[Sent]:
    found, generator = [], torch.Generator().manual_seed(1)
    for codec in CODECS_WITH_BITMAP:
        for dtype in (torch.bfloat16, torch.float32, torch.complex128):
            for size in (1200, 4500):
                value = torch.randn(2, size // 2, generator=generator).relu().to(dtype)
                gradient = torch.randn(2, size // 2, generator=generator).to(dtype)
                mask = encode(value, codec)
                frame = encode(gradient, codec, mask=mask)
                if max(len(mask), len(frame)) > MOST_FRAME_BYTES // 2 or read_header(frame).flags != MASKED:
                    continue
                promise = Promise(tuple(value.shape), dtype, None, written_by(codec), masked=True, none=True)
                found.append(Sent(bytes(frame.numpy()), promise, bytes(mask.numpy())))
    return found


class Promised(Fuzz):
    """One run against promises."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.sent = sent()

    def step(self) -> None:
        """Mutate a frame, or what its receiver holds, and receive it; keep it if it came further."""
        rng, one, other = self.rng, self.rng.choice(self.sent), self.rng.choice(self.sent)
        frame, mask, promise = one.frame, one.mask, one.promise
        if rng.random() < 0.9:
            frame = bytes(mutated(rng, frame, other.frame))
        if mask is not None and rng.random() < 0.2:
            mask = bytes(mutated(rng, mask, other.mask or other.frame))
        if rng.random() < 0.1:
            promise = other.promise._replace(masked=rng.random() < 0.5)
        num_arcs = len(self.arcs.seen)
        self.receive(Sent(frame, promise, mask))
        if len(self.arcs.seen) > num_arcs:
            self.sent.append(Sent(frame, promise, mask))
            self.report.kept += 1

    def receive(self, one: Sent) -> None:
        """Receive ``one`` in a buffer as long as the promise needs; what may not be becomes a finding."""
        self.report.executions += 1
        longest = max(len(one.frame), frame_bytes(one.promise.sizes, one.promise.dtype))
        posted = self._frame[MOST_FRAME_BYTES - min(longest, MOST_FRAME_BYTES) :]
        posted[: len(one.frame)].copy_(_bytes(one.frame))  # behind it lies what came before
        mask = None if one.mask is None else _bytes(one.mask)
        try:
            with self.arcs.recorded():
                back, num_bytes, _ = decode_received(posted, one.promise, mask=mask)
            self.report.decoded += 1
            name = read_header(posted).codec
            self.report.codecs[name] = self.report.codecs.get(name, 0) + 1
            if num_bytes > len(posted) or not _kept(back, one.promise):
                self._find("not what was promised", one.frame)
        except CodecError as error:
            if isinstance(error.__cause__, (MemoryError, RuntimeError)):
                self._find(f"memory: {error}", one.frame)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            self._find(f"{type(error).__name__} in {where}: {error}", one.frame)
        self._measure(one.frame)


def _kept(back: Tensor | None, promise: Promise) -> bool:
    if back is None:
        return promise.none
    same = (back.dtype, tuple(back.shape)) == (promise.dtype, promise.sizes)
    same = same and promise.strides in (None, back.stride())
    if back.dtype is torch.bool and back.numel():
        same = same and int(back.contiguous().view(torch.uint8).max()) <= 1
    spread = 1 if promise.strides is not None and back.is_contiguous() else MOST_SPREAD
    return same and back.untyped_storage().nbytes() <= spread * back.nbytes + 128


def _bytes(frame: bytes) -> Tensor:
    return torch.frombuffer(bytearray(frame), dtype=torch.uint8)


def lawful() -> int:
    """Receive every frame unchanged; how many came."""
    for one in sent():
        mask = None if one.mask is None else _bytes(one.mask)
        back, num_bytes, _ = decode_received(_bytes(one.frame), one.promise, mask=mask)
        assert num_bytes == len(one.frame)
        assert (back is None) == (decode(_bytes(one.frame), mask=mask) is None)
    return len(sent())
