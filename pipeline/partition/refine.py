"""Cuts near the exact one, compared by their simulated step.

The exact search goes by the costliest rank. A step also fills and drains, waits for links while few
micro-batches are in flight, and has several stages on a rank: the simulation knows all that, and no search
over all cuts could ask it. So it looks at all if there are few, else at some: those that send fewer bytes
than the exact one, and from the best of them on in shorter and shorter moves."""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from math import comb

from .split import TOLERANCE

LOOKS = 32  # cuts of which a step is simulated
LOOSER = (50,)  # per cent by which the costliest rank of a start may exceed the cheapest
FARTHEST = 8  # places that a cut moves at first, then half as far, down to one

Cuts = tuple[int, ...]


def refined(
    starts: Sequence[Cuts], places: Sequence[int], seconds: Callable[[Cuts], float], *, looks: int
) -> Cuts:
    """Return the first of ``starts``, or the best of ``looks`` cuts if that shortens a step by more than 5 %.

    Args:   starts: the exact cut, then one with fewer bytes.
            places: where the model may be cut, ascending.
            seconds: the simulated step with these cuts; math.inf where they do not fit."""
    first, stride = starts[0], FARTHEST
    few = comb(len(places), len(first)) <= looks
    known = {cuts: seconds(cuts) for cuts in (*starts, *(combinations(places, len(first)) if few else ()))}
    best = min(known, key=known.__getitem__)
    while stride and len(known) < looks:
        before = best
        for other in _moved(best, places, stride):
            if other not in known and len(known) < looks:
                known[other] = seconds(other)
                best = min(best, other, key=known.__getitem__)
        stride //= 1 if best != before else 2
    return best if 100 * known[first] > (100 + TOLERANCE) * known[best] else first


def _moved(cuts: Cuts, places: Sequence[int], stride: int) -> Iterator[Cuts]:
    """Each of ``cuts`` so many places earlier or later, or as far as its neighbours let it."""
    found = [places.index(cut) for cut in cuts]
    ends = [-1, *found, len(places)]
    for number, place in enumerate(found):
        for moved in (max(place - stride, ends[number] + 1), min(place + stride, ends[number + 2] - 1)):
            yield (*cuts[:number], places[moved], *cuts[number + 1 :])
