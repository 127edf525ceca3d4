"""When something is used next: of every saved tensor, parameter, version and optimizer state, at every point.

A program says which instructions read a thing, and the layers of its stages say where in them; so both are
sorted once, and a question costs a binary search. Whoever moves things asks here what may leave, and for how
long."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...compression.errors import ScheduleError
from ...stages.weight_versions.policies import rule_named
from .instruction import Instruction, Op

BACKWARD = (Op.B, Op.I, Op.W)  # these walk the layers of their stage from the last to the first
KINDS = ("saved", "parameter", "version", "gradient", "optimizer")


class Point(NamedTuple):
    """A layer in an instruction of a program: both by number."""

    instruction: int
    layer: int


class Datum(NamedTuple):
    """A datum in use: the ``number``-th saved tensor of a stage for the micro-batch ``of``; or the
    "parameter"s
    of layer ``number`` (the newest), their "version" ``of``, their "gradient", their "optimizer" state."""

    kind: str
    stage: int
    number: int
    of: int = 0


class NextUse:
    """The next use of everything that a rank's program reads.

    A saved tensor is used at its layers in its micro-batch's B, or in I and in W: a graph stands until W. The
    newest parameters are used wherever a micro-batch sees them, and by U; a version by what sees it, and by
    the U that makes the next one. Versions are numbered from 0 at the start of the program, which is a drain.
    Gradients are used by B, W and U, the optimizer's state by U. A prediction counts as the version that it
    starts from."""

    def __init__(
        self,
        program: Sequence[Instruction],
        saved: Mapping[int, Sequence[Sequence[int]]],
        *,
        num_stages: int = 1,
        weights: str = "latest",
        micro_batches: int | None = None,
    ) -> None:
        """Sort the uses of one rank's ``program``.

        Args:
            saved: Of every stage, for each saved tensor the layers whose backward reads it.
            num_stages: Of all ranks together, by which ``weights`` counts its versions.
            weights: A policy of a plan; micro_batches: those of one update where a batch makes one.

        Raises:
            PlanError: There is no such policy.
        """
        self._program = tuple(program)
        self._saved = {stage: [sorted(layers) for layers in each] for stage, each in saved.items()}
        self._uses: dict[Datum, list[int]] = {}
        seen = seen_versions(program, num_stages=num_stages, weights=weights, micro_batches=micro_batches)
        updates = dict.fromkeys((i.stage for i in program), 0)
        for index, ((stage, op, micro_batch), version) in enumerate(zip(program, seen, strict=True)):
            used = [("version", version)]
            if version == updates[stage]:
                used.append(("parameter", 0))
            if op in BACKWARD:
                used.append(("saved", micro_batch or 0))
            if op in (Op.B, Op.W, Op.U):
                used.append(("gradient", 0))
            if op is Op.U:
                used.append(("optimizer", 0))
                updates[stage] += 1
            for kind, of in used:
                self._uses.setdefault(Datum(kind, stage, 0, of), []).append(index)

    def of(self, what: Datum, at: Point | None = None) -> Point | None:
        """The first use of ``what`` behind ``at`` (None: from the start on); None where there is none.

        Raises:  ScheduleError: ``what`` is of no known kind."""
        if what.kind not in KINDS:
            raise ScheduleError(f"a kind of data is one of {', '.join(KINDS)}, found {what.kind!r}")
        uses = self._uses.get(what._replace(number=0), ())
        layers = self._saved[what.stage][what.number] if what.kind == "saved" else (what.number,)
        first = 0 if at is None else bisect_left(uses, at.instruction)
        for index in uses[first : first + 2] if layers else ():
            backward = self._program[index].op in BACKWARD
            if at is None or index > at.instruction:
                return Point(index, layers[-1 if backward else 0])
            place = bisect_left(layers, at.layer + (not backward))  # layers before it come behind, or after
            left = layers[:place] if backward else layers[place:]
            if left:
                return Point(index, left[-1 if backward else 0])
        return None


def seen_versions(
    program: Sequence[Instruction],
    *,
    num_stages: int,
    weights: str = "latest",
    micro_batches: int | None = None,
) -> list[int]:
    """For every instruction the version of its stage's weights that it reads: updates since the start.

    An update reads the newest. Args as for ``NextUse``."""
    rule, found = rule_named(weights), []
    updates = dict.fromkeys((i.stage for i in program), 0)
    most = max((i.micro_batch for i in program if i.micro_batch is not None), default=0) + 1
    in_update = (micro_batches or most) if rule.per_batch else 1
    for stage, op, micro_batch in program:
        version = updates[stage]
        if micro_batch is not None and rule.delay:
            version = min(version, rule.version(micro_batch // in_update, stage, num_stages))
        found.append(version)
        updates[stage] += op is Op.U
    return found
