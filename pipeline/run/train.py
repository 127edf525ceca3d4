"""READ FIRST: how a run goes, from the options to the trained model.

``train`` runs in the process that was started: it refuses what cannot work, makes the plan, starts the ranks.
Where there are several, each of them starts at ``join``; ``train_rank`` runs once in every one:

    train:       options -> samples -> model -> trace -> measure -> partition -> Plan -> Pipeline, to try it
    follow:      every rank but 0 of those that torchrun started (``torchrun.py``): options -> Plan of rank 0
    join:        options, Plan -> samples -> model -> Pipeline
    train_rank:  Pipeline -> step after step -> the run folder

``planning.py`` and ``training_loop.py`` read the configuration with it; below them functions take values."""

import contextlib
import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...compression.errors import PenstockError, PlanError, ScheduleError
from ...conf.schema import AGAIN, MEASURED, TrainConfig
from ...stages.device import grad_scaler
from ...stages.memory.disk import DiskOptions
from ...stages.plan.plan import Plan
from ...stages.safetensors_io import check_storable
from ...stages.seeds import TURN
from ..data.samples import Samples
from ..distributed.failure import Lost, leave
from ..distributed.launcher import init, run_rank, start_ranks
from ..distributed.process_group import World, thread_of
from ..distributed.threads import start_threads
from ..pipeline import Pipeline
from ..schedules.replicated import without
from . import build, console, counts, digests, early, torchrun
from .bounded import first_values, is_without_memory, make_model, return_freed_memory, write_first_values
from .determinism import place
from .logs import JsonLog
from .planning import Recorded, check_batches, count_updates, decide, prepare, record
from .resume import Source, resolve
from .run_folder import RunFolder, step_of
from .training_loop import NOT_FINITE, check_samples, train_rank


def train(
    config: TrainConfig, folder: RunFolder, typed: Sequence[str] = (), *, launched: bool = False
) -> int:
    """Train as ``config`` says and leave everything in ``folder``; print what a person sees.

    Args:   folder: claimed for this run.
            typed: the options as typed, so that one that contradicts ``plan=`` is refused and not ignored.
            launched: the ranks are there already, and this is the first of them.
    Returns: the exit code: 0, or 3 where the loss was no number and ``nan=stop``.
    Raises: PenstockError: something that was asked for cannot be had, or a rank failed.
    """
    given = early.check(config, typed)
    return_freed_memory(config)
    build.check_targets(config)
    world = torchrun.meet(config) if launched and config.ranks > 1 else None
    with torchrun.planning(world):
        threads = config.threads
        samples = prepare(config)
        for note in samples.notes:
            console.warn(note)
        check_samples(config, samples)
        build.scheduler(config.scheduler, num_steps=count_updates(config, samples))
        source, stages = resolve(config, folder, console.warn, threads=threads), config.stages
        if chosen := counts.choose(config, samples):
            console.warn(chosen)
        # Among ranks that torchrun started, every one makes the model: some may be on other machines.
        recorded = write_first_values(config, samples, folder) if world is None else None
        with console.planning():
            plan, pipe = build_run(config, samples, folder, given=given, source=source, recorded=recorded)
        del recorded
        folder.begin(console.warn, resumes=source is not None and source.own)
        folder.save(config, plan)
    console.begin(plan, folder.path)

    def start(config: TrainConfig, plan: Plan) -> None:
        with _traced(config), folder.private() as told:  # what the ranks read; the run folder has a record
            told.tell(config, plan)
            ranks: Any = {"errors": told.errors, "stages_of_rank": plan.stages_of_rank}
            if config.replicas.threads:
                ranks["deadline"] = config.deadline
                return start_threads(lambda world: join(copy.deepcopy(config), plan, folder, world), **ranks)
            start_ranks(__name__, [str(told.path), str(folder.path)], **ranks)

    def replan(config: TrainConfig) -> Plan:
        config.stages = stages
        plan, _ = build_run(config, samples, folder)
        folder.save(config, plan)
        return plan

    if plan.num_ranks == 1 and not config.max_restarts:  # the pipeline is there with one rank
        with _traced(config, folder.errors):
            train_rank(config, plan, folder, samples, pipe)  # pyright: ignore[reportArgumentType]
    elif world:
        del pipe  # this rank needs the memory
        torchrun.publish(world, config, plan, folder)
        plan = dataclasses.replace(plan, graph=None)  # all ranks trace the same made-up inputs
        join_world(config, plan, folder, world)
    else:
        if pipe:
            pipe.close(keeps_model=False)
        del pipe  # the ranks need the memory
        if place(config).is_gpu:
            torch.accelerator.empty_cache()  # this process keeps it otherwise
        persist(config, plan, folder, start, replan=replan)
    summary = folder.read_summary()
    console.close(summary, files=[folder.plan_picture, folder.timeline, folder.trace])
    return NOT_FINITE if summary["ended_early"] and summary["loss"] is None and config.nan == "stop" else 0


