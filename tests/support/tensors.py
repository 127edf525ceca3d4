"""Tensors of any layout, and when two are the same."""

from typing import Any

import torch

from penstock.compression.codec import decode


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of every element, shape (*sizes, item size): the slow twin of every comparison."""
    item = tensor.dtype.itemsize
    first, strides = tensor.storage_offset() * item, [stride * item for stride in tensor.stride()]
    view = torch.empty(0, dtype=torch.uint8)
    view.set_(tensor.untyped_storage(), int(first), [*tensor.size(), item], [*strides, 1])
    return view.clone()


def expected_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bits of a tensor after a round trip: its own; a true bool is 1, whatever other byte it was made
    from.
    """
    bits = bits_of(tensor)
    return bits.ne_(0) if tensor.dtype is torch.bool else bits


def decoded(frame: torch.Tensor, **options: Any) -> torch.Tensor:
    """The tensor of a frame that is not the frame of None; options as ``decode``."""
    tensor = decode(frame, **options)
    assert tensor is not None
    return tensor


def assert_same(back: torch.Tensor | None, tensor: torch.Tensor) -> None:
    assert back is not None
    assert (back.dtype, back.shape, back.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert not back.requires_grad
    assert not back.is_conj()
    assert torch.equal(bits_of(back), expected_bits(tensor))
    if tensor.numel() and tensor.data_ptr() % tensor.dtype.itemsize == 0:
        assert back.data_ptr() % 64 == tensor.data_ptr() % 64


def laid_out(dtype, sizes, strides, *, first=0, density=0.5, seed=0) -> torch.Tensor:
    """A tensor of random bits and of special values, in a storage with other bits around it."""
    item, source = dtype.itemsize, torch.Generator().manual_seed(seed)
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True) if size)
    items = torch.randint(0, 256, (first + span + 3, item), dtype=torch.uint8, generator=source)
    items[torch.rand(len(items), generator=source) >= density] = 0
    items[1::9] = 0
    items[1::9, -1] = 128  # -0.0
    items[2::9] = 255  # NaN
    items[3::9, :-1] = 0  # halves of a complex number, powers of two, infinities
    storage = items.contiguous().untyped_storage()
    return torch.empty(0, dtype=torch.uint8).view(dtype).set_(storage, first, sizes, strides)
