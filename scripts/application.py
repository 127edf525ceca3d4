"""One Hydra application: composes the options first, so that a refusal is one sentence, then lets Hydra run.

Hydra tells a wrong option in several lines and an exception of the task as a traceback; here both become a
``PenstockError`` that names what was typed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ..compression.errors import ConfigError, PenstockError
from ..pipeline import console
from ..pipeline.run_folder import RunFolder
from . import overrides, stopping
from .command import REFUSED

CONFIGURATION = "penstock.conf"

Task = Callable[[Any, RunFolder, Sequence[str]], None]


def run(name: str, schema: type[Any], task: Task, *, arguments: Sequence[str]) -> int:
    """Compose the options of command ``name`` and call ``task(options, run folder, what was typed)``.

    Args:    schema: the dataclass in ``conf/schema.py``; arguments: ``KEY=VALUE``, and Hydra's own flags.
    Returns: the exit code; with --multirun a run that is refused does not keep the others from running.
    Raises:  ConfigError: an option is unknown or does not fit.
    """
    ConfigStore.instance().store(name=f"{name}_schema", node=schema)
    OmegaConf.register_new_resolver("pid", os.getpid, replace=True)  # makes the folder's name unique
    arguments = overrides.with_own_groups(arguments)
    if not any(
        argument.startswith("-") for argument in arguments
    ):  # --multirun and others compose differently
        _try(name, schema, arguments)
    codes = [0]

    @hydra.main(version_base="1.3", config_path=f"pkg://{CONFIGURATION}", config_name=name)
    def application(config: DictConfig) -> None:
        settings = HydraConfig.get()
        folder = RunFolder(path=Path(settings.runtime.output_dir))
        try:
            with folder.claim() as missing:
                if missing:
                    console.warn(missing)
                task(checked(config, schema), folder, list(settings.overrides.task))
        except PenstockError as error:
            console.refuse(error)
            codes.append(REFUSED)
        except KeyboardInterrupt as stop:
            stop.add_note(stopping.kept(folder.path))
            raise

    sweep = _sweep(name, arguments)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where model._target_=my.Net usually lies
    typed, sys.argv = sys.argv, [f"penstock {name}", *arguments]
    try:
        with sweep.claim() if sweep else contextlib.nullcontext():
            application()
    finally:
        sys.argv = typed
    return max(codes)


def checked(config: DictConfig, schema: type[Any]) -> Any:
    """Return the options as an object of ``schema``, every rule of which has been checked.

    Raises: ConfigError: a rule is broken, a value is missing, or an interpolation leads nowhere.
    """
    try:
        if missing := sorted(OmegaConf.missing_keys(config)):
            raise ConfigError(f"{missing[0]}= must be given; add {missing[0]}=VALUE")
        made = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{error.full_key or 'an option'} cannot be resolved: {reason}") from error
    assert isinstance(made, schema)
    _check_names(made)
    return made


def _check_names(made: Any, prefix: str = "") -> None:
    """Refuse what ``+KEY=VALUE`` added to the schema, which no part of a run would look at."""
    known = [field.name for field in dataclasses.fields(made)]
    for name, value in vars(made).items():
        if name not in known:
            raise ConfigError(f"{prefix}{name}={value}: there is no option {prefix}{name}; drop it")
        if dataclasses.is_dataclass(value):
            _check_names(value, prefix=f"{prefix}{name}.")


def _sweep(name: str, arguments: Sequence[str]) -> RunFolder | None:
    """Return the folder of all runs of --multirun; None without it."""
    if not {"-m", "--multirun"} & set(arguments):
        return None
    typed = [argument for argument in arguments if argument.startswith("hydra.")]
    with hydra.initialize_config_module(CONFIGURATION, version_base="1.3"):
        try:
            composed = hydra.compose(name, overrides=typed, return_hydra_config=True)
        except Exception as error:
            raise overrides.refusal(name, typed, error) from error
    return RunFolder(path=Path(composed.hydra.sweep.dir))


def _try(name: str, schema: type[Any], arguments: Sequence[str]) -> None:
    """Refuse wrong options and an impossible run folder before Hydra makes anything."""
    with hydra.initialize_config_module(CONFIGURATION, version_base="1.3"):
        try:
            config = hydra.compose(name, overrides=list(arguments), return_hydra_config=True)
        except Exception as error:  # Hydra's grammar and composition raise several unrelated kinds
            raise overrides.refusal(name, arguments, error) from error
    folder = Path(config.hydra.run.dir)
    with open_dict(config):
        del config["hydra"]
    checked(config, schema)
    with RunFolder(path=folder).claim():
        pass  # and is gone again, if this made it
