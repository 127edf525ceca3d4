"""Options as typed, ``KEY=VALUE`` after ``KEY=VALUE``: made ready for Hydra, and found when Hydra refuses it.

Hydra reports what it could not compose, not always which argument was to blame; adding the arguments
one by one to the defaults finds the first that fails."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError

from ..compression.errors import ConfigError
from ..conf import groups
from .flags import near

NOT_TYPED = ("_target_", "versions", "hydra")  # what is not offered
KINDS = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}


def with_own_groups(arguments: Sequence[str]) -> list[str]:
    """Return the arguments so that ``model._target_=my.Net`` starts from ``model=own``, not from our default.

    Options of one's own (``model.width=3``) are new keys to Hydra, so they are added rather than looked for.
    """
    arguments = [re.sub(r"^(\+*)cache=", r"\1cache.mode=", argument) for argument in arguments]
    typed = [argument.partition("=")[0] for argument in arguments]
    targets = (re.fullmatch(r"\+*(\w+)\._target_", key) for key in typed)
    groups = {target[1] for target in targets if target}
    chosen = [f"{group}=own" for group in sorted(groups) if group not in typed]

    def added(argument: str) -> str:
        group, dot, rest = argument.partition("=")[0].partition(".")
        return f"++{argument}" if dot and group in groups and rest != "_target_" else argument

    return chosen + [added(argument) for argument in arguments]


def one_by_one(options: Sequence[str]) -> list[list[str]]:
    """The options of a sweep as those of single runs, so that every value is there at least once."""
    parser = OverridesParser.create()
    values: list[list[str]] = []
    for option in options:
        try:
            (parsed,) = parser.parse_overrides([option])
            swept = parsed.is_sweep_override() and parsed.is_discrete_sweep()
            given = (
                [f"{parsed.get_key_element()}={one}" for one in parsed.sweep_string_iterator()]
                if swept
                else []
            )
        except HydraException:  # said when it is composed
            given = []
        values.append(given or [option])
    first = [given[0] for given in values]
    runs = [first]
    for place, given in enumerate(values):
        runs += [[*first[:place], other, *first[place + 1 :]] for other in given[1:]]
    return runs


def refusal(name: str, where: Sequence[str], options: Sequence[str], error: Exception) -> ConfigError:
    """Return the one sentence for what Hydra, still initialized, refused of configuration ``name``.

    Args:   where: the override that says where configurations lie.
    """
    try:
        good = hydra.compose(name, overrides=[*where], return_hydra_config=True)
    except Exception as found:
        return ConfigError(_of_a_file(name, found))
    ordered = sorted(options, key=lambda option: _key(option) not in groups.groups())  # groups first
    for count in range(1, len(ordered) + 1):
        try:
            good = hydra.compose(name, overrides=[*where, *ordered[:count]], return_hydra_config=True)
        except Exception as found:
            return ConfigError(_sentence(ordered[count - 1], found, good))
    return ConfigError(str(error).splitlines()[0])


def unknown(full: str, known: Sequence[str]) -> str:
    """The sentence for a key, by its full dotted name, that is among no known ones."""
    hint = (
        f"did you mean {close}?" if (close := near(full, known)) else f"known are {', '.join(sorted(known))}"
    )
    return f"there is no option {full}; {hint}"


def _of_a_file(name: str, error: Exception) -> str:
    """Return the mistake in a configuration as it is in its file."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file == name:
        return f"--config-name {name}: there is no {name}.yaml; say where it lies with --config-dir"
    cause, place = error.__cause__ or error.__context__ or error, _IN_A_FILE.match(str(error))
    file = f"{place[1] if place else name}.yaml"
    key, node = str(getattr(cause, "full_key", "")), getattr(cause, "object_type", None)
    if isinstance(cause, ConfigKeyError) and key and dataclasses.is_dataclass(node):
        group = key.rpartition(".")[0]
        known = [f"{group}.{one.name}" if group else one.name for one in dataclasses.fields(node)]
        return f"{file}: {unknown(key, known)}"
    return f"{file}: {' '.join(str(cause).split())}"


_IN_A_FILE = re.compile(r"In '([^']+)'")


def _sentence(argument: str, error: Exception, good: DictConfig) -> str:
    key = _key(argument)
    reason = str(error.__cause__ or error)
    argument = argument.removeprefix("++")
    if isinstance(error, MissingConfigException):
        choices = ", ".join(error.options or ())
        return f"{argument} is not known; {key} is one of {choices}"
    if isinstance(error, OverrideParseException) or not isinstance(error, HydraException):
        written = re.match(r"(\w[\w.]*)(?::(.*))?$", argument)
        if written and (close := near(written[1], _all_names(good))):
            return f"{argument} has no value; write {close}={written[2] or 'VALUE'}"
        return (
            f"{argument} cannot be read; write KEY=VALUE, and quote a value with spaces, commas or brackets"
        )
    if _IN_A_FILE.match(str(error)):
        return f"{argument}: {_of_a_file(key, error)}"
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
    names = [str(name) for name in node if name not in NOT_TYPED]
    known = sorted(f"{parent}.{name}" if parent else name for name in names)
    value = argument.partition("=")[2]
    if close := near(key, known if parent else _all_names(good)):
        return f"{argument}: there is no option {key}; did you mean {close}? write {close}={value}"
    choice = f"known are {', '.join(known)}" if known else f"{parent}={_choice(node)} takes none"
    return f"{argument}: there is no option {key}; {choice}"


def _all_names(node: DictConfig, prefix: str = "") -> list[str]:
    found = []
    for name in node:
        if name not in NOT_TYPED:
            found.append(f"{prefix}{name}")
            inner = node._get_node(str(name))
            found += _all_names(inner, f"{prefix}{name}.") if isinstance(inner, DictConfig) else []
    return sorted(found, key=lambda full: full.count("."))


def _choice(node: DictConfig) -> str:
    return str(node.get("_target_", "none")).rpartition(".")[2]


def _key(argument: str) -> str:
    return argument.partition("=")[0].lstrip("+~").partition("@")[0]
