"""What runs in processes of their own for ``penstock bench checkpoint``.

``python -m`` this file takes turns on every rank; with ``start`` in front it trains until it is ended."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

from omegaconf import OmegaConf

from ...compression.errors import TransportError
from ...conf.schema import CheckpointConfig, TrainConfig
from ...pipeline.ranks.launch import init, run_rank
from ...pipeline.run import build, console
from ...pipeline.run.checkpoints import Checkpoints
from ...pipeline.run.decide import prepare
from ...pipeline.run.run_folder import RunFolder
from ...pipeline.run.run_length import training_batches
from ...pipeline.run.train import assemble, train
from ...stages.files import save_json
from ...stages.planner.plan import Plan
from .harness import alternate

SIDES = WITHOUT, WITH = "without", "with"
MEASURED = "measured.json"
NUM_BATCHES = 4
"""Batches kept in memory and used in turn."""

_LIMIT_SECONDS = 600.0


def take_turns(told: RunFolder, folder: RunFolder, repeats: int) -> None:
    """Run as one rank: ``every`` steps without a checkpoint, as many with one, in turn; rank 0 notes seconds
    of a step, by the clock and by the processors of all ranks.

    The checkpoint begins behind the first step of a run, which ends when it is whole: all it costs is
    counted, and none of it falls into the other side's run."""
    config, plan = told.read_config(), Plan.load(told.plan)
    init(deadline=config.deadline)
    samples = prepare(config)
    model = [build.model(config.model, describe=samples.describe, seed=config.seed)]
    pipe = assemble(config, plan, samples, model.pop())
    batches = cycle(list(islice(training_batches(config, samples, epoch=0), NUM_BATCHES)))
    every, none, held = config.checkpoint.every or 1, CheckpointConfig(), []

    def run(kept: Checkpoints) -> tuple[float, float]:
        pipe.world.barrier()
        began, busy, waited = time.perf_counter(), time.process_time(), 0.0
        for _ in range(every):
            report = pipe.step(*next(batches))
            called = time.perf_counter()
            kept.after(report)
            waited += time.perf_counter() - called
        kept.settle()
        pipe.world.barrier()
        held.append(waited)
        (busy,) = pipe.world.all_reduce([time.process_time() - busy])
        return (time.perf_counter() - began) / every, busy / every

    while not pipe.policy.settled or pipe.num_steps % every != every - 1:
        pipe.step(*next(batches))
    with (
        Checkpoints(pipe, folder.checkpoints, config.checkpoint, tell=console.warn) as kept,
        Checkpoints(pipe, folder.path / "none", none, tell=console.warn) as idle,
    ):
        kept.notes = lambda: {"config": dataclasses.asdict(config)}
        sides = {WITHOUT: lambda: run(idle), WITH: lambda: run(kept)}
        alternate(sides, 1)  # warms up, the disk too
        held.clear()
        taken = alternate(sides, repeats)
    if pipe.rank == 0:
        seconds, busy = ({side: [run[i] for run in taken[side]] for side in SIDES} for i in range(2))
        save_json(told.path / MEASURED, {"seconds": seconds, "busy": busy, "held": held[1::2]})
    pipe.close()


def start(config: TrainConfig, folder: Path) -> float:
    """Train in a new process until the first step is done; return the seconds since it was started.

    Raises: TransportError: it ended before, or takes minutes."""
    run = RunFolder(path=folder)
    run.path.mkdir(parents=True)
    OmegaConf.save(dataclasses.asdict(config), run.config)
    began = time.perf_counter()
    command = [sys.executable, "-m", __name__, "start", str(run.path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while not (run.metrics.exists() and run.metrics.stat().st_size):
            if process.poll() is not None or time.perf_counter() - began > _LIMIT_SECONDS:
                raise TransportError("a run ended before its first step; look at its output above")
            time.sleep(0.005)
        return time.perf_counter() - began
    finally:
        process.terminate()  # its ranks end with it
        process.wait()


def main(words: Sequence[str]) -> None:
    """Do what ``words`` say."""
    if words[0] == "start":
        folder = RunFolder(path=Path(words[1]))
        with folder.claim():
            train(folder.read_config(), folder)
        return
    told, folder = (RunFolder(path=Path(path)) for path in words[:2])
    run_rank(lambda: take_turns(told, folder, int(words[2])), told.errors)


if __name__ == "__main__":
    main(sys.argv[1:])
