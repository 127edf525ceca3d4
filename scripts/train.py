"""``penstock train``: options from the command line, then ``pipeline/run/train.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..conf.schema import TrainConfig
from . import usage

if TYPE_CHECKING:
    from ..pipeline.run.run_folder import RunFolder


def main(arguments: Sequence[str]) -> int:
    """Train as ``arguments`` say; return the exit code."""
    if usage.wanted(arguments):
        print(usage.text("train", TrainConfig))
        return 0
    from ..pipeline.run import early
    from .application import run

    return run("train", TrainConfig, _train, arguments=arguments, early=early.check)


def _train(config: TrainConfig, folder: RunFolder, typed: Sequence[str]) -> None:
    from ..pipeline.run.train import train  # brings torch, which a refusal does not wait for

    train(config, folder, typed)
