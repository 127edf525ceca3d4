"""What a process of ``penstock bench offload`` does: it trains, trains in turn, or tries the disk.

A task takes the folder of the run, what it was told and its memory group, and returns what it found."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...conf.schema import TrainConfig
from ...pipeline.pipeline import Pipeline
from ...pipeline.planner.partition import partition
from ...pipeline.run import build
from ...pipeline.run.decide import prepare
from ...pipeline.run.epochs import loss
from ...pipeline.run.run_folder import RunFolder
from ...pipeline.run.run_length import training_batches
from ...pipeline.runtime.process_memory import ResidentMemory
from ...stages.memory.disk import Disk
from ...stages.memory.disk_rate import timed
from ...stages.memory.options import MemoryOptions
from ...stages.memory.room import DiskOptions
from ...stages.planner.measure import measure
from ...stages.planner.plan import Plan
from ...stages.tracing.graph import trace
from .harness import alternate
from .memory_group import MemoryGroup
from .offload_start import STEPS

NUM_BATCHES = 4
"""Batches kept in memory and used in turn."""
FRAME_BYTES = 8 << 20
"""Of a frame by which the disk is tried, as large as a feature map."""


def train(folder: Path, told: Mapping[str, Any], group: MemoryGroup | None) -> dict[str, Any]:
    """Train for ``warmup`` steps and then ``steps`` more, within ``limit`` bytes above the start if given.

    Returns: ``seconds`` of a step, what was still to be written at the end included; ``peak_bytes``: the most
             resident memory above that of the process before it had the model; ``bytes_written`` and
             ``bytes_read`` of a step by the tier disk, and ``losses``, every bit of them.
             Where the limit does not even hold the model: ``killed``."""
    batches, pipeline = _prepared(RunFolder(path=folder), told["path"])
    _warm_up(told["path"])
    _trim()
    resident, base = ResidentMemory(model_bytes=0), group.held_bytes() if group else 0
    with pipeline(told["contestant"], told["options"]) as pipe:
        _trim()
        if group:
            try:
                group.limit(base + told["limit"])
            except MemoryError:
                return {"killed": True, "steps": 0}
        resident.begin()
        losses, done = [], folder / STEPS

        def steps(number: int) -> None:
            for _ in range(number):
                losses.append(pipe.step(*next(batches)).loss.hex())
                done.write_text(str(len(losses)))
            if pipe.disk:
                pipe.disk.drain()

        steps(told["warmup"])
        before, began = _moved(pipe), time.perf_counter()
        steps(told["steps"])
        seconds = (time.perf_counter() - began) / told["steps"]
        written, read = ((now - then) / told["steps"] for now, then in zip(_moved(pipe), before, strict=True))
        peak = resident.most()
        if group:
            group.lift()  # a pipeline that is closed brings back all parameters
        return {
            "seconds": seconds,
            "peak_bytes": peak,
            "bytes_written": written,
            "bytes_read": read,
            "direct": pipe.disk.direct if pipe.disk else None,
            "losses": losses,
        }


def train_in_turn(folder: Path, told: Mapping[str, Any], group: MemoryGroup | None) -> dict[str, Any]:
    """Train everything kept and as ``contestant`` says, run by run in turn, in this one process.

    Returns: for each side the ``seconds`` of a step in every run; of the contestant the bytes that a step
             ``saved`` in its tier and those it ``kept`` there; ``same_bits`` of the losses."""
    batches, pipeline = _prepared(RunFolder(path=folder), told["path"])
    first = list(islice(batches, NUM_BATCHES))
    with pipeline("kept", {}) as kept, pipeline(told["contestant"], told["options"]) as moved:
        pipes, losses = {"kept": kept, told["contestant"]: moved}, {}
        saved: list[tuple[int, int]] = []

        def side(name: str, pipe: Pipeline) -> Callable[[], float]:
            own, heard = cycle(first), losses.setdefault(name, [])

            def run() -> float:
                began = time.perf_counter()
                for _ in range(told["steps"]):
                    report = pipe.step(*next(own))
                    heard.append(report.loss.hex())
                    saved.extend((one.saved_raw, one.saved_kept) for one in report.stages if pipe is moved)
                return (time.perf_counter() - began) / told["steps"]

            return run

        sides = {name: side(name, pipe) for name, pipe in pipes.items()}
        for _ in range(told["warmup"]):
            alternate(sides, 1)
        saved.clear()
        seconds = alternate(sides, told["repeats"])
        raw, packed = (sum(numbers) / len(saved) for numbers in zip(*saved, strict=True))
        same = losses["kept"] == losses[told["contestant"]]
        return {"seconds": seconds, "saved": raw, "kept": packed, "same_bits": same}


def try_disk(folder: Path, told: Mapping[str, Any], group: MemoryGroup | None) -> dict[str, Any]:
    """Write so many ``bytes`` through the class of the tier and read them, twice; the first makes the file.

    Returns: bytes a second, ``written`` and ``read``, and whether that was ``direct``."""
    disk, number = Disk(DiskOptions(path=told["path"])), -(-told["bytes"] // FRAME_BYTES)
    try:
        timed(disk, num_frames=number, frame_bytes=FRAME_BYTES)
        written, read = timed(disk, num_frames=number, frame_bytes=FRAME_BYTES)
        return {"written": written, "read": read, "direct": disk.direct}
    finally:
        disk.close()


TASKS: dict[str, Callable[[Path, Mapping[str, Any], MemoryGroup | None], dict[str, Any]]] = {
    "train": train,
    "train_in_turn": train_in_turn,
    "try_disk": try_disk,
}


def _prepared(
    folder: RunFolder, path: str
) -> tuple[Iterator[Any], Callable[[str, Mapping[str, Mapping[str, Any]]], closing[Pipeline]]]:
    """The batches of the job, and what makes its pipeline as a contestant has it planned."""
    config: TrainConfig = folder.read_config()
    samples = prepare(config)
    batches = list(islice(training_batches(config, samples, epoch=0), NUM_BATCHES))

    def pipeline(contestant: str, options: Mapping[str, Mapping[str, Any]]) -> closing[Pipeline]:
        model = [build.model(config.model, describe=samples.describe, seed=config.seed)]
        return closing(
            Pipeline(
                model.pop(),
                Plan.load(folder.plans / f"{contestant}.json"),
                loss=loss,
                optimizer=build.optimizer(config.optimizer),
                seed=config.seed,
                disk=DiskOptions(path=path),
                memory=MemoryOptions(**options.get("memory", {})),
            )
        )

    return cycle(batches), pipeline


def _warm_up(path: str) -> None:
    """Train a small thing in a tier, so that what is imported and compiled for that counts to the start."""
    model, example = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 8)), torch.ones(64, 64)
    graph = trace(model, (example,))
    tiers: Any = {"tier": "disk", "parameters_tier": "disk"}
    plan = partition(measure(graph, (example,)), stages=1, ranks=1, micro_batches=1, **tiers)
    made = {"optimizer": lambda named: torch.optim.SGD(named, lr=0.1), "disk": DiskOptions(path=path)}
    with closing(Pipeline(model, plan, loss=loss, **made)) as pipe:
        pipe.step(example, torch.zeros(64, dtype=torch.int64))


def _moved(pipe: Pipeline) -> tuple[int, int]:
    return (pipe.disk.bytes_written, pipe.disk.bytes_read) if pipe.disk else (0, 0)


def _trim() -> None:
    """Give back what tracing left."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
