"""The course of a run: its batches, and how many steps and updates they make.

Every rank follows it by itself, so it comes from the options and the data alone."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ..compression.errors import ConfigError
from ..conf.schema import PlanConfig, TrainConfig
from ..stages.plan import Plan
from ..stages.rules import STREAM
from .samples.samples import Samples


def training_batches(config: PlanConfig, samples: Samples, *, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the batches of one epoch, the same ones on every rank."""
    return samples.batches(
        "train",
        batch_size=config.batch_size,
        epoch=epoch,
        seed=config.seed,
        drop_last=config.data.get("drop_last", True),
    )


def example_inputs(config: PlanConfig, samples: Samples) -> tuple[Tensor]:
    """Return the first micro-batch of the first training batch."""
    inputs, _ = next(training_batches(config, samples, epoch=0))
    return (inputs.tensor_split(min(config.micro_batches, len(inputs)))[0].clone(),)


def count_steps(config: TrainConfig, samples: Samples) -> int:
    """Return how many steps the run takes."""
    an_epoch = samples.num_batches(
        "train", batch_size=config.batch_size, drop_last=config.data.get("drop_last", True)
    )
    num_steps = config.epochs * an_epoch
    return num_steps if config.max_steps is None else min(num_steps, config.max_steps)


def count_updates(config: TrainConfig, samples: Samples) -> int:
    """Return how often the run updates the weights: every micro-batch of ``async_1f1b`` does."""
    number = count_steps(config, samples)
    return number * min(config.micro_batches, config.batch_size) if config.schedule == STREAM else number


def check_batches(config: TrainConfig, plan: Plan, samples: Samples) -> None:
    """Refuse batches, the last of an epoch too, that are too small for two versions of the weights.

    Raises: ConfigError: one has fewer samples than there are stages.
    """
    if plan.weights != "double_buffered":
        return
    found, smallest = f"batch_size={config.batch_size}", config.batch_size
    rest = samples.num_samples("train") % config.batch_size
    if rest and not config.data.get("drop_last", True):
        found, smallest = f"data.drop_last=false, whose last batch has {rest}", rest
    if smallest < plan.num_stages:
        raise ConfigError(
            "weights=double_buffered needs at least as many samples in a batch as there are stages, "
            f"{plan.num_stages}, found {found}; choose another batch_size"
        )
