"""A receiver takes what it was promised, and says of anything else where it came from."""

import contextlib
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT, run_script
from guarded import guarded
from small_pipelines import model_of, pipeline_of
from tensors import decoded
from torch import Tensor, nn

from penstock.compression.buffers import Frame
from penstock.compression.codec import CODECS, decode, decode_received, encode
from penstock.compression.errors import CodecError, StageError
from penstock.compression.frame import (
    MASKED,
    FrameSpec,
    Header,
    header_bytes,
    header_text,
    read_header,
    written_by,
)
from penstock.compression.lossy import LOSSY_CODECS

PROMISE = FrameSpec((2, 32), torch.float32, (32, 1), written_by("zero_value"))
# What was sent instead of a tensor: every one went through, or failed deep inside a layer.
LIES = {
    "fewer rows": lambda t: encode(t[:1].clone()),
    "more rows": lambda t: encode(torch.cat([t, t])),
    "no dimensions": lambda t: encode(t.sum()),
    "one element": lambda t: encode(t.sum().view(1)),
    "repeated rows": lambda t: encode(t[:1].expand(3, -1)),
    "float64": lambda t: encode(t.double()),
    "float16": lambda t: encode(t.half()),
    "int64": lambda t: encode(t.long()),
    "bool": lambda t: encode(t.bool()),
    "complex": lambda t: encode(t.to(torch.complex64)),
    "None": lambda t: encode(None),
    "lossy": lambda t: encode(t, "int8"),
    "another codec": lambda t: encode(torch.zeros_like(t), "byte_plane"),
    "another flag": lambda t: encode(t.detach().requires_grad_(not read_header(encode(t)).requires_grad)),
    "spread": lambda t: torch.cat([_header(t, strides=(64 * 100, 1)), encode(t, "raw")[64:]]),
    "values alone": lambda t: torch.cat([_header(t, codec="zero_value", flags=MASKED, checksum=7)]),
}
# Autograd lays gradients out as it likes.
LIES_OF_VALUES = LIES | {
    "transposed": lambda t: encode(t.t().contiguous().t()),
    "with gaps": lambda t: torch.cat([_header(t, strides=(64 * 33, 1)), encode(t, "raw")[64:]]),
}


def _header(tensor: Tensor, **fields) -> Tensor:
    header = read_header(encode(tensor, "raw"))._replace(**fields)
    return text_of(header._replace(payload_bytes=0) if header.flags else header)


def text_of(header: Header) -> Tensor:
    return torch.frombuffer(bytearray(header_text(header)), dtype=torch.uint8)


@pytest.mark.parametrize("lie", LIES_OF_VALUES.values(), ids=LIES_OF_VALUES)
def test_anything_else_than_the_promise_is_refused(lie) -> None:
    tensor = torch.randn(2, 32).relu()
    back, *_ = decode_received(encode(tensor), PROMISE)
    assert back is not None
    with pytest.raises(CodecError):
        decode_received(lie(tensor), PROMISE)


def test_a_promise_may_leave_strides_masks_and_none_open() -> None:
    tensor, promise = torch.randn(32, 2).relu().t(), PROMISE._replace(strides=None, none=True, masked=True)
    back, *_ = decode_received(encode(tensor), promise)
    assert back is not None
    assert back.stride() == (1, 2)
    assert decode_received(encode(None), promise) == (None, 64, False)
    value = torch.randn(40, 50).relu()
    mask, other = encode(value), encode(value.roll(1))
    frame = encode(torch.randn(40, 50), mask=mask)
    promise = promise._replace(sizes=(40, 50))
    back, *_ = decode_received(frame, promise, mask=mask)
    assert back is not None
    for wrong in (None, other):
        with pytest.raises(CodecError, match="mask="):
            decode_received(frame, promise, mask=wrong)
    with pytest.raises(CodecError, match="set bits of a mask"):
        decode_received(frame, promise._replace(masked=False), mask=mask)


class Lying:
    """A transport that sends something else in the place of frames of one kind, and perhaps ends then."""

    def __init__(self, inner, op: str, lie, *, ends: bool = False):
        self.inner, self.pool, self.op, self.lie, self.ends = inner, inner.pool, op, lie, ends

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def send(self, message, frame, messages) -> None:
        said = frame.bytes
        if message.op.value != self.op or read_header(said).flags:
            self.inner.send(message, frame, messages)
            return
        other = self.lie(decoded(said).requires_grad_(read_header(said).requires_grad))
        buffer = self.pool.take(len(other))
        buffer[: len(other)].copy_(other)
        self.inner.send(message, Frame(buffer, len(other), self.pool), messages)
        if self.ends:  # or the other rank would be waited for until the deadline
            raise RuntimeError("a lie is enough")


