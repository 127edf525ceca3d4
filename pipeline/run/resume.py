"""Resolve ``resume=`` before ranks start: the checkpoint, and whether the training is the same."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ...compression.codec import LOSSY_CODECS
from ...compression.errors import CheckpointError, ConfigError
from ...compression.names import AUTO
from ...conf.schema import AGAIN, TrainConfig, shown
from ...stages.plan.plan import Plan
from ..checkpoint import Checkpoint, load
from ..pipeline import Pipeline
from .checkpoints import find, first_whole
from .console import Training
from .metrics import read_lines
from .run_folder import RunFolder

# What changes no bit of a synchronous training; what it changes of a stream, loading the state refuses.
FREE = (
    "ranks", "stages", "cuts", "schedule", "program", "plan", "weights", "prediction", "weights_first",
    "error_feedback", "recompute", "extra_in_flight", "link", "cluster", "memory", "deadline", "logger",
    "checkpoint", "resume", "epochs", "max_steps", "detect_anomaly", "nan", "eval", "traceback", "versions",
    "settings", "digest", "audit", "max_restarts", "min_ranks", "cache", "data.workers", "data.local",
    "replicas", "nodes", "node", "master", "join_deadline", "guard",  # of older checkpoints
)  # fmt: skip
# What a plan is made of; where all of it is the same, so is the plan, however long layers took this time.
ASKED = (
    "ranks", "stages", "cuts", "schedule", "program", "plan", "weights", "prediction", "weights_first",
    "error_feedback", "recompute", "extra_in_flight", "link", "cluster", "memory", "codec", "micro_batches",
    "device", "replicas",
)  # fmt: skip
# What changes bits because it changes how sums are made, and is said.
BY_NATURE = ("threads", "micro_batches", "deterministic", "device", "tf32")
# What decides which weights a micro-batch of a stream sees; a checkpoint and a test drain it.
OF_A_STREAM = ("micro_batches", "checkpoint.every", "eval.every", "extra_in_flight")
# What options were before there was a choice, for checkpoints that do not name them.
SINCE = {
    "error_feedback": False,
    "data.skip_broken": False,
    "replicas.shares": "even",
    "replicas.check": "rarely",
    "loss._target_": "penstock.pipeline.run.losses.cross_entropy",
    "loss.label_smoothing": 0.0,
}
OF_THE_LENGTH = ("epochs", "max_steps")  # what a scheduler may have been told


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Checkpoint from which a run goes on; ``own``: it is of the run in the same folder."""

    checkpoint: Checkpoint
    own: bool

    def plan(self, config: TrainConfig) -> Plan | None:
        """The plan of the checkpoint, if ``config`` asks for the same."""
        ours, theirs = _both(config, self.checkpoint.notes)
        if config.stages is None:
            theirs["stages"] = None  # as many as the plan had
        if config.schedule == AUTO:
            theirs["schedule"] = AUTO  # the notes have the one that was chosen
        keys = [key for key in {*ours, *theirs} - {"replicas.check"} if key.partition(".")[0] in ASKED]
        if not all(ours.get(key) == theirs.get(key) for key in keys):
            return None
        config.schedule = self._plan.schedule
        return self._plan

    def compare(self, config: TrainConfig, plan: Plan, tell: Callable[[str], None]) -> None:
        """Say what another cut changes."""
        if config.clip.norm is not None and config.clip.scope == "stage" and plan.cuts != self._plan.cuts:
            was, now = (shown(list(one.cuts)) for one in (self._plan, plan))
            tell(f"bits may differ, for clip.scope=stage clips each stage: cuts={now} were {was}")

    @property
    def _plan(self) -> Plan:
        kept = copy.deepcopy(self.checkpoint.index["plan"])  # reading a plan takes it apart
        return Plan.of_json(kept, f"the plan of {self.checkpoint.folder}")


