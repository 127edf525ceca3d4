"""Refuse an option's value in one sentence that names the option, the value and what would do.

Group options (``data.size``, ``model.width``) come as anything the user typed, so type and range are checked
together.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..compression.errors import ConfigError


def check_count(**values: object) -> None:
    """Refuse values that are not whole numbers of at least 1; ``__`` in a name stands for the dot."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name.replace('__', '.')}={value} must be a whole number of at least 1")


def check_known(option: str, value: object, known: Iterable[object]) -> None:
    """Refuse a value that is not among the known ones."""
    if value not in (names := list(known)):
        raise ConfigError(f"{option}={value} is not known; known are {', '.join(map(str, names))}")
