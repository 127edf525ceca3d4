"""``penstock train``: options from the command line, then ``pipeline/run/train.py``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..conf.schema import TrainConfig
from ..pipeline.ranks.launched import Launched
from . import usage

if TYPE_CHECKING:
    from ..pipeline.run.run_folder import RunFolder


def main(arguments: Sequence[str]) -> int:
    """Train as ``arguments`` say; return the exit code."""
    launched = Launched.of_environment()
    if usage.wanted(arguments):
        if not (launched and launched.rank):
            print(usage.text("train", TrainConfig))
        return 0
    from ..pipeline.run import early
    from .application import run

    if launched is None:
        return run("train", TrainConfig, _train, arguments=arguments, early=early.check)
    with contextlib.closing(launched):
        if launched.rank:
            from ..pipeline.run.train import follow

            follow(launched)
            return 0
        arguments = _with_ranks(arguments, launched.ranks)
        task = functools.partial(_train, launched=launched)
        return run("train", TrainConfig, task, arguments=arguments, early=early.check)


def _with_ranks(arguments: Sequence[str], ranks: int) -> list[str]:
    """The arguments with ``ranks=``, beside other options (flags may not part them), where none says it."""
    places = [place for place, one in enumerate(arguments) if "=" in one and not one.startswith("-")]
    if any(arguments[place].partition("=")[0] in ("ranks", "plan") for place in places):
        return list(arguments)
    first = places[0] if places else len(arguments)
    return [*arguments[:first], f"ranks={ranks}", *arguments[first:]]


def _train(
    config: TrainConfig, folder: RunFolder, typed: Sequence[str], *, launched: Launched | None = None
) -> None:
    from ..pipeline.run.train import train  # brings torch, which a refusal does not wait for

    train(config, folder, typed, launched=launched)
