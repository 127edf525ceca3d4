"""Contents of the files of a group: the names to choose from, and for each target its options and defaults.

The files are read as they lie in the package, so what a person typed can be held against them before anything
heavy is imported. A target of one's own takes what it takes, which only its import can tell.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, cast

from omegaconf import OmegaConf

from ..compression.errors import ConfigError

OURS = "penstock."
OF_THE_RUN = {
    "data": {
        "drop_last": "leave out the last batch of an epoch where it is smaller",
        "workers": "processes that load samples ahead; auto: as many as there are spare cores",
        "skip_broken": "leave out samples that cannot be read, and count them",
        "local": "folder of this machine to which the data are copied once, and read from",
    },
    "model": {
        "leaves": "classes, modules or functions that are one layer each",
        "load_weights": "safetensors file of the first values; the model is made without memory",
        "init_weights": "function of (name, tensor) that gives first values; the same",
    },
}
"""Options of a group that are for the run, not for its target, and what they mean."""

OF_TORCH = {
    "optimizer": "torch.optim",
    "scheduler": "torch.optim.lr_scheduler",
    "loss": "torch.nn.functional",
}
"""Modules whose callables are chosen by their names alone, in any case: ``optimizer=adam``."""


def groups() -> list[str]:
    """The groups by name."""
    return sorted(entry.name for entry in _root().iterdir() if entry.is_dir() and choices(entry.name))


def choices(group: str) -> list[str]:
    """The names of a group, or nothing where there is no such group."""
    folder = _root() / group
    if not folder.is_dir():
        return []
    names = (entry.name for entry in folder.iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


@functools.cache
def files(group: str) -> Mapping[str, Mapping[str, Any]]:
    """The options of each file of the group by its name, with their defaults and ``_target_``."""
    texts = {name: (_root() / group / f"{name}.yaml").read_text(encoding="utf-8") for name in choices(group)}
    return {name: cast("Any", OmegaConf.to_container(OmegaConf.create(text))) for name, text in texts.items()}


def listed(group: str) -> Mapping[str, Mapping[str, Any]]:
    """The options of each target that a file of the group names, with their defaults."""
    return {
        options.get("_target_", ""): {key: value for key, value in options.items() if key != "_target_"}
        for options in files(group).values()
    }


def check(group: str, options: Mapping[str, Any], *, name: str | None = None) -> None:
    """Refuse options that no part of a run would read, and values of another kind than their default.

    Args:   name: what the options are called, where that is not the group.
    Raises: ConfigError: it names the option by its full dotted name.
    """
    name, target = name or group, options.get("_target_")
    given = [key for key in options if key != "_target_"]
    for key in given:
        if any(key in names for other, names in OF_THE_RUN.items() if other != group):
            raise ConfigError(f"{name}.{key}={options[key]}: there is no option {name}.{key}; drop it")
    if given and not target:
        key = given[0]
        raise ConfigError(
            f"{name}.{key}={options[key]} has no target that takes it; choose one by {name}=NAME "
            f"({', '.join(choices(group))}) or {name}._target_="
        )
    known = listed(group).get(str(target))
    if known is None:
        return
    for key in given:
        full = f"{name}.{key}"
        if key in known:
            _check_kind(full, options[key], known[key])
        elif str(target).startswith(OURS) and key not in OF_THE_RUN.get(group, ()):
            raise ConfigError(_unknown(f"{full}={options[key]}", full, (f"{name}.{one}" for one in known)))


def _unknown(typed: str, full: str, known: Iterable[str]) -> str:
    names = sorted(known)
    return f"{typed}: there is no option {full}; " + (
        f"known are {', '.join(names)}" if names else f"{full.partition('.')[0]} takes none here"
    )


def _check_kind(full: str, value: Any, default: Any) -> None:
    kind = next((kind for kind in _KINDS if isinstance(default, kind)), None)
    if kind is None:
        return
    fits, takes = _KINDS[kind]
    if not isinstance(value, fits) or (isinstance(value, bool) and kind is not bool):
        typed = "null" if value is None else value
        takes = takes.format(full=full, value=typed)
        raise ConfigError(f"{full}={typed} does not fit: {full} takes {takes}, not {typed}")


_KINDS: dict[type, tuple[Any, str]] = {  # in this order: a truth value is a whole number, too
    bool: (bool, "true or false"),
    int: (int | float, "a number"),
    float: (int | float, "a number"),
    list: (list, "a list, for example {full}=[{value}]"),
}


def _root() -> Traversable:
    return resources.files("penstock.conf")
