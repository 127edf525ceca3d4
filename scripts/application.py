"""One command of ``penstock`` by its options: Hydra composes them, rules are asked, a job of Hydra runs.

``hydra.main`` would make the run folder before anything is checked, and print what is wrong in several lines.
So its parts are called here: composition, then our checks, then a job or a sweep."""

import argparse
import contextlib
import copy
import dataclasses
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path, get_args_parser
from hydra.conf import HydraConf
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobStatus, run_job
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from ..compression.errors import ConfigError, PenstockError
from ..conf.schema import AGAIN
from ..pipeline.run import console, early, sweep
from ..pipeline.run.run_folder import RunFolder
from . import stopping
from .command import REFUSED, unloadable
from .command_line import find_own_modules, names, nearest, parse, unknown_option

UNKNOWN = (ConfigAttributeError, ConfigKeyError)
KINDS = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}

Task = Callable[[Any, RunFolder, Sequence[str]], int | None]


def run(name: str, schema: type[Any], task: Task, *, arguments: Sequence[str]) -> int:
    """Compose the options of command ``name`` and call ``task(options, run folder, options as typed)``.

    What needs neither a model nor torch is refused first, with --multirun of every run before one begins.

    Args: arguments: ``KEY=VALUE``, and Hydra's own flags.

    Returns:
        The exit code, 0 unless the task returns another. With --multirun a run that fails stops no other.
    """
    typed, codes, swept = parse(name, arguments, schema), [0], dict[Path, list[str]]()

    def call(options: Any) -> None:
        job = HydraConfig.get()
        folder = RunFolder(path=Path(job.runtime.output_dir))
        try:
            codes.append(task(options, folder, list(job.overrides.task)) or 0)
        except KeyboardInterrupt as stop:
            stop.add_note(stopping.kept(folder, command=shlex.join(["penstock", name, *arguments])))
            raise

    def call_one_of_several(config: DictConfig) -> None:
        try:
            options, job = checked(config, schema), HydraConfig.get()
            early.check(options, list(job.overrides.task))
            with _claim(job.runtime.output_dir, options):
                call(options)
            swept[Path(job.runtime.output_dir)] = list(job.overrides.task)
        except (PenstockError, ImportError) as error:
            console.warn(str(unloadable(error) if isinstance(error, ImportError) else error))
            codes.append(REFUSED)

    with _hydra(name, typed, schema) as hydra:
        if _answer(hydra, typed, schema):
            return 0
        # 1. compose and check every run
        runs = [(_compose(hydra, typed, schema, given), given) for given in _runs(typed)]
        checks = [(checked(config, schema), given) for config, given in runs]
        for options, given in checks:
            early.check(options, given)
        # 2. a sweep: Hydra composes each run anew, and calls it
        config, options = runs[0][0], checks[0][0]
        if typed.multirun:
            with RunFolder(path=Path(config.hydra.sweep.dir)).claim():
                hydra.multirun(typed.config_name, call_one_of_several, typed.overrides)
                sweep.close(Path(config.hydra.sweep.dir), swept)
            return max(codes)
        # 3. or one job
        callbacks = Callbacks(config)
        callbacks.on_run_start(config=config, config_name=typed.config_name)
        with _claim(config.hydra.run.dir, options):
            context = HydraContext(config_loader=hydra.config_loader, callbacks=callbacks)
            job = run_job(lambda _: call(options), config, "hydra.run.dir", None, context)
        callbacks.on_run_end(config=config, config_name=typed.config_name, job_return=job)
        if job.status == JobStatus.FAILED:
            raise job._return_value
    return max(codes)


def options(name: str, schema: type[Any], *, arguments: Sequence[str]) -> tuple[Any, RunFolder] | None:
    """Return the options of command ``name``, and the run folder, which another process claims, as this one
    would name it; None where a flag asks for no run."""
    typed = parse(name, arguments, schema)
    if _asked_of_hydra(typed):
        return None
    with _hydra(name, typed, schema) as hydra:
        config = _compose(hydra, typed, schema, typed.overrides)
        composed = checked(config, schema)
    early.check(composed, typed.overrides)
    return composed, RunFolder(path=Path(config.hydra.run.dir))


