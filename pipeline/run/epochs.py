"""The steps of a run one after another, with a test behind each epoch; all ranks go through it together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...conf.schema import TrainConfig
from ...stages.planner.plan import Plan
from ...stages.tracing.layers import casting
from ..pipeline import Pipeline
from ..runtime.report import Report
from ..samples.loader import Loader
from ..samples.reading import Place
from . import build
from .course import Course

BETWEEN = 10  # batches of a test; an exchange behind each would cost small ones a tenth of their time


def run_epochs(
    pipe: Pipeline,
    plan: Plan,
    config: TrainConfig,
    ahead: Course,
    loader: Loader,
    *,
    see: Sequence[Callable[[Report], None]],
    between: Callable[[], None],
    log: Callable[[int, Mapping[str, float]], None],
    note: Callable[[str], None],
) -> dict[str, float]:
    """Take every step that is left and test after each epoch; return the last test's results.

    Args: see: are called with the report of every step; between: every ``BETWEEN`` batches of a test;
          log: with the last step and the results of a test."""
    test: dict[str, float] = {}
    for epoch, numbers in ahead.by_epoch():
        for number in numbers:
            report = pipe.step(*loader.take(Place("train", epoch, number)))
            for one in see:
                one(report)
        test = evaluate(pipe, plan, config, map(loader.take, ahead.test()), between=between)
        if test:
            log(pipe.num_steps - 1, test)
            result = f"test accuracy {test['accuracy']:.2%}, test loss {test['loss']:.4f}"
            note(f"epoch {epoch + 1}/{config.epochs}: {result}")
    return test


def evaluate(
    pipe: Pipeline,
    plan: Plan,
    config: TrainConfig,
    batches: Iterable[tuple[Any, Any]],
    *,
    between: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Return the accuracy and the mean loss over the batches of a test, on every rank; nothing of none."""
    right = total = 0
    lost = 0.0
    number = 0
    for number, (inputs, targets) in enumerate(batches, start=1):
        if number % BETWEEN == 0:
            between()
        outputs = pipe.evaluate(inputs)
        if outputs is not None:
            targets = targets.to(outputs.device)
            right += int((outputs.argmax(-1) == targets).sum())
            with casting(build.autocast(config.autocast), outputs.device):
                lost += float(loss(outputs, targets)) * targets.numel()
            total += targets.numel()
    if not number:
        return {}
    last = plan.owner(-1)
    right, lost, total = (
        pipe.world.broadcast(number, last, at="the test's result") for number in (right, lost, total)
    )
    return {"accuracy": right / total, "loss": lost / total}


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of classes (batch, classes) or of characters (batch, length, classes)."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())
