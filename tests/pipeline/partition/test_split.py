"""Cutting a line: what brute force over all cuts finds, where links cost more or less than parts."""

import itertools
import math
import random

import pytest

from penstock.pipeline.partition.split import split


def by_brute_force(points, *, parts, span, edge, weight):
    """The cuts of the definition in ``split``."""

    def costs(ends):
        return [
            max(span(start, end, part), edge[start] if part else 0, edge[end])
            for part, (start, end) in enumerate(itertools.pairwise(ends))
        ]

    def key(ends):
        return sum(weight[end] for end in ends[1:]), max(costs(ends)), ends[::-1]

    inner = itertools.combinations(points[1:-1], parts - 1)
    found = [[points[0], *cuts, points[-1]] for cuts in inner]
    smallest = min((max(costs(ends)) for ends in found), default=math.inf)
    near = [ends for ends in found if max(costs(ends)) <= smallest * 105 // 100]
    return min(near, key=key) if smallest < math.inf else None


@pytest.mark.parametrize("seed", range(60))
def test_it_is_the_split_that_brute_force_finds(seed):
    draw = random.Random(seed)
    points = sorted(draw.sample(range(15), draw.randint(3, 9)))
    sizes = [draw.choice([1, 2, 5, 20, 60]) for _ in range(15)]
    case = {
        "parts": draw.randint(1, 4),
        "span": lambda start, end, part: math.inf if end - start > 11 else sum(sizes[start:end]),
        "edge": [0, *(draw.choice([0, 3, 30, 100, math.inf]) for _ in range(14))],
        "weight": [draw.randint(0, 9) for _ in range(15)],
    }
    case["edge"][points[0]] = case["edge"][points[-1]] = 0
    assert split(points, **case) == by_brute_force(points, **case)
