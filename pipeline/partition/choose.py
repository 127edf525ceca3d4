"""Choice of the tiers that a plan leaves open: of all mixes that fit a rank's memory, the cheapest.

Each mix is cut by the same search with the same memory model. Its price is the time of its slowest rank for a
micro-batch: computing, and moving that does not hide behind it. Of equals the one that moves less is taken.
Source: steps S2 and S3 of the resource management of distributed deep learning (what fits where decides)."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ...compression.errors import PlanError
from ...compression.names import AUTO, HOST
from ...stages.plan.plan import Plan
from ...stages.plan.plan_stage import PlanStage
from ...stages.plan.validation import STREAM
from ...stages.profiling.network_profile import Profile
from ...stages.units import share_of, show_bytes
from .costs import with_margin

PACKING_RATE = 4e9  # bytes per second of a thread: below all of docs/results/codecs_epyc_zen4_2026-11-21
LINK_RATE = 10e9  # of a GPU to host memory: taken, as nothing of it has run on one
DISK_RATE = 1e9  # where nobody measured one
EQUAL = 1.02  # seconds that differ by less decide nothing: they were measured


class TooSmall(PlanError):
    """A budget that no cut keeps to; ``needed``: one that a cut keeps to, ``least``: and no smaller one."""

    def __init__(self, sentence: str, needed: int, *, least: bool) -> None:
        super().__init__(sentence)
        self.needed, self.least = needed, least


class Mix(NamedTuple):
    """Tiers of saved tensors and parameters while nobody reads them."""

    tier: str
    parameters_tier: str
    recompute: bool | Sequence[str]
    prefetches: bool

    def __str__(self) -> str:
        saved = "forwards that run again" if self.recompute else f"saved tensors in the tier {self.tier}"
        waits = "" if self.prefetches else ", one layer's at a time"
        return f"{saved} and parameters in the tier {self.parameters_tier}{waits}"


def is_open(
    memory: int | str | None, *, limited: bool, tier: str, parameters_tier: str, prefetches: bool | None
) -> bool:
    """Return whether a tier has to be chosen, or measured first."""
    moves = limited and parameters_tier != "device" and prefetches is None
    return AUTO in (tier, parameters_tier) or share_of(memory) is not None or moves


def cheapest(
    cut: Callable[..., Plan],
    profile: Profile,
    *,
    memory: int | str | None,
    tier: str,
    parameters_tier: str,
    recompute: bool | Sequence[str],
    prefetches: bool | None,
    limited: bool,
    disk_rate: float | None,
    looks: int,
) -> Plan:
    """Return the plan that ``cut`` (``partition``, told all else) makes with the cheapest mix of tiers.

    Args:    memory: a rank's budget, also as a share ("25%") of what it holds with everything kept.
             limited: there is a budget, be it that of a cluster; disk_rate: bytes per second of the disk; 0:
             it may not be used, None: not measured; looks: for the chosen mix alone.
    Raises:  PlanError: nothing fits, with the least budget that does."""
    kept, asked = Mix("device", "device", recompute=False, prefetches=True), f"memory={memory}"
    if (share := share_of(memory)) is not None:
        memory = bytes_of_share(share, cut)
        asked += f" ({show_bytes(memory)})"
    found: list[tuple[float, Mix, Plan]] = []
    refused: list[tuple[int, Mix, bool]] = []
    last: PlanError | None = None
    for mix in _mixes(profile, tier, parameters_tier, recompute, prefetches, allows_disk=disk_rate != 0):
        try:
            plan = cut(memory=memory, looks=0, **mix._asdict())
        except TooSmall as error:
            refused.append((error.needed, mix, error.least))
            last = error
            continue
        except PlanError as error:
            if mix == kept:
                raise
            last = error  # that mix does not suit the schedule
            continue
        found.append((_seconds(plan, disk_rate or DISK_RATE), mix, plan))
        if not limited:
            break  # nothing is moved where there is no limit
    if found:
        least = min(seconds for seconds, *_ in found)
        _, mix, plan = next(one for one in found if one[0] <= least * EQUAL)
        return cut(memory=memory, looks=looks, **mix._asdict()) if looks else plan
    for needed, mix, least in sorted(refused) if memory is not None else ():
        with contextlib.suppress(PlanError):  # the mix may not suit the schedule
            cut(memory=needed, looks=0, **mix._asdict())
            budget = "the smallest budget" if least else "a budget"
            last = TooSmall(
                f"{asked} on each rank holds this in no tier; {budget} that does is memory={needed} "
                f"({show_bytes(needed)}), with {mix}; raise memory or ranks",
                needed,
                least=least,
            )
            break
    assert last is not None, "every mix was refused"
    raise last


def bytes_of_share(share: float, cut: Callable[..., Plan]) -> int:
    """A rank's budget as a share of what the fullest one needs that keeps everything."""
    whole = cut(memory=None, **Mix("device", "device", recompute=False, prefetches=True)._asdict())
    sums = (sum(whole.stages[s].held_bytes for s in stages) for stages in whole.stages_of_rank)
    return round(share * with_margin(max(sums)))


def _mixes(
    profile: Profile, tier: str, parameters_tier: str, recompute: bool | Sequence[str],
    prefetches: bool | None, *, allows_disk: bool
) -> Iterator[Mix]:  # fmt: skip
    """Yield every mix that suits what was asked for, those that move less first."""
    host, disk = ["host"] * (profile.device != HOST), ["disk"] * allows_disk
    runs_again = tier == AUTO and not recompute
    tiers = ["device", "packed", *host, *disk] if runs_again else [tier.replace(AUTO, "device")]
    # Dense numbers hardly shrink, so that packing is no choice of its own.
    parts = ["device", *host, *disk] if parameters_tier == AUTO else [parameters_tier]
    mixes = [
        Mix(one, part, again, prefetches is not False)
        for part in parts
        for one, again in [*((one, recompute) for one in tiers), *[("device", True)] * runs_again]
    ]
    yield from mixes
    if prefetches is None:  # what needs least memory, where nothing else fits
        yield from (mix._replace(prefetches=False) for mix in mixes if mix.parameters_tier != "device")


def _seconds(plan: Plan, disk_rate: float) -> float:
    """Seconds of the slowest rank for a micro-batch."""
    rates = {"packed": PACKING_RATE, "host": LINK_RATE, "disk": disk_rate}
    each = 1 if plan.schedule == STREAM else plan.micro_batches
    return max(
        sum(
            _stage_seconds(plan.stages[s], rates, plan.micro_batches) / plan.replicas[s]
            + plan.stages[s].update_seconds / each
            for s in stages
        )
        for stages in plan.stages_of_rank
    )


def _stage_seconds(stage: PlanStage, rates: dict[str, float], micro_batches: int) -> float:
    """Seconds of a stage: each way of moving hides behind its own half, as far as it goes."""
    away = stage.saved_bytes / rates[stage.tier] if stage.tier != "device" else 0.0
    forward, backward = max(stage.forward_seconds, away), max(stage.backward_seconds, away)
    if stage.parameters_tier != "device":  # read twice, its gradient twice more; updated once a step
        one = max(0, 4 * stage.num_parameters - stage.staying_bytes) / rates[stage.parameters_tier]
        if stage.prefetches:
            forward, backward = max(forward, away + one), max(backward, away + 3 * one)
        else:
            forward, backward = forward + one, backward + 3 * one
        backward += 6 * one / micro_batches
    return forward + backward
