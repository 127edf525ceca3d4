"""How many micro-batches each replica of a stage shall take: as many as it is fast, by what was measured.

The parts of a whole by largest remainder are whole numbers, nobody's further than one from what is due. They
are taken up only where the slowest replica gains by it: seconds vary, and shares that follow each of their
turns would make ever other sums, and plans of steps, for nothing.

Source: Hamilton's method (Balinski and Young, Fair Representation, 1982, appendix A); replicas by measured
speed: claims C5 and C6 of CN107463448A."""

from __future__ import annotations

from collections.abc import Sequence

Shares = Sequence[Sequence[int]]  # of every stage

LEAST_GAIN = 0.05  # of the seconds of the slowest replica; predictions err by as much
SMOOTHING = 0.3  # the weight of the newest seconds: what lasts counts for half after two steps


def by_speed(seconds: Sequence[float], number: int) -> tuple[int, ...]:
    """Shares of ``number`` micro-batches in proportion to speed, by largest remainder.

    Each replica gets one at least where there are as many, or nobody would see it become faster.

    Args:    seconds: of each replica for a micro-batch, above 0."""
    least = 1 if number >= len(seconds) else 0
    total = sum(1 / one for one in seconds)
    due = [number / one / total for one in seconds]
    counts = [int(one) for one in due]
    by_rest = sorted(range(len(due)), key=lambda place: (counts[place] - due[place], place))
    for place in by_rest[: number - sum(counts)]:
        counts[place] += 1
    while min(counts) < least:
        some = [place for place, count in enumerate(counts) if count > least]
        counts[max(some, key=lambda place: (counts[place] - due[place], counts[place]))] -= 1
        counts[counts.index(0)] += 1
    return tuple(counts)


def better(counts: Sequence[int], seconds: Sequence[float]) -> tuple[int, ...] | None:
    """The shares by speed, if with them the slowest replica is done at least 5 % sooner than with ``counts``;
    else None."""
    found = by_speed(seconds, sum(counts))
    now, then = (max(n * one for n, one in zip(some, seconds, strict=True)) for some in (counts, found))
    return found if then <= (1 - LEAST_GAIN) * now else None


def smoothed(before: float, new: float) -> float:
    """Seconds that follow ``new`` ones, and no single outlier; 0 before the first."""
    return before + SMOOTHING * (new - before) if before else new