def skipping(self, x):
    """Two values cross the cut behind ``b``, and both have gradients."""
    h = self.r(self.a(x))
    return self.c(h + self.r(self.b(h)))


def pipeline(forward=skipping, *, cuts=("b",), loss=nn.functional.mse_loss, micro_batches=2, ranks=None):
    options = {"cuts": list(cuts), "micro_batches": micro_batches, "ranks": ranks, "loss": loss}
    layers: Any = {name: nn.Linear(32, 32) for name in "abc"}
    model = model_of(forward, **layers, r=nn.ReLU())
    return pipeline_of(model, example=(torch.randn(2, 32),), **options)


def lying(op: str, name: str, *, rank: int = 0, **options):
    """A pipeline of which ``rank`` sends a lie."""
    torch.manual_seed(0)
    pipe = pipeline(**options)
    frames = pipe.engine.frames
    if pipe.rank == rank:
        inner = frames.transport
        frames.transport = Lying(inner, op, LIES_OF_VALUES[name], ends=rank > 0)  # pyright: ignore
    return pipe


@pytest.mark.parametrize(
    ("op", "name"),
    [("F", "fewer rows"), ("F", "transposed"), ("F", "None"), ("B", "float64"), ("B", "values alone")],
)
def test_a_lying_stage_is_named(op: str, name: str) -> None:
    x = torch.randn(4, 32)
    stage, subject = (1, "forward .* the value") if op == "F" else (0, "backward .* the gradient of")
    where = f"^rank 0, stage {stage}, {subject} [rb] of micro-batch 0, "
    with pytest.raises(CodecError, match=f"{where}from stage {1 - stage} on rank {1 - stage}: "):
        lying(op, name).step(x, x)


def test_a_value_that_keeps_its_gradient_back_is_named() -> None:
    x = torch.randn(4, 32)
    with pytest.raises((CodecError, StageError), match=r"micro-batch 0, step 0: .*gradient .*found None"):
        lying("F", "another flag").step(x, x)


def lie_on_ranks() -> None:
    pipe, x = lying("B", "None", rank=1, ranks=2), torch.randn(4, 32)  # the same of every rank's seed
    pipe.step(x, x)


def test_a_lying_rank_is_named_on_ranks(ranks) -> None:
    (said, _), _ = ranks.try_run(lie_on_ranks, ranks=2)
    where = (
        "rank 0, stage 0, backward of micro-batch 0, .* from stage 1 on rank 1: .* a tensor of torch.float32"
    )
    assert re.search(where, said), said


def test_a_gradient_may_be_none_where_nothing_leads_one_back() -> None:
    def detached(self, x):
        h = self.r(self.a(x))
        return self.c(h.detach() + self.r(self.b(h.detach())))

    pipe, x = pipeline(detached, cuts=("r",)), torch.randn(4, 32)
    pipe.step(x, x)
    returns = [route[1].returns for route in pipe.steps.step("train", [(x[:2],)])[0].routes.values()]
    assert returns == [frozenset()]
    pipe = pipeline()
    messages, _ = pipe.steps.step("train", [(x[:2],)])
    back = [m for sent in messages.sends.values() for m in sent if m.op.value == "B"]
    assert len(back) == 2
    assert not any(message.promise.none for message in back)


def test_a_loss_that_reads_no_outputs_is_refused() -> None:
    def nothing(outputs, targets):
        return torch.zeros((), requires_grad=True)

    pipe, x = pipeline(loss=nothing), torch.randn(4, 32)
    with pytest.raises(StageError, match=r"found None; a loss .* outputs.sum\(\) \* 0"):
        pipe.step(x, x)
    pipe = pipeline(loss=lambda outputs, targets: outputs.sum() * 0)
    assert pipe.step(x, x).loss == 0


TURNED = []


@torch.fx.wrap
def turned(x):
    return x.t().contiguous().t() if TURNED else x * 1


def test_a_value_that_lies_otherwise_than_traced_is_refused_where_it_is_made() -> None:
    pipe, x = pipeline(lambda self, x: self.c(turned(self.b(x))), cuts=("turned",)), torch.randn(4, 32)
    pipe.step(x, x)
    TURNED.append(True)
    try:
        with pytest.raises(StageError, match=r"stage 0.*turned had strides \(32, 1\) .* found \(1, 2\)"):
            pipe.step(x, x)
    finally:
        TURNED.clear()


def test_every_codec_writes_what_was_promised_of_it() -> None:
    half = torch.randn(70, 64).relu()
    others = torch.randn(70, 64), half.to(torch.int32), half > 0, torch.zeros(70, 64), half[:1, :9]
    for tensor in (half, *others):
        for codec in (*CODECS, *LOSSY_CODECS):
            assert read_header(encode(tensor, codec)).codec in written_by(codec)