def resolve(
    config: TrainConfig, folder: RunFolder, tell: Callable[[str], None], *, threads: int | None
) -> Source | None:
    """Make ``config.resume`` the path of what the run goes on from, or None; return that, opened.

    Args:    threads: of each rank, as asked for; None: those of the checkpoint, so that the bits stay."""
    own = config.resume == AGAIN
    if own and not folder.whole_checkpoints():
        config.resume = None  # a run that did not come to its first checkpoint, or none at all
    if config.resume is None:
        return None
    source = folder.path if own else Path(config.resume)
    try:
        checkpoint = first_whole(find(source, f"resume={source}"), Checkpoint, tell)
    except CheckpointError as error:
        raise ConfigError(f"resume={config.resume}: {error}") from error
    options = checkpoint.notes.get("config")
    if isinstance(options, Mapping):  # what was chosen then
        for name in config.searched:
            setattr(config, name, options.get(name, getattr(config, name)))
        config.searched = ()
    kept = options.get("threads") if threads is None and isinstance(options, Mapping) else None
    if type(kept) is int and 0 < kept != config.threads:  # other numbers of them make other sums
        others = f"threads={config.threads} would use all cores"
        tell(f"goes on with threads={kept} as the checkpoint, for the same bits; {others}")
        config.threads = kept
        torch.set_num_threads(kept)
    check(config, checkpoint.notes, tell)
    config.resume = str(source.absolute())
    return Source(checkpoint=checkpoint, own=own)


def check(config: TrainConfig, notes: Mapping[str, Any], tell: Callable[[str], None]) -> None:
    """Refuse to go on as another training than that of ``notes``, and say what changes bits by its nature."""
    if not isinstance(notes.get("config"), Mapping):
        raise ConfigError(
            f"resume={config.resume} was not written by penstock train, and says nothing of its options; "
            "load it in Python (penstock.load)"
        )
    ours, theirs = _both(config, notes)
    others = []
    for key in sorted(ours.keys() | theirs.keys()):
        mine, there = ours.get(key, SINCE.get(key)), theirs.get(key)
        kind = "free" if mine == there else kind_of(key, config, mine, there)
        if kind == "refused":
            raise ConfigError(
                f"resume= goes on with the same training, found {key}={mine}, and the checkpoint was made "
                f"with {key}={there}; give the same, or begin anew in another folder"
            )
        if kind == "said":
            others.append(f"{key}={mine} was {there}")
    if others:
        tell(f"bits may differ from those of the run that goes on: {', '.join(others)} in the checkpoint")


def position(step: int, steps_of_an_epoch: int) -> tuple[int, int]:
    """The epoch of the last step that was done, and how many of its steps were: its test may still be due."""
    epoch = max(0, step - 1) // steps_of_an_epoch
    return epoch, step - epoch * steps_of_an_epoch


def take_over(
    pipe: Pipeline, source: str | None, metrics: Path, progress: Training
) -> tuple[Mapping[str, Any], dict[str, Any] | None]:
    """Load what ``resolve`` found, and say behind which step the run goes on, and which it does again.

    Returns: its notes, and what ``summary.json`` says of it; nothing of both without a source."""
    if source is None:
        return {}, None
    folders = find(Path(source), f"resume={source}")
    folder, notes = first_whole(folders, lambda folder: (folder, load(pipe, folder)), progress.note)
    step, last = pipe.num_steps, -1
    with contextlib.suppress(OSError, ConfigError, IndexError):
        last = read_lines(metrics)[-1]["step"]
    repeated = max(0, last + 1 - step)
    steps = f"steps {step + 1}-{step + repeated} are" if repeated > 1 else f"step {step + 1} is"
    progress.resume(step, f"; {steps} done again, in metrics.jsonl too" if repeated else "")
    return notes, {"path": str(folder), "step": step, "repeated_steps": repeated}


def _both(config: TrainConfig, notes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of now and of the checkpoint, flat."""
    return dict(flat(dataclasses.asdict(config))), SINCE | dict(flat(notes["config"]))


def kind_of(key: str, config: TrainConfig, mine: object, there: object) -> str:
    """Return what a changed option does to bits: "free" of any change, "said", or "refused"."""
    group = key.partition(".")[0]
    if config.streams and key in OF_A_STREAM:
        return "refused"
    if key == "codec":
        return "said" if {mine, there} & set(LOSSY_CODECS) else "free"
    if group == "replicas" and key not in ("replicas.check", "replicas.sharded", "replicas.owner"):
        return "free" if config.replicas.exact or not config.replicas.several else "said"
    if key in BY_NATURE or (key in OF_THE_LENGTH and config.scheduler.get("_target_")):
        return "said"
    return "free" if {key, group} & set(FREE) else "refused"


def flat(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield options by their full dotted names."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", list(value) if isinstance(value, tuple) else value
