"""Metrics of a test: computed by the rank that has the outputs, batch by batch, and given to all ranks."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...compression.errors import ConfigError, PenstockError
from ...stages.device import CPU
from ...stages.plan.plan import Plan
from ...stages.torch_private import tree_map_only
from ...stages.tracing.layers import casting
from .agreement import Agreement
from .batches import tensors_of

Metrics = Mapping[str, Callable[[Any, Any], Any]]


def check_metrics(metrics: Metrics) -> None:
    """Raise ConfigError unless ``metrics`` are functions by name."""
    if not (isinstance(metrics, Mapping) and metrics and all(map(callable, metrics.values()))):
        rule = "metrics are functions of outputs and targets, by name"
        raise ConfigError(f"{rule}, found {metrics!r}; pass metrics={{'accuracy': accuracy}}")


def pairs(batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield inputs and targets of each batch; raises ConfigError for anything else, and for none."""
    batch = None
    for batch in batches:
        if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
            found = f"a {type(batch).__name__}" + f" of {len(batch)}" * isinstance(batch, (tuple, list))
            raise ConfigError(f"with metrics a batch is (inputs, targets), found {found}; pass pairs")
        yield batch[0], batch[1]
    if batch is None:
        raise ConfigError("metrics are means over one batch or more, found none; pass batches of a test")


class Means:
    """The mean of each metric over the samples of all batches.

    An error of a metric waits until all batches are through: the other ranks count on this one."""

    def __init__(self, metrics: Metrics, *, autocast: torch.dtype | None) -> None:
        self._metrics, self._sums, self._num_samples = metrics, [0.0] * len(metrics), 0
        self._autocast = autocast
        self._error: PenstockError | None = None

    def add(self, outputs: Any, targets: Any, num_samples: int) -> None:
        """Count a batch; the targets go where the outputs are."""
        self._num_samples += num_samples
        device = next((tensor.device for tensor in tensors_of(outputs)), CPU)
        targets = tree_map_only(Tensor, operator.methodcaller("to", device), targets)
        for number, (name, metric) in enumerate(self._metrics.items()):
            if self._error is None:
                try:
                    with torch.no_grad(), casting(self._autocast, device):
                        self._sums[number] += float(metric(outputs, targets)) * num_samples
                except Exception as error:
                    said = f"found {type(error).__name__}: {error}"
                    rule = f"a metric returns one number for a batch, {said} of metrics[{name!r}]"
                    self._error = ConfigError(f"{rule}; try it on the outputs of pipe.evaluate(inputs)")
                    self._error.__cause__ = error

    def on_all_ranks(self, agreement: Agreement, plan: Plan) -> dict[str, float]:
        """Return the means, which the rank of the last stage has; raises ConfigError; collective."""
        at, world = "the metrics of a test", agreement.world
        source = 0 if world.is_alone else plan.owner(-1)
        with agreement.all_or_none(at):
            if self._error is not None:
                raise self._error
        means = [total / max(1, self._num_samples) for total in self._sums]
        return dict(zip(self._metrics, world.all_gather(means, at=at)[source], strict=True))
