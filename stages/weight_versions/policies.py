"""The policies of the weights: which version of its weights a micro-batch sees, as values in one table.

Nothing here imports torch: what does not fit is refused before anybody waits for it."""

import dataclasses
from collections.abc import Callable

from ...compression.errors import PlanError

STREAM = "async_1f1b"  # no flush: every micro-batch is an update of its own


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VersionRule:
    """Version that a forward and its backward run with: micro-batch u (batch u, if ``per_batch``) has the
    weights after max(0, u - ``delay``) updates.

    Args:    schedule: the schedule in whose order versions change between a forward and its backward.
             delay: from a stage and the number of stages to updates, never fewer than the schedule leaves
             between a forward and its backward; None for no stashing: the newest weights in each of both."""

    schedule: str = STREAM
    delay: Callable[[int, int], int] | None
    per_batch: bool = False  # an update takes the gradients of a batch, else of one micro-batch
    predicts: bool = False  # it may run with predicted weights

    def old_versions(self, stage: int, stages: int) -> int:
        """Versions of a stage's weights that are kept beside the newest one, at most."""
        return self.delay(stage, stages) if self.delay else 0

    def version(self, update: int, stage: int, stages: int) -> int:
        """Number of updates in the weights with which micro-batch or batch number ``update`` runs."""
        return max(0, update - self.old_versions(stage, stages))


# latest          no stashing: a backward sees the updates that have come since its forward
# stashed         the newest at the forward (PipeDream, Narayanan et al., SOSP 2019, section 3.3)
# vertical_sync   on all stages the version that the first has at the forward (the same section)
# double_buffered batch t takes version t - 1: a whole batch lies between, so that no stage waits for the
#                 updates of others and two versions suffice
#                 (PipeDream-2BW, Narayanan et al., ICML 2021, section 3.1)
POLICIES: dict[str, VersionRule] = {
    "latest": VersionRule(delay=None, predicts=True),
    "stashed": VersionRule(delay=lambda stage, stages: stages - 1 - stage, predicts=True),
    "vertical_sync": VersionRule(delay=lambda stage, stages: stages - 1),
    "double_buffered": VersionRule(delay=lambda stage, stages: 1, schedule="1f1b", per_batch=True),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightPolicy:
    """Rule for the weights of a stage."""

    rule: VersionRule | None = None  # None: no update comes between a forward and its backward
    prediction: bool = False  # forwards run with the weights as they are expected to be at the backward
    tier: str = "device"  # where a version waits that no instruction reads right now


def rule_named(name: str) -> VersionRule:
    """The row of ``POLICIES``; raises PlanError, which lists the names, if there is none."""
    if name not in POLICIES:
        raise PlanError(f"weights is one of {', '.join(POLICIES)}, found {name!r}; choose one of these")
    return POLICIES[name]


def policy_named(name: str, *, schedule: str, prediction: bool = False, tier: str = "device") -> WeightPolicy:
    """Return the policy of the rule ``name``; PlanError if it does not suit schedule or prediction."""
    rule = rule_named(name)
    if prediction and not rule.predicts:
        remedies = " or ".join(f"weights={known}" for known, row in POLICIES.items() if row.predicts)
        raise PlanError(
            f"prediction=true says which weights a forward runs with, and so does weights={name}; "
            f"take {remedies}"
        )
    if schedule == rule.schedule:
        return WeightPolicy(rule=rule, prediction=prediction, tier=tier)
    if rule.delay or prediction:
        raise PlanError(
            f"{'prediction=true' if prediction else f'weights={name}'} is for weights that change between a "
            f"forward and its backward as under {rule.schedule}, found schedule={schedule}; leave it out, or "
            f"take schedule={rule.schedule}"
        )
    return WeightPolicy(tier=tier)
