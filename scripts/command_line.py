"""Command lines: flags parted from options, misspelt ones named, and the text of ``--help``.

Hydra answers a flag it does not know with its whole usage; here it is one sentence, before Hydra composes."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from ..compression.errors import ConfigError
from ..conf import groups

RENAMED = {"guard": "detect_anomaly"}  # options by their old names
NOT_TYPED = ("_target_", "versions", "hydra")  # what is not offered
FOOT = """\
hydra.run.dir=PATH        where the run is kept; default: runs/<date>_<time>-<process>
--multirun KEY=A,B        one run for each value
--cfg job                 print the whole configuration and stop
--hydra-help              everything else that Hydra offers"""


def parse(command: str, arguments: Sequence[str], schema: type[Any]) -> argparse.Namespace:
    """Part the words of a command line into Hydra's flags and, as ``overrides``, options.

    Args:
        command: As it is typed after ``penstock``.
        schema: Dataclass of its options.

    Raises:
        ConfigError: There is no such flag; the sentence has the option that was meant, if one is similar.
    """
    from hydra._internal.utils import get_args_parser  # takes a tenth of a second

    parser, known = get_args_parser(), names(schema)
    parser.allow_abbrev = parser.exit_on_error = False
    try:
        typed, unknown = parser.parse_known_intermixed_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name}: {error.message}") from error
    for word in (word for word in unknown if word.startswith("-")):
        after = [*arguments, ""][list(arguments).index(word) + 1]
        flag, equals, value = word.partition("=")
        raise ConfigError(_unknown_flag(command, flag, value if equals else after, known))
    typed.overrides += unknown
    for word, value in pairwise(typed.overrides):
        if "=" not in word and "=" not in value and (name := nearest(word, known)):
            raise ConfigError(f"{word} {value} are two words; options are one: {name}={value}")
    typed.overrides, typed.config_name = with_own_groups(typed.overrides), typed.config_name or command
    return typed


def _unknown_flag(command: str, flag: str, value: str, known: Sequence[str]) -> str:
    value = "" if "=" in value or value.startswith("--") else value
    if meant := nearest(flag, known):
        shown = f"{flag} {value}".strip()
        return f"{shown} is written {meant}={value or 'VALUE'} here: options are KEY=VALUE, without dashes"
    example = f"options are KEY=VALUE, for example ranks=2, and penstock {command} --help lists them"
    flags = ("--help", "--multirun", "--cfg", "--config-dir", "--config-name")
    close = difflib.get_close_matches(flag, flags, n=1, cutoff=0.7)
    return f"there is no flag {flag}; {f'did you mean {close[0]}?' if close else example}"


def with_own_groups(arguments: Sequence[str]) -> list[str]:
    """Return the options so that ``model._target_=my.Net`` starts from ``model=own``, not from our default.

    Options of one's own (``model.width=3``) are new keys to Hydra, so they are added rather than looked for.
    """
    arguments = [re.sub(r"^(\+*)cache=", r"\1cache.mode=", argument) for argument in arguments]
    typed = [argument.partition("=")[0] for argument in arguments]
    targets = (re.fullmatch(r"\+*(\w+)\._target_", key) for key in typed)
    own = {target[1] for target in targets if target}

    def added(argument: str) -> str:
        group, dot, rest = argument.partition("=")[0].partition(".")
        return f"++{argument}" if dot and group in own and rest != "_target_" else argument

    chosen = [f"{group}=own" for group in sorted(own) if group not in typed]
    return chosen + [added(argument) for argument in arguments]


def names(schema: type[Any], prefix: str = "") -> list[str]:
    """Options of a command by their full dotted names, those of all choices of its groups included."""
    known: list[str] = []
    for one in dataclasses.fields(schema):
        default = getattr(schema(), one.name)
        known.append(f"{prefix}{one.name}")
        if dataclasses.is_dataclass(default):
            known += names(type(default), f"{prefix}{one.name}.")
        for options in groups.listed(one.name).values():
            known += [f"{one.name}.{key}" for key in options]
    return list(dict.fromkeys(known))


def nearest(word: str, known: Iterable[str]) -> str:
    """Option that was meant: by an old name, spelt otherwise, without its group, or mistyped; "" for none."""
    known, word = list(known), RENAMED.get(word, word).lstrip("-").lower().replace("-", "_")
    if word in known:
        return word
    group, _, leaf = word.rpartition(".")
    same = [name for name in known if not group and name.endswith(f".{word}")]
    alike = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == group}
    close = difflib.get_close_matches(leaf, alike, n=1, cutoff=0.7) if len(leaf) > 2 else []
    return next(iter([*same, *map(alike.__getitem__, close)]), "")


def unknown_option(full: str, known: Iterable[str], schema: type[Any]) -> str:
    """Sentence about a key, by its full dotted name, that is not among the ``known`` ones of its group."""
    group = full.rpartition(".")[0]
    known = sorted(f"{group}.{name}" if group else name for name in known if name not in NOT_TYPED)
    if close := nearest(full, known if group else names(schema)):
        return f"there is no option {full}; did you mean {close}?"
    return f"there is no option {full}; " + (
        f"known are {', '.join(known)}" if known else f"{group} has none"
    )


def asks_for_help(arguments: Sequence[str]) -> bool:
    """True if help was asked for."""
    return any(argument in ("-h", "--help") for argument in arguments) or list(arguments) == ["help"]


def help_text(command: str, schema: type[Any]) -> str:
    """Help of a command whose options are the dataclass ``schema``: from its docstrings and the groups."""
    wrap = textwrap.TextWrapper(
        118, subsequent_indent=26 * " ", break_long_words=False, break_on_hyphens=False
    )
    lines = [wrap.fill(f"{head:<25} {meaning}") for head, meaning in _options(schema)]
    return "\n".join([f"penstock {command} [KEY=VALUE ...]", "", *lines, "", FOOT])


def meanings(schema: type[Any]) -> dict[str, str]:
    """Attributes of a dataclass and its bases, with their docstrings' text."""
    lines: dict[str, str] = {}
    for one in reversed(schema.__mro__):
        attributes = (one.__doc__ or "").partition("Attributes:\n")[2]
        lines |= dict(re.findall(r"^ +(\w+): (.+)$", attributes, flags=re.MULTILINE))
    return lines


def _options(schema: type[Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    meaning = meanings(schema)
    for field, default in ((field, getattr(schema(), field.name)) for field in dataclasses.fields(schema)):
        if dataclasses.is_dataclass(default):
            yield from _options(type(default), f"{prefix}{field.name}.")
        elif choices := groups.choices(field.name):
            yield f"{field.name}=NAME", f"{meaning[field.name]} (NAME: {', '.join(choices)})"
        elif not isinstance(default, dict):
            value = default if isinstance(default, str) else json.dumps(default)
            yield f"{prefix}{field.name}={value}", meaning[field.name]
