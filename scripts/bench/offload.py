"""Steps with a tier on disk, or within a budget, next to the bound of the same machine.

The bound of a run is the largest of the seconds that computing takes, that its bytes take to be written, and
to be read. A contestant within a limit is held to it by a memory cgroup. Each run is a process, which enters
its group before anything large is imported. Pages of files count in a group as any other, so a page cache
cannot replace the disk. Source: Documentation/admin-guide/cgroup-v1/memory.rst of Linux."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import cycle
from pathlib import Path
from typing import Any

if len(sys.argv) > 2 and sys.argv[1] == "run" and sys.argv[3:]:  # a run enters its group first of all
    Path(sys.argv[3], "cgroup.procs").write_text(str(os.getpid()))

import harness
import torch
from harness import Job, Options, Results, Row, alternate, ratio_of_pairs, say
from torch import nn

from penstock.compression.errors import ConfigError, TransportError
from penstock.pipeline.partition.partition import partition
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.run.planning import look, model_name
from penstock.pipeline.run.run_folder import RunFolder
from penstock.pipeline.run.training_loop import loss
from penstock.pipeline.runtime.meter import ResidentMemory
from penstock.stages.files import reason, save_json
from penstock.stages.memory.disk import Disk, DiskOptions, timed
from penstock.stages.plan.plan import Plan
from penstock.stages.profiling.measure import measure
from penstock.stages.tracing.tracer import trace
from penstock.stages.units import parse_bytes, show_bytes

KEPT, KEPT_AS_IT_COMES, SPEED = "kept", "kept_as_it_comes", "disk speed"
LIMIT, BUDGET = "$limit", 0.7
"""Stands for a contestant's budget, and its share of the limit: a layer and the allocator need the rest."""

