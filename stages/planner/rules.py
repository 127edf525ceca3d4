"""Whether a schedule, a policy of the weights and the counts of a plan go together, refused by name.

One function on plain values, without torch, so that a command, a plan and a partition refuse in the same
words; the policies' own rules come with their rows (``stages/weights/policies.py``)."""

from __future__ import annotations

from ...compression.errors import PlanError
from ..record import shortened
from ..weights.policies import STREAM, policy_named, rule_named


def streams(schedule: str, weights: str) -> bool:
    """Whether micro-batches flow on from batch to batch, so that only a drain empties the pipeline.

    Raises:  PlanError: there is no such policy."""
    return schedule == STREAM or rule_named(weights).per_batch


def check_versions(
    *,
    schedule: str,
    weights: str,
    prediction: bool,
    num_stages: int,
    micro_batches: int,
    extra_in_flight: int,
) -> None:
    """Refuse what cannot be trained as asked.

    Args:    weights: a name in ``POLICIES``; ``prediction``: whether forwards run with predicted weights.
    Raises:  PlanError: the schedule, the policy and the counts do not go together.
    """
    rule = policy_named(weights, schedule=schedule, prediction=prediction).rule
    if rule and rule.per_batch and micro_batches < num_stages:
        raise PlanError(
            f"weights={weights} needs at least as many micro-batches as stages, or its versions do not "
            f"suffice, found micro_batches={micro_batches} for {num_stages} stages; raise micro_batches to "
            f"{num_stages}"
        )
    if extra_in_flight and streams(schedule, weights):
        asked = f"schedule={schedule}" if schedule == STREAM else f"weights={weights}"
        raise PlanError(
            f"{asked} has a fixed number of micro-batches in flight, which decides who reads which weights, "
            f"found extra_in_flight={extra_in_flight}; leave it out"
        )


def check_mirror(*, schedule: str, weights: str, parameters_tier: str) -> None:
    """Refuse a mirror of the parameters where there are several versions of them at a time."""
    if parameters_tier != "device" and streams(schedule, weights):
        asked = f"schedule={schedule}" if schedule == STREAM else f"weights={weights}"
        raise PlanError(
            f"a mirror has one version of the parameters, and {asked} reads several at a time, found "
            f"parameters {parameters_tier}; leave them on the device, or take a schedule with a flush"
        )


def check_extra(least: int, most: int, *, micro_batches: int) -> None:
    """Refuse counts of micro-batches in flight beyond the schedule's own that no search can go through."""
    if most and not least <= most <= max(least, micro_batches):
        raise PlanError(
            "most_extra_in_flight is 0, or from extra_in_flight up to the micro-batches of a step, found "
            f"{shortened(most)} with extra_in_flight={shortened(least)} and micro_batches="
            f"{shortened(micro_batches)}; choose one of these"
        )