def checked(config: DictConfig, schema: type[Any]) -> Any:
    """Return the options as an object of ``schema``, every rule of which has been checked."""
    if "hydra" in config:
        config = copy.deepcopy(config)
        with open_dict(config):
            del config["hydra"]
    try:
        if OmegaConf.get_type(config) is not schema:  # a configuration of one's own, without our schema
            config = OmegaConf.merge(OmegaConf.structured(schema), config)  # pyright: ignore[reportAssignmentType]
        if missing := sorted(OmegaConf.missing_keys(config)):
            raise ConfigError(f"{missing[0]}= must be given; add {missing[0]}=VALUE")
        composed = OmegaConf.to_object(config)
    except ConfigKeyError as error:
        known = [field.name for field in dataclasses.fields(error.object_type or schema)]
        raise ConfigError(unknown_option(str(error.full_key), known, schema)) from error
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{error.full_key or 'an option'} cannot be resolved: {reason}") from error
    _check_names(composed, schema)
    return composed


def _check_names(composed: Any, schema: type[Any], prefix: str = "") -> None:
    """Refuse what ``+KEY=VALUE`` added to the schema, which no part of a run would look at."""
    known = [field.name for field in dataclasses.fields(composed)]
    for name, value in vars(composed).items():
        if name not in known and not (name == "searched" and isinstance(value, tuple)):  # which nobody types
            typed = "" if isinstance(value, dict) else f"{prefix}{name}={value}: "
            raise ConfigError(typed + unknown_option(f"{prefix}{name}", known, schema))
        if dataclasses.is_dataclass(value):
            _check_names(value, schema, prefix=f"{prefix}{name}.")


@contextlib.contextmanager
def _claim(path: str, options: Any) -> Iterator[None]:
    with RunFolder(path=Path(path)).claim(resumes=getattr(options, "resume", None) == AGAIN) as missing:
        if missing:
            console.warn(missing)
        yield


@contextlib.contextmanager
def _hydra(name: str, typed: argparse.Namespace, schema: type[Any]) -> Iterator[Hydra]:
    """Hydra as ``hydra.main`` sets it up, which looks for configurations where the flags say."""
    find_own_modules()
    version.setbase("1.3")
    ConfigStore.instance().store(name=f"{name}_schema", node=schema)
    OmegaConf.register_new_resolver("pid", os.getpid, replace=True)  # makes the folder's name unique
    home = os.path.abspath(typed.config_path) if typed.config_path else "pkg://penstock.conf"
    places = create_automatic_config_search_path(None, None, home)
    if typed.config_dir:
        folder = Path(typed.config_dir).absolute()
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {typed.config_dir} is no folder; name that of your options")
        places.prepend("command-line", f"file://{folder}", anchor=SearchPathQuery(provider="schema"))
    try:
        yield Hydra.create_main_hydra2(name, places)
    finally:
        GlobalHydra.instance().clear()


def _asked_of_hydra(typed: argparse.Namespace) -> list[str]:
    """Flags that ask for an answer of Hydra's instead of a run; refuses those that do not go together."""
    if typed.experimental_rerun:
        raise ConfigError(
            "--experimental-rerun reads a pickle, which may run anything; type the options of config.yaml"
        )
    asked = [flag for flag in ("hydra_help", "shell_completion", "info", "cfg") if getattr(typed, flag)]
    if len(asked) + typed.multirun > 1:
        flags = ", ".join(f"--{flag.replace('_', '-')}" for flag in [*asked, "multirun"][: 1 + len(asked)])
        raise ConfigError(f"a command does one thing at a time, found {flags}; drop all but one")
    if (typed.package or typed.resolve) and "cfg" not in asked:
        raise ConfigError("--package and --resolve say what --cfg prints; add --cfg job, or drop them")
    return asked


