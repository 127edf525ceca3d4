"""Refuse an option's value in one sentence that names the option, the value and what would do.

Group options (``data.size``, ``model.width``) come as anything the user typed, so type and range are checked
together.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...compression.errors import ConfigError

MOST_PIXELS = 1 << 26


def check_count(**values: object) -> None:
    """Refuse values that are not whole numbers of at least 1; ``__`` in a name stands for the dot."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name.replace('__', '.')}={value} must be a whole number of at least 1")


def check_image(*, size: object, channels: object = 1) -> None:
    """Refuse an image that is not (channels, size, size) of whole numbers, or too large for any memory."""
    check_count(data__size=size, data__channels=channels)
    assert isinstance(size, int)
    assert isinstance(channels, int)
    if channels * size * size > MOST_PIXELS:
        found = f"data.size={size} data.channels={channels}"
        raise ConfigError(f"{found} makes an image of more than {MOST_PIXELS:,} numbers; take a smaller one")


def check_known(option: str, value: object, known: Iterable[object]) -> None:
    """Refuse a value that is not among the known ones."""
    if value not in (names := list(known)):
        raise ConfigError(f"{option}={value} is not known; known are {', '.join(map(str, names))}")
