"""Changes to frames: bits, bytes, lengths, parts of other frames, and headers with a right CRC32.

A header that is damaged is refused at once; sealed again, it leads to the checks behind that.
"""

import random
import zlib

from penstock.compression.frame import header_bytes
from penstock.compression.names import CODEC_NAMES

MOST_FRAME_BYTES = 1 << 16
# What lengths, sizes and offsets are off by one, or absurd, at.
_NUMBERS = (0, 1, 2, 7, 8, 63, 64, 65, 255, 4095, 4096, 4097, 2**31, 2**32, 2**60, 2**63, 2**64 - 1)


def seal(frame: bytearray) -> None:
    """Give a header the payload's length and its CRC32, so that the checks behind it are reached."""
    if len(frame) < header_bytes(0) or len(frame) < (end := header_bytes(frame[9])):
        return
    frame[16:24] = (len(frame) - end).to_bytes(8, "little")
    recheck(frame)


def recheck(frame: bytearray) -> None:
    """Give a header its CRC32."""
    end = header_bytes(frame[9])
    frame[12:16] = zlib.crc32(frame[16:end], zlib.crc32(frame[:12])).to_bytes(4, "little")


def mutated(rng: random.Random, frame: bytes, other: bytes) -> bytearray:
    """One to four changes to ``frame``, by chance with parts of ``other``; mostly sealed."""
    found = bytearray(frame)
    for _ in range(rng.choice((1, 1, 2, 4))):
        rng.choice(_MUTATIONS)(rng, found, other)
        del found[MOST_FRAME_BYTES:]
        found.extend(bytes(max(0, 8 - len(found))))
    if rng.random() < 0.85:
        seal(found)
    return found


def _place(rng: random.Random, frame: bytearray) -> int:
    """Somewhere in the payload, or one time in eight anywhere."""
    start = header_bytes(frame[9]) if len(frame) > 9 else 0
    return rng.randrange(start if start < len(frame) and rng.randrange(8) else 0, len(frame))


def _flip(rng: random.Random, frame: bytearray, other: bytes) -> None:
    frame[_place(rng, frame)] ^= 1 << rng.randrange(8)


def _put_byte(rng: random.Random, frame: bytearray, other: bytes) -> None:
    frame[_place(rng, frame)] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))


def _put_number(rng: random.Random, frame: bytearray, other: bytes) -> None:
    """A u64 where lengths, counts and offsets are: at the start of the payload, or anywhere."""
    start = header_bytes(frame[9]) if len(frame) > 9 else 0
    place = rng.choice((start + 8 * rng.randrange(9), 8 * rng.randrange(1 + len(frame) // 8)))
    near = int.from_bytes(frame[place : place + 8], "little") + rng.choice((-64, -1, 1, 64))
    number = rng.choice((*_NUMBERS, near, near)) % (1 << 64)
    if place + 8 <= len(frame):
        frame[place : place + 8] = number.to_bytes(8, "little")


def _splice(rng: random.Random, frame: bytearray, other: bytes) -> None:
    place, source = _place(rng, frame), rng.randrange(len(other))
    length = rng.choice((1, 8, 64, rng.randrange(1, 512)))
    frame[place : place + rng.choice((0, length))] = other[source : source + length]


def _cut(rng: random.Random, frame: bytearray, other: bytes) -> None:
    place = _place(rng, frame)
    del frame[place : rng.choice((len(frame), place + rng.randrange(1, 130)))]


def _set_header(rng: random.Random, frame: bytearray, other: bytes) -> None:
    """Another codec, dtype, flag, address, size or stride, with the right CRC32."""
    if len(frame) < header_bytes(0) or len(frame) < header_bytes(frame[9]):
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
        number = rng.choice((*_NUMBERS, number * 2, number * 64, number // 2, number + 1, number - 1))
        frame[place : place + 8] = (number % (1 << 64)).to_bytes(8, "little")
    if len(frame) >= header_bytes(frame[9]):
        recheck(frame)


_MUTATIONS = (_flip, _put_byte, _put_number, _splice, _cut, _set_header)
