"""Whether buffers with lifetimes fit below a limit: a search that misses nothing, bounded by its work.

Buffers enter from the bottom up, each as low as those under it let it. Every placement can be pushed down
until it is of that kind without growing, so only three questions cut the tree: does what is still to come in
a section of time fit above its floor, would a buffer leave a gap that another one fills whole, and do the
parts that share no time fit each by itself.

The functions speak the Python of ``compression/kernels/lower.py``, which compiles them; they run as they are
as well. What they share:

    box      buffers, sections, limit, work that is left, buffers on the trail
    first, last, size   of buffers, which are in order of choice; ``twin``: one before that is alike, or -1
    at       offsets, or -1; ``trail``: who came in which order; ``kept``: the heights that it covered
    height, left        of sections: where the top is, and how many bytes are still to come

Source: the published idea of MiniMalloc: Moffitt, A Lightweight Memory Allocator for Hardware-Accelerated
Machine Learning, ASPLOS 2023 (canonical solutions, dominated offsets, section inference, decomposition).
"""

from __future__ import annotations


def put(
    box: list[int],
    first: list[int],
    last: list[int],
    size: list[int],
    height: list[int],
    left: list[int],
    at: list[int],
    trail: list[int],
    kept: list[int],
    i: int,
    offset: int,
) -> int:
    """Lay buffer ``i`` at ``offset``."""
    base = box[4] * box[1]
    trail[box[4]] = i
    box[4] += 1
    at[i] = offset
    for s in range(first[i], last[i]):
        kept[base + s] = height[s]
        height[s] = offset + size[i]
        left[s] -= size[i]
    return 0


def undo(
    box: list[int],
    first: list[int],
    last: list[int],
    size: list[int],
    height: list[int],
    left: list[int],
    at: list[int],
    trail: list[int],
    kept: list[int],
    mark: int,
) -> int:
    """Take away all but the first ``mark`` buffers of the trail."""
    while box[4] > mark:
        box[4] -= 1
        base = box[4] * box[1]
        i = trail[box[4]]
        at[i] = -1
        for s in range(first[i], last[i]):
            height[s] = kept[base + s]
            left[s] += size[i]
    return 0


def fit(
    box: list[int],
    first: list[int],
    last: list[int],
    size: list[int],
    twin: list[int],
    height: list[int],
    left: list[int],
    at: list[int],
    trail: list[int],
    kept: list[int],
    raw: list[int],
    floor: list[int],
    reach: list[int],
    tops: list[int],
    depth: int,
    low: int,
    high: int,
    now: int,
    before: int,
) -> int:
    """Lay what is left in the sections from ``low`` to ``high``, none lower than ``now``.

    Returns: 1: all lie; 0: they cannot; -1: out of work."""
    never = 4611686018427387904
    n = box[0]
    box[3] -= n + high - low
    if box[3] < 0:
        return -1
    base = depth * n
    for s in range(low, high):
        floor[s] = never
        tops[s] = never
        reach[s] = 0
    count = 0
    below = never  # a buffer from here on leaves room under it for a whole other one
    for i in range(n):
        if at[i] < 0 and low <= first[i] and first[i] < high:
            count += 1
            offset = 0
            for s in range(first[i], last[i]):
                offset = max(offset, height[s])
            raw[base + i] = offset
            below = min(below, offset + size[i])
            reach[first[i]] = max(reach[first[i]], last[i])
            top = max(offset, now) + size[i]
            for s in range(first[i], last[i]):
                tops[s] = min(tops[s], top)
            box[3] -= 3 * (last[i] - first[i])
    if count == 0:
        return 1
    if below <= now:
        return 0
    for i in range(n):
        if at[i] < 0 and low <= first[i] and first[i] < high:
            offset = raw[base + i]
            if offset < now or (offset == now and i < before):  # waits for one under it
                offset = never
                for s in range(first[i], last[i]):
                    offset = min(offset, tops[s])
            if offset + size[i] > box[2]:
                return 0
            for s in range(first[i], last[i]):
                floor[s] = min(floor[s], offset)
    for s in range(low, high):
        if left[s] > 0 and floor[s] + left[s] > box[2]:
            return 0
    mark = box[4]
    s = low
    parts = 0
    while s < high:  # what shares no time does not care for each other
        if reach[s] == 0:
            s += 1
            continue
        begin = s
        end = reach[s]
        while s < end:
            end = max(end, reach[s])
            s += 1
        if begin == low and end == high:
            break
        found = fit(
            box, first, last, size, twin, height, left, at, trail, kept, raw, floor, reach, tops,
            depth + 1, begin, end, now, before,
        )  # fmt: skip
        if found != 1:
            undo(box, first, last, size, height, left, at, trail, kept, mark)
            return found
        parts += 1
    if parts > 0:
        return 1
    tried = -1
    tried_at = -1
    while tried < n:
        best = -1
        best_at = below
        for i in range(n):
            if at[i] < 0 and low <= first[i] and first[i] < high:
                offset = raw[base + i]
                if offset < now or (offset == now and i < before) or offset >= best_at:
                    continue
                if offset < tried_at or (offset == tried_at and i <= tried):
                    continue
                if twin[i] >= 0 and at[twin[i]] < 0:
                    continue
                best = i
                best_at = offset
        if best < 0:
            return 0
        tried = best
        tried_at = best_at
        put(box, first, last, size, height, left, at, trail, kept, best, best_at)
        found = fit(
            box, first, last, size, twin, height, left, at, trail, kept, raw, floor, reach, tops,
            depth + 1, low, high, best_at, best,
        )  # fmt: skip
        if found != 0:
            return found
        undo(box, first, last, size, height, left, at, trail, kept, mark)
    return 0
