"""Hit rates in closed form, for jobs of one speed that use each sample once an epoch in random orders.

``share`` is the capacity by all samples: of one data set where jobs read the same, else of all data sets
together. Derived for phases that are spread evenly, and as fluids: many samples, many jobs; 0 to 1."""

from __future__ import annotations

from math import exp, log


def never_evict(share: float) -> float:
    """What stays is hit once an epoch. For a job alone no policy hits more, whatever it knows."""
    return share


def lru(share: float) -> float:
    """Of a job alone, or of several that each have their part.

    A sample survives if fewer others than fit came since: f + (1 - f) ln(1 - f)."""
    return share + (1 - share) * log(1 - share) if share < 1 else 1.0


def next_use_own(share: float) -> float:
    """Of many jobs with data of their own: h = (1.06 c)^(2/3), where that is below a half.

    A sample used with the rest u of an epoch to go, and at position v of the next, holds its slot for u + v;
    the shortest are kept."""
    return (1.06 * share) ** (2 / 3)


def next_use_same(share: float) -> float:
    """Of many jobs with one data set: c = 1 - e^-x (1 + x), h = 1 - e^-x.

    Times between the uses of a sample are exponential, and the shortest are kept."""
    if share >= 1:
        return 1.0
    low, high = 0.0, 50.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - exp(-middle) * (1 + middle) < share else (low, middle)
    return 1 - exp(-low)
