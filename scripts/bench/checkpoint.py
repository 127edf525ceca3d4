"""Cost of a checkpoint: its share of a step, its bytes, and how soon a run goes on from it.

Runs with a checkpoint and without take turns on the same ranks; so do starts, in processes of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import harness
from harness import Job, Options, Results, alternate, medians, ratio_of_pairs, say, spread
from omegaconf import OmegaConf

from penstock.compression.codec import encode
from penstock.compression.errors import TransportError
from penstock.compression.names import lossless
from penstock.conf.parts import CheckpointConfig
from penstock.conf.schema import TrainConfig
from penstock.pipeline.checkpoint import Checkpoint
from penstock.pipeline.distributed.launcher import init
from penstock.pipeline.distributed.processes import Stopped
from penstock.pipeline.run import console
from penstock.pipeline.run.checkpoints import Checkpoints
from penstock.pipeline.run.planning import decide, model_name
from penstock.pipeline.run.run_folder import RunFolder
from penstock.pipeline.run.train import assemble, train
from penstock.stages.units import show_bytes

WITHOUT, WITH = "without", "with"
ANEW, RESUMED = "anew", "from the checkpoint"
LIMIT_SECONDS = 600.0


def options() -> Any:
    """Return the parser of the command line."""
    made = harness.parser(
        __doc__, job="data=digits ranks=2 batch_size=128 micro_batches=8 codec=raw", repeats=5
    )
    count = harness.at_least(1)
    made.add_argument("--every", type=count, default=10, help="steps between checkpoints, and of one run")
    made.add_argument("--starts", type=count, default=3, help="pairs of starts, each until its first step")
    codecs = harness.list_of(harness.name_of(lossless()))
    meaning = "codecs that would pack the tensors of a checkpoint"
    made.add_argument("--codecs", type=codecs, default=["zero_value", "exponent", "byte_plane"], help=meaning)
    return made


def bench(asked: Options, path: Path) -> Results:
    """Measure steps, bytes and starts, and show them."""
    defaults = {"ranks": 2, "batch_size": 128, "micro_batches": 8, "codec": "raw"}
    config = harness.train_config(asked.job, defaults, {"checkpoint.every": asked.every})
    job = Job(config)
    plan = decide(config, job.samples)
    config.stages = plan.num_stages
    facts: dict[str, Any] = {name: getattr(config, name) for name in defaults} | {"cuts": list(plan.cuts)}
    facts |= {"model": model_name(config), "optimizer": config.optimizer["_target_"]}
    facts |= {name: getattr(asked, name) for name in ("every", "repeats", "starts")}
    results = Results(path, threads=config.threads, job=facts)
    with results.folder().private() as folder:
        ranks: dict[str, Any] = {"ranks": config.ranks}
        measured = harness.measure_on_ranks("checkpoint", folder, asked, config, {"plan": plan}, **ranks)
        results.keep(steps=step_facts(**measured))
        newest = folder.whole_checkpoints()[0]
        results.keep(bytes=byte_facts(newest, asked.codecs))
        home = folder.path / "starts"
        sides = {ANEW: config, RESUMED: dataclasses.replace(config, resume=str(newest.absolute()))}
        turns = {
            name: lambda one=one: start(one, home / str(len(list(home.glob("*")))))
            for name, one in sides.items()
        }
        seconds = alternate(turns, asked.starts)
    results.keep(starts={"seconds": medians(seconds), "seconds_of_runs": seconds})
    steps, size = results.content["steps"], results.content["bytes"]
    say(
        f"a checkpoint every {asked.every} steps: {steps['ratio']:.3f} times the step "
        f"({spread(steps['ratio_of_pairs'])}), of processors {steps['busy_ratio']:.3f} times "
        f"({spread(steps['busy_ratio_of_pairs'])}); each held training up for {1e3 * steps['held']:.0f} ms",
        f"{show_bytes(size['files'])} for {show_bytes(size['raw'])} of tensors",
        *(
            f"to the first step {name}: {statistics.median(runs):.1f} s ({spread(runs)})"
            for name, runs in seconds.items()
        ),
    )
    rows = [{"part": kind, **sums} for kind, sums in size["kinds"].items()]
    columns: dict[str, Any] = {"part": "{part}", "bytes": lambda row: show_bytes(row["raw"])}
    columns |= {name: lambda row, name=name: f"{row['raw'] / row[name]:.2f}x" for name in asked.codecs}
    harness.show(rows, columns)
    return results


def step_facts(
    seconds: Mapping[str, Sequence[float]], busy: Mapping[str, Sequence[float]], held: Sequence[float]
) -> dict[str, Any]:
    """Seconds of a step on both sides, and ratios of neighbours.

    Args:
        busy: Seconds of all ranks' processors, which other programs do not lengthen as much.
        held: Seconds in which a run did not step, but began or continued its checkpoint.
    """
    facts: dict[str, Any] = {"held": statistics.median(held), "held_of_runs": list(held)}
    for prefix, taken in {"": seconds, "busy_": busy}.items():
        facts |= {f"{prefix}seconds": medians(taken), f"{prefix}seconds_of_runs": dict(taken)}
        facts |= ratio_of_pairs(taken[WITH], taken[WITHOUT], f"{prefix}ratio")
    return facts


def byte_facts(folder: Path, codecs: Sequence[str]) -> dict[str, Any]:
    """Bytes of all files of a checkpoint, of its tensors by kind, and of these packed by each codec."""
    kinds: dict[str, dict[str, int]] = {}
    for part in Checkpoint(folder).parts():
        for name in sorted(part.names):
            group, _, rest = name.partition("/")
            kind = group if group == "model" else rest.rpartition("/")[2]
            tensor, sums = part.read(name), kinds.setdefault(kind, dict.fromkeys(("raw", *codecs), 0))
            sums["raw"] += tensor.nbytes
            for codec in codecs:
                sums[codec] += encode(tensor, codec=codec).nbytes
    total = {name: sum(sums[name] for sums in kinds.values()) for name in ("raw", *codecs)}
    files = sum(path.stat().st_size for path in folder.iterdir())
    return {"files": files, "raw": total["raw"], "kinds": kinds | {"all": total}}


def take_turns(folder: RunFolder, asked: Options) -> dict[str, Any]:
    """Run as one rank: so many steps without a checkpoint, as many with one, in turn.

    The checkpoint begins after the first step of a run, which ends when it is whole: all of its cost counts,
    and none of it in the other side's run."""
    config, plan = folder.read_config(), harness.load_plans(folder)["plan"]
    init(deadline=config.deadline)
    job = Job(config)
    model = [job.model()]
    pipe = assemble(config, plan, job.samples, model.pop())
    batches, held = cycle(job.batches()), list[float]()

    def run(kept: Checkpoints) -> tuple[float, float]:
        pipe.world.barrier()
        begin, busy, waited = time.perf_counter(), time.process_time(), 0.0
        for _ in range(asked.every):
            report = pipe.step(*next(batches))
            called = time.perf_counter()
            kept.after(report)
            waited += time.perf_counter() - called
        kept.settle()
        pipe.world.barrier()
        held.append(waited)
        (busy,) = pipe.world.all_reduce([time.process_time() - busy])
        return (time.perf_counter() - begin) / asked.every, busy / asked.every

    while not pipe.policy.settled or pipe.num_steps % asked.every != asked.every - 1:
        pipe.step(*next(batches))
    none, home = CheckpointConfig(), folder.path / "none"
    with (
        Checkpoints(pipe, folder.checkpoints, config.checkpoint, tell=console.warn) as kept,
        Checkpoints(pipe, home, none, tell=console.warn) as idle,
    ):
        kept.notes = lambda: {"config": dataclasses.asdict(config)}
        sides = {WITHOUT: lambda: run(idle), WITH: lambda: run(kept)}
        alternate(sides, 1)  # warms up, the disk too
        held.clear()
        taken = alternate(sides, asked.repeats)
    seconds, busy = ({side: [one[i] for one in runs] for side, runs in taken.items()} for i in range(2))
    pipe.close()
    return {"seconds": seconds, "busy": busy, "held": held[1::2]}


def start(config: TrainConfig, home: Path) -> float:
    """Train in a new process until the first step is done; return the seconds since its start."""
    path = home / str(len(list(home.glob("*"))))
    folder = RunFolder(path=path)
    path.mkdir(parents=True)
    OmegaConf.save(dataclasses.asdict(config), folder.config)
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, __file__, "start", str(path)], stdout=subprocess.DEVNULL)
    try:
        while not (folder.metrics.exists() and folder.metrics.stat().st_size):
            if process.poll() is not None or time.perf_counter() - begin > LIMIT_SECONDS:
                raise TransportError("a run ended before its first step; look at its output above")
            time.sleep(0.005)
        return time.perf_counter() - begin
    finally:
        process.terminate()  # its ranks end with it
        process.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["start"]:
        home = RunFolder(path=Path(sys.argv[2]))
        with contextlib.suppress(Stopped), home.claim():
            train(home.read_config(), home)
        os._exit(0)
    harness.main(options(), bench, rank=take_turns)
