"""One rank of a run: its pipeline, step after step, and what it leaves in the run folder."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

from ...conf.schema import TrainConfig
from ...stages.files import save_json
from ...stages.planner.plan import Plan
from ..pipeline import Pipeline
from ..ranks.launch import cores
from ..samples.samples import Samples
from ..samples.storage import check_shared
from . import console
from .asked import Asked
from .checkpoints import Checkpoints
from .course import course, loader
from .decide import model_name
from .epochs import run_epochs
from .loggers import Loggers
from .metrics import Metrics, summarise
from .model_file import keeping, writer
from .resume import take_over
from .run_folder import RunFolder
from .run_length import count_steps
from .shares_log import SharesLog
from .step_files import save_step
from .tier_rows import foretell


def train_rank(config: TrainConfig, plan: Plan, folder: RunFolder, samples: Samples, pipe: Pipeline) -> None:
    """Train this rank's stages; rank 0 also tells and writes what happens."""
    num_steps, first = count_steps(config, samples), pipe.rank == 0
    mark = folder.mark() if first else None
    with console.Training(num_steps, shown=first) as progress:
        path, tell = folder.metrics if first else None, progress.note
        names, options = config.loggers if first else (), dataclasses.asdict(config)
        notes, resumed = take_over(pipe, config.resume, folder.metrics, progress)
        if pipe.world.size > 1:
            gather = functools.partial(pipe.world.all_gather_json, at="the storage of its samples")
            check_shared(config.data, rank=pipe.rank, gather=gather)
        ahead = course(config, samples, done=pipe.num_steps)
        loads = loader(config, samples, pipe, ahead, folder=folder.path, tell=tell)
        with (
            Metrics(path, num_stages=plan.num_stages, tell=tell, first=pipe.num_steps) as metrics,
            Loggers(names, folder.path, first=pipe.num_steps, options=options, tell=tell) as loggers,
            Checkpoints(pipe, folder.checkpoints, config.checkpoint, tell=tell) as kept,
            Asked(pipe, kept.now) as asked,
            contextlib.closing(loads) as batches,
            SharesLog(pipe, folder.shares if first else None, tell=tell) as shares,
        ):
            metrics.totals.load(notes.get("totals"))
            kept.notes = lambda: {"config": options, "totals": vars(metrics.totals)}
            see = [metrics.add, progress.step, foretell(plan, tell), loggers.step, kept.after, asked.after]
            see.append(shares.after)
            more = {"see": see, "between": asked.between, "log": loggers.test, "note": tell}
            test = run_epochs(pipe, plan, config, ahead, batches, **more)
    pipe.drain()
    data = pipe.world.all_gather_json(batches.told, at="the end of its data")
    spans, flows = pipe.timeline(), pipe.flows()
    sizes = {key: pipe.state.expected[key].numel() for key in pipe.state.keys}
    writer(config.model, pipe)(pipe, folder.model, before=lambda: mark and folder.check(mark))
    if mark is None:
        return
    with keeping(folder.model):
        if spans:  # a run that goes on may have had no step left
            save_step(folder, spans, title=_title(config, plan, step=num_steps - 1))
        told = {"ranks": plan.num_ranks, "threads": config.threads, "cores": cores(), "codec": plan.codec}
        told |= {"turns": [dataclasses.asdict(turn) for turn in pipe.policy.turns], "flows": flows}
        told |= {"sizes": sizes, "test": test, "resumed_from": resumed, "data": data}
        save_json(folder.summary, summarise(metrics.totals, plan, **told))


def _title(config: TrainConfig, plan: Plan, *, step: int) -> str:
    predicted = " prediction=true" if plan.prediction else ""
    versions = f" weights={plan.weights}{predicted}" if plan.streams else ""
    job = f"schedule={plan.schedule}{versions} micro_batches={plan.micro_batches} stages={plan.num_stages}"
    return f"{model_name(config)}, step {step}: {job} ranks={plan.num_ranks}"
