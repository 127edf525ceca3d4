"""Contents of the files of a group: the names to choose from, and for each target its options and defaults.

The files are read as they lie in the package, so what a person typed can be held against them before anything
heavy is imported. A target of one's own takes what it takes, which only its import can tell.
"""

import functools
from collections.abc import Mapping
from importlib import resources
from typing import Any, cast

from omegaconf import OmegaConf

from ..compression.errors import ConfigError

_ROOT = resources.files("penstock.conf")
OURS = "penstock."
OF_THE_RUN = {
    "data": {
        "drop_last": "leave out the last batch of an epoch where it is smaller",
        "workers": "processes that load samples ahead; auto: as many as there are spare cores",
        "skip_broken": "leave out and count samples that cannot be read, or differ in shape from their batch",
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
    return sorted(entry.name for entry in _ROOT.iterdir() if entry.is_dir() and choices(entry.name))


def choices(group: str) -> list[str]:
    """The names of a group, or nothing where there is no such group."""
    folder = _ROOT / group
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


@functools.cache
def files(group: str) -> Mapping[str, Mapping[str, Any]]:
    """The options of each file of the group by its name, with their defaults and ``_target_``."""
    texts = {name: (_ROOT / group / f"{name}.yaml").read_text(encoding="utf-8") for name in choices(group)}
    return {name: cast("Any", OmegaConf.to_container(OmegaConf.create(text))) for name, text in texts.items()}


def listed(group: str) -> Mapping[str, Mapping[str, Any]]:
    """The options of each target that a file of the group names, with their defaults."""
    return {
        options.get("_target_", ""): {key: value for key, value in options.items() if key != "_target_"}
        for options in files(group).values()
    }


def check(group: str, options: Mapping[str, Any]) -> None:
    """Refuse options that no part of a run would read, and values of another kind than their default.

    Raises: ConfigError: it names the option by its full dotted name.
    """
    target = options.get("_target_")
    given = {key: value for key, value in options.items() if key != "_target_"}
    for key, value in given.items():
        if any(key in names for other, names in OF_THE_RUN.items() if other != group):
            raise ConfigError(f"{group}.{key}={value}: there is no option {group}.{key}; drop it")
    if given and not target:
        key, value = next(iter(given.items()))
        raise ConfigError(
            f"{group}.{key}={value} has no target that takes it; choose one by {group}=NAME "
            f"({', '.join(choices(group))}) or {group}._target_="
        )
    if (known := listed(group).get(str(target))) is None:
        return
    for key, value in given.items():
        full = f"{group}.{key}"
        if key in known:
            _check_kind(full, value, known[key])
        elif str(target).startswith(OURS) and key not in OF_THE_RUN.get(group, ()):
            names = ", ".join(sorted(f"{group}.{one}" for one in known))
            remedy = f"known are {names}" if names else f"{group} takes none here"
            raise ConfigError(f"{full}={value}: there is no option {full}; {remedy}")


def _check_kind(full: str, value: Any, default: Any) -> None:
    kind = next((kind for kind in _KINDS if isinstance(default, kind)), None)
    fits, takes = _KINDS.get(kind, (object, ""))
    if not isinstance(value, fits) or (isinstance(value, bool) and kind in (int, float, list)):
        typed = "null" if value is None else value
        takes = takes.format(full=full, value=typed)
        raise ConfigError(f"{full}={typed} does not fit: {full} takes {takes}, not {typed}")


_KINDS: dict[Any, tuple[Any, str]] = {  # in this order: a truth value is a whole number, too
    bool: (bool, "true or false"),
    int: (int | float, "a number"),
    float: (int | float, "a number"),
    list: (list, "a list, for example {full}=[{value}]"),
}