CONTESTANTS: dict[str, dict[str, Any]] = {
    KEPT: {},
    KEPT_AS_IT_COMES: {},
    "disk": {"tier": "disk"},
    "disk_parameters": {"tier": "disk", "parameters_tier": "disk"},
    "auto": {"memory": LIMIT, "tier": "auto", "parameters_tier": "auto"},
}
"""Options of ``partition`` by contestant."""

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "131072", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Lets a process shrink as its tensors do: else glibc keeps blocks between others. That costs page faults, so
what keeps everything also runs without (``kept_as_it_comes``)."""

FRAME_BYTES = 8 << 20
GROUPS, OWN_GROUP = Path("/sys/fs/cgroup/memory"), Path("/proc/self/cgroup")
Side = tuple[str, str]
"""A contestant, and its limit as it is typed."""


def options() -> Any:
    """Return the parser of the command line."""
    made = harness.parser(__doc__, job="data=digits batch_size=64 micro_batches=1 threads=1 codec=auto")
    listed, count = harness.list_of, harness.at_least(1)
    add = made.add_argument
    names = tuple(name for name in CONTESTANTS if not name.startswith(KEPT))
    add("--contestants", type=listed(harness.name_of(names)), default=["disk", "disk_parameters"],
        help=f"sides next to what keeps everything, of {', '.join(names)}")  # fmt: skip
    add("--limits", type=listed(harness.option(_limit)), default=["none", "50%"],
        help="memory of a run: none, bytes (2GiB), or a share of what is needed (50%%)")  # fmt: skip
    add("--steps", type=count, default=3, help="steps of a run")
    add("--warmup", type=count, default=1, help="steps of a run before anything is timed")
    speed = harness.option(lambda text: parse_bytes(text, name="speed-bytes"))
    add("--speed-bytes", type=speed, default=256 << 20, help="bytes to measure the disk with")
    add("--path", type=Path, default=Path(tempfile.gettempdir()), help="folder of the disk's file")
    return made


def _limit(text: str) -> str:
    limit_bytes(text, 1)
    return text


def limit_bytes(limit: str, needed: int) -> int | None:
    """Bytes of a limit: a size, a share of ``needed``, or None."""
    if limit == "none":
        return None
    if share := re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?)%", limit):
        if not 0 < float(share[1]) <= 100:
            raise ConfigError(f"{limit} is no share of what is needed; write 1% to 100%")
        return max(1, int(needed * float(share[1]) / 100))
    return parse_bytes(limit, name="limits")


def bench(asked: Options, path: Path) -> Results:
    """Measure what a step costs on every side, and show it."""
    defaults = {"batch_size": 64, "micro_batches": 1, "threads": 1, "codec": "auto", "data.drop_last": "true"}
    defaults["deadline"] = 600
    config = harness.train_config(asked.job, defaults, {"ranks": 1, "stages": 1})
    if not asked.path.is_dir():
        raise ConfigError(f"--path={asked.path} is no folder; name the one for the file of the tier disk")
    job = Job(config)
    profile = look(config, job.samples)
    refused = None if asked.limits == ["none"] else why_no_group()
    limits = ["none"] if refused else asked.limits
    facts: dict[str, Any] = {"model": model_name(config), "batch_size": config.batch_size}
    facts |= {"codec": config.codec, "micro_batches": config.micro_batches, "seed": config.seed}
    facts |= {name: getattr(asked, name) for name in ("repeats", "steps", "warmup")}
    results = Results(path, threads=config.threads, job=facts)
    if refused:
        say(f"without limits: {refused}")
    with results.folder().private() as folder:
        (folder.path / "plans").mkdir()
        (folder.path / "asked.json").write_text(
            json.dumps({"steps": asked.steps, "warmup": asked.warmup, "path": str(asked.path)})
        )

        def plan_of(name: str, limit: int | None) -> Plan:
            budget = None if limit is None else int(BUDGET * limit)
            given: dict[str, Any] = {
                key: budget if one == LIMIT else one for key, one in CONTESTANTS[name].items()
            }
            common: dict[str, Any] = {"stages": 1, "ranks": 1, "codec": config.codec}
            return partition(profile, micro_batches=config.micro_batches, **common, **given)

        def runs_of(side: Side, limit: int | None) -> Callable[[], Row]:
            name, killed = f"{side[0]}_{limit}", list[Row]()
            plan_of(side[0], limit).save(folder.path / "plans" / f"{name}.json")
            environment = {} if side[0] == KEPT_AS_IT_COMES else ENVIRONMENT

            def run() -> Row:
                if not killed:  # one that was killed is not tried again
                    got = run_process(folder, name, limit, environment, deadline=config.deadline)
                    killed.extend([got] if "killed" in got else [])
                    return got
                return killed[0]

            return run

        folder.tell(config, plan_of(KEPT, None))
        needed = runs_of((KEPT, "none"), None)()["peak_bytes"]
        sides: list[Side] = [(KEPT, "none"), (KEPT_AS_IT_COMES, "none")]
        # A budget is derived from a limit, so a side that has one does not run without.
        sides += [
            (name, limit)
            for limit in limits
            for name in asked.contestants
            if limit != "none" or LIMIT not in CONTESTANTS[name].values()
        ]
        say(f"{facts['model']} needs {show_bytes(needed)}; {len(sides)} sides take turns")
        given = {side: limit_bytes(side[1], needed) for side in sides}
        turns: dict[Any, Callable[[], Row]] = {side: runs_of(side, given[side]) for side in sides}
        turns[SPEED] = lambda: try_disk(asked.path, asked.speed_bytes)
        taken = alternate(turns, asked.repeats)
        within = {
            limit: runs_of((KEPT, limit), limit_bytes(limit, needed))() for limit in limits if limit != "none"
        }
    disk = rows_of(taken, given) | {"model": facts["model"], "needed_bytes": needed}
    disk |= {"limits_why_not": refused, "environment": ENVIRONMENT}
    disk["kept_within"] = {
        n: {"killed": "killed" in run, "steps": run.get("steps")} for n, run in within.items()
    }
    results.keep(disk=disk)
    harness.show(disk["rows"], COLUMNS, left=2)
    speed = disk["speed"]
    say(f"the disk: {show_bytes(speed['written'])}/s written, {show_bytes(speed['read'])}/s read")
    for limit, run in disk["kept_within"].items():
        say(f"everything kept within {limit} {'was killed' if run['killed'] else 'trains too'}")
    return results


def rows_of(taken: Mapping[Any, Sequence[Row]], given: Mapping[Side, int | None]) -> dict[str, Any]:
    """Row of each side, and the speed of the disk.

    Raises: TransportError: sides did not train alike."""
    speeds, rows = taken[SPEED], []
    neighbours = zip(taken[KEPT, "none"], taken[KEPT_AS_IT_COMES, "none"], strict=True)
    compute = [min(run["seconds"] for run in both) for both in neighbours]
    losses = taken[KEPT, "none"][0]["losses"]
    for side, runs in taken.items():
        if side == SPEED:
            continue
        row: dict[str, Any] = {"contestant": side[0], "limit": side[1], "limit_bytes": given[side]}
        if any("killed" in one for one in runs):
            rows.append(row | {"killed": True, "steps": min(one.get("steps", 0) for one in runs)})
            continue
        if any(one["losses"] != losses for one in runs):
            raise TransportError(f"{side[0]} has other losses than what keeps everything; a bit changed")
        rows.append(row | bounded_row(runs, compute, speeds))
    speed: dict[str, Any] = {
        way: statistics.median(one[way] for one in speeds) for way in ("written", "read")
    }
    speed |= {f"{way}_of_runs": [one[way] for one in speeds] for way in ("written", "read")}
    return {"rows": rows, "speed": speed | {"direct": speeds[0]["direct"]}}


def bounded_row(runs: Sequence[Row], compute: Sequence[float], speeds: Sequence[Row]) -> dict[str, Any]:
    """Seconds of a step, their bound by the same turn's computing and disk, and the ratio of both."""
    bounds = [
        max(own, one["bytes_written"] / speed["written"], one["bytes_read"] / speed["read"])
        for own, one, speed in zip(compute, runs, speeds, strict=True)
    ]
    seconds = [one["seconds"] for one in runs]
    ratios = ratio_of_pairs(seconds, bounds, "times_roofline")
    return {
        "seconds": statistics.median(seconds),
        "seconds_of_runs": seconds,
        "roofline": statistics.median(bounds),
        "times_roofline": ratios["times_roofline"],
        "times_roofline_of_runs": ratios["times_roofline_of_pairs"],
        "times_compute": ratio_of_pairs(seconds, compute)["speedup"],
        "peak_bytes": max(one["peak_bytes"] for one in runs),
        "bytes_written": statistics.median(one["bytes_written"] for one in runs),
        "bytes_read": statistics.median(one["bytes_read"] for one in runs),
    }


