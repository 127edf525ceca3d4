"""The tiers by name: what opens the store of each.

A new tier is a file with its store, one row here, and its name in ``TIERS`` of the plan and of the options.
"""

from __future__ import annotations

from collections.abc import Callable

from ...compression.errors import ConfigError
from .cascade import Cascade
from .disk_store import DiskStore
from .host_store import HostStore
from .store import UNLIMITED, Store, StoreOptions

STORES: dict[str, Callable[..., Store]] = {"packed": Store, "host": HostStore, "disk": DiskStore}


def open_store(tier: str, options: StoreOptions = UNLIMITED) -> Store:
    """Return a new, empty store of ``tier``; where it has a limit and there is a disk, with that behind it.

    Raises:  ConfigError: there is no such tier."""
    if tier not in tuple(STORES):  # a tuple: what was given may have no hash
        raise ConfigError(f"tier is one of {', '.join(STORES)}, found {tier!r}; choose one of these")
    store = STORES[tier](options)
    if tier != "disk" and options.disk is not None and store.is_limited:
        return Cascade([store, DiskStore(options)])
    return store
