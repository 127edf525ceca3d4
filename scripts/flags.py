"""Flags: those that there are, and what people type who come from other programs, with the right spelling.

Hydra answers a flag it does not know with its whole usage; here it is one sentence, before Hydra looks."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..compression.errors import ConfigError
from ..conf import groups

SHORT = {
    "-h": "--help", "-c": "--cfg", "-p": "--package", "-r": "--run", "-m": "--multirun",
    "-sc": "--shell-completion", "-cp": "--config-path", "-cn": "--config-name", "-cd": "--config-dir",
    "-i": "--info",
}  # fmt: skip
ALONE = ("--help", "--hydra-help", "--version", "--resolve", "--run", "--multirun", "--shell-completion")
VALUED: dict[str, tuple[str, ...]] = {  # with the values there are, where they are few
    "--cfg": ("job", "hydra", "all"),
    "--package": (),
    "--config-path": (),
    "--config-name": (),
    "--config-dir": (),
    "--experimental-rerun": (),
}
MAY_HAVE_A_VALUE = {"--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")}
FLAGS = (*ALONE, *VALUED, *MAY_HAVE_A_VALUE)
ELSEWHERE = {"--hydra-help", "--version", "--shell-completion", "--info", "--config-path", "--package"}
ELSEWHERE |= {"--experimental-rerun"}
"""With one of these Hydra does something else than to compose a run of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """Words of a command line: flags by their long names, and options in their order."""

    flags: dict[str, str] = field(default_factory=dict)
    options: list[str] = field(default_factory=list)


def read(command: str, arguments: Sequence[str], schema: type[Any]) -> Typed:
    """Tell flags from options.

    Args:   command: as it is typed after ``penstock``; schema: the dataclass of its options.
    Raises: ConfigError: there is no such flag; the sentence has the option that was meant, if it is near.
    """
    typed, left = Typed(), list(arguments)
    while left:
        word = left.pop(0)
        if not word.startswith("-"):
            if left and "=" not in word and "=" not in left[0] and (name := near(word, names(schema))):
                raise ConfigError(f"{word} {left[0]} are two words; options are one: {name}={left[0]}")
            typed.options.append(word)
            continue
        flag, equals, value = word.partition("=")
        flag = SHORT.get(flag, flag)
        if flag not in FLAGS:
            follows = left[0] if left and "=" not in left[0] and not left[0].startswith("--") else ""
            raise ConfigError(_unknown(command, flag, value if equals else follows, names(schema)))
        if flag in VALUED and not equals:
            value = left.pop(0) if left and not left[0].startswith("-") else ""
        elif flag in MAY_HAVE_A_VALUE and not equals:
            value = left.pop(0) if left and left[0] in MAY_HAVE_A_VALUE[flag] else ""
        _check_value(flag, value)
        typed.flags[flag] = value
    return typed


def names(schema: type[Any], prefix: str = "") -> list[str]:
    """The options of a command by their full dotted names, those of all choices of its groups included."""
    found: list[str] = []
    for one in dataclasses.fields(schema):
        default = getattr(schema(), one.name)
        found.append(f"{prefix}{one.name}")
        if dataclasses.is_dataclass(default):
            found += names(type(default), f"{prefix}{one.name}.")
        for options in groups.listed(one.name).values():
            found += [f"{one.name}.{key}" for key in options]
    return list(dict.fromkeys(found))


RENAMED = {"guard": "detect_anomaly"}  # options by their old names


def near(word: str, known: Iterable[str]) -> str:
    """The option meant by ``word``: an old name, another spelling, without its group, or mistyped."""
    if RENAMED.get(word) in (known := list(known)):
        return RENAMED[word]
    return next(_near(word.lstrip("-").lower().replace("-", "_"), known), "")


def _near(word: str, known: Sequence[str]) -> Iterator[str]:
    group, _, leaf = word.rpartition(".")
    yield from (name for name in known if name == word)
    if not group:
        yield from (name for name in known if name.rpartition(".")[2] == word)
    alike = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == group}
    if len(leaf) > 2:
        yield from (alike[close] for close in difflib.get_close_matches(leaf, alike, n=1, cutoff=0.7))


def _unknown(command: str, flag: str, value: str, known: Sequence[str]) -> str:
    shown = f"{flag} {value}".strip()
    if meant := near(flag, known):
        return f"{shown} is written {meant}={value or 'VALUE'} here: options are KEY=VALUE, without dashes"
    if close := difflib.get_close_matches(flag, FLAGS, n=1, cutoff=0.7):
        return f"there is no flag {flag}; did you mean {close[0]}?"
    return (
        f"there is no flag {flag}; options are KEY=VALUE, for example ranks=2, and penstock {command} --help "
        "lists them"
    )


def _check_value(flag: str, value: str) -> None:
    known = VALUED.get(flag, ())
    if flag in VALUED and (not value or (known and value not in known)):
        takes = f"one of {', '.join(known)}" if known else "a value"
        raise ConfigError(
            f"{flag} takes {takes}, found {value or 'none'}; write {flag} {(*known, 'NAME')[0]}"
        )
