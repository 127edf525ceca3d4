"""Where a run goes on, and whether it is the same training: what ``resume=`` means before ranks start."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...compression.codec import LOSSY_CODECS
from ...compression.errors import CheckpointError, ConfigError
from ...conf.schema import AGAIN, TrainConfig
from .checkpoints import find, newest
from .run_folder import RunFolder

FREE = (
    "ranks", "stages", "cuts", "schedule", "program", "plan", "weights", "prediction", "weights_first",
    "extra_in_flight", "link", "memory", "deadline", "logger", "checkpoint", "resume", "epochs",
    "max_steps", "guard", "versions", "settings",
)  # fmt: skip
"""What changes no bit of a synchronous training; what it changes of a stream, loading the state refuses."""

BY_NATURE = ("threads", "micro_batches", "deterministic", "device", "tf32")
"""What changes bits because it changes how sums are made, and is said."""

OF_A_STREAM = ("micro_batches", "checkpoint.every", "extra_in_flight")
"""What decides which weights a micro-batch of a stream sees; a checkpoint drains it."""

OF_THE_LENGTH = ("epochs", "max_steps")
"""What a scheduler may have been told."""


def resolve(config: TrainConfig, folder: RunFolder, tell: Callable[[str], None]) -> bool:
    """Make ``config.resume`` the path of what the run goes on from, or None.

    Returns: whether it continues the run in ``folder``.
    Raises:  ConfigError: it was another training, or there is no such checkpoint."""
    if config.resume is None:
        return False
    own = config.resume == AGAIN
    source = folder.path if own else Path(config.resume)
    try:
        find(source)
    except ConfigError:
        if not own:
            raise
        config.resume = None  # a run that did not come to its first checkpoint, or none at all
        return False
    try:
        checkpoint = newest(source, tell)
    except CheckpointError as error:
        raise ConfigError(f"resume={config.resume}: {error}") from error
    check(config, checkpoint.notes, tell)
    config.resume = str(source.absolute())
    return own


def check(config: TrainConfig, notes: Mapping[str, Any], tell: Callable[[str], None]) -> None:
    """Refuse to go on as another training, and say what changes bits by its nature.

    Args:   notes: of the checkpoint.
    Raises: ConfigError: an option that decides bits is another one."""
    theirs = notes.get("config")
    if not isinstance(theirs, Mapping):
        raise ConfigError(
            f"resume={config.resume} was not written by penstock train, and says nothing of its options; "
            "load it in Python (penstock.load)"
        )
    ours, theirs = (dict(_flat(options)) for options in (dataclasses.asdict(config), theirs))
    told = []
    for key in sorted(set(ours) | set(theirs)):
        mine, there = ours.get(key), theirs.get(key)
        if mine == there:
            continue
        kind = _kind(key, config, mine, there)
        if kind == "refused":
            raise ConfigError(
                f"resume= goes on with the same training, found {key}={mine}, and the checkpoint was made "
                f"with {key}={there}; give the same, or begin anew in another folder"
            )
        if kind == "said":
            told.append(f"{key}={mine} was {there}")
    if told:
        tell(f"bits may differ from those of the run that goes on: {', '.join(told)} in the checkpoint")


def position(step: int, steps_of_an_epoch: int) -> tuple[int, int]:
    """The epoch of the last step that was done, and how many of its steps were: its test may still be due."""
    epoch = max(0, step - 1) // steps_of_an_epoch
    return epoch, step - epoch * steps_of_an_epoch


def _kind(key: str, config: TrainConfig, mine: object, there: object) -> str:
    """ "free", "said" or "refused"."""
    if config.streams and key in OF_A_STREAM:
        return "refused"
    if key == "codec":
        return "said" if {mine, there} & set(LOSSY_CODECS) else "free"
    if key in OF_THE_LENGTH and config.scheduler.get("_target_"):
        return "said"
    if key in BY_NATURE:
        return "said"
    return "free" if key.partition(".")[0] in FREE else "refused"


def _flat(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", list(value) if isinstance(value, tuple) else value