@contextlib.contextmanager
def limited(num_bytes: int = 2 << 30) -> Iterator[None]:
    """At most ``num_bytes`` of address space more than now: what torch maps at import is not counted."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (num_pages * resource.getpagesize() + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes


@pytest.mark.parametrize("rows", [1 << 24, 1 << 60])
def test_a_header_costs_its_dimensions_alone(rows: int) -> None:
    """64 bytes: values of a mask that nobody has, at places that only a look at each would tell apart."""
    header = Header("zero_value", torch.float32, (rows, 2), (2, 3), 0, MASKED, 0, False, 1)
    frame, before = text_of(header), peak()
    for read in (read_header, decode, lambda f: decode(f, mask=encode(torch.ones(300).relu()))):
        try:
            read(frame)
        except CodecError:
            continue
        assert read is read_header
    with pytest.raises(CodecError):
        decode_received(frame, PROMISE)
    assert peak() - before < 1024


def test_packed_bytes_and_gaps_multiply_to_no_more_than_the_ratio() -> None:
    """4,096 bytes a byte, and 64 for gaps: 2 kB became 512 MiB."""
    packed = encode(torch.zeros(1 << 20, dtype=torch.int64), "byte_plane")
    text = text_of(read_header(packed)._replace(strides=(64,)))
    with pytest.raises(CodecError, match="suits its elements"):
        decode(torch.cat([text, packed[header_bytes(1) :]]))
    for codec in CODECS:
        spread = torch.zeros(64 * 9000, dtype=torch.int64)[::64]
        back = decoded(encode(spread, codec))
        assert torch.equal(back, spread)
        assert back.stride() == (64,)


def test_a_mask_shorter_than_its_bitmap_is_refused() -> None:
    value = torch.randn(64, 1000).relu()
    mask, gradient = encode(value), torch.randn(64, 1000)
    frame, length = encode(gradient, mask=mask), 300
    short = text_of(read_header(mask)._replace(payload_bytes=length))
    lying = guarded(len(short) + length)
    lying[: len(short)] = short
    for read in (lambda: decode(frame, mask=lying), lambda: encode(gradient, mask=lying)):
        with pytest.raises(CodecError, match=r"bitmap and offsets of this frame take .* found 300"):
            read()


def test_values_alone_come_from_codecs_with_a_bitmap() -> None:
    mask = encode(torch.randn(1000).relu())
    frame = encode(torch.randn(1000), mask=mask)
    for codec in ("narrow", "zero_value+lz4", "byte_plane"):
        text = text_of(read_header(frame)._replace(codec=codec))
        with pytest.raises(CodecError, match=f"values alone .* found {codec.replace('+', '.')}"):
            decode(torch.cat([text, frame[len(text) :]]), mask=mask)


def test_max_bytes_bounds_what_is_decoded() -> None:
    wide = torch.zeros(1000, 9)[:, ::3]
    repeated = torch.zeros(1, 10).expand(1000, 10)
    for tensor, num_bytes in ((torch.zeros(1000), 4000), (wide, 4 * (999 * 9 + 7)), (repeated, 40_000)):
        frame = encode(tensor)
        assert torch.equal(decoded(frame, max_bytes=num_bytes), tensor)
        with pytest.raises(CodecError, match=f"may have {num_bytes - 1} bytes, found {num_bytes};"):
            decode(frame, max_bytes=num_bytes - 1)
    assert decode(encode(None), max_bytes=0) is None


def decode_without_memory() -> None:
    """Decode where there is too little memory; in a process whose heap has no room of earlier days."""
    plain = torch.arange(1 << 23).view(2, -1)  # 64 MiB
    plain[:, ::2] = 0
    cases = [(tensor, codec, 8) for tensor in (plain, plain[:, : 1 << 21]) for codec in ("raw", "byte_plane")]
    # Room for the tensor and its words, 64 MiB each, but not to see which places they have.
    interleaved = torch.ones((1 << 26) + 4, dtype=torch.uint8).as_strided((1 << 25, 2), (2, 3))
    for tensor, codec, mebibytes in (*cases, (interleaved, "raw", 160)):
        frame = encode(tensor, codec)
        with limited(mebibytes << 20), pytest.raises(CodecError, match="memory"):
            decode(frame)
        back = decoded(frame)
        assert torch.equal(back, tensor)


@pytest.mark.slow
def test_memory_that_is_not_there_is_a_codec_error() -> None:
    program = "import test_promises; test_promises.decode_without_memory()"
    run_script("-c", program, cwd=ROOT)