COLUMNS: dict[str, Any] = {
    "contestant": "{contestant}",
    "limit": "{limit}",
    "s / step": lambda row: f"killed after {row['steps']}" if row.get("killed") else f"{row['seconds']:.3f}",
    "bound": "{roofline:.3f}",
    "of bound": lambda row: f"{row['times_roofline']:.2f}x ({harness.spread(row['times_roofline_of_runs'])})",
    "of computing": "{times_compute:.2f}x",
    "peak": lambda row: show_bytes(row["peak_bytes"]),
    "written": lambda row: show_bytes(row["bytes_written"]),
    "read": lambda row: show_bytes(row["bytes_read"]),
}


# Processes of runs.


def run_process(
    folder: RunFolder, plan: str, limit: int | None, environment: Mapping[str, str], *, deadline: float
) -> dict[str, Any]:
    """Train in a new process; return its row, or ``killed`` where the system ended it for its memory."""
    found, steps = (folder.path / name for name in ("found.json", "steps"))
    for path in (found, steps):
        path.unlink(missing_ok=True)
    command = [sys.executable, __file__, "run", str(folder.path)]
    with contextlib.ExitStack() as stack:
        group = None if limit is None else stack.enter_context(memory_group())
        (folder.path / "told.json").write_text(json.dumps({"plan": plan, "limit": limit}))
        process = subprocess.Popen(
            [*command, *([str(group)] if group else [])], env=os.environ | dict(environment)
        )
        try:
            code = process.wait(deadline)
        except subprocess.TimeoutExpired as error:
            raise TransportError(
                f"a run took longer than deadline={deadline:g} seconds; raise it, or take a smaller job"
            ) from error
        finally:
            process.kill()
            process.wait()
        killed = group is not None and num_killed(group) > 0
    if found.exists():
        return json.loads(found.read_text())
    if killed:
        return {"killed": True, "steps": int(steps.read_text()) if steps.exists() else 0}
    raise TransportError(f"a run ended without a result (exit code {code}); look at its output above")


def train(folder: RunFolder, group: Path | None) -> dict[str, Any]:
    """Train as ``told.json`` says, within its limit above the memory of this process before it has the model.

    Returns:
        ``seconds`` of a step, what is left to write at the end included; ``peak_bytes`` above the start;
        bytes of a step that the tier disk wrote and read; ``losses``, every bit. Or ``killed``.
    """
    told, asked = (json.loads((folder.path / f"{name}.json").read_text()) for name in ("told", "asked"))
    job = Job(folder.read_config())
    batches, plan = cycle(job.batches()), harness.load_plans(folder)[told["plan"]]
    disk = DiskOptions(path=asked["path"])
    _warm_up(disk)
    _trim()
    resident, base = ResidentMemory(model_bytes=0), held_bytes(group) if group else 0
    made = Pipeline(job.model(), plan, loss=loss, optimizer=job.optimizer, seed=job.config.seed, disk=disk)
    with closing(made) as pipe:
        _trim()
        try:
            if group:
                set_limit(group, base + told["limit"])
        except OSError:  # the model alone is larger
            return {"killed": True, "steps": 0}
        resident.begin()
        losses: list[str] = []

        def steps(number: int) -> None:
            for _ in range(number):
                losses.append(pipe.step(*next(batches)).loss.hex())
                (folder.path / "steps").write_text(str(len(losses)))
            if pipe.disk:
                pipe.disk.drain()

        steps(asked["warmup"])
        before, start = _moved(pipe), time.perf_counter()
        steps(asked["steps"])
        seconds = (time.perf_counter() - start) / asked["steps"]
        written, read = (
            (now - then) / asked["steps"] for now, then in zip(_moved(pipe), before, strict=True)
        )
        peak = resident.most()
        if group:
            set_limit(group, -1)  # a pipeline that is closed brings back all parameters
    moved = {"bytes_written": written, "bytes_read": read}
    return {"seconds": seconds, "peak_bytes": peak, "losses": losses} | moved


