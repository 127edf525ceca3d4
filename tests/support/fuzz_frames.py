"""A coverage-guided fuzz of ``decode``: damaged frames give CodecError or a tensor of the declared shape.

Frames come from strangers, and what a kernel reads out of bounds no test case foresees (law L9). Frames are
mutated, and those that reach new lines of ``compression/`` are kept and mutated further. Frame and output end
at unreadable pages: an access out of bounds kills the process, and the same seed leads there again.

    python tests/support/fuzz_frames.py --seconds 600 --seed 0

``--promises`` fuzzes ``decode_received`` instead, see ``fuzz_promises.py``.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from guarded import guarded
from mutations import MOST_FRAME_BYTES, mutated
from torch import Tensor

from penstock.compression import codec as registry
from penstock.compression.codec import CODECS, decode, encode
from penstock.compression.errors import CodecError
from penstock.compression.frame import Header, decoded_bytes, read_header
from penstock.compression.lossy import LOSSY_CODECS

MOST_DECODED_BYTES = 16 << 20  # what a frame may ask for here; true ones may ask for more
MOST_GROWTH_BYTES = 512 << 20  # of the process: a few times what one frame may ask for
_FOLDER = str(Path(registry.__file__).parent)
_DTYPES = (
    torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.float16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
_ALL = {**CODECS, **LOSSY_CODECS}


@dataclass(slots=True)
class Report:
    """What a run did and found."""

    executions: int = 0
    decoded: int = 0  # the others were refused
    kept: int = 0
    num_arcs: int = 0
    growth_bytes: int = 0
    findings: dict[str, bytes] = field(default_factory=dict)  # the first frame for each text
    codecs: dict[str, int] = field(default_factory=dict)  # executions that got as far as this codec

    def __str__(self) -> str:
        reached = ", ".join(f"{name} {count:,}" for name, count in sorted(self.codecs.items()))
        return (
            f"{self.executions:,} executions, {self.decoded:,} decoded, {self.kept:,} frames kept, "
            f"{self.num_arcs:,} arcs, {self.growth_bytes >> 20} MiB more memory, "
            f"{len(self.findings)} findings\nheaders accepted: {reached}"
        )


class Arcs:
    """Which line of ``compression/`` ran after which."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, int, int]] = set()
        self._last = 0

    def _call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        self._last = 0
        return self._line if frame.f_code.co_filename.startswith(_FOLDER) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        self.seen.add((frame.f_code.co_filename, self._last, frame.f_lineno))
        self._last = frame.f_lineno
        return self._line

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record what runs inside."""
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)


def seeds() -> list[bytes]:
    """Frames of every codec, dtype and kind of geometry."""
    frames = {bytes(encode(None).tolist())}
    generator = torch.Generator().manual_seed(0)
    for dtype in _DTYPES:
        for size, high in ((64, 3), (1100, 200), (4500, 2)):
            plain = torch.randint(0, high, (size,), generator=generator)
            normal = torch.randn(size, generator=generator).relu()
            for tensor in (plain.to(dtype), normal.to(dtype), torch.zeros(size, dtype=dtype)):
                square = tensor[:64].view(4, 4, 4)
                shapes = [tensor, square.transpose(0, 2), square[:, 1:, ::2]]
                shapes.append(square.as_strided((2, 3), (3, 2)))
                frames |= {bytes(encode(shape, name).numpy()) for shape in shapes for name in _ALL}
    return sorted(frame for frame in frames if len(frame) <= MOST_FRAME_BYTES // 2)


class Fuzz:
    """One run: its corpus, the arcs it has reached, and the memory that frames are decoded in."""

    def __init__(self, seed: int) -> None:
        self.rng, self.arcs, self.report = random.Random(seed), Arcs(), Report()
        self.corpus = seeds()
        self._frame, self._out = guarded(MOST_FRAME_BYTES), guarded(1 << 20)
        self._before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def step(self) -> None:
        """Mutate a frame and decode it; keep it if it came further than any before."""
        frame = bytes(mutated(self.rng, self.rng.choice(self.corpus), self.rng.choice(self.corpus)))
        num_arcs = len(self.arcs.seen)
        self.check(frame)
        if len(self.arcs.seen) > num_arcs:
            self.corpus.append(frame)
            self.report.kept += 1

    def check(self, frame: bytes) -> None:
        """Decode ``frame``; what law L9 does not allow becomes a finding."""
        self.report.executions += 1
        tensor = self._frame[MOST_FRAME_BYTES - len(frame) :]
        tensor.copy_(torch.frombuffer(bytearray(frame), dtype=torch.uint8))
        try:
            with self.arcs.recorded():
                header = read_header(tensor)
                self.report.codecs[header.codec] = self.report.codecs.get(header.codec, 0) + 1
                if decoded_bytes(header) > MOST_DECODED_BYTES:
                    return
                back = decode(tensor, self._buffer(header))
            self.report.decoded += 1
            if not _as_declared(back, header):
                self._find("a tensor of another shape", frame)
        except CodecError:
            pass
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            self._find(f"{type(error).__name__} in {Path(last.filename).name}:{last.lineno}: {error}", frame)
        self._measure(frame)

    def _measure(self, frame: bytes) -> None:
        growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self._before) * 1024
        self.report.growth_bytes, self.report.num_arcs = growth, len(self.arcs.seen)
        if growth > MOST_GROWTH_BYTES:
            self._find("more memory than a few frames may ask for", frame)

    def _buffer(self, header: Header) -> Tensor | None:
        """Memory that ends at an unreadable page, every second time that it is enough."""
        needed = -(-decoded_bytes(header) // 64) * 64
        if self.rng.random() < 0.5 or needed > len(self._out):
            return None
        return self._out[len(self._out) - needed :]

    def _find(self, what: str, frame: bytes) -> None:
        self.report.findings.setdefault(what, frame)


def _as_declared(tensor: Tensor | None, header: Header) -> bool:
    if tensor is None or header.dtype is None:
        return tensor is None and header.dtype is None
    found = tensor.dtype, tuple(tensor.shape), tensor.stride()
    return found == (header.dtype, header.sizes, header.strides)


def fuzz(
    *,
    seconds: float,
    seed: int,
    show: Callable[[Report], None] = lambda report: None,
    kind: type[Fuzz] = Fuzz,
) -> Report:
    """Run a fuzz of this ``kind`` for ``seconds``; ``show`` is called about every ten of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = kind(seed)
        start = shown = time.monotonic()
        while (now := time.monotonic()) < start + seconds:
            for _ in range(50):
                run.step()
            if now > shown + 10:
                shown = now
                show(run.report)
    return run.report


def main() -> None:
    """Fuzz, print, and exit with 1 if there were findings; a finding's frame is printed as hex."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--promises", action="store_true")
    options = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(1)
    run = {"seconds": options.seconds, "seed": options.seed}
    if options.promises:
        from fuzz_promises import Promised, limited

        with limited():
            report = fuzz(**run, show=lambda report: print(report, flush=True), kind=Promised)
    else:
        report = fuzz(**run, show=lambda report: print(report, flush=True))
    print(report)
    for what, frame in report.findings.items():
        print(f"\n{what}\n{frame.hex()}")
    sys.exit(bool(report.findings))


if __name__ == "__main__":
    main()
