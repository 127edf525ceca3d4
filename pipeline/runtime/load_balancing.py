"""Numbers of micro-batches for each replica of a stage, in proportion to its measured speed.

Shares are taken up only where the slowest replica gains by it: seconds vary, and shares that follow each of
their turns would make ever other sums, and plans of steps, for nothing.
Source: Hamilton's method (Balinski and Young, Fair Representation, 1982, appendix A)."""

from collections.abc import Mapping, Sequence

from ...compression.errors import PlanError
from ...stages.plan.plan import Plan
from ...stages.plan.plan_stage import counts_of

Shares = Sequence[Sequence[int]]  # of every stage

LEAST_GAIN = 0.05  # of the seconds of the slowest replica; predictions err by as much
SMOOTHING = 0.3  # the weight of the newest seconds: what lasts counts for half after two steps


def by_speed(seconds: Sequence[float], number: int) -> tuple[int, ...]:
    """Shares of ``number`` micro-batches in proportion to speed, by largest remainder; ``seconds``: of each
    replica for one. Each gets one at least where there are as many, or nobody would see it become faster."""
    least = 1 if number >= len(seconds) else 0
    total = sum(1 / one for one in seconds)
    due = [number / one / total for one in seconds]
    counts = [int(one) for one in due]
    by_rest = sorted(range(len(due)), key=lambda place: (counts[place] - due[place], place))
    for place in by_rest[: number - sum(counts)]:
        counts[place] += 1
    while min(counts) < least:
        some = [place for place, count in enumerate(counts) if count > least]
        counts[max(some, key=lambda place: (counts[place] - due[place], counts[place]))] -= 1
        counts[counts.index(0)] += 1
    return tuple(counts)


def better(counts: Sequence[int], seconds: Sequence[float]) -> tuple[int, ...] | None:
    """The shares by speed, if they make the slowest replica at least 5 % faster than ``counts``; else
    None."""
    found = by_speed(seconds, sum(counts))
    now, then = (max(n * one for n, one in zip(some, seconds, strict=True)) for some in (counts, found))
    return found if then <= (1 - LEAST_GAIN) * now else None


def smoothed(before: float, new: float) -> float:
    """Seconds that follow ``new`` ones, and no single outlier; 0 before the first."""
    return before + SMOOTHING * (new - before) if before else new


MEASURED = "measured"
Seconds = Mapping[int, float]
NONE: Seconds = {}


class LoadBalancer:
    """The shares of a plan from step to step; where it ``follows``, they may change. ``seconds``: by rank its
    smoothed seconds for a micro-batch, as far as the next shares depend on them."""

    def __init__(self, *, follows: bool) -> None:
        self.follows, self.first = follows, True
        self.seconds: dict[int, float] = {}

    def begin(self, plan: Plan, kept: Shares = (), seconds: Seconds = NONE) -> Plan:
        """``plan`` as it begins; ``kept`` and ``seconds`` are those of a checkpoint, for as many replicas."""
        if not (self.follows and tuple(map(len, kept)) == plan.replicas):
            kept, seconds = plan.shares, NONE
        self.first, self.seconds = True, dict(seconds)
        return _with_shares(plan, kept)

    def after(self, plan: Plan, *, number: int, seconds: Sequence[float]) -> Plan:
        """``plan`` after a step of ``number`` micro-batches; the first is slow for other reasons and does not
        count."""
        if self.first or not self.follows:
            self.first = False
            return plan
        shares_of_stages = list(plan.shares)
        for stage, shares in enumerate(plan.shares):
            ranks = plan.stages[stage].ranks
            for rank, count in zip(ranks, counts_of(shares, number), strict=True):
                if count and seconds[rank]:
                    self.seconds[rank] = smoothed(self.seconds.get(rank, 0.0), seconds[rank] / count)
            known = [self.seconds[rank] for rank in ranks if rank in self.seconds]
            if len(ranks) > 1 and known:  # an idle rank is taken to be slow, so that it is measured
                predicted = [self.seconds.get(rank, max(known)) for rank in ranks]
                counts = better(counts_of(shares, plan.micro_batches), predicted)
                shares_of_stages[stage] = counts or shares
        return _with_shares(plan, shares_of_stages)


def _with_shares(plan: Plan, shares: Shares) -> Plan:
    return plan if tuple(map(tuple, shares)) == plan.shares else plan.with_shares(shares)


def check_asked(asked: object, plan: Plan) -> None:
    """Refuse shares that are neither measured ones nor none, and any of a plan with one rank a stage."""
    if asked is not None and asked != MEASURED:
        raise PlanError(
            f"shares are {MEASURED!r}, found {asked!r:.60}; leave them out for those of the plan, which has "
            "weights by partition(..., shares=[3, 1])"
        )
    if asked is not None and max(plan.replicas) == 1:
        raise PlanError(
            "shares are for stages with replicas, and the plan has one rank a stage; leave them out"
        )
