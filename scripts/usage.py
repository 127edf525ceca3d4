"""Text of ``penstock COMMAND --help``: made from the schema and the groups on disk, so never stale."""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from ..conf import groups

FOOT = """\
hydra.run.dir=PATH        where the run is kept; default: runs/<date>_<time>-<process>
--multirun KEY=A,B        one run for each value
--cfg job                 print the whole configuration and stop
--hydra-help              everything else that Hydra offers"""


def wanted(arguments: Sequence[str]) -> bool:
    """Return whether help was asked for."""
    return any(argument in ("-h", "--help") for argument in arguments) or list(arguments) == ["help"]


def text(command: str, schema: type[Any]) -> str:
    """Return the help of a command whose options are the dataclass ``schema``."""
    lines = [f"penstock {command} [KEY=VALUE ...]", ""]
    lines += [_wrapped(f"{head:<25} {meaning}") for head, meaning in _options(schema)]
    return "\n".join([*lines, "", FOOT])


def _wrapped(line: str) -> str:
    return textwrap.fill(
        line, 118, subsequent_indent=26 * " ", break_long_words=False, break_on_hyphens=False
    )


def meanings(schema: type[Any]) -> dict[str, str]:
    """Return what the docstrings of a dataclass and its bases say of each attribute."""
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
        elif names := groups.choices(field.name):
            yield f"{field.name}=NAME", f"{meaning[field.name]} (NAME: {', '.join(names)})"
        elif not isinstance(default, dict):
            yield f"{prefix}{field.name}={_shown(default)}", meaning[field.name]


def _shown(value: Any) -> str:
    """Return the value as it is typed."""
    if isinstance(value, list):
        return f"[{','.join(map(_shown, value))}]"
    return value if isinstance(value, str) else json.dumps(value)
