"""Combinations behind zero_value: who falls back to whom, and offsets that disagree."""

import lz4.block
import pytest
import torch
from payloads import check_lossless, numbers, packed, unpacked, with_number

from penstock.compression.byte_plane import BytePlane
from penstock.compression.chained import HEAD_BYTES, Combined, ZeroValueLz4
from penstock.compression.errors import CodecError
from penstock.compression.frame import sections
from penstock.compression.narrow import Narrow
from penstock.compression.raw import Codec
from penstock.compression.zero_value import ZeroValue

ALONE: dict[str, Codec] = {codec.name: codec for codec in (ZeroValue(), BytePlane(), Narrow())}
CODECS: dict[str, Codec] = {
    "zero_value+byte_plane": Combined(ZeroValue(), BytePlane()),
    "zero_value+narrow": Combined(ZeroValue(), Narrow()),
    "zero_value+lz4": ZeroValueLz4(ZeroValue()),
}
TOKENS, THIRDS = torch.arange(50_000) % 50, torch.arange(50_000) % 3 == 0
NOISE = torch.randint(-(1 << 63), (1 << 63) - 1, (50_000,), generator=torch.Generator().manual_seed(0))


def relu(size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).relu()


def test_the_payload_is_the_head_of_zero_value_and_the_values_of_the_other() -> None:
    tensor = relu(50_000)
    found, payload = packed(CODECS["zero_value+byte_plane"], tensor)
    assert found.codec == "zero_value+byte_plane"
    head = sections(len(tensor)).values
    assert torch.equal(payload[:head], packed(ZeroValue(), tensor)[1][:head])
    assert torch.equal(payload[head:], packed(BytePlane(), tensor[tensor != 0])[1])


@pytest.mark.parametrize(
    ("tensor", "codec", "chosen"),
    [
        (torch.zeros(50_000), "zero_value+byte_plane", "zero_value"),
        (torch.randn(50_000) + 9, "zero_value+byte_plane", "byte_plane"),
        (relu(50_000), "zero_value+byte_plane", "zero_value+byte_plane"),
        (NOISE, "zero_value+byte_plane", "raw"),
        (relu(50_000), "zero_value+narrow", "zero_value"),
        (TOKENS + 1, "zero_value+narrow", "narrow"),
        (TOKENS * THIRDS, "zero_value+narrow", "zero_value+narrow"),
        (torch.randn(50_000) + 9, "zero_value+lz4", "raw"),
        (relu(50_000), "zero_value+lz4", "zero_value"),
        (torch.zeros(50_000), "zero_value+lz4", "zero_value+lz4"),
        (torch.cat([relu(5_000), torch.zeros(50_000)]), "zero_value+lz4", "zero_value+lz4"),
    ],
)
def test_a_codec_that_does_not_pay_is_left_out(tensor: torch.Tensor, codec: str, chosen: str) -> None:
    assert check_lossless(CODECS[codec], ALONE, tensor).codec == chosen


def test_lz4_shortens_bitmap_and_values_each_for_itself() -> None:
    ones = torch.zeros(50_000)
    ones[torch.rand(50_000, generator=torch.Generator().manual_seed(0)) < 0.5] = 1.5
    noise = torch.cat([torch.randn(5_000), torch.zeros(50_000)])
    for tensor in (ones, noise):
        payload, plain = packed(CODECS["zero_value+lz4"], tensor)[1], packed(ZeroValue(), tensor)[1]
        parts = sections(len(tensor))
        bitmap, values = plain[: parts.offsets].numpy(), plain[parts.values :].numpy()
        short = min(lz4.block.compress(bitmap, store_size=False), bitmap.tobytes(), key=len)
        rest = min(lz4.block.compress(values, store_size=False), values.tobytes(), key=len)
        assert numbers(payload, 1) == [len(short)]
        assert payload[HEAD_BYTES + parts.values - parts.offsets :].numpy().tobytes() == short + rest
        assert (len(short) < len(bitmap)) == (tensor is noise)
        assert (len(rest) < len(values)) == (tensor is ones)


@pytest.mark.parametrize("name", CODECS)
def test_more_values_than_words_are_refused_before_they_are_read(name: str) -> None:
    codec, tensor = CODECS[name], torch.arange(9000) % 90 * (torch.arange(9000) // 700 % 2)
    _, payload = packed(codec, tensor)
    first = sections(len(tensor)).offsets if name != "zero_value+lz4" else HEAD_BYTES
    [count] = numbers(payload, 1, first + 16)
    assert count == (tensor != 0).sum()
    for bad in (9001, 1 << 62, -1):
        with pytest.raises(CodecError, match="at most as many values"):
            unpacked(codec, with_number(payload, first + 16, bad), tensor)
    for bad in (count - 1, count + 1, 0):
        with pytest.raises(CodecError):
            unpacked(codec, with_number(payload, first + 16, bad), tensor)


@pytest.mark.parametrize("length", [0, 1125, 1153, 1 << 40])
def test_a_bitmap_of_another_length_is_refused(length: int) -> None:
    tensor = torch.cat([torch.ones(10), torch.zeros(8990)])
    _, payload = packed(CODECS["zero_value+lz4"], tensor)
    assert len(payload) < 1125  # so that the third bitmap ends behind the payload
    with pytest.raises(CodecError, match="fits into"):
        unpacked(CODECS["zero_value+lz4"], with_number(payload, 0, length), tensor)
