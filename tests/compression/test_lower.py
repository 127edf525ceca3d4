"""Functions of whole numbers: compiled they do what Python does."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest

from penstock.compression.kernels.jit import compiled
from penstock.compression.kernels.lower import lowered

pytestmark = pytest.mark.slow


def collatz(most: int) -> int:
    """The number below ``most`` with the longest way to one."""
    best = 1
    longest = 0
    for start in range(1, most):
        number = start
        steps = 0
        while number != 1:
            half = 0
            while 2 * half < number:
                half += 1
            if 2 * half == number:
                number = half
            else:
                number = 3 * number + 1
            steps += 1
        if steps > longest:
            longest = steps
            best = start
    return best


def queens(columns: list[int], row: int, size: int) -> int:
    """In how many ways ``size`` queens stand, the first ``row`` of which stand already."""
    if row == size:
        return 1
    found = 0
    for column in range(size):
        free = 1
        for above in range(row):
            gap = columns[above] - column
            if gap == 0 or gap == row - above or -gap == row - above:
                free = 0
                break
        if not (free == 1):
            continue
        columns[row] = column
        found += queens(columns, row + 1, size)
    return found


def ends(numbers: list[int], count: int) -> int:
    """The least and the largest, as one number."""
    low = numbers[0]
    high = numbers[0]
    i = 0
    while i < count and (numbers[i] != -7 or i == 0):
        low = min(low, numbers[i])
        high = max(high, numbers[i])
        numbers[i] -= 1
        i += 1
    return 1000 * high - low


def call(function: Callable[..., int], *arguments: int | list[int]) -> tuple[int, list[list[int]]]:
    code = compiled(lowered(function), [function.__name__], isa="portable", label="test")
    arrays = {index: np.array(a) for index, a in enumerate(arguments) if isinstance(a, list)}
    given = [arrays[index].ctypes.data if index in arrays else a for index, a in enumerate(arguments)]
    kinds = [ctypes.c_int64] * (len(given) + 1)
    found = ctypes.CFUNCTYPE(*kinds)(code.addresses[function.__name__])(*given)
    return found, [array.tolist() for array in arrays.values()]


def test_loops_and_branches() -> None:
    assert call(collatz, 60)[0] == collatz(60) == 54


def test_recursion_and_items() -> None:
    assert call(queens, [0] * 6, 0, 6)[0] == queens([0] * 6, 0, 6) == 4


@pytest.mark.parametrize(
    "numbers",
    [[3], [-7, 5, 2], [4, -9, -7, 100], [1 << 40, -(1 << 40)]],
    ids=["one", "first", "stop", "large"],
)
def test_conditions_stop_where_python_stops(numbers: list[int]) -> None:
    changed = list(numbers)
    expected = ends(changed, len(numbers))
    assert call(ends, numbers, len(numbers)) == (expected, [changed])
