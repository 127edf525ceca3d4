"""``penstock train``: options from the command line, then ``pipeline/train.py``."""

from __future__ import annotations

from collections.abc import Sequence

from ..conf.schema import TrainConfig
from . import usage


def main(arguments: Sequence[str]) -> int:
    """Train as ``arguments`` say; return the exit code."""
    if usage.wanted(arguments):
        print(usage.text("train", TrainConfig))
        return 0
    from ..pipeline.train import train
    from .application import run

    return run("train", TrainConfig, train, arguments=arguments)
