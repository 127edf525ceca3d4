"""Other ways to run a job beside a plan, simulated from the same measurements: what each would cost."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ...compression.errors import PenstockError
from ...stages.plan.cluster import Cluster, orders
from ...stages.plan.plan import Plan
from ...stages.profiling.network_profile import Profile
from ...stages.units import share_of, show_bytes, show_seconds
from ..partition.partition import partition
from .schedule_comparison import SYNCHRONOUS, Candidate, candidate

SHOWN = 3
LOOKS = 16  # cuts of each that are simulated: many plans are compared
BUSY = 0.5  # of a step; of a rank that computes less it is said
KNOWN = ("optimizer_state", "by_element")


class Alternative(NamedTuple):
    """A simulated step with other options: what to type, its seconds, the most bytes of a rank."""

    typed: str
    seconds: float
    memory: int


def alternatives(
    plan: Plan, profile: Profile, options: Mapping[str, Any], *, file: Mapping[str, Any] | None = None
) -> tuple[Candidate | None, list[Alternative]]:
    """Return ``plan``, simulated, and the best other plans that fit, the shortest step first; of a stream and
    of a budget that is a share, nothing.

    Args:   options: those ``partition`` made it with, but for the schedule; file: what the YAML file of its
        cluster holds, whose devices may stand in another order."""
    if plan.streams or share_of(options["memory"]) is not None:
        return None, []
    known = {name: options[name] for name in KNOWN}
    own, ours = dataclasses.replace(plan, asked=None), candidate(profile, plan, **known)
    found = list[Alternative]()
    for typed, changed in _changes(plan, options, file):
        try:
            other = candidate(profile, _planned(profile, plan, options, changed), **known)
        except PenstockError:
            continue  # it does not suit the model, or does not fit
        if other.fits and dataclasses.replace(other.plan, asked=None) != own:
            found.append(Alternative(typed, other.seconds, max(other.memory)))
    return ours, sorted(found, key=lambda one: (round(one.seconds, 9), one.memory))[:SHOWN]


def _planned(profile: Profile, plan: Plan, options: Mapping[str, Any], changed: Mapping[str, Any]) -> Plan:
    asked = {**options, "schedule": plan.schedule, "program": plan.program, "weights": plan.weights}
    first = plan.stages[0]  # tiers as they were chosen, which takes a tenth of the time of choosing them
    asked |= {"tier": first.tier, "parameters_tier": first.parameters_tier, "prefetches": first.prefetches}
    asked["recompute"] = options["recompute"] or first.recompute is True
    asked |= {"looks": LOOKS, **changed}
    if isinstance(asked.get("cluster"), dict):  # its links are known only now to be there
        asked["cluster"] = Cluster.of(asked["cluster"])
    return partition(profile, **asked)


def _changes(
    plan: Plan, options: Mapping[str, Any], file: Mapping[str, Any] | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Options to type, and changes: other schedules, other numbers of ranks, devices in other orders."""
    if not plan.program:
        yield from ((f"schedule={name}", {"schedule": name}) for name in SYNCHRONOUS if name != plan.schedule)
    if file is not None:
        given = list(file["ranks"])
        fewer = dict.fromkeys(tuple(given[:n] + given[n + 1 :]) for n in range(len(given)))
        for ranks in (*orders(file), *map(list, filter(None, fewer))):
            changed = {"cluster": {**file, "ranks": ranks}, "ranks": None}
            yield f"ranks: [{', '.join(map(str, ranks))}]", changed
    elif max(plan.replicas) == 1 and not (plan.program or options["cuts"] or options["stages"]):
        numbers = dict.fromkeys((plan.num_ranks - 1, plan.num_ranks + 1, 2 * plan.num_ranks))
        yield from ((f"ranks={number}", {"ranks": number}) for number in numbers if number)


def lower_bound(plan: Plan, profile: Profile) -> float:
    """Return seconds that no plan for the same ranks and micro-batches goes below: all layers divided evenly
    over the ranks, or one micro-batch through all layers, whose weights may get their gradients later."""
    speeds = plan.cluster.speeds if plan.cluster else [1.0] * plan.num_ranks
    forward = sum(layer.forward_seconds for layer in profile.layers)
    backward = sum(layer.backward_seconds for layer in profile.layers)
    evenly = plan.micro_batches * (forward + backward) / sum(speeds)
    return max(evenly, (forward + backward / 2) / max(speeds))


def described(ours: Candidate | None, profile: Profile, others: list[Alternative]) -> list[str]:
    """Return lines for people: the step and a bound of it, ranks that compute little, the other plans."""
    if ours is None:
        return []
    seconds, bound = ours.seconds, lower_bound(ours.plan, profile)
    lines = [
        f"a step takes {show_seconds(seconds)}, simulated from measured layers; no plan for as many ranks "
        f"and micro-batches takes less than {show_seconds(bound)} ({bound / seconds - 1:+.0%})"
    ]
    if idle := [f"rank {rank} ({1 - x:.0%})" for rank, x in enumerate(ours.panel.bubble) if 1 - x < BUSY]:
        lines += [
            f"ranks that compute in less than half of a step: {', '.join(idle)}; more micro_batches, fewer "
            "ranks or replicas.count would use them better"
        ]
    lines += ["beside it:"] * bool(others)
    return lines + [
        f"  {one.typed}: {show_seconds(one.seconds)} ({one.seconds / seconds - 1:+.0%}), "
        f"{show_bytes(one.memory)} on the fullest rank"
        for one in others
    ]
