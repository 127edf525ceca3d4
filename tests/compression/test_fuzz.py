"""Law L9 for whatever comes: mutated frames are refused, or are what they declare and what was promised.

Frame and output end at unreadable pages: an access out of bounds kills the process, by the same seed."""

import zlib
from random import Random
from typing import NamedTuple

import pytest
import torch
from guarded import guarded
from test_promises import limited
from torch import Tensor

from penstock.compression import frame as layout
from penstock.compression.codec import CODECS, decode, decode_received, encode
from penstock.compression.errors import CodecError
from penstock.compression.frame import MASKED, FrameSpec, decoded_bytes, frame_bytes, read_header, written_by
from penstock.compression.lossy import LOSSY_CODECS
from penstock.compression.names import CODEC_NAMES
from penstock.compression.zero_value import CODECS_WITH_BITMAP

pytestmark = pytest.mark.filterwarnings("ignore:Casting complex values to real", "ignore:B?Complex.* support")
MOST_FRAME_BYTES = 1 << 16
MOST_DECODED_BYTES = 16 << 20  # what a frame may ask for here; true ones may ask for more
MOST_SPREAD = 64  # what gaps may make of the bytes promised where strides are not
DTYPES = (
    torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.float16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
often = pytest.mark.parametrize("trials", [1500, pytest.param(60_000, marks=pytest.mark.slow)])


# What lengths, sizes and offsets are off by one, or absurd, at.
NUMBERS = (0, 1, 2, 7, 8, 63, 64, 65, 255, 4095, 4096, 4097, 2**31, 2**32, 2**60, 2**63, 2**64 - 1)


def seal(frame: bytearray) -> None:
    """Give a header the payload's length and its CRC32, so that the checks behind it are reached."""
    if len(frame) < layout.header_bytes(0) or len(frame) < (end := layout.header_bytes(frame[9])):
        return
    frame[16:24] = (len(frame) - end).to_bytes(8, "little")
    recheck(frame)


def recheck(frame: bytearray) -> None:
    """Give a header its CRC32."""
    end = layout.header_bytes(frame[9])
    frame[12:16] = zlib.crc32(frame[16:end], zlib.crc32(frame[:12])).to_bytes(4, "little")


def mutated(rng: Random, frame: bytes, other: bytes) -> bytearray:
    """One to four changes to ``frame``, by chance with parts of ``other``; mostly sealed."""
    found = bytearray(frame)
    for _ in range(rng.choice((1, 1, 2, 4))):
        rng.choice(MUTATIONS)(rng, found, other)
        del found[MOST_FRAME_BYTES:]
        found.extend(bytes(max(0, 8 - len(found))))
    if rng.random() < 0.85:
        seal(found)
    return found


def position(rng: Random, frame: bytearray) -> int:
    """Somewhere in the payload, or one time in eight anywhere."""
    start = layout.header_bytes(frame[9]) if len(frame) > 9 else 0
    return rng.randrange(start if start < len(frame) and rng.randrange(8) else 0, len(frame))


def flip(rng: Random, frame: bytearray, other: bytes) -> None:
    frame[position(rng, frame)] ^= 1 << rng.randrange(8)


def put_byte(rng: Random, frame: bytearray, other: bytes) -> None:
    frame[position(rng, frame)] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))


def put_number(rng: Random, frame: bytearray, other: bytes) -> None:
    """A u64 where lengths, counts and offsets are: at the start of the payload, or anywhere."""
    start = layout.header_bytes(frame[9]) if len(frame) > 9 else 0
    place = rng.choice((start + 8 * rng.randrange(9), 8 * rng.randrange(1 + len(frame) // 8)))
    near = int.from_bytes(frame[place : place + 8], "little") + rng.choice((-64, -1, 1, 64))
    number = rng.choice((*NUMBERS, near, near)) % (1 << 64)
    if place + 8 <= len(frame):
        frame[place : place + 8] = number.to_bytes(8, "little")


def splice(rng: Random, frame: bytearray, other: bytes) -> None:
    place, source = position(rng, frame), rng.randrange(len(other))
    length = rng.choice((1, 8, 64, rng.randrange(1, 512)))
    frame[place : place + rng.choice((0, length))] = other[source : source + length]


def cut(rng: Random, frame: bytearray, other: bytes) -> None:
    place = position(rng, frame)
    del frame[place : rng.choice((len(frame), place + rng.randrange(1, 130)))]


def set_header(rng: Random, frame: bytearray, other: bytes) -> None:
    """Another codec, dtype, flag, address, size or stride, with the right CRC32."""
    if len(frame) < layout.header_bytes(0) or len(frame) < layout.header_bytes(frame[9]):
        return
    kind, num_dims = rng.randrange(5), frame[9]
    if kind == 0:
        frame[6] = rng.randrange(len(CODEC_NAMES) + 1)
    elif kind == 1:
        frame[rng.choice((7, 7, 8, 10, 11))] = rng.randrange(64)
    elif kind == 2:
        frame[9] = rng.randrange(6)
    elif num_dims:
        place = 32 + 8 * rng.randrange(2 * num_dims)
        number = int.from_bytes(frame[place : place + 8], "little")
        number = rng.choice((*NUMBERS, number * 2, number * 64, number // 2, number + 1, number - 1))
        frame[place : place + 8] = (number % (1 << 64)).to_bytes(8, "little")
    if len(frame) >= layout.header_bytes(frame[9]):
        recheck(frame)


MUTATIONS = (flip, put_byte, put_number, splice, cut, set_header)


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
