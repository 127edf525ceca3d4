"""Cut a line into parts: the costliest part as cheap as can be, to 5 %, then the cuts as light as that lets.

The one algorithm behind stages and ranks. Costs are measured, and two that differ by less than measurements
err are equals; what passes the cuts is known exactly. So that decides, and not the noise of a busy machine.
Two passes, because a prefix of the best whole need not be a best prefix: the first finds the smallest limit
that some split keeps, the second the lightest split near it."""

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# (start, end, part) -> cost of that part; math.inf: not allowed
Span = Callable[[int, int, int], float]
# of the parts up to a point: the weight of their cuts, the cost of the costliest
Value = tuple[float, float]

TOLERANCE = 5  # per cent by which predictions may err (law L4), and costs differ that count as equal
NOWHERE = (math.inf, math.inf)


def split(
    points: Sequence[int],
    *,
    parts: int,
    span: Span,
    edge: Sequence[Sequence[float]],
    weight: Sequence[int],
    least: Span | None = None,
    tolerance: int = TOLERANCE,
) -> list[int] | None:
    """Choose ``parts - 1`` of the inner points as cuts; the first and last point are the ends of the line.

    Args:
        points: ascending positions; ``weight`` is indexed by position.
        span: cost of a part by itself, a whole number or math.inf.
        edge: of each part, what it and the next one pay for a cut there, each as ``max(span, edges)``.
        weight: the sum over the cuts decides among splits whose costliest part is within the tolerance of the
            cheapest possible; among equals, from the last cut on, the costliest part in front of it, then
            the earlier place.
        least: what a part costs at least, which never falls when it grows, so that longer ones need no look;
            None: ``span`` itself never falls.
        tolerance: per cent.
    Returns: the chosen positions ascending, both ends included, or None where nothing is allowed."""
    # 1. the smallest limit that some split keeps, and the tolerance over it
    least = least or span
    smallest = smallest_limit(points, parts=parts, span=span, edge=edge, least=least)
    if smallest == math.inf:
        return None
    line = _Line(points, parts, span, least, edge, weight, limit=smallest * (100 + tolerance) // 100)
    # 2. the best value of each part at every point
    values = line.values()
    # 3. back from the last point, to the earliest start that has the value
    ends = [len(points) - 1]
    for part in reversed(range(parts)):
        end = ends[-1]
        best = values[part + 1][end]
        starts = enumerate(values[part][:end])
        ends.append(next(i for i, before in starts if line.value(before, span, i, end, part) == best))
    return [points[end] for end in reversed(ends)]


def smallest_limit(
    points: Sequence[int], *, parts: int, span: Span, edge: Sequence[Sequence[float]], least: Span
) -> float:
    """The smallest possible cost of the costliest part; math.inf where nothing is allowed."""
    line = _Line(points, parts, span, least, edge, weight=[0] * (points[-1] + 1), limit=math.inf)
    return line.values()[-1][-1][1]


@dataclass(frozen=True)
class _Line:
    """A line to cut, and the limit that no part of it may cost more than."""

    points: Sequence[int]
    parts: int
    span: Span
    least: Span
    edge: Sequence[Sequence[float]]
    weight: Sequence[int]
    limit: float

    def values(self) -> list[list[Value]]:
        """Return the best value up to every point: of no part, of the first part, of the first two, ...

        A value is a sum and a maximum, so that under a known limit a prefix of the best is a best prefix."""
        found: list[list[Value]] = [[(0, 0), *[NOWHERE] * (len(self.points) - 1)]]
        for part in range(self.parts):
            found.append(self._with_part(part, found[-1]))
        return found

    def value(self, before: Value, span: Span, start: int, end: int, part: int) -> Value:
        """Return the value up to ``end`` where this part begins at ``start``, which has the value before."""
        cost = span(self.points[start], self.points[end], part)
        if cost > self.limit:
            return NOWHERE
        costliest = max(before[1], cost, self.edge[part][self.points[end]])
        return before[0] + self.weight[self.points[end]], costliest

    def _with_part(self, part: int, before: Sequence[Value]) -> list[Value]:
        """Return the values with this part, from those in front of it.

        A start is kept until a later one is as good: values of those kept ascend, and the least costs from
        them to an end descend. The best for that end is where these meet, found in about log n looks at n
        points. Only where a part costs more than the least, as with frames under a budget, more are tried."""
        found, kept, first, offered = [NOWHERE] * len(self.points), list[int](), 0, 0
        last = len(self.points) - 1
        # each part behind it needs a point, too
        for end in range(last if part == self.parts - 1 else part + 1, last - (self.parts - 1 - part) + 1):

            def cost_from(start: int, end: int = end) -> float:
                return self.least(self.points[start], self.points[end], part)

            # 1. the starts for this end
            for start in range(offered, end):
                while len(kept) > first and before[kept[-1]] >= before[start]:
                    kept.pop()
                if before[start][1] < math.inf:
                    kept.append(start)
            offered = end
            while first < len(kept) and cost_from(kept[first]) > self.limit:
                first += 1
            if first == len(kept) or self.edge[part][self.points[end]] > self.limit:
                continue
            # 2. the best of them by the least cost, and what it costs
            lightest = before[kept[first]][0]
            meet = bisect.bisect_left(
                kept, True, first, key=lambda one: before[one] >= (lightest, cost_from(one))
            )
            near = kept[max(meet - 1, first) : meet + 1]
            lower, found[end] = (
                min(self.value(before[one], cost, one, end, part) for one in near)
                for cost in (self.least, self.span)
            )
            if lower == found[end]:
                continue
            # 3. all that may be better
            here = self.weight[self.points[end]]
            meet = bisect.bisect_left(
                kept, found[end], first, key=lambda one: (before[one][0] + here, before[one][1])
            )
            for start in range(kept[max(meet - 1, first)], part - 1, -1):
                cost = cost_from(start)
                if cost > self.limit or (lightest + here, cost) >= found[end]:
                    break  # and so would every longer one
                found[end] = min(found[end], self.value(before[start], self.span, start, end, part))
        return found
