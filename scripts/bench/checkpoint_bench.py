"""``penstock bench checkpoint``: what a checkpoint costs a step, its bytes, how soon a run goes on.

Runs with a checkpoint and without take turns on the same ranks, in one process each; so do starts."""

from __future__ import annotations

import dataclasses
import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...compression.codec import encode
from ...compression.errors import TransportError
from ...compression.names import show_codec
from ...conf.bench_checkpoint import BenchCheckpointConfig
from ...pipeline.ranks.launch import start_ranks
from ...pipeline.run import build
from ...pipeline.run.decide import decide, model_name, prepare
from ...pipeline.runtime.checkpoint import Checkpoint
from ...stages.units import show_bytes
from . import checkpoint_turns, picture
from .checkpoint_turns import MEASURED, WITH, WITHOUT, start
from .harness import Record, alternate, medians, spread, table
from .picture import Bars, colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FACTS = ("ranks", "batch_size", "micro_batches", "codec", "every", "repeats", "starts")
ANEW, RESUMED = "anew", "from the checkpoint"


def bench(config: BenchCheckpointConfig, record: Record) -> None:
    """Measure steps, bytes and starts, and show them.

    Raises: PenstockError: an option does not fit, or a rank failed.
    """
    job = config.job()
    samples = prepare(job)
    build.optimizer(job.optimizer)
    plan = decide(job, samples)
    job.stages = plan.num_stages
    facts = {"model": model_name(job), "optimizer": job.optimizer["_target_"], "cuts": list(plan.cuts)}
    record.begin(threads=job.threads, job=facts | {name: getattr(config, name) for name in FACTS})
    with record.folder.private() as told:
        told.tell(job, plan)
        words = [str(told.path), str(record.folder.path), str(config.repeats)]
        stages = plan.stages_of_rank
        start_ranks(checkpoint_turns.__name__, words, errors=told.errors, stages_of_rank=stages)
        if not (measured := told.path / MEASURED).exists():
            raise TransportError("the ranks ended without a result; look at their output above")
        steps = step_facts(**json.loads(measured.read_text()))
    record.keep(steps=steps)
    newest = record.folder.whole_checkpoints()[0]
    record.keep(bytes=byte_facts(newest, config.codecs))
    resumed = dataclasses.replace(job, resume=str(newest.absolute()))
    home = record.folder.path / "starts"
    sides = {ANEW: job, RESUMED: resumed}
    seconds = alternate({name: _starter(home, one) for name, one in sides.items()}, config.starts)
    record.keep(starts={"seconds": medians(seconds), "seconds_of_runs": seconds})
    for folder in (home, record.folder.checkpoints):
        shutil.rmtree(folder)
    record.say(*sentences(record.content))
    record.screen.print(table(rows(record.content["bytes"]), left=["part"]))


def _starter(home: Path, job: Any) -> Any:
    return lambda: start(job, home / str(len(list(home.glob("*")))))


def step_facts(
    seconds: Mapping[str, Sequence[float]], busy: Mapping[str, Sequence[float]], held: Sequence[float]
) -> dict[str, Any]:
    """What runs in turn tell of a step: its seconds on both sides, and the ratio of neighbours.

    Args: busy: seconds of all ranks' processors, which other programs do not lengthen so much.
          held: seconds in which a run did not step, but began or led on its checkpoint."""
    found: dict[str, Any] = {"held": statistics.median(held), "held_of_runs": list(held)}
    for name, taken in {"": seconds, "busy_": busy}.items():
        ratios = [ours / plain for ours, plain in zip(taken[WITH], taken[WITHOUT], strict=True)]
        found |= {f"{name}seconds": medians(taken), f"{name}seconds_of_runs": dict(taken)}
        found |= {f"{name}ratio": statistics.median(ratios), f"{name}ratio_of_pairs": ratios}
    return found


def byte_facts(folder: Path, codecs: Sequence[str]) -> dict[str, Any]:
    """How large a checkpoint is beside the tensors in it, and how large these were if a codec packed them.

    Returns: bytes of all ``files`` and of the ``raw`` tensors, the latter also by ``kind`` of tensor, each
             with what the ``codecs`` make of it."""
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


def rows(found: Mapping[str, Any]) -> list[dict[str, str]]:
    """One row for each kind of tensor and all together: bytes, and the ratio that each codec would reach."""
    made = []
    for kind, sums in found["kinds"].items():
        ratios = {show_codec(name): f"{sums['raw'] / packed:.2f}x" for name, packed in sums.items() if packed}
        made.append({"part": kind, "bytes": show_bytes(sums["raw"])} | {**ratios, "raw": "1"})
    return made


def sentences(results: Mapping[str, Any]) -> list[str]:
    """What was found, in words."""
    steps, size, starts = results["steps"], results["bytes"], results["starts"]
    seconds, runs = starts["seconds"], starts["seconds_of_runs"]
    took, most = steps["seconds"], steps["ratio_of_pairs"]
    return [
        f"a checkpoint every {results['job']['every']} steps: {steps['ratio']:.3f} times the step "
        f"({min(most):.3f}-{max(most):.3f}), {took[WITH]:.3f} s beside {took[WITHOUT]:.3f} s; of processors "
        f"{steps['busy_ratio']:.3f} times ({spread(steps['busy_ratio_of_pairs'])}); for each training stood "
        f"{1e3 * steps['held']:.0f} ms",
        f"{show_bytes(size['files'])} for {show_bytes(size['raw'])} of tensors "
        f"({size['files'] / size['raw']:.4f}x); what codecs would make of them:",
        *(
            f"to the first step {name}: {seconds[name]:.1f} s ({spread(runs[name])})"
            for name in (ANEW, RESUMED)
        ),
    ]


def figure(results: Mapping[str, Any]) -> Figure:
    """Steps without a checkpoint and with one, and starts anew and from one."""
    made, panels = picture.panels(2, size=(9.0, 4.0))
    job = results["job"]
    for axes, key, title in zip(panels, ("steps", "starts"), ("a step", "to the first step"), strict=True):
        found = results[key]
        sides = [
            Bars(label=side, colour=colour(number), heights=[height], runs=[found["seconds_of_runs"][side]])
            for number, (side, height) in enumerate(found["seconds"].items())
        ]
        picture.bars(axes, [""], sides, form="%.2f")
        picture.name(axes, title, y="seconds (median)")
    made.suptitle(f"{job['model']} on {job['ranks']} ranks, a checkpoint every {job['every']} steps")
    return made
