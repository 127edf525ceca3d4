"""Who takes part in ``penstock bench cache``, by name; known without torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ...pipeline.samples.cache.gain import Gain
from ...pipeline.samples.cache.next_use import NextUse
from ...pipeline.samples.cache.policies import POLICIES
from ...pipeline.samples.cache.policy import Policy

PARTS = ("simulated", "real", "hit", "loaders", "jobs")
READS = ("own", "same")
CONTESTANTS: dict[str, Callable[[int], Policy]] = POLICIES | {
    "gain_last_0": partial(Gain, last_gain=0),
    "next_use_told": partial(NextUse, watch=False),
    "next_use_uncapped": partial(NextUse, caps=False),
    "next_use_floors": partial(NextUse, floors=True),
}
"""The policies, and some of them with other options than their own."""

SERVED = tuple(POLICIES)
"""Those that a broker has, by the names that it knows; they run in earnest too."""

TIMED = ("next_use", "next_use_told")
"""Whose hits hang on the epochs' times, so that they also run with times that are off."""
