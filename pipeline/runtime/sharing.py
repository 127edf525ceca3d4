"""Shares of the replicas of stages from step to step: those of the plan, or by measured speed.

All ranks know the seconds of all from the report of a step, and draw the same shares from them: it costs no
exchange, and the next step is dealt anew on every rank, or on none.
Source: claims C5 and C6 of CN107463448A (nodes of unlike devices)."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence

from ...compression.errors import PlanError
from ...stages.planner.plan import Plan
from ...stages.planner.plan_stage import counts_of
from ..schedules.shares import Shares, better, smoothed

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


def check_asked(asked: object) -> None:
    """Refuse shares that there are not, before other ranks hear of them.

    Raises:  PlanError: they are something else than measured ones or none."""
    if asked is not None and asked != MEASURED:
        raise PlanError(
            f"shares are {MEASURED!r}, found {asked!r:.60}; leave them out for those of the plan, which has "
            "weights by partition(..., shares=[3, 1])"
        )


def sharing_of(asked: str | None, plan: Plan, *, alone: bool) -> Sharing:
    """What ``Pipeline(shares=asked)`` means.

    Args:    alone: one process has all replicas as one.
    Raises:  PlanError: it means nothing, or suits another plan."""
    check_asked(asked)
    if asked is not None and max(plan.replicas) == 1:
        raise PlanError(
            "shares are for stages with replicas, and the plan has one rank a stage; leave them out"
        )
    return Planned() if alone or asked is None else Measured()
