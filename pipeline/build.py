"""Make what the configuration names: samples, model, optimizer, scheduler.

Each of the four groups names its own by ``_target_``, ours and the user's alike, so one way of calling serves
all, and a wrong option is refused with the options that the target takes."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from hydra.utils import instantiate
from torch import nn
from torch.amp import GradScaler

from ..compression.errors import ConfigError, ScheduleError
from .samples.samples import Description, Samples
from .scale import Scaler
from .schedules.written import load_program

NOT_FOR_THE_TARGET = {"_target_", "drop_last"}


def samples(options: Mapping[str, Any]) -> Samples:
    """Return the data that ``data=`` names.

    Raises: ConfigError: the target is unknown, does not take the options, or returns something else.
    """
    made = _call("data", options)
    if not isinstance(made, Samples):
        raise ConfigError(
            f"data._target_={options['_target_']} must return a penstock.pipeline.samples.Samples, not "
            f"{type(made).__name__}"
        )
    return made


def model(options: Mapping[str, Any], *, describe: Description, seed: int) -> nn.Module:
    """Return the network that ``model=`` names, drawn from ``seed`` and told what it asks of the data.

    Raises: ConfigError: the target is unknown, does not take the options, or returns no module.
    """
    torch.manual_seed(seed)
    facts = {"describe": describe, "num_classes": describe.num_classes, "input_shape": describe.input_shape}
    made = _call("model", options, **facts)
    if not isinstance(made, nn.Module):
        raise ConfigError(
            f"model._target_={options['_target_']} must return a torch module, not {type(made).__name__}"
        )
    return made


def optimizer(
    options: Mapping[str, Any],
) -> Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]:
    """Return what makes a stage's optimizer from its (name, parameter) pairs; tried at once.

    Raises: ConfigError: the target is unknown, does not take the options, or refuses their values.
    """

    def make(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return _call("optimizer", options, params=list(named))

    _refused("optimizer", options, lambda: make([("weight", nn.Parameter(torch.zeros(1)))]))
    return make


def scheduler(
    options: Mapping[str, Any], *, num_steps: int
) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None:
    """Return what makes the scheduler of an optimizer, or None for ``scheduler=none``.

    A schedule that has to know how long it lasts (``total_steps``, ``T_max``) is told ``num_steps``.
    """
    if "_target_" not in options:
        return None

    def make(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return _call("scheduler", options, optimizer=optimizer, total_steps=num_steps, T_max=num_steps)

    _refused(
        "scheduler",
        options,
        lambda: make(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)),
    )
    return make


def autocast(name: str | None) -> torch.dtype | None:
    """Return the dtype that ``autocast=`` names."""
    return None if name is None else getattr(torch, name)


def scaler(loss_scale: str | float | None) -> Scaler:
    """Return what ``loss_scale=`` asks for; ``dynamic`` is torch's GradScaler as torch sets it."""
    return GradScaler("cpu") if isinstance(loss_scale, str) else loss_scale


def program(path: str | None) -> tuple[str, ...]:
    """Return the lines of a custom schedule, those that say nothing left out.

    Raises: ConfigError: the file cannot be read, or holds no schedule.
    """
    if path is None:
        return ()
    try:
        return load_program(path)
    except ScheduleError as error:
        raise ConfigError(f"program={error}") from error


def _call(group: str, options: Mapping[str, Any], **facts: Any) -> Any:
    """Call the group's target with the user's options, and with those facts it takes that were not given."""
    target = _locate(group, options.get("_target_"))
    given = {name: value for name, value in options.items() if name not in NOT_FOR_THE_TARGET}
    known = inspect.signature(target).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in known.values())
    for name in given:
        if name not in known and not takes_all:
            takes = ", ".join(one for one in known if one not in facts) or "none"
            raise ConfigError(f"{group} has no option {group}.{name}={given[name]}; it takes {takes}")
    told = {name: value for name, value in facts.items() if name in known and given.get(name) is None}
    for name, one in known.items():
        if one.default is one.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
            if name not in given and name not in told:
                raise ConfigError(
                    f"{group}._target_={options['_target_']} needs {group}.{name}=, which is not given"
                )
    return target(**{**instantiate(given, _convert_="all"), **told})


def _locate(group: str, path: Any) -> Callable[..., Any]:
    if not isinstance(path, str):
        raise ConfigError(
            f"{group}=own needs {group}._target_=, the dotted name of a class or function of yours"
        )
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{group}._target_={path} cannot be imported ({reason}); check the name and the folder"
        ) from error


def _refused(group: str, options: Mapping[str, Any], attempt: Callable[[], object]) -> None:
    try:
        attempt()
    except (ValueError, TypeError) as error:
        given = [f"{group}.{name}={value}" for name, value in options.items() if name != "_target_"]
        raise ConfigError(f"{' '.join(given)} is refused: {error}") from error
