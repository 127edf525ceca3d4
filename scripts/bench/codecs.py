"""Every codec on every tensor: its ratio beside its bound, its speed as multiples of a copy beside it.

Multiples of one run are what can be compared: the speed of memory differs from host to host, hour to hour.
"""

# ruff: noqa: A005 (named as on the command line; inside the package it shadows nothing)

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ...compression.codec import CODECS, decode, encode
from ...conf.bench_codecs import BenchCodecsConfig
from . import codecs_sides as sides
from .codecs_bounds import bound, words_of
from .codecs_peers import PEERS, Peer, peers
from .codecs_subjects import Subject, subjects

MEBIBYTE = 1 << 20
SMALL_BYTES = (1 << 10, 16 << 10, 64 << 10)
_BATCH_BYTES = 2 * MEBIBYTE  # a small tensor is timed many times over
_SECONDS = 0.4  # for all runs of one codec on one tensor, but for one run at least
_CALLS = 50


def bench_codecs(config: BenchCodecsConfig) -> Iterator[list[dict[str, Any]]]:
    """Measure all codecs on one tensor after another, each checked bit for bit before.

    Yields: the rows of a tensor, one per codec: ``class``, ``tensor``, ``dtype``, ``num_bytes``, ``density``
            (share of words that are not zero), ``mask`` (whether one was reused), ``codec``, ``by``
            ("penstock" or "others"), ``sent_as``, ``ratio`` (before / after, headers left out), ``bound``
            (None for the others, and where nothing has to travel), ``runs``, and median seconds (of the
            processor, on one thread) of ``copy``, ``clone``, ``pack``, ``unpack`` and, where the public
            functions were timed, ``encode`` and ``decode``.
    Raises: CodecError: the instruction set is not known.
    """
    names = config.codecs or [*CODECS, *PEERS]
    sides.codecs_of(config.isa)
    for subject in subjects(config):
        ours = [name for name in names if name in CODECS and sides.applies(name, subject)]
        others = [] if subject.mask is not None else peers(names)
        yield _rows(subject, ours, others, config)


def _rows(
    subject: Subject, ours: Sequence[str], others: Sequence[Peer], config: BenchCodecsConfig
) -> list[dict[str, Any]]:
    codecs, tensor = sides.codecs_of(config.isa), subject.tensor
    memory, words = sides.Memory(subject, codecs), words_of(tensor)
    chosen = None if subject.mask is None else _nonzero(decode(subject.mask))
    facts = {
        "class": subject.kind,
        "tensor": subject.name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "num_bytes": tensor.nbytes,
        "density": float((words != 0).mean() if chosen is None else chosen.float().mean()),
        "mask": subject.mask is not None,
    }
    rows = []
    for name in ours:
        side = sides.ours(subject, name, memory, codecs, public=config.isa is None)
        best = bound(name, words, tensor.dtype, None if chosen is None else chosen.numpy())
        rows.append(facts | {"codec": name, "by": "penstock", "bound": best if isfinite(best) else None})
        rows[-1] |= _measured(side, subject, memory, config.repeats)
    for peer in others:
        side = sides.theirs(peer, subject, memory)
        rows.append(facts | {"codec": peer.name, "by": "others", "bound": None})
        rows[-1] |= _measured(side, subject, memory, config.repeats)
    return rows


def _nonzero(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "a mask is the frame of a tensor"
    return torch.from_numpy(words_of(tensor) != 0)


def _measured(side: sides.Side, subject: Subject, memory: sides.Memory, repeats: int) -> dict[str, Any]:
    routes = {**sides.common(memory, subject), **side.routes}
    num_bytes = subject.tensor.nbytes
    runs, seconds = _alternate(routes, repeats, max(1, _BATCH_BYTES // max(1, num_bytes)))
    return {"sent_as": side.sent_as, "ratio": num_bytes / max(1, side.num_bytes), "runs": runs, **seconds}


def _alternate(
    routes: Mapping[str, Callable[[], Any]], repeats: int, batch: int
) -> tuple[int, dict[str, float]]:
    """How many runs there were, and median seconds of a call of each route; all have run once before."""
    taken: dict[str, list[float]] = {name: [] for name in routes}
    # Processor time does not count what others on the machine run in between; it is of one thread alone.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    began, runs = clock(), 0
    while runs < repeats and (not runs or clock() - began < _SECONDS):
        for name, call in routes.items():
            start = clock()
            for _ in range(batch):
                call()
            taken[name].append((clock() - start) / batch)
        runs += 1
    return runs, {name: statistics.median(seconds) for name, seconds in taken.items()}


def call_overhead(config: BenchCodecsConfig) -> list[dict[str, Any]]:
    """Seconds of a call of the public functions on tensors so small that little else counts.

    Returns: a row per codec and size: ``codec``, ``num_bytes``, ``encode``, ``decode``, ``clone``; float32,
             half of it zeros; the median of ``config.repeats`` alternating batches.
    """
    rows = []
    for num_bytes in SMALL_BYTES:
        tensor = torch.relu(torch.randn(num_bytes // 64, 16, generator=torch.Generator().manual_seed(0)))
        for name in config.codecs or CODECS:
            if name not in CODECS or name == "narrow":
                continue
            frame = encode(tensor, name)
            routes = {
                "clone": tensor.clone,
                "encode": lambda name=name, tensor=tensor: encode(tensor, name),
                "decode": lambda frame=frame: decode(frame),
            }
            _, seconds = _alternate(routes, config.repeats, _CALLS)
            rows.append({"codec": name, "num_bytes": num_bytes, **seconds})
    return rows
