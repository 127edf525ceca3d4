"""Cut a line into parts: the costliest part as cheap as can be, to 5 %, then the cuts as light as that lets.

The one algorithm behind stages and ranks. Costs are measured, and two that differ by less than measurements
err are equals; what passes the cuts is known exactly. So that decides, and not the noise of a busy machine.
Two passes, because a prefix of the best whole need not be a best prefix: the first finds the smallest limit
that some split keeps, the second the lightest split near it."""

import math
from collections.abc import Callable, Sequence

# (start, end, part) -> cost of that part; math.inf: not allowed
Span = Callable[[int, int, int], float]

TOLERANCE = 5  # per cent by which predictions may err (law L4), and costs differ that count as equal


def split(
    points: Sequence[int],
    *,
    parts: int,
    span: Span,
    edge: Sequence[float],
    weight: Sequence[int],
    least: Span | None = None,
) -> list[int] | None:
    """Choose ``parts - 1`` of the inner points as cuts; the first and last point are the ends of the line.

    Args:
        points: ascending positions; ``edge`` and ``weight`` are indexed by position.
        span: cost of a part by itself, a whole number or math.inf.
        edge: what both parts at a cut pay for it, each as ``max(span, edges)``.
        weight: the sum over the cuts decides among splits whose costliest part is within the tolerance of the
            cheapest possible; among equals the costliest part, then the earlier cut, from the last on.
        least: what a part costs at least, which never falls when it grows, so that longer ones need no look;
            None: ``span`` itself never falls.
    Returns: the chosen positions ascending, both ends included, or None where nothing is allowed."""
    # 1. the smallest limit that some split keeps, and the tolerance over it
    least = least or span
    smallest = smallest_limit(points, parts=parts, span=span, edge=edge, least=least)
    if smallest == math.inf:
        return None
    limit = smallest * (100 + TOLERANCE) // 100
    # 2. the least (weight, cost of the costliest part) up to every point: a sum and a maximum, so that under
    #    a known limit a prefix of the best is a best prefix
    nowhere = (math.inf, math.inf)
    best: list[tuple[float, float]] = [(0, 0), *[nowhere] * (len(points) - 1)]
    chosen: list[list[int]] = []
    for part in range(parts):
        found, before = [nowhere] * len(points), [0] * len(points)
        for end in _ends(part, parts, len(points)):
            edges = edge[points[end]]
            if edges > limit:
                continue
            for start in range(end - 1, part - 1, -1) if part else (0,):
                cost = span(points[start], points[end], part)
                if cost > limit:
                    if least(points[start], points[end], part) > limit:
                        break  # and so would every longer one
                    continue
                lightest, costliest = best[start]
                one = lightest + weight[points[end]], max(costliest, cost, edges)
                if one <= found[end]:
                    found[end], before[end] = one, start
        best = found
        chosen.append(before)
    # 3. back from the last point along the chosen starts
    ends = [len(points) - 1]
    for before in reversed(chosen):
        ends.append(before[ends[-1]])
    return [points[end] for end in reversed(ends)]


def _ends(part: int, parts: int, points: int) -> range:
    """The points at which a part may end: each part behind it needs one, too."""
    return range(points - 1 if part == parts - 1 else part + 1, points - (parts - 1 - part))


def smallest_limit(
    points: Sequence[int], *, parts: int, span: Span, edge: Sequence[float], least: Span
) -> float:
    """The smallest possible cost of the costliest part; math.inf where nothing is allowed."""
    smallest: list[float] = [0, *[math.inf] * (len(points) - 1)]
    for part in range(parts):
        found = [math.inf] * len(points)
        for end in _ends(part, parts, len(points)):
            best = math.inf
            for start in range(end - 1, part - 1, -1) if part else (0,):
                cost = span(points[start], points[end], part)
                if cost >= best and least(points[start], points[end], part) >= best:
                    break  # and so would every longer one
                best = min(best, max(cost, smallest[start]))
            found[end] = max(best, edge[points[end]])
        smallest = found
    return smallest[-1]
