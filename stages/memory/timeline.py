"""When what a forward saved is read: the layers of a rank's program in running order, as plain positions.

A step is known before it runs, so every saved tensor has a next use: its layer in the backward of its
micro-batch, however many other forwards and backwards lie between.
Source: claims 1 and 4 of CN110032450B (data dependencies of the backward, so many layers ahead)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

NEVER = 1 << 62  # not in this program: in a later step, or nobody knows


class Pass(NamedTuple):
    """The layers of ``stage`` run on ``micro_batch``: forward in ascending order, else (``reads``) back."""

    stage: int
    micro_batch: int | None
    reads: bool = False


class Timeline:
    """Positions count layers; every pass takes as many as its stage has layers, and one at least.

    Nothing of it changes: steps that run the same program share one."""

    def __init__(self, program: Sequence[Pass] = (), num_layers: Mapping[int, int] | None = None) -> None:
        """``num_layers``: of every stage."""
        self.program, self._num_layers = tuple(program), dict(num_layers or {})
        self._starts, self._reads, position = list[int](), list[tuple[int, Pass]](), 0
        for one in self.program:
            self._starts.append(position)
            if one.reads:
                self._reads.append((position, one))
            position += max(1, self._num_layers.get(one.stage, 1))

    def start(self, number: int) -> int:
        """Where pass ``number`` of the program begins."""
        return self._starts[number]

    def position(self, start: int, stage: int, layer: int, *, reads: bool) -> int:
        """Where ``layer`` of a pass of ``stage`` runs that begins at ``start``."""
        return start + (max(0, self._num_layers.get(stage, 0) - 1 - layer) if reads else layer)

    def readings(self, now: int) -> Iterator[tuple[int, Pass]]:
        """The passes that read what was saved, from the one that runs at ``now`` on, and where they begin."""
        for start, one in self._reads:
            if start + max(1, self._num_layers.get(one.stage, 1)) > now:
                yield start, one

    def next_reading(self, stage: int, micro_batch: int, now: int) -> int:
        """Where the next pass begins that reads what ``stage`` saved of ``micro_batch``, or NEVER."""
        for start, one in self.readings(now):
            if one.stage == stage and one.micro_batch == micro_batch:
                return start
        return NEVER
