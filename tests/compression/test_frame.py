"""The header of a frame: its bytes, and that nothing malformed gets past it."""

import resource

import pytest
import torch
from frames import crafted

from penstock.compression.codec import decode, encode
from penstock.compression.errors import CodecError
from penstock.compression.frame import (
    DTYPE_NUMBERS,
    DTYPES,
    Header,
    decoded_bytes,
    frame_bytes,
    header_bytes,
    no_tensor,
    read_header,
    sections,
    write_header,
)

HEADER = Header("zero_value", torch.float32, (5, 1000), (1000, 1), 640 + 64 + 4 * 30, 0, 48, True)


def test_the_bytes_of_a_header_are_those_of_the_format() -> None:
    sizes, strides = (5, 7, 11), (77, 11, 1)
    header = Header("raw", torch.bfloat16, sizes, strides, 770, 0, 6, True)
    buffer = torch.full((1000,), 255, dtype=torch.uint8)
    length = write_header(buffer, header)
    number = DTYPE_NUMBERS[torch.bfloat16]
    frame = crafted(dtype=number, sizes=sizes, strides=strides, address=6, requires_grad=1, payload=770)
    assert buffer[:length].tolist() == frame[:length].tolist()
    assert length == header_bytes(3) == 128
    assert read_header(buffer) == header


def test_numbers_of_dtypes_never_change() -> None:
    kept = {1: "uint8", 3: "bool", 9: "int64", 10: "float16", 11: "bfloat16", 12: "float32", 16: "complex128"}
    assert {n: str(DTYPES[n]).removeprefix("torch.") for n in kept} == kept


def test_lengths_that_others_rely_on() -> None:
    assert [header_bytes(d) for d in (0, 1, 2, 3, 4, 6, 7, 10)] == [64, 64, 64, 128, 128, 128, 192, 192]
    assert frame_bytes((3, 5), torch.float64) == 64 + 120
    assert decoded_bytes(HEADER) == 20048
    assert decoded_bytes(no_tensor()) == 0
    assert (sections(5000).offsets, sections(5000).values) == (640, 704)


def test_every_truncation_is_refused() -> None:
    frame = encode(torch.relu(torch.randn(3, 5, 7, 2)))
    for length in range(frame.numel()):
        with pytest.raises(CodecError):
            decode(frame[:length])
    with pytest.raises(CodecError, match="cut off"):
        decode(torch.cat([frame, frame[:1]]))


def test_every_altered_bit_of_a_header_is_refused() -> None:
    for shape, codec in (((), "raw"), ((300,), "zero_value"), ((2, 1, 3, 1, 2, 1, 30), "zero_value")):
        frame = encode(torch.relu(torch.randn(shape)), codec)
        for bit in range(8 * header_bytes(len(shape))):
            frame[bit // 8] ^= 1 << bit % 8
            with pytest.raises(CodecError):
                decode(frame)
            frame[bit // 8] ^= 1 << bit % 8
        decode(frame)


ABSURD = {
    "magic": {"magic": b"PK\x03\x04"},
    "version": {"version": 2},
    "codec": {"codec": 200},
    "dtype": {"dtype": 250},
    "no dtype but a shape": {"dtype": 0},
    "flag": {"flags": 2},
    "no tensor but a shape": {"flags": 1},
    "no tensor but a payload": {"flags": 1, "dtype": 0, "sizes": (), "strides": (), "payload": 4},
    "requires_grad": {"requires_grad": 2},
    "checksum": {"checksum": 7},
    "padding": {"padding": b"\1"},
    "dimensions": {"sizes": (1,) * 65, "strides": (1,) * 65},
    "address past 63": {"address": 64},
    "address of no float": {"address": 2},
    "payload too short": {"payload": 8},
    "payload too long": {"payload": 16},
    "payload of 2 ** 63": {"payload": 1 << 63},
    "payload not there": {"sizes": (1 << 40,), "payload": 1 << 42},
    "no payload": {"sizes": (1 << 40,), "payload": 0},
    "size of 2 ** 63": {"sizes": (1 << 63,), "payload": 0},
    "size that is negative as i64": {"sizes": ((1 << 64) - 1,), "payload": (1 << 64) - 4},
    "product of 2 ** 64": {"sizes": (1 << 32, 1 << 32), "strides": (1 << 32, 1), "payload": 0},
    "product past 2 ** 64": {"sizes": (3, 1 << 63), "strides": (1, 3), "payload": 4},
    "product past 63 bits beside a zero": {"sizes": (0, 1 << 62, 8), "strides": (1, 1, 1), "payload": 0},
    "stride of 2 ** 63": {"sizes": (1,), "strides": (1 << 63,), "payload": 4},
    "stride that is negative as i64": {"sizes": (2,), "strides": ((1 << 64) - 1,), "payload": 8},
    "expanded past 63 bits": {"sizes": (1 << 62, 4), "strides": (0, 1), "payload": 16},
    "overlapping": {"sizes": (3, 4), "strides": (2, 1)},
    "overlapping though it interleaves": {"sizes": (3, 4), "strides": (3, 2)},
    "span": {"sizes": (2,), "strides": (1000,)},
    "span of petabytes": {"sizes": (2,), "strides": (1 << 50,)},
    "span of a repeated element": {"sizes": (1 << 40, 2), "strides": (0, 1 << 39), "payload": 8},
    "zeros without a bitmap": {"codec": 1, "sizes": (1 << 40,), "payload": 0},
    "zeros that overlap": {"codec": 1, "sizes": (1 << 20, 1 << 20), "strides": (2, 3), "payload": 64},
    "packed no shorter": {"codec": 1, "sizes": (16,), "payload": 128},
    "half a value": {"codec": 1, "sizes": (1000,), "payload": 192 + 6},
}


def test_absurd_headers_are_refused_before_anything_is_allocated() -> None:
    frames = {name: crafted(**fields) for name, fields in ABSURD.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, frame in frames.items():
        with pytest.raises(CodecError):
            decode(frame)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 1024, name  # kilobytes


def test_the_crafted_frame_is_otherwise_good() -> None:
    for sizes, strides in (((3,), (1,)), ((1, 0, 3), (9, 1 << 40, 5)), ((2, 2), (2, 3))):
        assert read_header(crafted(sizes=sizes, strides=strides))[2:4] == (sizes, strides)
    assert read_header(crafted(flags=1, dtype=0, sizes=(), strides=(), payload=0)) == no_tensor()


def test_only_bytes_on_the_cpu_are_frames() -> None:
    frame = encode(torch.ones(3))
    for wrong in (frame.view(torch.int8), frame.view(2, -1), frame[::2], frame.to("meta")):
        with pytest.raises(CodecError, match="1-D uint8"):
            read_header(wrong)
    with pytest.raises(CodecError, match="truncated"):
        read_header(crafted(sizes=(2000,), room=100))