def _answer(hydra: Hydra, typed: argparse.Namespace, schema: type[Any]) -> bool:
    """Print what a flag asks for instead of a run; False where none does."""
    asked, name = _asked_of_hydra(typed), typed.config_name
    try:
        if "cfg" in asked:
            hydra.show_cfg(name, typed.overrides, typed.cfg, typed.package, typed.resolve)
        if "info" in asked:
            hydra.show_info(typed.info, name, typed.overrides)
        if "hydra_help" in asked:
            hydra.hydra_help(name, get_args_parser(), typed)
        if "shell_completion" in asked:
            hydra.shell_completion(name, typed.overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise refusal(name, typed.overrides, error, schema) from error
    return bool(asked)


def _runs(typed: argparse.Namespace) -> list[list[str]]:
    """Options of every run: of a sweep, one of each list."""
    if not typed.multirun:
        return [typed.overrides]
    try:
        parsed = OverridesParser.create().parse_overrides(typed.overrides)
        (runs,) = BasicSweeper.split_arguments(parsed, None)
    except HydraException:  # refused when it is composed
        return [typed.overrides]
    return [list(run) for run in runs]


def _compose(hydra: Hydra, typed: argparse.Namespace, schema: type[Any], given: Sequence[str]) -> DictConfig:
    name, log = typed.config_name, not typed.multirun
    try:
        config = hydra.compose_config(name, [*given], RunMode.RUN, with_log_configuration=log)
    except Exception as error:  # Hydra's grammar and composition raise several unrelated kinds
        raise refusal(name, given, error, schema) from error
    known = [one.name for one in dataclasses.fields(HydraConf)]
    for key in (_key(option) for option in given if option.startswith("+hydra.")):
        if key.split(".")[1] not in known:
            raise ConfigError(unknown_option(key, known, schema))
    if not typed.multirun and config.hydra.mode == RunMode.MULTIRUN:
        raise ConfigError("hydra.mode=MULTIRUN is one run for each value; type --multirun")
    HydraConfig.instance().set_config(config)  # for ${hydra:...}
    return config


def refusal(name: str, options: Sequence[str], error: Exception, schema: type[Any]) -> ConfigError:
    """Return the sentence for what Hydra refused of ``options``, or of configuration ``name``."""
    first, cause = str(error).splitlines()[0], error.__cause__ or error.__context__ or error
    full = str(getattr(cause, "full_key", None) or "")
    if isinstance(error, MissingConfigException):
        missing, known = str(error.missing_cfg_file), ", ".join(error.options or ())
        group, _, choice = missing.rpartition("/")
        if missing == name:
            return ConfigError(f"--config-name {name}: there is no {name}.yaml; say where by --config-dir")
        return ConfigError(f"{group}={choice} is not known; {group} is one of {known}")
    if place := re.match(r"In '([^']+)'", first):
        reason = _unknown(full, cause, schema) if isinstance(cause, UNKNOWN) else str(cause)
        return ConfigError(f"{place[1]}.yaml: {' '.join(reason.split())}")
    override = getattr(error, "override", None) or ""
    culprits = (one for one in options if one == override or _key(one) == full or one in first)
    argument = next(culprits, first).removeprefix("++")
    key, _, value = argument.partition("=")
    if isinstance(error, OverrideParseException) or not isinstance(error, HydraException):
        written = re.match(r"(\w[\w.]*)(?::(.*))?$", argument)
        if written and (close := nearest(written[1], names(schema))):
            return ConfigError(f"{argument} has no value; write {close}={written[2] or 'VALUE'}")
        quote = "write KEY=VALUE, and quote a value with spaces, commas or brackets"
        return ConfigError(f"{argument} cannot be read; {quote}")
    if "Ambiguous" in first:
        several = f"write {key}=[...] for a list, or --multirun for one run each"
        return ConfigError(f"{argument} is several values; {several}")
    if isinstance(cause, UNKNOWN):
        sentence = f"{argument}: {_unknown(full, cause, schema)}"
        return ConfigError(re.sub(r"did you mean (.+)\?$", rf"did you mean \1? write \1={value}", sentence))
    reason = str(cause).splitlines()[0]
    if kind := re.search(r"(?:converted to|not a valid) (\w+)", reason):
        reason = f"{full} takes {KINDS.get(kind[1], kind[1])}, not {value}"
    elif "not Optional" in reason:
        reason = f"{full} must have a value"
    elif "not a subclass of" in reason:
        parts = [name for name in names(schema) if name.startswith(f"{full}.")]
        reason = f"{full}= has parts; write one, such as {parts[0] if parts else full}={value}"
    elif "ListConfig" in reason:
        reason = f"{full} takes a list, for example {full}=[{value}]"
    return ConfigError(f"{argument} does not fit: {reason}")


def _unknown(full: str, cause: Any, schema: type[Any]) -> str:
    node = cause.parent_node
    return unknown_option(full, map(str, node) if isinstance(node, DictConfig) else (), schema)


def _key(argument: str) -> str:
    return argument.partition("=")[0].lstrip("+~").partition("@")[0]
