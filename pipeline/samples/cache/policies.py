"""The policies of the sample cache, by name."""

from __future__ import annotations

from collections.abc import Callable

from ....compression.errors import ConfigError
from .gain import Gain
from .lru import Lru
from .next_use import NextUse
from .policy import Policy

POLICIES: dict[str, Callable[[int], Policy]] = {
    "next_use": NextUse,
    "gain": Gain,
    "lru": Lru,
}
DEFAULT = "next_use"


def policy(name: str, capacity: int) -> Policy:
    """A new policy for so many bytes.

    Raises: ConfigError: there is none of that name, or the bytes are below 0."""
    if name not in POLICIES:
        raise ConfigError(f"{name} is no policy of the sample cache; known are {', '.join(POLICIES)}")
    return POLICIES[name](capacity)
