"""``penstock train``: options from the command line, then ``pipeline/run/train.py``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..compression.errors import ConfigError, PenstockError
from ..conf.schema import TrainConfig
from ..pipeline.distributed.launcher import Launched, local_rank
from .command import REFUSED

if TYPE_CHECKING:
    from ..pipeline.run.run_folder import RunFolder

SCHEMA = TrainConfig
OWN_RENDEZVOUS = ("nodes", "node", "master", "join_deadline")
"""Options of former versions, in the place of which torchrun starts the ranks of several machines."""

_MOMENT = 2.0  # seconds in which a machine's first rank tells a refusal: torchrun ends it when another ends


def main(arguments: Sequence[str]) -> int:
    """Train as ``arguments`` say; return the exit code."""
    launched = Launched.of_environment()
    if launched and launched.rank:
        return _follow(arguments, launched)
    arguments = _checked(arguments, launched)
    from .application import run

    def task(config: TrainConfig, folder: RunFolder, typed: Sequence[str]) -> int:
        from ..pipeline.run.train import train  # brings torch, which a refusal does not wait for

        return train(config, folder, typed, launched=launched is not None)

    return run("train", SCHEMA, task, arguments=arguments)


def _follow(arguments: Sequence[str], launched: Launched) -> int:
    """Train as a rank other than 0; of the ranks of a machine, the first tells why none of them begins."""
    from . import application

    try:
        arguments = _checked(arguments, launched)
        options = application.options("train", SCHEMA, arguments=arguments)
        if options is None:
            return 0
        from ..pipeline.run.torchrun import follow
        from ..pipeline.run.train import join_world

        decisions = follow(*options)
    except PenstockError:
        if local_rank() == 0:
            raise
        time.sleep(_MOMENT)
        return REFUSED
    join_world(options[0], *decisions)
    return 0


def _checked(arguments: Sequence[str], launched: Launched | None) -> Sequence[str]:
    """Return the arguments, with ``ranks=`` where a launcher says it."""
    for argument in arguments:
        if argument.lstrip("+").partition("=")[0] in OWN_RENDEZVOUS:
            raise ConfigError(
                f"{argument} is gone, since torchrun starts the ranks of several machines; on each of them "
                "type torchrun --nnodes 2 --node-rank N --master-addr HOST -m penstock train ... "
                "(docs/machines.md)"
            )
    if launched is None:
        return arguments
    if {"--multirun", "-m"} & set(arguments):
        raise ConfigError(
            "--multirun is several runs, and the ranks of a launcher meet for one; start them one by one"
        )
    places = [place for place, one in enumerate(arguments) if "=" in one and not one.startswith("-")]
    if any(arguments[place].partition("=")[0] in ("ranks", "plan") for place in places):
        return arguments
    first = places[0] if places else len(arguments)  # next to other options: flags may not part them
    return [*arguments[:first], f"ranks={launched.ranks}", *arguments[first:]]
