"""One Hydra application: composes the options first, so that a refusal is one sentence, then lets Hydra run.

Hydra tells a wrong option in several lines and an exception of the task as a traceback; here both become a
``PenstockError`` that names what was typed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from ..compression.errors import ConfigError, PenstockError
from ..conf.schema import AGAIN
from ..pipeline.run import console
from ..pipeline.run.run_folder import RunFolder
from . import flags, overrides, stopping
from .command import REFUSED, unloadable

CONFIGURATION = "penstock.conf"

Task = Callable[[Any, RunFolder, Sequence[str]], None]
Check = Callable[[Any, Sequence[str]], object]


def run(
    name: str, schema: type[Any], task: Task, *, arguments: Sequence[str], early: Check, command: str = ""
) -> int:
    """Compose the options of command ``name`` and call ``task(options, run folder, what was typed)``.

    Args:    schema: the dataclass in ``conf/``; arguments: ``KEY=VALUE``, and Hydra's own flags.
             early: is called before ``task`` with the options and what was typed, to refuse what needs
             neither a model nor torch. command: as it is typed, where that is not ``name``.
    Returns: the exit code; with --multirun a run that is refused does not keep the others from running.
    Raises:  ConfigError: an option is unknown or does not fit.
    """
    command = command or name
    typed = _read(name, schema, command, arguments)
    asked = shlex.join(["penstock", *command.split(), *arguments])
    arguments = overrides.with_own_groups(arguments)
    sweep = None if flags.ELSEWHERE & typed.flags.keys() else _try(name, schema, typed, early)
    codes, before = [0], sys.argv

    @hydra.main(version_base="1.3", config_path=f"pkg://{CONFIGURATION}", config_name=name)
    def application(config: DictConfig) -> None:
        folder = RunFolder(path=Path(HydraConfig.get().runtime.output_dir))
        options = list(HydraConfig.get().overrides.task)
        try:
            with folder.claim(resumes=_resumes(config)) as missing:
                if missing:
                    console.warn(missing)
                made = checked(config, schema)
                early(made, options)
                task(made, folder, options)
        except PenstockError as error:
            console.refuse(error)
            codes.append(REFUSED)
        except ImportError as error:
            console.refuse(unloadable(error))
            codes.append(REFUSED)
        except KeyboardInterrupt as stop:
            stop.add_note(stopping.kept(folder, command=asked))
            raise

    sys.argv = [f"penstock {command}", *arguments]
    try:
        with sweep.claim() if sweep else contextlib.nullcontext():
            application()
    finally:
        sys.argv = before
    return max(codes)


def options(
    name: str, schema: type[Any], *, arguments: Sequence[str], early: Check
) -> tuple[Any, RunFolder] | None:
    """Compose the options of command ``name`` and leave its run folder alone: another process claims it.

    Args:    as those of ``run``.
    Returns: the options, and the folder as this process would name it; None where a flag asks for no run.
    Raises:  ConfigError: an option is unknown or does not fit.
    """
    typed = _read(name, schema, name, arguments)
    if {"--cfg", *flags.ELSEWHERE} & typed.flags.keys():
        return None
    with _composing(name, typed) as composed:
        config, folder = _without_hydra(composed(typed.options))
    made = checked(config, schema)
    early(made, typed.options)
    return made, folder


def _read(name: str, schema: type[Any], command: str, arguments: Sequence[str]) -> flags.Typed:
    """Tell flags from options, and get Hydra ready to compose them."""
    typed = flags.read(command, arguments, schema)
    ConfigStore.instance().store(name=f"{name}_schema", node=schema)
    OmegaConf.register_new_resolver("pid", os.getpid, replace=True)  # makes the folder's name unique
    try:
        here = os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("a run needs a working folder, and this one was removed; go to another") from error
    if here not in sys.path:
        sys.path.append(here)  # where model._target_=my.Net usually lies
    return dataclasses.replace(typed, options=overrides.with_own_groups(typed.options))


def _without_hydra(config: DictConfig) -> tuple[DictConfig, RunFolder]:
    """Part a composed configuration into the options of the command and the run folder."""
    folder = RunFolder(path=Path(config.hydra.run.dir))
    with open_dict(config):
        del config["hydra"]
    return config, folder


def checked(config: DictConfig, schema: type[Any]) -> Any:
    """Return the options as an object of ``schema``, every rule of which has been checked.

    Raises: ConfigError: a rule is broken, a value is missing, or an interpolation leads nowhere.
    """
    try:
        if OmegaConf.get_type(config) is not schema:  # a configuration of one's own, without our schema
            config = OmegaConf.merge(OmegaConf.structured(schema), config)  # pyright: ignore[reportAssignmentType]
        if missing := sorted(OmegaConf.missing_keys(config)):
            raise ConfigError(f"{missing[0]}= must be given; add {missing[0]}=VALUE")
        made = OmegaConf.to_object(config)
    except ConfigKeyError as error:
        known = [field.name for field in dataclasses.fields(error.object_type or schema)]
        raise ConfigError(overrides.unknown(str(error.full_key), known)) from error
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
            typed = "" if isinstance(value, dict) else f"{prefix}{name}={value}: "
            listed = [f"{prefix}{one}" for one in known if one not in overrides.NOT_TYPED]
            raise ConfigError(typed + overrides.unknown(f"{prefix}{name}", listed))
        if dataclasses.is_dataclass(value):
            _check_names(value, prefix=f"{prefix}{name}.")


def _try(name: str, schema: type[Any], typed: flags.Typed, early: Check) -> RunFolder | None:
    """Refuse wrong options and an impossible run folder before Hydra makes anything.

    Returns: the folder of all runs of --multirun; None without it.
    """
    with _composing(name, typed) as composed:
        if "--multirun" in typed.flags:
            for options in overrides.one_by_one(typed.options):
                composed(options)
            own = [option for option in typed.options if option.startswith("hydra.")]
            return RunFolder(path=Path(composed(own).hydra.sweep.dir))
        config, folder = _without_hydra(composed(typed.options))
        if any(option.startswith("+hydra.") for option in typed.options):
            _check_hydra(typed.options, composed([]))
    if "--cfg" not in typed.flags:
        early(checked(config, schema), typed.options)
        with folder.claim(resumes=_resumes(config)):
            pass  # and is gone again, if this made it
    return None


def _resumes(config: DictConfig) -> bool:
    """True if the run that did not finish in the same folder may go on."""
    return OmegaConf.select(config, "resume", default=None) == AGAIN


def _check_hydra(options: Sequence[str], known: DictConfig) -> None:
    """Refuse what ``+hydra.KEY=VALUE`` adds to Hydra's own options, among which there is no such one."""
    for option in options:
        key = option.partition("=")[0].lstrip("+")
        group, _, leaf = key.rpartition(".")
        if option.startswith("+hydra.") and leaf not in (node := OmegaConf.select(known, group) or {}):
            raise ConfigError(overrides.unknown(key, [f"{group}.{name}" for name in node]))


@contextlib.contextmanager
def _composing(name: str, typed: flags.Typed) -> Iterator[Callable[[list[str]], DictConfig]]:
    """Composes options as Hydra will, with the flags that say where configurations lie."""
    name, where = typed.flags.get("--config-name", name), []
    begin, home = hydra.initialize_config_module, CONFIGURATION
    if folder := typed.flags.get("--config-dir"):
        path = Path(folder).absolute()
        if not path.is_dir():
            raise ConfigError(f"--config-dir {folder} is no folder; name the one with your configurations")
        where = [f"hydra.searchpath=[{json.dumps(f'file://{path}')}]"]
        # A configuration is looked up in the first place only.
        if (path / f"{name.removesuffix('.yaml')}.yaml").is_file():
            where = [f"hydra.searchpath=[pkg://{CONFIGURATION}]"]
            begin, home = hydra.initialize_config_dir, str(path)

    def composed(options: list[str]) -> DictConfig:
        try:
            return hydra.compose(name, overrides=[*where, *options], return_hydra_config=True)
        except Exception as error:  # Hydra's grammar and composition raise several unrelated kinds
            raise overrides.refusal(name, where, options, error) from error

    with begin(home, version_base="1.3"):
        yield composed