def build_run(
    config: TrainConfig,
    samples: Samples,
    folder: RunFolder,
    *,
    given: Plan | None = None,
    source: Source | None = None,
    recorded: Recorded | None = None,
) -> tuple[Plan, Pipeline | None]:
    """Return the plan, unless it is ``given`` or that of ``source`` made anew, and the whole pipeline by it.

    The pipeline refuses now what a rank would; None where no process is to have it whole.

    Args:   recorded: the model and its trace, where they were made already."""
    model = recorded.model if recorded else make_model(config, samples, folder)
    plan = given or (source and source.plan(config))
    if plan is None:
        autocast = build.autocast(config.autocast)
        recorded = recorded or record(config, samples, model=model, autocast=autocast)
        plan = decide(config, recorded.measure(packs=config.has_links))
    if source:
        source.compare(config, plan, console.warn)
    config.stages = plan.num_stages
    check_batches(config, plan, samples)
    if config.digest.every:
        digests.check_plan(plan)
    if is_without_memory(config, folder) and plan.num_ranks > 1:
        return plan, None
    try:
        pipe = assemble(config, plan, samples, model, folder, World())
        check_storable(pipe.state.expected)
        return plan, pipe
    except (PlanError, ScheduleError) as error:
        files = {"plan": config.plan, "program": config.program}
        options = [f"{name}={value}: " for name, value in files.items() if value]
        raise type(error)("".join(options[:1]) + str(error)) from error


def assemble(
    config: TrainConfig,
    plan: Plan,
    samples: Samples,
    model: nn.Module,
    folder: RunFolder,
    world: World | None,
) -> Pipeline:
    """Return the pipeline of this process: in a group of ranks its own stages, else all of them.

    Args:   folder: where the tier disk has its file unless ``memory.path=`` says otherwise.
            world: the ranks, where they are not those of the default process group."""
    memory = config.memory
    # Other machines may lack the folder.
    path = memory.path or (folder.path if folder.path.is_dir() else None)
    return Pipeline(
        model,
        plan,
        loss=build.loss(config.loss),
        optimizer=build.optimizer(config.optimizer),
        scheduler=build.scheduler(config.scheduler, num_steps=count_updates(config, samples)),
        clip=config.clip.norm,
        clip_scope=config.clip.scope,
        scaler=grad_scaler(place(config).torch) if config.loss_scale == "dynamic" else config.loss_scale,
        autocast=build.autocast(config.autocast),
        seed=config.seed,
        deadline=config.deadline,
        world=world,
        device=place(config, rank=world and world.rank),
        detect_anomaly=config.detect_anomaly,
        memory=build.memory(memory),
        disk=DiskOptions(path=path, budget=memory.disk),
        shares=MEASURED if config.replicas.shares == MEASURED else None,
        **build.sources(config.model, first_values(folder)),
    )


def join_world(config: TrainConfig, plan: Plan, folder: RunFolder, world: World) -> None:
    """Train as one of the ranks that torchrun started, who have met."""
    with _traced(config, folder.errors):
        join(config, plan, folder, world)


