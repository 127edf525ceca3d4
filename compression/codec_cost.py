"""Cost of each codec on a tensor: bytes and seconds, tried on a sample of the tensor itself.

No codec pays everywhere: zeros, dense floats and integers want different ones, and a fast link wants none.
Source: Rhu et al., HPCA 2018 (densities differ by layer and over time).
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .buffers import Pool
from .codec import CODECS, buffer_bytes, decode, encode, pack_into
from .frame import header_bytes

SAMPLE_BYTES = 1 << 20
SAMPLE_BYTES_GPU = 1 << 26  # less is no work for one


class Cost(NamedTuple):
    """Cost of sending a tensor with one codec: bytes of the frame, seconds to pack and to unpack."""

    num_bytes: float
    pack_seconds: float
    unpack_seconds: float


def candidates(dtype: torch.dtype, *, on_gpu: bool = False) -> list[str]:
    """The lossless codecs that may pay for a dtype, by their own word; ``raw`` is the first.

    Args:    on_gpu: those alone that a GPU packs by itself."""
    found = [name for name, codec in CODECS.items() if dtype in codec.dtypes]
    if on_gpu:
        from .gpu.payloads import KERNELS

        return [name for name in found if name in KERNELS]
    return found


def sample(tensor: Tensor) -> Tensor:
    """The first rows of ``tensor``: samples of a batch resemble each other."""
    most = SAMPLE_BYTES_GPU if tensor.is_cuda else SAMPLE_BYTES
    if tensor.dim() == 0 or tensor.nbytes <= most:
        return tensor
    rows = max(1, len(tensor) * most // tensor.nbytes)
    return tensor.narrow(0, 0, rows)


def trial(tensor: Tensor, codec: str, pool: Pool, *, num_bytes: int, mask: Tensor | None = None) -> Cost:
    """Pack and unpack a sample with one codec and scale to ``num_bytes``, the size of the whole tensor.

    Args:    mask: a frame of the sample's shape whose bitmap says where it matters, as for ``encode``.
    """
    header, scale = header_bytes(tensor.dim()), num_bytes / max(1, tensor.nbytes)
    if tensor.is_cuda:  # both wait for the GPU, whose launches are not worth counting at this size
        frame, packing = _fastest(lambda: encode(tensor, codec, mask=mask))
        _, unpacking = _fastest(lambda: decode(frame, mask=mask))
        return Cost(header + (frame.numel() - header) * scale, packing * scale, unpacking * scale)
    buffer = pool.take(buffer_bytes(tensor.shape, tensor.dtype, codec))
    length, packing = _fastest(lambda: pack_into(tensor, buffer, codec=codec, mask=mask))
    _, unpacking = _fastest(lambda: decode(buffer[:length], mask=mask))
    pool.give(buffer)
    return Cost(header + (length - header) * scale, packing * scale, unpacking * scale)


def _fastest(run: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of ``run``, and the seconds of its faster run of two."""
    first = time.perf_counter()
    run()
    second = time.perf_counter()
    result = run()
    return result, min(second - first, time.perf_counter() - second)
