"""What a policy of the weights asks of the schedule, and the other way round, refused by name.

One function on plain values, so that a plan, a partition and a pipeline refuse in the same words."""

from __future__ import annotations

from ...compression.errors import PlanError

STREAM = "async_1f1b"  # no flush: every micro-batch is an update of its own


def streams(schedule: str, weights: str) -> bool:
    """Whether micro-batches flow on from batch to batch, so that only a drain empties the pipeline."""
    return schedule == STREAM or weights == "double_buffered"


def check_versions(
    *,
    schedule: str,
    weights: str,
    prediction: bool,
    num_stages: int,
    micro_batches: int,
    extra_in_flight: int,
) -> None:
    """Refuse what cannot be trained as asked; names are known already.

    Args:    weights: one of ``plan.WEIGHTS``; ``prediction``: whether forwards run with predicted weights.
    Raises:  PlanError: the schedule, the policy and the counts do not go together.
    """
    if schedule != STREAM and (weights in ("stashed", "vertical_sync") or prediction):
        asked = "prediction=true" if prediction else f"weights={weights}"
        raise PlanError(
            f"{asked} is for weights that change between a forward and its backward, and schedule={schedule} "
            f"changes them after a batch; leave it out, or take schedule={STREAM}"
        )
    if prediction and weights not in ("latest", "stashed"):
        raise PlanError(
            "prediction=true says which weights a forward runs with, and so does "
            f"weights={weights}; take weights=latest or weights=stashed"
        )
    if weights == "double_buffered":
        _check_double_buffered(schedule, num_stages, micro_batches)
    if extra_in_flight and streams(schedule, weights):
        asked = f"schedule={schedule}" if schedule == STREAM else f"weights={weights}"
        raise PlanError(
            f"{asked} has a fixed number of micro-batches in flight, which decides who reads which weights, "
            f"found extra_in_flight={extra_in_flight}; leave it out"
        )


def _check_double_buffered(schedule: str, num_stages: int, micro_batches: int) -> None:
    if schedule != "1f1b":
        raise PlanError(
            f"weights=double_buffered updates once a batch in the order of 1f1b, found schedule={schedule}; "
            "take schedule=1f1b"
        )
    if micro_batches < num_stages:
        raise PlanError(
            "weights=double_buffered needs at least as many micro-batches as stages, or two versions do not "
            f"suffice, found micro_batches={micro_batches} for {num_stages} stages; raise micro_batches to "
            f"{num_stages}"
        )
