"""The length of a run: its batches, and how many steps and updates they make.

Every rank follows it by itself, so it comes from the options and the data alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ...compression.errors import ConfigError
from ...conf.schema import PlanConfig, TrainConfig
from ...stages.planner.plan import Plan
from ...stages.planner.rules import STREAM
from ...stages.tracing.capture.call_spec import Example
from ..samples.samples import Samples


def training_batches(
    config: PlanConfig, samples: Samples, *, epoch: int, first: int = 0
) -> Iterator[tuple[Any, Tensor]]:
    """Return the batches of one epoch from number ``first`` on, the same ones on every rank."""
    return samples.batches(
        "train",
        batch_size=config.batch_size,
        epoch=epoch,
        seed=config.seed,
        drop_last=config.data.get("drop_last", True),
        first=first,
        skips=bool(config.data.get("skip_broken", False)),
    )


def example_inputs(config: PlanConfig, samples: Samples) -> Example:
    """Return the first micro-batch of the first training batch, as the model takes it."""
    inputs, _ = next(training_batches(config, samples, epoch=0))
    given = inputs if isinstance(inputs, tuple | dict) else (inputs,)
    number = min(config.micro_batches, len(tree_leaves(given)[0]))
    return tree_map(lambda tensor: tensor.tensor_split(number)[0].clone(), given)


def count_steps(config: TrainConfig, samples: Samples) -> int:
    """Return how many steps the run takes."""
    num_steps = config.epochs * steps_of_an_epoch(config, samples)
    return num_steps if config.max_steps is None else min(num_steps, config.max_steps)


def steps_of_an_epoch(config: PlanConfig, samples: Samples) -> int:
    """Return how many batches an epoch has."""
    return samples.num_batches(
        "train", batch_size=config.batch_size, drop_last=config.data.get("drop_last", True)
    )


def count_updates(config: TrainConfig, samples: Samples) -> int:
    """Return how often the run updates the weights: every micro-batch of ``async_1f1b`` does."""
    number = count_steps(config, samples)
    return number * min(config.micro_batches, config.batch_size) if config.schedule == STREAM else number


def check_batches(config: TrainConfig, plan: Plan, samples: Samples) -> None:
    """Refuse a last batch of an epoch that is too small for two versions of the weights.

    Every other batch has as many samples as micro-batches at least, and so as many as stages.
    Raises: ConfigError: it has fewer samples than there are stages.
    """
    if not (plan.policy.rule and plan.policy.rule.per_batch) or config.data.get("drop_last", True):
        return
    rest = samples.num_samples("train") % config.batch_size
    if 0 < rest < plan.num_stages:
        raise ConfigError(
            f"weights={plan.weights} needs at least as many samples in a batch as there are stages, "
            f"{plan.num_stages}, found data.drop_last=false, whose last batch has {rest}; choose another "
            f"batch_size than {config.batch_size}"
        )
