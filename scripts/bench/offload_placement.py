"""The case ``placement`` of ``penstock bench offload``: how close buffers are laid to what lives at once."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...compression.errors import ConfigError, PlanError
from ...conf.bench_offload import BenchOffloadConfig
from ...stages.memory.arena import max_live, place
from .harness import Record, table
from .lifetimes import buffers_of
from .offload_sides import files

Buffers = list[tuple[int, int, int]]


def bench(config: BenchOffloadConfig, record: Record) -> None:
    """Place the steps of networks, and the files of a folder, one after another.

    Raises: ConfigError: a file holds no buffers."""
    record.keep(placement=[])
    for name, buffers, limit in _given(config):
        record.keep(placement=[placed(name, buffers, limit)])
        record.say(sentence(record.content["placement"][-1]))
    record.screen.print(table(rows(record.content["placement"]), left=["buffers of"]))


def _given(config: BenchOffloadConfig) -> Iterator[tuple[str, Buffers, int | None]]:
    for name in config.traces:
        yield name, buffers_of(name), None
    for file in files(config.corpora):
        yield file.stem, read(file), int(file.stem.rpartition(".")[2])


def read(file: Path) -> Buffers:
    """The buffers of a file with the columns lower, upper and size.

    Raises: ConfigError: it is none."""
    try:
        with file.open(newline="") as lines:
            return [(int(r["lower"]), int(r["upper"]), int(r["size"])) for r in csv.DictReader(lines)]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} needs whole numbers in its columns lower, upper and size") from error


def placed(name: str, buffers: Buffers, limit: int | None) -> dict[str, Any]:
    """Place ``buffers`` below ``limit``.

    Returns: ``num_buffers``, ``max_live``, ``seconds``, and those of the processor, ``busy_seconds``;
             ``held``: bytes of the allocation, and its ``gap`` above what lives at once; None where nothing
             was found below the limit."""
    began, busy = time.perf_counter(), time.process_time()
    offsets: list[int] | None = place(buffers)
    took = {"seconds": time.perf_counter() - began, "busy_seconds": time.process_time() - busy}
    live = max_live(buffers)
    held = high(buffers, offsets)
    held = held if limit is None or held <= limit else None
    facts = {"name": name, "num_buffers": len(buffers), "limit": limit, "max_live": live}
    return facts | took | {"held": held, "gap": None if held is None else held / live - 1}


def high(buffers: Buffers, offsets: Sequence[int]) -> int:
    """The bytes of an allocation in which ``buffers`` lie at ``offsets``.

    Raises: PlanError: two of them overlap in time and in place."""
    laid = sorted(
        (low, up, at, at + size) for (low, up, size), at in zip(buffers, offsets, strict=True) if size
    )
    there: list[tuple[int, int, int]] = []
    for low, up, begin, end in laid:
        there = [one for one in there if one[0] > low]
        if any(begin < others_end and others_begin < end for _, others_begin, others_end in there):
            raise PlanError("a placement has two buffers in one place at one time, which is a bug of ours")
        there.append((up, begin, end))
    return max((end for *_, end in laid), default=0)


def rows(found: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The rows of the table."""
    return [
        {
            "buffers of": one["name"],
            "buffers": str(one["num_buffers"]),
            "at once": str(one["max_live"]),
            "laid in": "none found" if one["held"] is None else str(one["held"]),
            "gap": "" if one["gap"] is None else f"{one['gap']:.3%}",
            "seconds": f"{one['seconds']:.2f}",
            "of the processor": f"{one['busy_seconds']:.2f}",
        }
        for one in found
    ]


def sentence(one: Mapping[str, Any]) -> str:
    """What was found, in words."""
    many = f"{one['name']}: {one['num_buffers']} buffers, {one['max_live']} bytes at once"
    took = f"in {one['seconds']:.2f} s"
    if one["held"] is None:
        return f"{many}, not laid below {one['limit']} {took}"
    return f"{many}, laid in {one['held']} ({one['gap']:.3%} more) {took}"
