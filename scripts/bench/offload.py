"""Steps with a tier on disk, or within a budget, next to the bound of the same machine.

The bound of a run is the largest of the seconds that computing takes (everything kept), that its bytes take
to be written, and to be read. A side within a limit is held to it by a memory cgroup (version 1). Each run is
a process, which enters its group before anything large is imported. Pages of files count in a group as any
other, so a page cache cannot replace the disk. Source: Documentation/admin-guide/cgroup-v1/memory.rst of
Linux."""

import contextlib
import ctypes
import gc
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

if len(sys.argv) > 2 and sys.argv[1] == "run" and sys.argv[3:]:  # a run enters its group first of all
    Path(sys.argv[3], "cgroup.procs").write_text(str(os.getpid()))

import harness
import torch
from harness import Job, Options, Results, Row, alternate, ratio_of_pairs, spread
from torch import nn

from penstock.compression.errors import ConfigError, TransportError
from penstock.pipeline.partition.partition import partition
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.run.losses import cross_entropy as loss
from penstock.pipeline.run.planning import model_name, record
from penstock.pipeline.run.run_folder import RunFolder
from penstock.pipeline.runtime.meter import ResidentMemory
from penstock.stages.files import reason, save_json
from penstock.stages.memory.disk import Disk, DiskOptions, timed
from penstock.stages.profiling.measure import measure
from penstock.stages.tracing.tracer import trace
from penstock.stages.units import parse_bytes, show_bytes

KEPT, SPEED, NONE = "kept", "disk speed", "none"
# Contestants with a budget, and its share of the limit: a layer and the allocator need the rest.
WITHIN, BUDGET = ("auto",), 0.7
# Options of ``partition`` by contestant.
CONTESTANTS: dict[str, dict[str, Any]] = {
    KEPT: {},
    "packed": {"tier": "packed"},
    "disk": {"tier": "disk"},
    "disk_parameters": {"tier": "disk", "parameters_tier": "disk"},
    "auto": {"tier": "auto", "parameters_tier": "auto"},
}
# Lets a process shrink as its tensors do: else glibc keeps blocks between others. That costs page faults, so
# what keeps everything runs without.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "131072", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

FRAME_BYTES = 8 << 20
Side = tuple[str, str]  # a contestant, and its limit as it is typed
COLUMNS: dict[str, Any] = {
    "contestant": "{contestant}",
    "limit": "{limit}",
    "s / step": lambda row: f"killed after {row['steps']}" if row.get("killed") else f"{row['seconds']:.3f}",
    "bound": "{bound:.3f}",
    "of bound": lambda row: f"{row['of_bound']:.2f}x ({spread(row['of_bound_of_pairs'])})",
    "peak": lambda row: show_bytes(row["peak_bytes"]),
    "written": lambda row: show_bytes(row["bytes_written"]),
    "read": lambda row: show_bytes(row["bytes_read"]),
}


def options() -> Any:
    """Return the parser of the command line."""
    made = harness.parser(__doc__, job="data=digits batch_size=64 micro_batches=1 threads=1 codec=auto")
    listed, count, add = harness.list_of, harness.at_least(1), made.add_argument
    names = [name for name in CONTESTANTS if name != KEPT]
    add("--contestants", type=listed(known=names), default=["disk", "disk_parameters"],
        help=f"sides next to what keeps everything, of {', '.join(names)}")  # fmt: skip
    add("--limits", type=listed(_limit), default=[NONE, "50%"],
        help="memory of a run: none, bytes (2GiB), or a share of what is needed (50%%)")  # fmt: skip
    add("--steps", type=count, default=3, help="steps of a run, behind one that is not timed")
    speed = partial(parse_bytes, name="speed-bytes")
    add("--speed-bytes", type=speed, default=256 << 20, help="bytes to measure the disk with")
    add("--path", type=Path, default=Path(tempfile.gettempdir()), help="folder of the disk's file")
    return made


def _limit(text: str) -> str:
    limit_bytes(text, 1)
    return text


def limit_bytes(limit: str, needed: int) -> int | None:
    """Bytes of a limit: a size, a share of ``needed``, or None."""
    if limit == NONE:
        return None
    if limit.endswith("%"):
        share = harness.at_least(0.0)(limit[:-1])
        if not 0 < share <= 100:
            raise ConfigError(f"{limit} is no share of what is needed; write 1% to 100%")
        return max(1, int(needed * share / 100))
    return parse_bytes(limit, name="limits")


