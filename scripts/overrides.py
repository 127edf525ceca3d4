"""What was typed, ``KEY=VALUE`` after ``KEY=VALUE``: made ready for Hydra, and found when Hydra refuses it.

Hydra reports what it could not compose, not always which argument was to blame; adding the arguments
one by one to the defaults finds the first that fails."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from importlib import resources

import hydra
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf

from ..compression.errors import ConfigError

KINDS = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}


def with_own_groups(arguments: Sequence[str]) -> list[str]:
    """Return the arguments so that ``model._target_=my.Net`` starts from ``model=own``, not from our default.

    Options of one's own (``model.width=3``) are new keys to Hydra, so they are added rather than looked for.
    """
    typed = [argument.partition("=")[0] for argument in arguments]
    targets = (re.fullmatch(r"\+*(\w+)\._target_", key) for key in typed)
    groups = {target[1] for target in targets if target}
    chosen = [f"{group}=own" for group in sorted(groups) if group not in typed]

    def added(argument: str) -> str:
        group, dot, rest = argument.partition("=")[0].partition(".")
        return f"++{argument}" if dot and group in groups and rest != "_target_" else argument

    return chosen + [added(argument) for argument in arguments]


def refusal(name: str, arguments: Sequence[str], error: Exception) -> ConfigError:
    """Return the one sentence for what Hydra, still initialized, refused of command ``name``."""
    ordered = sorted(arguments, key=lambda argument: _key(argument) not in _groups())  # groups first
    good = hydra.compose(name)
    for count in range(1, len(ordered) + 1):
        try:
            good = hydra.compose(name, overrides=ordered[:count])
        except Exception as found:
            return ConfigError(_sentence(ordered[count - 1], found, good))
    return ConfigError(str(error).splitlines()[0])


def _sentence(argument: str, error: Exception, good: DictConfig) -> str:
    key = _key(argument)
    reason = str(error.__cause__ or error)
    argument = argument.removeprefix("++")
    if isinstance(error, MissingConfigException):
        choices = ", ".join(error.options or ())
        return f"{argument} is not known; {key} is one of {choices}"
    if isinstance(error, OverrideParseException) or not isinstance(error, HydraException):
        return (
            f"{argument} cannot be read; write KEY=VALUE, and quote a value with spaces, commas or brackets"
        )
    if "Ambiguous" in str(error):
        return f"{argument} is several values; write {key}=[...] for a list, or --multirun for one run each"
    if isinstance(error, ConfigCompositionException) and "Could not override" in str(error):
        return _unknown(argument, key, good)
    kind = re.search(r"(?:converted to|not a valid) (\w+)", reason)
    value = argument.partition("=")[2]
    if kind:
        return f"{argument} does not fit: {key} takes {KINDS.get(kind[1], kind[1])}, not {value}"
    if "not Optional" in reason:
        return f"{argument} does not fit: {key} must have a value"
    if "ListConfig" in reason:
        return f"{argument} does not fit: {key} takes a list, for example {key}=[{value}]"
    return f"{argument} does not fit: {reason.splitlines()[0]}"


def _unknown(argument: str, key: str, good: DictConfig) -> str:
    parent = key.rpartition(".")[0]
    node = OmegaConf.select(good, parent) if parent else good
    if not isinstance(node, DictConfig):
        node, parent = good, ""
    names = [str(name) for name in node if name not in ("_target_", "versions")]
    known = sorted(f"{parent}.{name}" if parent else name for name in names)
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    choice = f"known are {', '.join(known)}" if known else f"{parent}={_choice(node)} takes none"
    return f"{argument}: there is no option {key}; {hint}{choice}"


def _choice(node: DictConfig) -> str:
    return str(node.get("_target_", "none")).rpartition(".")[2]


def _key(argument: str) -> str:
    return argument.partition("=")[0].lstrip("+~").partition("@")[0]


def _groups() -> set[str]:
    return {entry.name for entry in resources.files("penstock.conf").iterdir() if entry.is_dir()}