def join(config: TrainConfig, plan: Plan, folder: RunFolder, world: World | None = None) -> None:
    """Train as one rank among others; without ``world`` they have yet to meet."""
    world = world or init(deadline=config.deadline)
    return_freed_memory(config)
    with TURN:  # where ranks are threads: what a person's code draws here is its own
        samples = prepare(config)
        # No other reference to the model is kept: the pipeline drops the layers of other ranks.
        model = [make_model(config, samples, folder)]
    own = None if thread_of(world.group) is None else world  # a process knows its own, and leaves it
    pipe = assemble(config, plan, samples, model.pop(), folder, own)
    if config.replicas.check == "digest":
        pipe.replicas.every = 1
    with contextlib.ExitStack() as ends:
        if own:
            ends.callback(pipe.close, keeps_model=False)
        train_rank(config, plan, folder, samples, pipe)


def persist(
    config: TrainConfig,
    plan: Plan,
    folder: RunFolder,
    start: Callable[[TrainConfig, Plan], None],
    *,
    replan: Callable[[TrainConfig], Plan],
) -> None:
    """Run the ranks by ``start``, and where some are lost, again: ``config.max_restarts`` times at most, and
    as often as a lost replica may be done without.

    Args:   config: ``resume``, ``ranks`` and ``replicas`` become those of the last start.
            replan: makes the plan for other ranks, and keeps it in ``folder``.
    """
    before, lost_before, restart = config.resume, None, 0
    while True:
        steps = _num_steps(folder)
        try:
            return start(config, plan)
        except Lost as lost:
            if config.replicas.shrink and (fewer := without(plan, lost.rank)):
                plan = fewer
                config.ranks, config.stages = plan.num_ranks, plan.num_stages
                config.device = _devices_without(lost.rank, config.device)
                config.replicas.count = list(plan.replicas)
                if isinstance(config.replicas.shares, list):
                    config.replicas.shares = [share for own in plan.shares for share in own]
                folder.save(config, plan)
                where = _go_back(config, folder, before)
                console.warn(f"{lost}; {where}, without it: replicas.count={config.replicas.count}")
                continue
            restart += 1
            if restart > config.max_restarts:
                raise
            at_once = lost.rank == lost_before is not None and _num_steps(folder) <= steps + 1
            lost_before = lost.rank
            where = _go_back(config, folder, before)
            sentence = f"{lost}; restart {restart} of {config.max_restarts} {where}"
            if at_once and config.ranks > (config.min_ranks or config.ranks):
                devices, config.ranks = config.device, config.ranks - 1
                config.device = _devices_without(lost.rank, devices)
                try:
                    plan = replan(config)
                    sentence += f", with ranks={config.ranks}"
                except PenstockError as error:
                    config.ranks, config.device = config.ranks + 1, devices
                    sentence += f", with all ranks ({error})"
            console.warn(sentence)


def _devices_without(rank: int | None, devices: Any) -> Any:
    """Return the devices of the other ranks, where each has its own."""
    return [one for n, one in enumerate(devices) if n != rank] if isinstance(devices, list) else devices


def _go_back(config: TrainConfig, folder: RunFolder, before: str | None) -> str:
    """Let the run go on from its last checkpoint, or begin as it did ``before``; return which, as a text."""
    config.resume = AGAIN
    step = 0
    if resolve(config, folder, console.warn, threads=config.threads):
        step = step_of(folder.whole_checkpoints()[0])
        where = f"goes on behind step {step}"
    else:
        config.resume = before
        where = f"begins as the run did, with {before}" if before else "begins anew: there is no checkpoint"
    with JsonLog(folder.metrics, tell=console.warn, first=step):  # cut off what is done again
        return where


def _num_steps(folder: RunFolder) -> int:
    return folder.metrics.read_bytes().count(b"\n") if folder.metrics.exists() else 0


@contextlib.contextmanager
def _traced(config: TrainConfig, errors: Path | None = None) -> Iterator[None]:
    """Write the traceback of an error inside into the folder ``errors``; None: ranks did, and the notes of
    the error have it. With ``traceback=true`` print it."""
    try:
        yield
    except PenstockError as error:
        trace = getattr(error, "__notes__", [])
        if errors:
            left = leave(errors, error)
            trace = left.trace
            if not left.consequence:
                error.args = (left.sentence,)
        if config.traceback:
            print(*trace, sep="\n", file=sys.stderr)
        raise


if __name__ == "__main__":
    told, run_folder = (RunFolder(path=Path(path)) for path in sys.argv[1:])
    run_rank(lambda: join(told.read_config(), Plan.load(told.plan), run_folder), told.errors)