def bench(asked: Options, path: Path) -> Results:
    """Measure what a step costs on every side, and show it."""
    defaults = {"batch_size": 64, "micro_batches": 1, "threads": 1, "codec": "auto", "data.drop_last": "true"}
    config = harness.train_config(asked.job, defaults | {"deadline": 600}, {"ranks": 1, "stages": 1})
    if not asked.path.is_dir():
        raise ConfigError(f"--path={asked.path} is no folder; name the one for the file of the tier disk")
    if asked.limits != [NONE]:
        with memory_group():  # refuses where there is none
            pass
    job = Job(config)
    profile = record(config, job.samples).measure()
    names = ("batch_size", "codec", "micro_batches", "seed", "threads")
    facts = {"model": model_name(config)} | {name: getattr(config, name) for name in names}
    facts |= {name: getattr(asked, name) for name in ("repeats", "steps")}
    results = Results(path, job=facts)
    with results.folder().private() as folder:
        (folder.path / "plans").mkdir()

        def runs_of(side: Side, needed: int) -> Callable[[], Row]:
            limit = limit_bytes(side[1], needed)
            budget = None if limit is None else int(BUDGET * limit)
            asks: dict[str, Any] = {"codec": config.codec, "micro_batches": config.micro_batches}
            asks |= CONTESTANTS[side[0]] | ({"memory": budget} if side[0] in WITHIN else {})
            plan = partition(profile, stages=1, ranks=1, **asks)
            name = f"{side[0]}_{limit}"
            plan.save(folder.path / "plans" / f"{name}.json")
            folder.tell(config, plan)
            told = {"plan": name, "limit": limit, "steps": asked.steps, "path": str(asked.path)}
            return partial(run_process, folder, told, deadline=config.deadline)

        needed = runs_of((KEPT, NONE), 0)()["peak_bytes"]
        sides: list[Side] = [(KEPT, limit) for limit in dict.fromkeys([NONE, *asked.limits])]
        # A budget is derived from a limit, so a side that has one does not run without.
        pairs = [(name, limit) for limit in asked.limits for name in asked.contestants]
        sides += [side for side in pairs if side[1] != NONE or side[0] not in WITHIN]
        print(f"{facts['model']} needs {show_bytes(needed)}; {len(sides)} sides take turns", flush=True)
        turns: dict[Any, Callable[[], Row]] = {side: runs_of(side, needed) for side in sides}
        turns[SPEED] = lambda: try_disk(asked.path, asked.speed_bytes)
        taken = alternate(turns, asked.repeats)
    speeds = taken.pop(SPEED)
    rows = [row_of(side, runs, taken[KEPT, NONE], speeds) for side, runs in taken.items()]
    results.keep(rows=rows, needed_bytes=needed, speeds=speeds, environment=ENVIRONMENT)
    harness.show(rows, COLUMNS, left=2)
    written, read = (statistics.median(one[way] for one in speeds) for way in ("written", "read"))
    print(f"the disk: {show_bytes(written)}/s written, {show_bytes(read)}/s read", flush=True)
    return results


def row_of(side: Side, runs: Sequence[Row], kept: Sequence[Row], speeds: Sequence[Row]) -> dict[str, Any]:
    """Row of a side: its step, and the bound by the computing and the disk of the same turn."""
    row: dict[str, Any] = {"contestant": side[0], "limit": side[1]}
    if any("killed" in one for one in runs):
        return row | {"killed": True, "steps": min(one.get("steps", 0) for one in runs)}
    if any(one["losses"] != kept[0]["losses"] for one in runs):
        raise TransportError(f"{side[0]} has other losses than what keeps everything; a bit changed")
    bounds = [
        max(one["seconds"], run["bytes_written"] / speed["written"], run["bytes_read"] / speed["read"])
        for one, run, speed in zip(kept, runs, speeds, strict=True)
    ]
    seconds = [one["seconds"] for one in runs]
    row |= {"seconds": statistics.median(seconds), "seconds_of_runs": seconds}
    for name in ("peak_bytes", "bytes_written", "bytes_read"):
        row[name] = statistics.median(one[name] for one in runs)
    return row | {"bound": statistics.median(bounds)} | ratio_of_pairs(seconds, bounds, "of_bound")


# Processes of runs.


