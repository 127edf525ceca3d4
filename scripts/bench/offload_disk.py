"""The case ``disk`` of ``penstock bench offload``: steps with a tier on disk beside the machine's own bound.

That is the largest of the seconds that computing takes, that the bytes take to be written, and to be read,
all of the same run. Contestants within a limit are held to it by the system."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...compression.errors import TransportError
from ...conf.bench_offload import BenchOffloadConfig
from ...pipeline.planner.partition import partition
from ...pipeline.run import build
from ...pipeline.run.decide import look, model_name, prepare
from ...pipeline.run.run_folder import RunFolder
from ...stages.planner.layer_profile import Profile
from ...stages.planner.plan import Plan
from ...stages.units import parse_bytes, show_bytes
from . import memory_group
from .harness import Record, alternate, spread
from .offload_sides import CONTESTANTS, ENVIRONMENT, KEPT, KEPT_AS_IT_COMES, Options, bytes_of, filled
from .offload_start import run

SPEED = "disk speed"
Run = dict[str, Any]
Side = tuple[str, Any]
"""A contestant, and its limit as it is typed."""


def bench(config: BenchOffloadConfig, record: Record) -> None:
    """Measure what a step costs, and keep and say it.

    Raises: PenstockError: an option does not fit, or a run failed."""
    job = config.job()
    samples = prepare(job)
    build.optimizer(job.optimizer)
    profile = look(job, samples)
    refused = None if config.limits == [None] else memory_group.why_not()
    limits = [limit for limit in config.limits if limit is None or not refused]
    facts: dict[str, Any] = {"model": model_name(job), "limits_why_not": refused, "environment": ENVIRONMENT}
    if refused:
        record.say(f"without limits: {refused}")
    path = config.path or tempfile.gettempdir()
    with record.folder.private() as told:
        told.plans.mkdir()
        trains = _trainer(config, profile, told, path)
        told.tell(job, planned(config, profile, {}))
        record.say(f"{facts['model']}: everything kept, to see what it needs ...")
        first = trains((KEPT, None), None)()
        needed = first["peak_bytes"]
        sides = sides_of(config.contestants, limits)
        given = {side: bytes_of(side[1], needed) for side in sides}
        for side in [s for s in sides if filled(CONTESTANTS[s[0]], given[s]) is None]:
            record.say(f"{side[0]} has its budget from a limit, so it does not run without one")
            sides.remove(side)
        runs: dict[Any, Callable[[], Run]] = {side: trains(side, given[side]) for side in sides}
        runs[SPEED] = _speed(config, told, path)
        record.say(f"... {show_bytes(needed)}; {len(runs)} sides take turns")
        taken = alternate(runs, config.repeats)
        beyond = {}
        for limit in dict.fromkeys(limits):
            if limit is not None:
                beyond[str(limit)] = trains((KEPT, limit), bytes_of(limit, needed))()
    record.keep(disk=facts | {"needed_bytes": needed} | found(taken, given, beyond))
    record.say(*sentences(record.content["disk"]))


def sides_of(contestants: Sequence[str], limits: Sequence[Any]) -> list[Side]:
    """What keeps everything, with and without room, and every contestant within every limit."""
    others = [name for name in contestants if name not in (KEPT, KEPT_AS_IT_COMES)]
    return [(KEPT, None), (KEPT_AS_IT_COMES, None), *((name, limit) for limit in limits for name in others)]


def planned(config: BenchOffloadConfig, profile: Profile, options: Mapping[str, Any]) -> Plan:
    """The plan of a contestant: one stage."""
    given: dict[str, Any] = {"stages": 1, "ranks": 1, "codec": config.codec, **options}
    return partition(profile, micro_batches=config.micro_batches, **given)


def _trainer(
    config: BenchOffloadConfig, profile: Profile, told: RunFolder, path: str
) -> Callable[[Side, int | None], Callable[[], Run]]:
    """What makes the runs of a side; one that was killed is not tried again."""

    def trains(side: Side, limit: int | None) -> Callable[[], Run]:
        contestant, ended = side[0], list[Run]()
        options: Options = filled(CONTESTANTS[contestant], limit) or {}
        name = f"{contestant}_{limit}"
        planned(config, profile, options.get("partition", {})).save(told.plans / f"{name}.json")
        words = {"contestant": name, "options": options, "steps": config.steps, "warmup": config.warmup}
        environment = options.get("environment", ENVIRONMENT)

        def once() -> Run:
            if not ended:
                given: Any = {"limit": limit, "environment": environment, "deadline": config.deadline}
                got = run(told.path, "train", words | {"path": path}, **given)
                ended.extend([got] if "killed" in got else [])
                return got
            return ended[0]

        return once

    return trains


def _speed(config: BenchOffloadConfig, told: RunFolder, path: str) -> Callable[[], Run]:
    words = {"bytes": parse_bytes(config.speed_bytes, name="speed_bytes"), "path": path}
    return lambda: run(told.path, "try_disk", words, environment=ENVIRONMENT, deadline=config.deadline)


def found(
    taken: Mapping[Any, Sequence[Run]], given: Mapping[Side, int | None], beyond: Mapping[str, Run]
) -> dict[str, Any]:
    """What runs in turn tell: a row for each side, the speed of the disk, and what keeping everything does
    within each limit.

    Raises: TransportError: sides did not train alike."""
    speeds = taken[SPEED]
    neighbours = zip(taken[KEPT, None], taken[KEPT_AS_IT_COMES, None], strict=True)
    compute = [min(run["seconds"] for run in both) for both in neighbours]
    losses = taken[KEPT, None][0]["losses"]
    rows = []
    for (name, limit), runs in _sides(taken):
        row: Run = {"contestant": name, "limit": limit, "limit_bytes": given[name, limit]}
        if any("killed" in one for one in runs):
            rows.append(row | {"killed": True, "steps": min(one.get("steps", 0) for one in runs)})
            continue
        if any(one["losses"] != losses for one in runs):
            raise TransportError(
                f"{name} has other losses than what keeps everything; its bits are not the same"
            )
        rows.append(row | _row(runs, compute, speeds))
    speed = {way: statistics.median(one[way] for one in speeds) for way in ("written", "read")}
    of_runs = {f"{way}_of_runs": [one[way] for one in speeds] for way in speed}
    kept = {limit: {"killed": "killed" in one, "steps": one.get("steps")} for limit, one in beyond.items()}
    return {
        "speed": speed | of_runs | {"direct": speeds[0]["direct"]},
        "rows": rows,
        "kept_within": kept,
    }


def _sides(taken: Mapping[Any, Sequence[Run]]) -> list[tuple[Side, Sequence[Run]]]:
    return [(side, runs) for side, runs in taken.items() if side != SPEED]


def _row(runs: Sequence[Run], compute: Sequence[float], speeds: Sequence[Run]) -> Run:
    bounds = [
        max(own, one["bytes_written"] / speed["written"], one["bytes_read"] / speed["read"])
        for own, one, speed in zip(compute, runs, speeds, strict=True)
    ]
    seconds = [one["seconds"] for one in runs]
    times = [own / bound for own, bound in zip(seconds, bounds, strict=True)]
    slower = [own / alone for own, alone in zip(seconds, compute, strict=True)]
    return {
        "seconds": statistics.median(seconds),
        "seconds_of_runs": seconds,
        "roofline": statistics.median(bounds),
        "times_roofline": statistics.median(times),
        "times_roofline_of_runs": times,
        "times_compute": statistics.median(slower),
        "peak_bytes": max(one["peak_bytes"] for one in runs),
        "bytes_written": statistics.median(one["bytes_written"] for one in runs),
        "bytes_read": statistics.median(one["bytes_read"] for one in runs),
    }


def shown(row: Mapping[str, Any]) -> str:
    """A side as it is called."""
    return row["contestant"] + (f" in {row['limit']}" if row["limit"] is not None else "")


def rows(result: Mapping[str, Any]) -> list[dict[str, str]]:
    """The rows of the table."""
    made = []
    for row in result["rows"]:
        words = {"contestant": shown(row)}
        if row.get("killed"):
            words["s / step"] = f"killed behind step {row['steps']}"
        else:
            words |= {
                "s / step": f"{row['seconds']:.3f}",
                "roofline": f"{row['roofline']:.3f}",
                "of it": f"{row['times_roofline']:.2f}x ({spread(row['times_roofline_of_runs'])})",
                "of computing": f"{row['times_compute']:.2f}x",
                "peak": show_bytes(row["peak_bytes"]),
                "written": show_bytes(row["bytes_written"]),
                "read": show_bytes(row["bytes_read"]),
            }
        made.append(words)
    return made


def sentences(result: Mapping[str, Any]) -> list[str]:
    """What was found, beside the table."""
    speed = result["speed"]
    way = "past the page cache" if speed["direct"] else "through the page cache"
    lines = [
        f"the disk, {way}: {show_bytes(speed['written'])}/s written, {show_bytes(speed['read'])}/s read; the "
        "losses of all sides have the same bits"
    ]
    for limit, one in result["kept_within"].items():
        ended = f"was killed behind step {one['steps']}" if one["killed"] else "trains too"
        lines.append(f"everything kept within {limit} {ended}")
    return lines
