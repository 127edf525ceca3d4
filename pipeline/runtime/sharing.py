"""Which shares the replicas of stages have from step to step: the plan's, by measured speed, or as a run had.

All ranks know the seconds of all from the report of a step, and draw the same shares from them: it costs no
exchange, and the next step is dealt anew on every rank, or on none.
Source: claims C5 and C6 of CN107463448A (nodes of unlike devices)."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence

from ...compression.errors import PlanError
from ...stages.planner.dealing import counts_of
from ...stages.planner.plan import Plan
from ..schedules.shares import Course, Shares, better, smoothed

MEASURED = "measured"
Seconds = Mapping[int, float]
NONE: Seconds = {}


class Sharing(abc.ABC):
    """What shares a plan has.

    Attributes: follows: whether they may change between steps."""

    follows = True

    @abc.abstractmethod
    def begin(self, plan: Plan, step: int, kept: Shares, seconds: Seconds = NONE) -> Plan:
        """``plan`` as it begins with ``step``; ``kept``, ``seconds``: the shares, and what was ``known``,
        of a checkpoint that was loaded, if one was."""

    def known(self) -> Seconds:
        """The seconds of ranks for a micro-batch, as far as the next shares hang on them."""
        return NONE

    @abc.abstractmethod
    def after(self, plan: Plan, step: int, *, number: int, seconds: Sequence[float]) -> Plan:
        """``plan`` for ``step``, behind one of ``number`` micro-batches, at which ranks worked so long."""


class Planned(Sharing):
    """Those of the plan, always."""

    follows = False

    def begin(self, plan: Plan, step: int, kept: Shares, seconds: Seconds = NONE) -> Plan:
        """The plan."""
        return plan

    def after(self, plan: Plan, step: int, *, number: int, seconds: Sequence[float]) -> Plan:
        """The plan."""
        return plan


class Measured(Sharing):
    """By speed: seconds of each rank for a micro-batch, smoothed, from all steps but the first, which is slow
    for reasons of its own."""

    def begin(self, plan: Plan, step: int, kept: Shares, seconds: Seconds = NONE) -> Plan:
        """With what was kept, if it is of as many replicas; else as it is."""
        alike = tuple(map(len, kept)) == plan.replicas
        self.first, self.seconds = True, dict(seconds) if alike else {}
        return plan.with_shares(kept) if alike else plan

    def known(self) -> Seconds:
        """Smoothed, of the ranks that were seen."""
        return dict(self.seconds)

    def after(self, plan: Plan, step: int, *, number: int, seconds: Sequence[float]) -> Plan:
        """With shares by speed where the slowest replica of a stage gains by them."""
        if self.first:
            self.first = False
            return plan
        found = list(plan.shares)
        for stage, shares in enumerate(plan.shares):
            ranks = plan.stages[stage].ranks
            for rank, count in zip(ranks, counts_of(shares, number), strict=True):
                if count and seconds[rank]:
                    self.seconds[rank] = smoothed(self.seconds.get(rank, 0.0), seconds[rank] / count)
            known = [self.seconds[rank] for rank in ranks if rank in self.seconds]
            if len(ranks) > 1 and known:  # who was not seen yet is taken to be slow, and is seen so
                taken = [self.seconds.get(rank, max(known)) for rank in ranks]
                found[stage] = better(counts_of(shares, plan.micro_batches), taken) or shares
        return plan if tuple(found) == plan.shares else plan.with_shares(found)


class Replayed(Sharing):
    """Those that another run had at the same steps; before the first that is known, the plan's."""

    def __init__(self, plan: Plan, course: Course) -> None:
        """Refuse a course of another plan, now."""
        self.planned = plan.shares
        self.course = [(step, plan.with_shares(shares).shares) for step, shares in course]
        steps = [step for step, _ in course]
        if sorted(set(steps)) != steps:
            raise PlanError(f"a course of shares has every step once, ascending, found steps {steps}")

    def begin(self, plan: Plan, step: int, kept: Shares, seconds: Seconds = NONE) -> Plan:
        """With the last ones up to ``step``, also where that is earlier than what ran before."""
        *_, found = self.planned, *(shares for first, shares in self.course if first <= step)
        return plan if found == plan.shares else plan.with_shares(found)

    def after(self, plan: Plan, step: int, *, number: int, seconds: Sequence[float]) -> Plan:
        """With the last ones up to ``step``."""
        return self.begin(plan, step, ())


def check_asked(asked: object) -> None:
    """Refuse what is no list of steps with the shares of every stage, before others are told of it; whether
    it suits the plan, ``sharing_of`` knows.

    Raises:  PlanError: it is something else."""
    if asked is None or isinstance(asked, str):
        return
    listed = isinstance(asked, list | tuple)
    for one in asked if listed else [asked]:
        if not listed or not _is_entry(one):
            raise PlanError(
                "shares as another run had them are pairs of a step and the shares of every stage, all whole "
                f"numbers, found {one!r:.60}; give such as [(0, [[3, 1], [1, 1]])]"
            )


def _is_entry(one: object) -> bool:
    if not isinstance(one, list | tuple) or len(one) != 2:
        return False
    step, shares = one
    if type(step) is not int or not isinstance(shares, list | tuple):
        return False
    return all(isinstance(row, list | tuple) and all(type(n) is int for n in row) for row in shares)


def sharing_of(asked: str | Course | None, plan: Plan, *, alone: bool) -> Sharing:
    """What ``Pipeline(shares=asked)`` means.

    Args:    alone: one process has all replicas as one.
    Raises:  PlanError: it means nothing, or suits another plan."""
    if isinstance(asked, str) and asked != MEASURED:
        raise PlanError(
            f"shares are {MEASURED!r}, or (step, shares of every stage) as another run had them, found "
            f"{asked!r}; leave them out for those of the plan"
        )
    if asked is not None and max(plan.replicas) == 1:
        raise PlanError(
            "shares are for stages with replicas, and the plan has one rank a stage; leave them out"
        )
    course = None if asked is None or isinstance(asked, str) else Replayed(plan, asked)
    if alone or asked is None:
        return Planned()
    return course or Measured()
