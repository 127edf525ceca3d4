"""Law L9 for whatever comes: mutated frames are refused, or are what they declare and what was promised.

Frame and output end at unreadable pages: an access out of bounds kills the process, by the same seed."""

from random import Random
from typing import NamedTuple

import pytest
import torch
from guarded import guarded
from mutations import MOST_FRAME_BYTES, mutated
from test_promises import limited
from torch import Tensor

from penstock.compression.codec import CODECS, decode, decode_received, encode
from penstock.compression.errors import CodecError
from penstock.compression.frame import MASKED, FrameSpec, decoded_bytes, frame_bytes, read_header, written_by
from penstock.compression.lossy import LOSSY_CODECS
from penstock.compression.zero_value import CODECS_WITH_BITMAP

pytestmark = pytest.mark.filterwarnings("ignore:Casting complex values to real", "ignore:B?Complex.* support")
MOST_DECODED_BYTES = 16 << 20  # what a frame may ask for here; true ones may ask for more
MOST_SPREAD = 64  # what gaps may make of the bytes promised where strides are not
DTYPES = (
    torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.float16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
often = pytest.mark.parametrize("trials", [1500, pytest.param(60_000, marks=pytest.mark.slow)])


class Sent(NamedTuple):
    """A frame on its way, what its receiver was promised, and the mask that it has."""

    frame: bytes
    promise: FrameSpec
    mask: bytes | None = None


def bytes_of(frame: Tensor) -> bytes:
    return bytes(frame.numpy())


def seeds() -> list[bytes]:
    """Frames of every codec, dtype and kind of geometry."""
    frames, generator = {bytes_of(encode(None))}, torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        for size, high in ((64, 3), (1100, 200), (4500, 2)):
            plain = torch.randint(0, high, (size,), generator=generator)
            normal = torch.randn(size, generator=generator).relu()
            for tensor in (plain.to(dtype), normal.to(dtype), torch.zeros(size, dtype=dtype)):
                square = tensor[:64].view(4, 4, 4)
                shapes = tensor, square.transpose(0, 2), square[:, 1:, ::2], square.as_strided((2, 3), (3, 2))
                names = {**CODECS, **LOSSY_CODECS}
                frames |= {bytes_of(encode(shape, name)) for shape in shapes for name in names}
    return sorted(frame for frame in frames if len(frame) <= MOST_FRAME_BYTES // 2)


def sent() -> list[Sent]:
    """Those frames with their promises, as values and as gradients, and gradients at a mask."""
    found = []
    for number, frame in enumerate(seeds()):
        header = read_header(torch.frombuffer(bytearray(frame), dtype=torch.uint8))
        back = header.dtype is None or number % 3 == 0
        dtype, strides = header.dtype or torch.float32, None if back else header.strides
        found.append(
            Sent(frame, FrameSpec(header.sizes, dtype, strides, written_by(header.codec), none=back))
        )
    generator = torch.Generator().manual_seed(1)
    for codec in CODECS_WITH_BITMAP:
        for dtype in (torch.bfloat16, torch.float32, torch.complex128):
            value, gradient = (torch.randn(2, 600, generator=generator) for _ in range(2))
            mask = encode(value.relu().to(dtype), codec)
            frame = encode(gradient.to(dtype), codec, mask=mask)
            assert read_header(frame).flags == MASKED
            promise = FrameSpec((2, 600), dtype, None, written_by(codec), masked=True, none=True)
            found.append(Sent(bytes_of(frame), promise, bytes_of(mask)))
    return found


def placed(room: Tensor, frame: bytes) -> Tensor:
    """The frame at the end of ``room``."""
    tensor = room[len(room) - len(frame) :]
    tensor.copy_(torch.frombuffer(bytearray(frame), dtype=torch.uint8))
    return tensor


def for_memory(error: CodecError) -> bool:
    """True if it was refused for its content, not for lack of memory."""
    return isinstance(error.__cause__, (MemoryError, RuntimeError))


@often
def test_a_mutated_frame_is_refused_or_what_it_declares(trials: int) -> None:
    rng, corpus, num_decoded = Random(0), seeds(), 0
    room, out = guarded(MOST_FRAME_BYTES), guarded(1 << 20)
    with limited(512 << 20):
        for _ in range(trials):
            frame = placed(room, bytes(mutated(rng, rng.choice(corpus), rng.choice(corpus))))
            try:
                header = read_header(frame)
                if (num_bytes := decoded_bytes(header)) > MOST_DECODED_BYTES:
                    continue
                first = len(out) - -(-num_bytes // 64) * 64
                back = decode(frame, out[first:] if first >= 0 and rng.random() < 0.5 else None)
            except CodecError as error:
                if for_memory(error):
                    raise
                continue
            num_decoded += 1
            found = (None, (), ()) if back is None else (back.dtype, tuple(back.shape), back.stride())
            assert found == (header.dtype, header.sizes, header.strides)
    assert trials // 50 < num_decoded < trials


def is_kept(promise: FrameSpec, back: Tensor | None) -> bool:
    if back is None:
        return promise.none
    if back.dtype is torch.bool and back.numel():
        assert int(back.contiguous().view(torch.uint8).max()) <= 1
    spread = 1 if promise.strides is not None and back.is_contiguous() else MOST_SPREAD
    assert back.untyped_storage().nbytes() <= spread * back.nbytes + 128
    same = (back.dtype, tuple(back.shape)) == (promise.dtype, promise.sizes)
    return same and promise.strides in (None, back.stride())


@often
def test_who_was_promised_a_tensor_gets_it_or_an_error_whatever_is_mutated(trials: int) -> None:
    """The frame, the mask that its receiver has, or the promise; behind a frame lies what came before."""
    rng, corpus, room, num_decoded = Random(0), sent(), guarded(MOST_FRAME_BYTES), 0
    with limited():
        for trial in range(len(corpus) + trials):
            one, other = corpus[trial % len(corpus)], rng.choice(corpus)
            frame, promise, mask = one
            if lawful := trial < len(corpus):
                pass
            elif rng.random() < 0.9:
                frame = bytes(mutated(rng, frame, other.frame))
            elif mask is not None:
                mask = bytes(mutated(rng, mask, other.mask or other.frame))
            else:
                promise = other.promise._replace(masked=rng.random() < 0.5)
            length = max(len(frame), frame_bytes(promise.sizes, promise.dtype))
            posted = room[len(room) - min(length, len(room)) :]
            posted[: len(frame)].copy_(torch.frombuffer(bytearray(frame), dtype=torch.uint8))
            held = None if mask is None else torch.frombuffer(bytearray(mask), dtype=torch.uint8)
            try:
                back, num_bytes, _ = decode_received(posted, promise, mask=held)
            except CodecError as error:
                if lawful or for_memory(error):
                    raise
                continue
            num_decoded += 1
            assert is_kept(promise, back)
            assert num_bytes == len(frame) if lawful else num_bytes <= len(posted)
    assert len(corpus) + trials // 50 < num_decoded < len(corpus) + trials
