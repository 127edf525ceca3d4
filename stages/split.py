"""Cut a line into parts: the costliest part as cheap as possible, then the cuts as light as that allows.

The one algorithm behind stages and ranks. Two passes, because a prefix of the best whole need not be a best
prefix: the first finds the smallest limit that some split keeps, the second the lightest split that keeps it.
"""

import math
from collections.abc import Callable, Sequence

# (start, end, part) -> cost of that part; never falls when the part grows; math.inf: not allowed
Span = Callable[[int, int, int], float]


def split(
    points: Sequence[int], *, parts: int, span: Span, edge: Sequence[float], weight: Sequence[int]
) -> list[int] | None:
    """Choose ``parts - 1`` of the inner points as cuts; the first and last point are the ends of the line.

    Args:
        points: ascending positions; ``edge`` and ``weight`` are indexed by position.
        span: cost of a part by itself.
        edge: what both parts at a cut pay for it, each as ``max(span, edges)``.
        weight: the sum over the cuts decides among splits whose costliest part is equal.
    Returns: the chosen positions ascending, both ends included, or None where nothing is allowed.
    """
    limit = smallest_limit(points, parts=parts, span=span, edge=edge)
    if limit == math.inf:
        return None
    lightest: list[float] = [0, *[math.inf] * (len(points) - 1)]
    chosen: list[list[int]] = []
    for part in range(parts):
        found, before = [math.inf] * len(points), [0] * len(points)
        for end in range(part + 1, len(points)):
            if edge[points[end]] > limit:
                continue
            for start in range(end - 1, part - 1, -1):
                if span(points[start], points[end], part) > limit:
                    break  # and so would every longer one
                if lightest[start] + weight[points[end]] < found[end]:
                    found[end], before[end] = lightest[start] + weight[points[end]], start
        lightest = found
        chosen.append(before)
    ends = [len(points) - 1]
    for before in reversed(chosen):
        ends.append(before[ends[-1]])
    return [points[end] for end in reversed(ends)]


def smallest_limit(points: Sequence[int], *, parts: int, span: Span, edge: Sequence[float]) -> float:
    """The smallest possible cost of the costliest part; math.inf where nothing is allowed."""
    smallest: list[float] = [0, *[math.inf] * (len(points) - 1)]
    for part in range(parts):
        found = [math.inf] * len(points)
        for end in range(part + 1, len(points)):
            least = math.inf
            for start in range(end - 1, part - 1, -1):
                cost = span(points[start], points[end], part)
                if cost >= least:
                    break  # and so would every longer one
                least = min(least, max(cost, smallest[start]))
            found[end] = max(least, edge[points[end]])
        smallest = found
    return smallest[-1]
