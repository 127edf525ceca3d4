"""The case ``packed`` of ``penstock bench offload``: what networks save, packed, and what that costs a step.

Everything kept and everything packed take turns in one process, once with a core beside the one that computes
and once without."""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...conf.bench_offload import BenchOffloadConfig
from ...pipeline.run.decide import look, prepare
from ...stages.units import show_bytes
from .harness import Record, spread, table
from .offload_disk import planned
from .offload_sides import NETWORKS
from .offload_start import run

PACKED = "packed"


def bench(config: BenchOffloadConfig, record: Record) -> None:
    """Measure one network after another, and keep and show each.

    Raises: PenstockError: an option does not fit, or a run failed."""
    record.keep(packed=[])
    for row in measured(config, record):
        record.keep(packed=[row])
        record.say(sentence(row))
    record.screen.print(table(rows(record.content["packed"]), left=["network"]))


def measured(config: BenchOffloadConfig, record: Record) -> Iterator[dict[str, Any]]:
    """Measure every network on every number of cores.

    Yields: ``network``, ``threads`` that compute, ``cores``; bytes of a step: all that is ``saved_in_all``,
            what of it was ``saved`` in the tier, and ``kept`` there; ``seconds`` of both sides, and ``ratio``
            of neighbours, everything kept : packed; ``same_bits`` of the losses."""
    cores = sorted(os.sched_getaffinity(0))
    for name in config.networks:
        job = config.job(**NETWORKS[name])
        samples = prepare(job)
        one = dataclasses.replace(config, model=job.model, data=job.data)
        profile = look(job, samples)
        with record.folder.private() as told:
            told.plans.mkdir()
            plans = {"kept": planned(one, profile, {}), PACKED: planned(one, profile, {"tier": PACKED})}
            for side, plan in plans.items():
                plan.save(told.plans / f"{side}.json")
            told.tell(job, plans["kept"])
            words: dict[str, Any] = {"contestant": PACKED, "options": {}, "path": tempfile.gettempdir()}
            words |= {number: getattr(config, number) for number in ("steps", "warmup", "repeats")}
            for some in dict.fromkeys((len(cores[:2]), 1)):
                got = run(
                    told.path, "train_in_turn", words,
                    cores=cores[:some], environment={}, deadline=config.deadline,
                )  # fmt: skip
                in_all = config.micro_batches * sum(stage.saved_bytes for stage in plans["kept"].stages)
                yield row(name, config.threads, some, in_all, got)


def row(name: str, threads: int, cores: int, in_all: int, got: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a run."""
    seconds: Mapping[str, Sequence[float]] = got["seconds"]
    pairs = [plain / own for plain, own in zip(seconds["kept"], seconds[PACKED], strict=True)]
    return {
        "network": name,
        "threads": threads,
        "cores": cores,
        "saved_in_all": in_all,
        **{key: got[key] for key in ("saved", "kept", "same_bits")},
        "seconds": {side: statistics.median(runs) for side, runs in seconds.items()},
        "seconds_of_runs": dict(seconds),
        "ratio": statistics.median(pairs),
        "ratio_of_pairs": pairs,
    }


def left(row: Mapping[str, Any]) -> float:
    """The share of all saved bytes that is still there when they are packed."""
    return 1 - (row["saved"] - row["kept"]) / row["saved_in_all"] if row["saved_in_all"] else 1.0


def where(row: Mapping[str, Any]) -> str:
    """The threads and the cores."""
    cores = "one core alone" if row["cores"] == 1 else f"{row['cores']} cores"
    return f"{row['threads']} thread{'s' * (row['threads'] > 1)}, {cores}"


def rows(found: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The rows of the table."""
    return [
        {
            "network": one["network"],
            "on": where(one),
            "saved": show_bytes(one["saved_in_all"]),
            "packed": show_bytes(one["saved_in_all"] - one["saved"] + one["kept"]),
            "left": f"{left(one):.1%}",
            "kept : packed": f"{one['ratio']:.3f} ({spread(one['ratio_of_pairs'])})",
            "same bits": "yes" if one["same_bits"] else "NO",
        }
        for one in found
    ]


def sentence(one: Mapping[str, Any]) -> str:
    """What was found, in words."""
    seconds = one["seconds"]
    share = f"{left(one):.1%} of {show_bytes(one['saved_in_all'])} is left"
    took = f"a step takes {seconds[PACKED]:.3f} s, everything kept {seconds['kept']:.3f} s"
    return f"{one['network']}, {where(one)}: {share}, {took}"
