"""Frames as the engine sends them from a GPU: the CPU's bytes, nothing waits, damage shows on the device."""

from contextlib import nullcontext

import pytest
import torch
from gpus import moved, no_waiting
from late import whole_frame
from tensors import assert_same, decoded

from penstock.compression import codec
from penstock.compression.errors import CodecError
from penstock.compression.frame import header_bytes, read_header
from penstock.compression.gpu import frames
from penstock.stages.worker import Work

pytest.importorskip("triton")
CODECS = ("raw", "zero_value", "exponent", "zero_value+exponent", "narrow", "zero_value+lz4")


def sparse(*sizes, dtype=torch.float32):
    """A tensor of which half is zero."""
    values = torch.randn(*sizes, generator=torch.Generator().manual_seed(0))
    return torch.relu(values).to(dtype)


def room(tensor, name, device):
    """Memory for the frame of ``tensor``."""
    return torch.empty(codec.buffer_bytes(tensor.shape, tensor.dtype, name), dtype=torch.uint8, device=device)


def sent(tensor, name, device, mask=None):
    """The header and the buffer of ``tensor``, packed on ``device``."""
    buffer = room(tensor, name, device)
    packed = frames.pack(moved(tensor, device), buffer, name, requires_grad=True, mask=mask)
    return frames.header_of(Work(packed)), buffer


@pytest.mark.parametrize("name", CODECS)
def test_a_frame_has_the_cpus_bytes_and_gives_the_tensor_back(name, device):
    odd, empty, scalar = sparse(3, 5, 7, dtype=torch.bfloat16), sparse(0, 4), sparse(())
    for tensor in (sparse(40, 60), odd, empty, scalar, sparse(30, 40).t()):
        header, buffer = sent(tensor, name, device)
        expected = codec.encode(tensor.requires_grad_(), name)
        assert torch.equal(whole_frame(header, buffer.cpu()), expected)
        back, error = frames.unpack(header, buffer)
        assert not int(error)
        assert_same(moved(back, "cpu"), decoded(expected))


def test_what_has_gaps_travels_raw(device):
    tensor = sparse(40, 60)[:, ::2]
    header, buffer = sent(tensor, "zero_value", device)
    assert header.codec == "raw"
    back, _ = frames.unpack(header, buffer)
    assert_same(moved(back, "cpu"), decoded(codec.encode(tensor, "raw")))


@pytest.mark.parametrize("name", ["zero_value", "zero_value+exponent"])
def test_a_gradient_travels_at_the_set_bits_of_a_mask(name, device):
    value, gradient = sparse(64, 100), torch.randn(64, 100)
    mask = sent(value, "zero_value", device)
    header, buffer = sent(gradient, name, device, mask=mask)
    assert header.flags
    expected = codec.encode(gradient.requires_grad_(), name, mask=codec.encode(value))
    assert torch.equal(whole_frame(header, buffer.cpu()), expected)
    back, error = frames.unpack(header, buffer, mask=mask)
    assert not int(error)
    assert_same(moved(back, "cpu"), decoded(expected, mask=codec.encode(value)))
    other = sent(value.flip(0), "zero_value", device)  # as many set bits
    assert int(frames.unpack(header, buffer, mask=other)[1])
    with pytest.raises(CodecError, match="values alone"):
        frames.unpack(header, buffer)


def test_damage_is_told_on_the_device(device):
    header, buffer = sent(sparse(64, 100), "zero_value", device)
    buffer[header_bytes(2)] ^= 1
    assert int(frames.unpack(header, buffer)[1])


def test_nothing_waits(device):
    dense, mask = torch.randn(90, 100), sent(sparse(90, 100), "zero_value", device)
    cases = [(dense, name, None) for name in ("raw", "exponent")]
    cases += [(sparse(90, 100), name, None) for name in ("zero_value", "zero_value+exponent")]
    cases += [(dense, name, mask) for name in ("zero_value", "zero_value+exponent")]
    for values, name, bitmap in [*cases, (torch.arange(9000) % 9, "narrow", None)]:
        tensor, buffer = moved(values, device), room(values, name, device)
        for strict in (False, True):  # the first time kernels are compiled and loaded
            with no_waiting(device) if strict else nullcontext():
                packed = frames.pack(tensor, buffer, name, requires_grad=False, mask=bitmap)
            header = frames.header_of(Work(packed))
            assert header.codec == name
            assert read_header(whole_frame(header, buffer.cpu())) == header
            with no_waiting(device) if strict else nullcontext():
                back, error = frames.unpack(header, buffer, mask=bitmap)
            assert not int(error)
            assert bitmap is not None or torch.equal(back, tensor)
