"""The most hits that any policy could have had on a trace: Belady's rule, with the choice not to admit.

Source: L. A. Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems
Journal 1966: what is used last leaves. For samples of one size this is the optimum."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np


def optimum(keys: Sequence[int], num_slots: int) -> np.ndarray:
    """Whether each use of a trace hits with ``num_slots`` samples cached, as the optimum has it.

    Args: keys: the sample of each use, as whole numbers from 0, in the order of time."""
    asked = np.asarray(keys, dtype=np.int64)
    following = _following(asked)
    hits = np.zeros(asked.size, dtype=bool)
    cached: dict[int, int] = {}  # when each is used next
    farthest: list[tuple[int, int]] = []  # (minus that, key); outdated where `cached` says otherwise
    for at, (key, then) in enumerate(zip(asked.tolist(), following.tolist(), strict=True)):
        hits[at] = key in cached
        cached.pop(key, None)
        if then == asked.size or not num_slots:
            continue  # never used again
        if len(cached) >= num_slots:
            while cached.get(farthest[0][1]) != -farthest[0][0]:
                heappop(farthest)
            if -farthest[0][0] < then:
                continue  # all that is cached is used sooner
            del cached[heappop(farthest)[1]]
        cached[key] = then
        heappush(farthest, (-then, key))
    return hits


def _following(asked: np.ndarray) -> np.ndarray:
    """For each use the place of the next one of its sample; the number of uses where there is none."""
    order = np.argsort(asked, kind="stable")
    found = np.full(asked.size, asked.size, dtype=np.int64)
    same = asked[order[:-1]] == asked[order[1:]]
    found[order[:-1][same]] = order[1:][same]
    return found
