"""The search of ``fitting.py`` compiled, with the memory it works in."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...compression.kernels.jit import Code, compiled
from ...compression.kernels.lower import lowered
from . import fitting

MOST_BUFFERS = 1000  # that are searched: what a call of the search holds grows with their square
_FUNCTIONS = (fitting.put, fitting.undo, fitting.fit)
_NUM_ARGUMENTS = fitting.fit.__code__.co_argcount


@functools.cache
def _code() -> Code:
    names = [function.__name__ for function in _FUNCTIONS]
    return compiled(lowered(*_FUNCTIONS), names, isa="portable", label="fitting")


class Fitter:
    """Buffers whose lifetimes are sections of time, to be fitted below one limit after the other."""

    def __init__(self, buffers: Sequence[tuple[int, int, int]], live: int) -> None:
        """``buffers``: (first section, behind the last, size); ``live``: the most that is there at once."""
        self._buffers, self._live = buffers, live
        self._num_sections = max(last for _, last, _ in buffers)

    def run(
        self, order: Sequence[int], limit: int, work: int, *, compiled: bool = True
    ) -> tuple[int, list[int], int]:
        """Fit all below ``limit``, trying them in ``order``; without ``compiled`` Python itself runs it.

        Returns: 1, 0 if nothing fits, or -1 if the work ended first; offsets, if all lie; the work done."""
        sorted_buffers = [self._buffers[index] for index in order]
        count, num_sections = len(order), self._num_sections
        columns: list[Any] = [
            np.array(column, dtype=np.int64) for column in zip(*sorted_buffers, strict=True)
        ]
        seen: dict[tuple[int, int, int], int] = {}
        twins = []
        for index, buffer in enumerate(sorted_buffers):
            twins.append(seen.get(buffer, -1))
            seen[buffer] = index
        left = np.zeros(num_sections, dtype=np.int64)
        for first, last, size in sorted_buffers:
            left[first:last] += size
        zeros = functools.partial(np.zeros, dtype=np.int64)
        box = np.array([count, num_sections, limit, work, 0], dtype=np.int64)
        at = np.full(count, -1, dtype=np.int64)
        trail, kept, raw = zeros(count), zeros((count + 1) * num_sections), zeros(2 * (count + 1) * count)
        given = [
            box,
            *columns,
            np.array(twins, dtype=np.int64),
            zeros(num_sections),
            left,
            at,
            trail,
            kept,
            raw,
        ]
        given += [zeros(num_sections) for _ in range(3)]
        last: Any = 0, 0, num_sections, 0, -1
        if compiled:
            kinds = [ctypes.c_int64] * (_NUM_ARGUMENTS + 1)
            call: Any = ctypes.CFUNCTYPE(*kinds)(_code().addresses["fit"])
            found = call(*[array.ctypes.data for array in given], *last)
        else:
            numbers = [array.tolist() for array in given]
            found = fitting.fit(*numbers, *last)
            box, at = numbers[0], numbers[7]
        offsets = [0] * count
        for index, offset in zip(order, at, strict=True):
            offsets[index] = int(offset)
        return found, offsets, work - int(box[3])
