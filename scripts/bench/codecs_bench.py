"""``penstock bench codecs``: each codec on each tensor, its ratio beside a bound, its speed beside a copy's.

Multiples of one run are what can be compared: the speed of memory differs from host to host, hour to hour."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from math import isfinite
from typing import Any

import torch

from ...compression.codec import CODECS, decode, encode
from ...compression.kernels import jit
from ...conf.bench_codecs import BenchCodecsConfig
from ...pipeline.run import console
from ...pipeline.run.run_folder import RunFolder
from .codecs_bounds import bound, words_of
from .codecs_peers import PEERS, missing, peers, versions
from .codecs_shown import CAPTION, call_table, figure, shown
from .codecs_sides import Bench, applies, codecs_of, decoded
from .codecs_subjects import Subject, subjects
from .harness import Record, alternate, medians, timed

SMALL_BYTES = (1 << 10, 16 << 10, 64 << 10)
_BATCH_BYTES = 2 << 20  # a small tensor is timed many times over
_SECONDS = 0.4  # for all runs of one codec on one tensor, but for one run at least
_CALLS = 50


def bench(config: BenchCodecsConfig, folder: RunFolder, typed: Sequence[str]) -> None:
    """Measure every codec on every class of tensors; what is done is printed and kept, tensor by tensor."""
    folder.begin(console.warn)
    config.threads = config.threads or 1
    torch.set_num_threads(config.threads)
    isa = config.isa or jit.host_isas()[0]
    record = Record("codecs", typed, folder, threads=config.threads, isa=isa, rows=[], overhead=[])
    record.content["versions"] |= versions()
    for rows in bench_codecs(config):
        record.keep(rows=rows)
        record.screen.print(shown(rows))
    if config.isa is None:
        record.keep(overhead=call_overhead(config))
        record.screen.print(call_table(record.content["overhead"]))
    record.screen.print(CAPTION, highlight=False)
    record.draw(figure)
    if told := missing():
        print(told)
    record.end()


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
    names, codecs = config.codecs or [*CODECS, *PEERS], codecs_of(config.isa)
    for subject in subjects(config):
        yield list(_rows(subject, names, Bench(subject, codecs, public=config.isa is None), config.repeats))


def _rows(subject: Subject, names: Sequence[str], bench: Bench, repeats: int) -> Iterator[dict[str, Any]]:
    tensor, words, mask = subject.tensor, words_of(subject.tensor), subject.mask
    chosen = words != 0 if mask is None else words_of(decoded(mask)) != 0
    facts = {"class": subject.kind, "tensor": subject.name, "dtype": str(tensor.dtype).removeprefix("torch.")}
    facts |= {"num_bytes": tensor.nbytes, "density": float(chosen.mean()), "mask": mask is not None}
    batch = max(1, _BATCH_BYTES // max(1, tensor.nbytes))
    ours = (bench.ours(name) for name in names if name in CODECS and applies(name, subject))
    theirs = map(bench.theirs, [] if mask is not None else peers(names))
    for side in chain(ours, theirs):
        best = bound(side.name, words, tensor.dtype, None if mask is None else chosen) if side.ours else None
        row = facts | {"codec": side.name, "by": "penstock" if side.ours else "others"}
        row |= {"bound": best if best is not None and isfinite(best) else None, "sent_as": side.sent_as}
        row["ratio"] = tensor.nbytes / max(1, side.num_bytes)
        yield row | _measured(bench.common | side.routes, repeats, batch)


def _measured(routes: Mapping[str, Callable[[], Any]], repeats: int, batch: int) -> dict[str, Any]:
    """How many runs there were, and median seconds of a call of each route; all have run once before."""
    # Processor time does not count what others on the machine run in between; it is of one thread alone.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    sides = {name: timed(call, batch, clock=clock) for name, call in routes.items()}
    taken = alternate(sides, repeats, seconds=_SECONDS, clock=clock)
    return {"runs": len(taken["clone"]), **medians(taken)}


def call_overhead(config: BenchCodecsConfig) -> list[dict[str, Any]]:
    """Seconds of a call of the public functions on tensors so small that little else counts.

    Returns: a row per codec and size: ``codec``, ``num_bytes``, ``encode``, ``decode``, ``clone``; float32,
             half of it zeros; the median of alternating batches.
    """
    rows = []
    for num_bytes in SMALL_BYTES:
        tensor = torch.relu(torch.randn(num_bytes // 64, 16, generator=torch.Generator().manual_seed(0)))
        for name in (name for name in config.codecs or CODECS if name in CODECS and name != "narrow"):
            routes = {"clone": tensor.clone, **_public(tensor, name, encode(tensor, name))}
            seconds = _measured(routes, config.repeats, _CALLS)
            rows.append({"codec": name, "num_bytes": num_bytes} | {route: seconds[route] for route in routes})
    return rows


def _public(tensor: torch.Tensor, name: str, frame: torch.Tensor) -> dict[str, Callable[[], Any]]:
    return {"encode": lambda: encode(tensor, name), "decode": lambda: decode(frame)}
