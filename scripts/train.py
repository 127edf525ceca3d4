"""``penstock train``: options from the command line, then ``pipeline/run/train.py``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..compression.errors import ConfigError
from ..conf.machines import MachinesConfig
from ..conf.schema import TrainConfig
from ..pipeline.ranks.launch import secret
from ..pipeline.ranks.launched import Launched
from . import usage

if TYPE_CHECKING:
    from ..pipeline.run.run_folder import RunFolder


def main(arguments: Sequence[str], **how: Any) -> int:
    """Train as ``arguments`` say; return the exit code.

    Args: how: what else ``pipeline.run.train.train`` takes, such as what starts a rank's process.
    """
    launched = Launched.of_environment()
    if usage.wanted(arguments):
        if not (launched and launched.rank):
            print(usage.text("train", TrainConfig))
        return 0
    from ..pipeline.run import early
    from .application import run

    if launched is None and (other := _other_node(arguments)):
        from ..pipeline.run.machines import follow_node_0

        follow_node_0(other, [option for option in arguments if not option.startswith("-")])
        return 0
    if launched is None:
        task = functools.partial(_train, **how)
        return run("train", TrainConfig, task, arguments=arguments, early=early.check)
    with contextlib.closing(launched):
        if launched.rank:
            from ..pipeline.run.train import follow

            follow(launched)
            return 0
        arguments = _with_ranks(arguments, launched.ranks)
        task = functools.partial(_train, launched=launched)
        return run("train", TrainConfig, task, arguments=arguments, early=early.check)


def _other_node(arguments: Sequence[str]) -> MachinesConfig | None:
    """The options of a machine other than 0, which takes all else from that; None for machine 0.

    Raises: ConfigError: they do not fit."""
    own = [field.name for field in dataclasses.fields(MachinesConfig)]
    options = [option for option in arguments if option.partition("=")[0] in own]
    several = any(option.partition("=")[0] == "nodes" and option != "nodes=1" for option in options)
    if several and {"--multirun", "-m"} & set(arguments):
        raise ConfigError("--multirun is several runs, and nodes= meet for one; start them one by one")
    if "--cfg" in arguments or not any(re.fullmatch(r"node=(?!0+$).*", option) for option in options):
        return None
    schema = OmegaConf.structured(MachinesConfig)
    for option in options:
        try:
            made = OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.from_dotlist([option])))
        except OmegaConfBaseException as error:
            raise ConfigError(f"{option} does not fit: {str(error).splitlines()[0]}") from error
    made = OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.from_dotlist(options)))
    assert isinstance(made, MachinesConfig)
    made.check_machines()
    secret()
    return made


def _with_ranks(arguments: Sequence[str], ranks: int) -> list[str]:
    """The arguments with ``ranks=``, beside other options (flags may not part them), where none says it."""
    places = [place for place, one in enumerate(arguments) if "=" in one and not one.startswith("-")]
    if any(arguments[place].partition("=")[0] in ("ranks", "plan") for place in places):
        return list(arguments)
    first = places[0] if places else len(arguments)
    return [*arguments[:first], f"ranks={ranks}", *arguments[first:]]


def _train(config: TrainConfig, folder: RunFolder, typed: Sequence[str], **how: Any) -> None:
    from ..pipeline.run.train import train  # brings torch, which a refusal does not wait for

    train(config, folder, typed, **how)