def try_disk(path: Path, num_bytes: int) -> dict[str, Any]:
    """Bytes a second of the tier disk, the second of two passes: the first makes the file."""
    with closing(Disk(DiskOptions(path=path))) as disk:
        frames = {"num_frames": -(-num_bytes // FRAME_BYTES), "frame_bytes": FRAME_BYTES}
        timed(disk, **frames)
        written, read = timed(disk, **frames)
        return {"written": written, "read": read, "direct": disk.direct}


def _warm_up(disk: DiskOptions) -> None:
    """Train a small model in a tier, so that imports and kernels count to the start."""
    model, example = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 8)), torch.ones(64, 64)
    tiers: Any = {"tier": "disk", "parameters_tier": "disk"}
    profile = measure(trace(model, (example,)), (example,))
    plan = partition(profile, stages=1, ranks=1, micro_batches=1, **tiers)
    made = {"optimizer": lambda named: torch.optim.SGD(named, lr=0.1), "disk": disk}
    with closing(Pipeline(model, plan, loss=loss, **made)) as pipe:
        pipe.step(example, torch.zeros(64, dtype=torch.int64))


def _moved(pipe: Pipeline) -> tuple[int, int]:
    return (pipe.disk.bytes_written, pipe.disk.bytes_read) if pipe.disk else (0, 0)


def _trim() -> None:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# Memory cgroups (version 1).


@contextlib.contextmanager
def memory_group(*, root: Path = GROUPS, own: Path = OWN_GROUP) -> Iterator[Path]:
    """Make a group below the one of this process; it is gone after the block, when its processes ended.

    Raises: ConfigError: this machine, or its administrator, has none to give."""
    lines = own.read_text().splitlines() if own.exists() else []
    groups = (line.split(":", 2) for line in lines)
    below = next((path for _, names, path in groups if "memory" in names.split(",")), None)
    if below is None or not (root / "memory.limit_in_bytes").exists():
        raise ConfigError(
            f"a limit needs a memory cgroup (version 1), and there is none at {root}; drop --limits"
        )
    path = root / below.lstrip("/") / f"penstock_{secrets.token_hex(8)}"
    try:
        path.mkdir()
    except OSError as error:
        raise ConfigError(
            f"a limit needs a memory cgroup, and {path.parent} takes none ({reason(error)}); run as "
            "whoever may make one, or drop --limits"
        ) from error
    try:
        yield path
    finally:
        end = time.monotonic() + 5.0
        while True:  # the system needs a moment for whom it killed
            try:
                path.rmdir()
                break
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)


def why_no_group() -> str | None:
    """Return why no limit can be held here, or None where one can."""
    try:
        with memory_group():
            return None
    except ConfigError as error:
        return str(error)


def held_bytes(group: Path) -> int:
    """Bytes that cannot be given up for others: without pages of files that nobody has mapped."""
    stat = dict(map(str.split, (group / "memory.stat").read_text().splitlines()))
    usage = int((group / "memory.usage_in_bytes").read_text())
    return usage - int(stat["cache"]) + int(stat["mapped_file"])


def set_limit(group: Path, num_bytes: int) -> None:
    """Hold a group below ``num_bytes``, swap included where it is counted; -1: no limit.

    Raises: OSError: it holds more already."""
    names = ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]
    for name in names if num_bytes >= 0 else reversed(names):
        with contextlib.suppress(*([OSError] if "memsw" in name else [])):
            (group / name).write_text(str(num_bytes))


def num_killed(group: Path) -> int:
    """Processes that the system ended because they needed more."""
    lines = (group / "memory.oom_control").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run_folder = RunFolder(path=Path(sys.argv[2]))
        save_json(
            run_folder.path / "found.json", train(run_folder, Path(sys.argv[3]) if sys.argv[3:] else None)
        )
    else:
        harness.main(options(), bench)
