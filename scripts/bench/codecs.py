"""Codecs against a plain copy and the plain torch route, side by side in one run.

Ratios of one run are what can be compared: the speed of memory differs from host to host and hour to hour.
"""

# ruff: noqa: A005 (named as on the command line; inside the package it shadows nothing)

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ...compression.codec import buffer_bytes, decode, encode, pack_into
from ...compression.frame import decoded_bytes, read_header
from ...compression.pool import Pool

CODEC = "zero_value"
MEBIBYTE = 1 << 20
ROUTES = ("copy", "pack", "unpack", "encode", "decode", "torch_pack", "torch_unpack")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BATCH_BYTES = 8 * MEBIBYTE  # a small tensor is timed many times over


def bench_codecs(
    *,
    sizes: Sequence[int] = (1 * MEBIBYTE, 4 * MEBIBYTE, 32 * MEBIBYTE),
    densities: Sequence[float] = (0.1, 0.5, 0.9, 1.0),
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    captured: Mapping[str, Tensor] | None = None,
    repeats: int = 9,
) -> list[dict[str, Any]]:
    """Time zero_value on random tensors and on ``captured`` ones, each checked bit for bit before.

    Args:    sizes: bytes of the random tensors. densities: shares of their elements that are not zero.
             captured: real tensors by name. repeats: alternating runs of all routes; medians count.
    Returns: a row per tensor: ``tensor``, ``dtype``, ``num_bytes``, ``density``, ``ratio`` (before / after),
             and the seconds of each of ``ROUTES``; pack and unpack in pooled memory, the others in new.
    """
    pool, rows = Pool(), []
    for name, tensor in [*_random(sizes, densities, dtypes), *(captured or {}).items()]:
        tensor = tensor.detach()
        frame = encode(tensor, CODEC)
        seconds = _alternate(
            _routes(tensor, frame, pool), repeats, max(1, _BATCH_BYTES // max(1, tensor.nbytes))
        )
        rows.append(
            {
                "tensor": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "num_bytes": tensor.nbytes,
                "density": float((_words(tensor) != 0).double().mean()),
                "ratio": tensor.nbytes / frame.numel(),
                **seconds,
            }
        )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """``rows`` for people: speeds as multiples of the copy beside them."""
    shown = Table(title="zero_value, one thread; pack ... torch_unpack as multiples of a plain copy's speed")
    for heading in ("tensor", "dtype", "MB", "density", "ratio", "copy GB/s", *ROUTES[1:]):
        shown.add_column(heading, justify="left" if heading in ("tensor", "dtype") else "right")
    for row in rows:
        speeds = [f"{row['copy'] / row[route]:.2f}" for route in ROUTES[1:]]
        facts = [f"{row['num_bytes'] / MEBIBYTE:.2f}", f"{row['density']:.2f}", f"{row['ratio']:.2f}"]
        copy = f"{row['num_bytes'] / row['copy'] / 1e9:.1f}"
        shown.add_row(row["tensor"], row["dtype"], *facts, copy, *speeds)
    return shown


def _random(
    sizes: Sequence[int], densities: Sequence[float], dtypes: Sequence[torch.dtype]
) -> Iterator[tuple[str, Tensor]]:
    source = torch.Generator().manual_seed(0)
    for dtype in dtypes:
        for num_bytes in sizes:
            for density in densities:
                num_elements = num_bytes // dtype.itemsize
                kept = torch.rand(num_elements, generator=source) < density
                values = torch.randn(num_elements, generator=source)
                yield "random", torch.where(kept, values, 0.0).to(dtype)


def _words(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(_INTEGERS[tensor.dtype.itemsize])


def _routes(tensor: Tensor, frame: Tensor, pool: Pool) -> dict[str, Callable[[], Any]]:
    """What is timed, by name; raises AssertionError where a round trip changed a bit."""
    words, out = _words(tensor), pool.take(tensor.nbytes)
    buffer = pool.take(buffer_bytes(tensor.shape, tensor.dtype, CODEC))
    back = pool.take(decoded_bytes(read_header(frame)))
    bits, values = _torch_pack(words)
    assert torch.equal(buffer[: pack_into(tensor, buffer, codec=CODEC)], frame), "two frames of one tensor"
    for made in (decode(frame), decode(frame, back)):
        assert made is not None, "this frame carries a tensor"
        assert torch.equal(_words(made), words), "the codec changed a bit"
    assert torch.equal(_torch_unpack(bits, values, len(words)), words), "the torch route changed a bit"
    routes = {
        "copy": lambda: ctypes.memmove(out.data_ptr(), words.data_ptr(), tensor.nbytes),
        "pack": lambda: pack_into(tensor, buffer, codec=CODEC),
        "unpack": lambda: decode(frame, back),
        "encode": lambda: encode(tensor, CODEC),
        "decode": lambda: decode(frame),
        "torch_pack": lambda: _torch_pack(words),
        "torch_unpack": lambda: _torch_unpack(bits, values, len(words)),
    }
    for lent in (out, buffer, back):
        pool.give(lent)
    return routes


def _alternate(routes: Mapping[str, Callable[[], Any]], repeats: int, batch: int) -> dict[str, float]:
    """Median seconds of a call of each route; each batch follows one call that is not timed."""
    taken: dict[str, list[float]] = {name: [] for name in routes}
    for _ in range(repeats):
        for name, call in routes.items():
            call()
            start = time.perf_counter()
            for _ in range(batch):
                call()
            taken[name].append((time.perf_counter() - start) / batch)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def _torch_pack(words: Tensor) -> tuple[Tensor, Tensor]:
    """The plain torch route: a mask as bits, and the selected words."""
    mask = words != 0
    octets = torch.nn.functional.pad(mask, (0, -len(mask) % 8)).view(-1, 8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)
    return (octets * weights).sum(1, dtype=torch.uint8), words.masked_select(mask)


def _torch_unpack(bits: Tensor, values: Tensor, num_words: int) -> Tensor:
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)
    mask = (bits[:, None] & weights).bool().view(-1)[:num_words]
    return torch.zeros(num_words, dtype=values.dtype).masked_scatter_(mask, values)
