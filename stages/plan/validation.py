"""Rules between a schedule, a policy of the weights and the counts of a plan, refused by name.

One function on plain values, without torch, so that a command, a plan and a partition refuse in the same
words; the policies' own rules come with their rows (``stages/weight_versions/policies.py``)."""

from collections.abc import Collection, Sequence

from ...compression.errors import PlanError
from ..record import shortened
from ..weight_versions.policies import STREAM, policy_named, rule_named

REPLICATED = ("gpipe", "1f1b", "zb_h1", "interleaved", "zbv", "dualpipev")  # their stages may have replicas

MOST_MICRO_BATCHES = 2**16


def streams(schedule: str, weights: str) -> bool:
    """Return whether micro-batches flow on from batch to batch, so that only a drain empties the pipeline."""
    return schedule == STREAM or rule_named(weights).per_batch


def check_versions(
    *,
    schedule: str,
    weights: str,
    prediction: bool,
    num_stages: int,
    micro_batches: int,
    extra_in_flight: int,
    error_feedback: bool = False,
) -> None:
    """Raise PlanError if the schedule, the policy of ``weights`` and the counts do not go together."""
    rule = policy_named(weights, schedule=schedule, prediction=prediction).rule
    if error_feedback and not (rule and rule.per_batch):
        raise PlanError(
            "error_feedback=true makes up for the delay of updates under weights=double_buffered, found "
            f"schedule={schedule} weights={weights}; take schedule=1f1b and these weights, or leave it out"
        )
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


def check_mirror(*, prediction: bool, parameters_tier: str, error_feedback: bool = False) -> None:
    """Refuse to predict weights that are offloaded, or to feed errors back to them; raises PlanError."""
    for name, asked in {"prediction": prediction, "error_feedback": error_feedback}.items():
        if asked and parameters_tier != "device":
            raise PlanError(
                f"{name} computes with all parameters at once, found {name}=true and parameters "
                f"{parameters_tier}; leave them on the device, or take {name}=false"
            )


OWNERS = {"spread": "divided among them", "first": "with the first of them"}
"""Replicas that update the parameters for all of their stage, and how a plan says so."""


def check_owner(owner: str, *, sharded: bool) -> None:
    """Refuse an unknown owner of the parameters, or one where every replica updates all of them."""
    if owner not in OWNERS:
        raise PlanError(f"replicas.owner is one of {', '.join(OWNERS)}, found {owner}; take one of these")
    if owner != "spread" and not sharded:
        raise PlanError(
            f"replicas.owner={owner} says which replica updates the parameters, and every replica does; add "
            "replicas.sharded=true, or memory.parameters= of a tier"
        )


def check_again(*, weights: str, prediction: bool) -> None:
    """Refuse second forwards in a stream whose policy forgets the weights of the first; raises PlanError."""
    if weights == "latest" or prediction:
        raise PlanError(
            "a forward that runs again must see the weights of the first time, which "
            f"weights={weights}{' with prediction' * prediction} forgets without a flush; take "
            "weights=stashed without prediction, or recompute=false"
        )


def check_statistics(written: Collection[str]) -> None:
    """Refuse second forwards on replicas of a model that writes to buffers in a forward; raises PlanError."""
    if written:
        raise PlanError(
            f"replicas set the running statistics of batch norms aside, found {min(written)} and "
            "recompute=true; take recompute=false, or one rank a stage"
        )


def check_extra(least: int, most: int, *, micro_batches: int) -> None:
    """Refuse counts of micro-batches that nobody can list: those of a step, and those in flight."""
    if not 1 <= micro_batches <= MOST_MICRO_BATCHES:
        raise PlanError(
            f"a step has from 1 to {MOST_MICRO_BATCHES} micro-batches, found "
            f"micro_batches={shortened(micro_batches)}; choose one of these"
        )
    if most and not least <= most <= max(least, micro_batches):
        raise PlanError(
            "most_extra_in_flight is 0, or from extra_in_flight up to the micro-batches of a step, found "
            f"{shortened(most)} with extra_in_flight={shortened(least)} and micro_batches="
            f"{shortened(micro_batches)}; choose one of these"
        )


def check_replicas(
    ranks: Sequence[Sequence[int]], *, schedule: str, weights: str, micro_batches: int
) -> None:
    """Raise PlanError for replicas, on the ``ranks`` of every stage, that cannot share its work."""
    counts = [len(own) for own in ranks]
    if max(counts) == 1:
        return
    check_replicated(f"replicas {counts}", schedule=schedule, weights=weights)
    if max(counts) > micro_batches >= 1:
        raise PlanError(
            f"each replica of a stage gets a micro-batch at least, found {max(counts)} replicas and "
            f"micro_batches={micro_batches}; raise micro_batches, or take fewer replicas"
        )
    together = [rank for own in {tuple(own) for own in ranks} for rank in own]
    if len(set(together)) != len(together):
        raise PlanError(
            "stages have replicas on the same ranks or on others, found ranks "
            f"{[list(own) for own in ranks]}; give stages that share a rank the same ones"
        )


def check_replicated(found: str, *, schedule: str, weights: str) -> None:
    """Raise PlanError for a schedule whose stages cannot have the replicas ``found``."""
    if streams(schedule, weights):
        asked = f"schedule={schedule}" if schedule == STREAM else f"weights={weights}"
        raise PlanError(
            f"replicas of a stage update together, and with {asked} there is no moment at which they could, "
            f"found {found}; take schedule=1f1b, or one rank a stage"
        )
    if schedule not in REPLICATED:
        raise PlanError(
            f"stages have replicas under {', '.join(REPLICATED)}, found {found} with "
            f"schedule={schedule}; take one of these, or one rank a stage"
        )
