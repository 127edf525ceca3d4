"""Rules that several options share, each refused in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..compression.errors import ConfigError


def shown(names: list[str]) -> str:
    """Return the list as it is typed on the command line."""
    return f"[{','.join(names)}]"


def one_of(known: Sequence[str], name: str, value: str) -> None:
    """Refuse a name that is not known."""
    if value not in known:
        raise ConfigError(f"{name}={value} is not known; known are {', '.join(known)}")


def count_or_auto(name: str, value: Any) -> None:
    """Refuse what is neither "auto" nor a count from 0."""
    if value != "auto" and (type(value) is not int or value < 0):
        raise ConfigError(f"{name}={value} must be auto, or 0 or more")


def at_least(least: int, name: str, value: int | None) -> None:
    """Refuse a count below its least; None is no count."""
    if value is not None and value < least:
        raise ConfigError(f"{name}={value} must be {least} or more")
