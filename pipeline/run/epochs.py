"""The steps of a run one after another, with a test behind each epoch; all ranks go through it together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import torch.nn.functional as F
from torch import Tensor

from ...conf.schema import TrainConfig
from ...stages.planner.plan import Plan
from ...stages.tracing.layers import casting
from ..pipeline import Pipeline
from ..runtime.report import Report
from ..samples.samples import Samples
from . import build
from .resume import position
from .run_length import count_steps, steps_of_an_epoch, training_batches


def run_epochs(
    pipe: Pipeline,
    plan: Plan,
    config: TrainConfig,
    samples: Samples,
    *,
    see: Sequence[Callable[[Report], None]],
    note: Callable[[str], None],
) -> dict[str, float]:
    """Take every step that is left and test after each epoch; return the last test's results."""
    left = count_steps(config, samples) - pipe.num_steps
    test: dict[str, float] = {}
    begin, done = position(pipe.num_steps, steps_of_an_epoch(config, samples))
    for epoch in range(begin, config.epochs):
        batches = training_batches(config, samples, epoch=epoch, first=done if epoch == begin else 0)
        for inputs, targets in islice(batches, max(0, left)):
            report = pipe.step(inputs, targets)
            left -= 1
            for one in see:
                one(report)
        test = evaluate(pipe, plan, config, samples)
        if test:
            result = f"test accuracy {test['accuracy']:.2%}, test loss {test['loss']:.4f}"
            note(f"epoch {epoch + 1}/{config.epochs}: {result}")
        if left <= 0:
            break
    return test


def evaluate(pipe: Pipeline, plan: Plan, config: TrainConfig, samples: Samples) -> dict[str, float]:
    """Return the accuracy and the mean loss over the test split, on every rank; nothing without one."""
    if samples.test is None:
        return {}
    right = total = 0
    lost = 0.0
    for inputs, targets in samples.batches("test", batch_size=config.batch_size):
        outputs = pipe.evaluate(inputs)
        if outputs is not None:
            targets = targets.to(outputs.device)
            right += int((outputs.argmax(-1) == targets).sum())
            with casting(build.autocast(config.autocast), outputs.device):
                lost += float(loss(outputs, targets)) * targets.numel()
            total += targets.numel()
    last = plan.rank_of(-1, 0)
    right, lost, total = (pipe.world.broadcast(number, last) for number in (right, lost, total))
    return {"accuracy": right / total, "loss": lost / total}


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of classes (batch, classes) or of characters (batch, length, classes)."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())