def run_process(folder: RunFolder, told: Mapping[str, Any], *, deadline: float) -> dict[str, Any]:
    """Train in a new process; return its row, or ``killed`` where the system ended it for its memory."""
    measured, steps = (folder.path / name for name in ("measured.json", "steps"))
    for path in (measured, steps):
        path.unlink(missing_ok=True)
    save_json(folder.path / "told.json", dict(told))
    environment = os.environ | ({} if told["plan"].startswith(f"{KEPT}_") else ENVIRONMENT)
    with contextlib.ExitStack() as stack:
        group = None if told["limit"] is None else stack.enter_context(memory_group())
        command = [sys.executable, __file__, "run", str(folder.path), *([str(group)] if group else [])]
        try:
            done = subprocess.run(command, env=environment, timeout=deadline, check=False)
        except subprocess.TimeoutExpired as error:
            raise TransportError(
                f"a run took longer than deadline={deadline:g} seconds; raise it, or take a smaller job"
            ) from error
        lines = (group / "memory.oom_control").read_text().splitlines() if group else []
    if measured.exists():
        return json.loads(measured.read_text())
    if any(line.startswith("oom_kill ") and int(line.split()[1]) for line in lines):
        return {"killed": True, "steps": int(steps.read_text()) if steps.exists() else 0}
    raise TransportError(f"a run ended without a result (code {done.returncode}); look at its output above")


def train(folder: RunFolder, group: Path | None) -> dict[str, Any]:
    """Train as ``told.json`` says, within its limit above the memory of this process before it has the model.

    Returns:
        ``seconds`` of a step, what is left to write at the end included; ``peak_bytes`` above the start;
        bytes of a step that the tier disk wrote and read; ``losses``, every bit. Or ``killed``.
    """
    told, job = json.loads((folder.path / "told.json").read_text()), Job(folder.read_config())
    batches, plan = cycle(job.batches()), harness.load_plans(folder)[told["plan"]]
    disk = DiskOptions(path=told["path"])
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

        def steps(number: int) -> tuple[int, int]:
            for _ in range(number):
                losses.append(pipe.step(*next(batches)).loss.hex())
                (folder.path / "steps").write_text(str(len(losses)))
            if pipe.disk:
                pipe.disk.drain()
            return (pipe.disk.bytes_written, pipe.disk.bytes_read) if pipe.disk else (0, 0)

        before, start = steps(1), time.perf_counter()
        after = steps(told["steps"])
        seconds = (time.perf_counter() - start) / told["steps"]
        written, read = ((now - then) / told["steps"] for now, then in zip(after, before, strict=True))
        peak = resident.most()
        if group:
            set_limit(group, -1)  # a pipeline that is closed brings back all parameters
    moved = {"bytes_written": written, "bytes_read": read}
    return {"seconds": seconds, "peak_bytes": peak, "losses": losses} | moved


def try_disk(path: Path, num_bytes: int) -> dict[str, Any]:
    """Bytes a second of the tier disk, the second of two passes: the first makes the file."""
    with closing(Disk(DiskOptions(path=path))) as disk:
        frames = {"num_frames": -(-num_bytes // FRAME_BYTES), "frame_bytes": FRAME_BYTES}
        _, (written, read) = timed(disk, **frames), timed(disk, **frames)
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


def _trim() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # glibc's


# Memory cgroups.


@contextlib.contextmanager
def memory_group() -> Iterator[Path]:
    """Make a group below the one of this process; it is gone after the block, when its processes ended."""
    groups = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    below = next((path for _, names, path in groups if "memory" in names.split(",")), "")
    path = Path("/sys/fs/cgroup/memory", below.lstrip("/"), f"penstock_{secrets.token_hex(8)}")
    try:
        path.mkdir()
    except OSError as error:
        raise ConfigError(
            f"a limit needs a memory cgroup (version 1), and {path.parent} takes none ({reason(error)}); run "
            "as whoever may make one, or take --limits none"
        ) from error
    try:
        yield path
    finally:
        for _ in range(250):  # the system needs a moment for whom it killed
            with contextlib.suppress(OSError):
                path.rmdir()
                break
            time.sleep(0.02)


def held_bytes(group: Path) -> int:
    """Bytes that cannot be given up for others: without pages of files that nobody has mapped."""
    stat = dict(map(str.split, (group / "memory.stat").read_text().splitlines()))
    usage = int((group / "memory.usage_in_bytes").read_text())
    return usage - int(stat["cache"]) + int(stat["mapped_file"])


def set_limit(group: Path, num_bytes: int) -> None:
    """Hold a group below ``num_bytes``, swap included where it is counted; -1: no limit."""
    names = ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]
    for name in names if num_bytes >= 0 else reversed(names):
        with contextlib.suppress(*([OSError] if "memsw" in name else [])):
            (group / name).write_text(str(num_bytes))


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run_folder = RunFolder(path=Path(sys.argv[2]))
        group = Path(sys.argv[3]) if sys.argv[3:] else None
        save_json(run_folder.path / "measured.json", train(run_folder, group))
    else:
        harness.main(options(), bench)
