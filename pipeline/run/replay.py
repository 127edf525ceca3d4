"""Steps of a run once more, in one process and on any cut, held to the digests that the run recorded.

A synchronous step follows from the checkpoint before it, the options and the data, so a machine that
computes right gets the same bits. ``replayed`` goes from the newest checkpoint at or before a step, or from
the initial weights, to that step; ``audited`` does so for steps drawn at random, each on another cut."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import random
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from ...compression.codec import LOSSY_CODECS
from ...compression.errors import ConfigError
from ...compression.names import AUTO
from ...conf.schema import TrainConfig
from ...stages.files import refusing
from ...stages.plan.plan import Plan
from ...stages.safetensors_io import write_tensors
from ..checkpoint import Checkpoint, load
from ..data.samples import Samples
from . import console, early
from .checkpoints import find, first_whole
from .digests import Difference, digests_of, first_of, record_digests, recorded, states_of
from .layer_tensors import (
    OF_MICRO_BATCH,
    LayerTensor,
    LayerTensors,
    copied,
    draw_histograms,
    in_order,
    numbers_of,
    stop_before,
)
from .metrics import read_lines
from .planning import prepare, set_up
from .resume import ASKED, flat, kind_of, resolve
from .run_folder import RunFolder, step_of
from .tables import table
from .train import build_run
from .training_loop import course, loader

if TYPE_CHECKING:
    from ..pipeline import Pipeline

ANEW = (
    "ranks", "stages", "cuts", "schedule", "program", "plan", "weights_first", "recompute", "extra_in_flight",
    "link", "cluster", "memory", "codec", "replicas", "checkpoint", "digest", "audit", "eval", "logger",
    "cache", "max_restarts", "min_ranks", "nan", "versions", "settings",
)  # fmt: skip
"""Options of a run that its replay does not take over: how it was cut and watched."""
OF_THE_CUT = ("stages", "cuts", "schedule", "extra_in_flight", "codec", "checkpoint", "eval")
"""Those that it does take over where bits depend on the cut, which is then that of the run."""
SCHEDULES = ("gpipe", "1f1b", "zb_h1")
TIERS = ("device", "packed", "host")
MORE_STEPS = 4  # that are compared after the first that differs

Line = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A start of a run: its first step, its options as stored and read, and its plan."""

    step: int
    stored: str | None
    config: TrainConfig
    plan: Plan

    @property
    def depends_on_cut(self) -> bool:
        """True if bits depend on how the model is cut, and into what schedule."""
        clips = self.config.clip.norm is not None and self.config.clip.scope == "stage"
        codecs = {self.plan.codec, *self.plan.named_codecs.values()}
        return self.config.streams or clips or not codecs.isdisjoint(LOSSY_CODECS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedStep:
    """A step once more: its number and line of digests, the one that the run has on record (without values if
    only the loss is), the first difference of both, the pipeline after it, and copies of what layers
    returned, if they were asked for."""

    step: int
    line: Line
    on_record: Line
    difference: Difference | None
    pipe: Pipeline
    tensors: LayerTensors | None = None


def replay(
    run: str | Path, step: int, *, show: str = "", options: Sequence[str] = ()
) -> Iterator[LayerTensor]:
    """Repeat a step of a run in this process and yield what its layers returned, with the gradients.

        for one in penstock.replay("runs/one", step=137, show="layer3"):
            print(one.layer, one.micro_batch, one.output.std(), one.gradient.abs().max())

    A warning says where the step differs from the digests on record. Threads and determinism of torch are
    then those of the run.

    Args:
        run: Folder of a run of ``penstock train``.
        step: Number of the step, from 0.
        show: Layer or module whose tensors are copied; "" copies those of all layers.
        options: KEY=VALUE as for ``penstock train``, such as ``stages=2``, in the place of the run's own.

    Yields:
        A tensor with its gradient, by layer as they run, then by micro-batch.

    Raises:
        ConfigError: The run has no such step or layer, or is not one that can be repeated."""
    if isinstance(options, str | Mapping) or not all("=" in str(one) for one in options):
        raise ConfigError(f"options is a list such as ['stages=2'], found {options!r}; write KEY=VALUE in it")
    tell, differs = functools.partial(warnings.warn, stacklevel=3), False
    for repeated in replayed(Path(run), step, options, tell=tell, show=show):
        if repeated.difference and not differs:
            tell(str(repeated.difference))
            differs = True
        if repeated.step == step:
            if not (found := _in_order(repeated)):
                raise ConfigError(f"show={show}: no layer has this name or lies in a module of it")
            yield from found


def replayed(
    run: Path, step: int, options: Sequence[str] = (), *, tell: Callable[[str], None],
    begin: int | None = None, oldest: int = 0, show: str | None = None, stop: str | None = None,
) -> Generator[RepeatedStep]:  # fmt: skip
    """Repeat the steps from the newest checkpoint at or before ``step`` to it; the pipeline is there until it
    ends.

    Args:    options: KEY=VALUE as for ``penstock train``, in the place of the run's own.
             begin: begin at or before this step; None: the last one possible.
             oldest: refuse to begin before this step.
             show: the layer or module of whose tensors copies are taken.
             stop: the layer or module ahead of which ``step`` opens a debugger.
    Raises:  ConfigError: the run has no such step, or is not one that can be repeated."""
    folder = RunFolder(path=run)
    starts = _starts(folder, until=step)
    start = starts[-1]
    was, config = start.config, _options(folder, start, options, tell)
    steps = {line["step"]: {**line, "loss": _hex(line["loss"]), "values": {}} for line in _metrics(folder)}
    on_record = steps | (recorded(run) if folder.digests.is_file() else {})
    if step not in steps:
        has = f"steps {min(steps)} to {max(steps)}" if steps else "no step"
        raise ConfigError(f"{run} has {has} in {folder.metrics.name}, found step={step}")
    config.resume = _source(folder, config, step if begin is None else begin, tell)
    samples = prepare(config)
    for name, mine in folder.held_now(config).items():
        for key, there in getattr(was, name).items():
            if mine.get(key) != there:
                tell(f"bits may differ: {name}.{key}={mine.get(key)} was {there}")
    given = _on_one_rank(start.plan) if start.depends_on_cut else None
    with contextlib.ExitStack() as stack:
        private = stack.enter_context(folder.private())
        source = resolve(config, private, tell, threads=config.threads)
        begins = source.checkpoint.step if source else 0
        if begins < oldest:
            raise ConfigError(
                f"{run} has no checkpoint between oldest={oldest} and step {step}; keep more "
                "(checkpoint.keep=)"
            )
        _check_starts(run, starts, begins)
        with console.planning():
            plan, pipe = build_run(config, samples, private, given=given, source=source)
        assert pipe is not None, "one process has it whole"
        stack.callback(pipe.close)
        if source:
            load(pipe, source.checkpoint.folder)
            _check_checkpoint(pipe, on_record, source.checkpoint.folder)
        if pipe.steps.written_in_eval and begins < start.step:
            raise ConfigError(
                f"tests of {run} change bits, and may have been others before its start at {start.step}; "
                "keep more checkpoints (checkpoint.keep=)"
            )
        ahead = course(was, samples, done=pipe.num_steps)
        if not pipe.steps.written_in_eval:  # tests change nothing
            ahead = dataclasses.replace(ahead, tests=0)
        loads = stack.enter_context(
            contextlib.closing(loader(config, samples, pipe, ahead, folder=private.path, tell=tell))
        )
        lines: Any = []
        record = record_digests(pipe, lines, every=1, layers=was.digest.layers, tell=tell)
        drains = _drains(was, samples, done=pipe.num_steps) if plan.streams else ()
        same = pipe.num_steps - 1 if pipe.num_steps else None  # behind it stands the checkpoint
        tensors = None if show is None else LayerTensors(pipe.stages.values(), show)
        for index in ahead:
            set_up(config)  # another replay may be going on
            if index.split == "test":
                pipe.evaluate(loads.take(index)[0])
                continue
            now = pipe.num_steps
            if tensors is not None:
                tensors.found.clear()
            stopped = stop_before(pipe.stages.values(), stop) if stop and now == step else None
            if now in drains:
                pipe.drain()
            report = pipe.step(*loads.take(index))
            if plan.streams:
                lines.append({"step": now, "loss": _hex(report.loss), "values": {}})
            else:
                record(report)
            if stopped == []:
                raise ConfigError(f"break={stop}: no layer has this name or lies in a module of it")
            line = lines.pop()
            difference = first_of(on_record, {now: line}, same=same)
            known = on_record.get(now, {"values": {}})
            same = now if known["values"] and not difference else same
            yield RepeatedStep(
                step=now, line=line, on_record=known, difference=difference, pipe=pipe,
                tensors=tensors,
            )  # fmt: skip
            if now == step:
                return


def _starts(folder: RunFolder, *, until: int) -> list[Start]:
    """Return the starts of a run up to a step; of a run without a record the options and plan that it has."""
    try:
        lines = read_lines(folder.starts) if folder.starts.is_file() else []
        found = [
            Start(
                step=line["step"],
                stored=line["config"],
                config=folder.read_config(stored=line["config"]),
                plan=Plan.of_json(dict(line["plan"]), str(folder.starts)),
            )
            for line in lines
            if line["step"] <= until
        ]
        if found:
            return found
        if not folder.config.is_file():
            raise ConfigError(f"{folder.path} has no {folder.config.name}; name the folder of a run")
        return [Start(step=0, stored=None, config=folder.read_config(), plan=Plan.load(folder.plan))]
    except (OmegaConfBaseException, yaml.YAMLError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{folder.path} has damaged options: {reason}; take them from the run again"
        ) from error


def _check_starts(run: Path, starts: Sequence[Start], begins: int) -> None:
    """Refuse to repeat steps through a start at which options changed, or a stream was drained."""
    for before, after in zip([None, *starts], starts, strict=False):
        if after.step <= begins:
            continue
        changed = "no start before it is on record"
        if before is not None:
            pairs = (dict(flat(dataclasses.asdict(one.config))) for one in (before, after))
            there, here = pairs
            keys = [key for key in here if here[key] != there.get(key)]
            other = [k for k in keys if kind_of(k, after.config, here[k], there.get(k)) != "free"]
            if not (other or after.depends_on_cut):
                continue
            changed = f"{other[0]}={here[other[0]]} was {there.get(other[0])}" if other else "the run went on"
        raise ConfigError(
            f"a replay begins at a checkpoint behind the last start that changes bits, found none of step "
            f"{after.step} in {run}, where {changed}; name a step before it, or keep checkpoints "
            "(checkpoint.keep=)"
        )


def _on_one_rank(plan: Plan) -> Plan:
    """Return the plan with the same stages, all in one process and on the device."""
    one: Any = {"ranks": (0,), "shares": (), "device": None}
    one |= dict.fromkeys(("tier", "weights_tier", "parameters_tier"), "device")
    stages = tuple(dataclasses.replace(stage, **one) for stage in plan.stages)
    alone: Any = {"stages": stages, **dict.fromkeys(("cluster", "link", "memory"))}
    alone |= {"exact": False, "sharded": False, "owners": "spread"}
    if not plan.streams:
        alone |= {"schedule": "1f1b", "program": (), "extra_in_flight": 0, "most_extra_in_flight": 0}
    return dataclasses.replace(plan, **alone)


def _drains(was: TrainConfig, samples: Samples, *, done: int) -> set[int]:
    """Return the steps ahead of which the run, a stream, had nothing in flight."""
    ahead, drains = course(was, samples, done=done), set[int]()
    for _, numbers in ahead.by_test():
        steps = range(done + 1, done + len(numbers) + 1)
        drains |= {step for step in steps if was.checkpoint.every and step % was.checkpoint.every == 0}
        done += len(numbers)
        drains |= {done} if ahead.tests else set()
    return drains


def _hex(loss: float | None) -> str | None:
    return None if loss is None or not math.isfinite(loss) else float(loss).hex()


def _check_checkpoint(pipe: Pipeline, on_record: Mapping[int, Line], path: Path) -> None:
    """Refuse a checkpoint that is not what the run had on record, of what it has; raises ConfigError."""
    if not (before := on_record.get(pipe.num_steps - 1)) or not before["values"]:
        return
    values = digests_of(pipe)
    for name in values.keys() & before["values"].keys():
        values[name][1] = before["values"][name][1]  # no checkpoint has gradients
        if name in pipe.steps.written_in_eval:  # a test may lie between both
            values[name] = before["values"][name]
    if difference := first_of({before["step"]: before}, {before["step"]: {**before, "values": values}}):
        raise ConfigError(
            f"{path} is not what the run had then, {', '.join(difference.kinds)}: it was written or read "
            "wrongly, or changed since; remove it, and the one before it is taken"
        )


def compared(
    one: Path, other: Path, known: Difference, *, tell: Callable[[str], None]
) -> Iterator[tuple[Difference | None, list[LayerTensor], list[LayerTensor]]]:
    """Repeat both runs side by side, each from its own checkpoint before the last step that was the same.

    Yields: from the first step that differs on, ``MORE_STEPS`` after it, too: the difference, and what the
            layers of both returned; nothing if all is the same up to the step that is ``known``."""
    begin, same, first = 0 if known.same is None else known.same + 1, None, None
    last = min(known.step + MORE_STEPS, *(_last_step(run, known.step) for run in (one, other)))
    both = [replayed(run, last, tell=tell, begin=begin, show="") for run in (one, other)]
    with contextlib.closing(both[0]) as ours, contextlib.closing(both[1]) as theirs:
        mine = next(ours)
        for repeated in theirs:
            while mine.step < repeated.step:
                mine = next(ours)
            if mine.step > repeated.step:
                continue
            same = known.same if same is None and known.same == repeated.step - 1 else same
            difference = first_of({mine.step: mine.line}, {repeated.step: repeated.line}, same=same)
            first = repeated.step if first is None and difference else first
            if first is None and repeated.step == known.step:
                return
            if first is not None:
                yield difference, _in_order(mine), _in_order(repeated)
                if repeated.step == first + MORE_STEPS:
                    return
            same = repeated.step


def _last_step(run: Path, step: int) -> int:
    """Return the last step of the run that follows a step without another start."""
    folder = RunFolder(path=run)
    starts = [one.step for one in _starts(folder, until=sys.maxsize) if one.step > step]
    steps = [line["step"] for line in _metrics(folder)]
    return min([*starts, max(steps, default=step) + 1]) - 1


def _in_order(repeated: RepeatedStep) -> list[LayerTensor]:
    return [] if repeated.tensors is None else in_order(repeated.tensors.found)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Result of a step that was drawn: the options of its replay, and the first difference on the way to it.

    ``repeats``: whether a second replay, with the same options, had the same other bits; None where there was
    none."""

    step: int
    options: Sequence[str]
    difference: Difference | None
    repeats: bool | None = None


def audited(
    run: Path, *, steps: int, seed: int, tell: Callable[[str], None], step: int | None = None, oldest: int = 0
) -> Iterator[Audit]:
    """Replay so many steps on record, drawn at random, or ``step``, each on a cut, schedule and tier drawn at
    random.

    Raises:  ConfigError: there is nothing on record, or not what a replay computes."""
    folder, draw = RunFolder(path=run), random.Random(seed)
    starts = _starts(folder, until=sys.maxsize)
    if starts[-1].config.streams:
        raise ConfigError(
            f"an audit compares digests of steps, and {run} has micro-batches of several in flight; repeat "
            "single steps with penstock replay"
        )
    on_record = sorted(recorded(run))
    if step is not None and step not in on_record:
        raise ConfigError(f"step={step} is not on record in {folder.digests}; name one that is, or none")
    drawn = draw.sample(on_record, min(steps, len(on_record))) if step is None else [step]
    for number in sorted(drawn):
        start = next((one for one in reversed(starts) if one.step <= number), starts[0])
        if start.config.replicas.several and not start.config.replicas.exact:
            raise ConfigError(
                f"{run} summed gradients over replicas in another order than a replay does, so it cannot be "
                "audited; train with replicas.exact=true"
            )
        most = start.plan.num_stages  # so many the model can be cut into
        options = [f"stages={draw.randint(1, most)}", f"schedule={draw.choice(SCHEDULES)}"]
        options = [] if start.depends_on_cut else [*options, f"memory.tier={draw.choice(TIERS)}"]
        one = _first_difference(run, number, options, tell, oldest=oldest)
        if one is None:
            yield Audit(step=number, options=options, difference=None)
        else:
            other = _first_difference(run, one.step, options, tell, oldest=oldest)
            same = other is not None and other.line == one.line
            yield Audit(step=number, options=options, difference=one.difference, repeats=same)


def _first_difference(
    run: Path, step: int, options: Sequence[str], tell: Callable[[str], None], *, oldest: int = 0
) -> RepeatedStep | None:
    with contextlib.closing(replayed(run, step, options, tell=tell, oldest=oldest)) as steps:
        return next((repeated for repeated in steps if repeated.difference), None)


def show(repeated: RepeatedStep, name: str, path: Path) -> None:
    """Print figures of all tensors of a step under ``name``: what layers returned, then what there is after
    it; write them to ``path``, and beside it their histograms.

    Raises:  ConfigError: there are none."""
    found = {} if repeated.tensors is None else repeated.tensors.named()
    modules = {
        one.module for one in _in_order(repeated) if one.module.replace(".", "_") == one.layer.strip("_")
    }
    with repeated.pipe.parameters_resident():
        for full, (tensor, state) in states_of(repeated.pipe).items():
            if any(f"{full}.".startswith(f"{inside}.") for inside in (name, *modules)):
                every = {"weights": tensor, "gradients": tensor.grad, **(state or {})}
                kept = {kind: copied(one) for kind, one in every.items() if isinstance(one, Tensor)}
                found |= {f"{full} {kind}": one for kind, one in kept.items()}
    if not found:
        names = [*repeated.line["values"]]
        ends = f"run from {names[0]} to {names[-1]}"
        raise ConfigError(f"show={name}: no layer, module or weight has this name; weights {ends}")
    rows = []
    for kind, tensor in found.items():
        if not tensor.numel():
            continue
        values = numbers_of(tensor)
        figures = (values.mean(), values.std(correction=0), values.min(), values.max())
        shares = ((values == 0).double().mean(), (~values.isfinite()).double().mean())
        cells = (*(f"{one:.3g}" for one in figures), *(f"{one:.0%}" for one in shares))
        of, mark, micro_batch = kind.rpartition(OF_MICRO_BATCH)
        of, micro_batch = (of, micro_batch) if mark else (kind, "")
        rows.append((of, micro_batch, "x".join(map(str, tensor.shape)), *cells))
    names = ("tensor", "micro-batch", "shape", "mean", "std", "least", "most", "zeros", "NaN/inf")
    console.screen(width_of_a_log=150).print(table(names, rows, left=names[:1]))
    with refusing(path.parent):
        path.parent.mkdir(exist_ok=True)
    write_tensors(path, {kind: tensor.contiguous() for kind, tensor in found.items()})
    picture = path.with_suffix(".png")
    draw_histograms(found, picture, title=f"Step {repeated.step}, {name}")
    print(f"{console.short(path)}\n{console.short(picture)}")


def first_not_finite(run: Path) -> int:
    """Return the first step whose loss is no number.

    Raises:  ConfigError: every loss is one."""
    folder = RunFolder(path=run)
    lines = _metrics(folder)
    if lines and _starts(folder, until=sys.maxsize)[0].config.streams:
        # first steps of a stream may end no micro-batch
        lines = [*itertools.dropwhile(lambda line: line["loss"] is None, lines)] or lines
    for line in lines:
        if line["loss"] is None:
            return int(line["step"])
    raise ConfigError(f"step=nan is the first step whose loss is no number, and {run} has none; name a step")


def _metrics(folder: RunFolder) -> list[Line]:
    if not folder.metrics.is_file():
        raise ConfigError(f"{folder.path} has no {folder.metrics.name}; name the folder of a run with steps")
    return read_lines(folder.metrics)


def _options(
    folder: RunFolder, start: Start, changes: Sequence[str], tell: Callable[[str], None]
) -> TrainConfig:
    """Return the options of a replay of the steps after ``start``."""
    was, keeps = start.config, start.depends_on_cut
    try:
        without = {*ANEW} - {*OF_THE_CUT} if keeps else ANEW
        own = [] if was.streams else ["schedule=1f1b"] if keeps else ["codec=raw"]
        changed = ["ranks=1", *own, *changes]
        now = folder.read_config(without=without, changes=changed, stored=start.stored)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{' '.join(changes) or folder.config} does not fit penstock train: {reason}"
        ) from error
    early.check(now, changes)
    typed = [key.partition(".")[0] for key in early.keys_of(changes)]
    if "resume" in typed:
        raise ConfigError("a replay begins at a checkpoint of its run, found resume=; leave it out")
    if keeps and (others := [key for key in typed if key in ASKED and key != "memory"]):
        names = ("schedule", "weights", "codec", "clip.scope")
        asked = dict(flat(dataclasses.asdict(was)))
        found = " ".join(f"{name}={asked[name]}" for name in names)
        raise ConfigError(f"a replay of a run with {found} keeps its cut, found {others[0]}=; leave it out")
    if was.codec == AUTO and not {*LOSSY_CODECS}.isdisjoint(start.plan.named_codecs.values()):
        raise ConfigError(
            f"codec=auto of {folder.path} could turn off the lossy codecs of its plan by measurement, which "
            "no replay repeats; name one codec= for all, or lossless ones in the plan"
        )
    if now.streams and not was.streams:
        raise ConfigError(f"schedule={now.schedule} is another training than {folder.path}; leave it out")
    if isinstance(was.device, list):
        raise ConfigError(f"a replay runs on one device, found device={was.device}; its bits may be others")
    if was.replicas.several and not was.replicas.exact:
        tell("bits may differ: the run summed gradients over replicas without replicas.exact=true")
    there = dict(flat(dataclasses.asdict(was)))
    for key, mine in flat(dataclasses.asdict(now)):
        if mine == there.get(key):
            continue
        kind = kind_of(key, now, mine, there.get(key))
        if kind == "refused":
            raise ConfigError(
                f"{key}={mine} is another training than {folder.path}, which had {there.get(key)}"
            )
        if kind == "said":
            tell(f"bits may differ: {key}={mine} was {there.get(key)}")
    return now


def _source(folder: RunFolder, config: TrainConfig, step: int, tell: Callable[[str], None]) -> str | None:
    """Return the newest whole checkpoint at or before a step; None where the run began without one.

    Where the run has none it is one of those from which the run went on."""
    found = [path for path in folder.whole_checkpoints() if step_of(path) <= step]
    if not found and config.resume is not None and Path(config.resume).resolve() != folder.path.resolve():
        source = find(Path(config.resume), f"{folder.path} went on from resume={config.resume}, which")
        found = [path for path in source if step_of(path) <= step]
    return str(first_whole(found, lambda path: Checkpoint(path).folder, tell)) if found else None
