"""Whether an optimizer treats every parameter by itself: one per stage is then the one of the plain loop.

Some do not: they clip by a norm over all gradients, estimate one step size for all, draw random numbers in
turn, or get settings by a parameter's place. None says so; so each is tried, before anything runs, on small
parameters under the model's names: one optimizer of all, and one per stage."""

from __future__ import annotations

import functools
import math
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch.optim import Optimizer

from ...compression.errors import PlanError
from ...stages.tracing.comparison import same_bits
from .optimizers import Make, Named, make_optimizer, optimizer_like, random_kept, settings_of

SCALES = (1e-3, 1.0, 30.0, 1e3, 1.0)
"""How large the gradients of each update are; in the last one a number of them is infinite."""
NUM_TRIED = 96  # parameters with gradients, spread over stages, groups, dtypes and dimensions

Outcome = tuple[torch.Tensor, dict[str, Any], dict[str, Any]]
"""A parameter, the optimizer's state of it, the settings of its group."""


def check_apart(
    optimizer: Make, named: Named, stage_of: Mapping[str, int], made: Mapping[int, Optimizer]
) -> None:
    """Refuse an optimizer that does something else with all parameters than with those of each stage.

    Args:    named: the parameters of the whole model, of which only names, dtypes and shapes are read, so
             that every rank decides alike.
             made: the optimizers of this process; where the function does not take small parameters (it may
             look up its model's own), copies of these are tried.
    Raises:  PlanError: it does. A warning says that it could not be tried."""
    if len(set(stage_of.values())) < 2:
        return
    trials: list[Callable[[], str]] = [lambda: _difference(optimizer, named, stage_of)]
    trials += [functools.partial(_twins_differ, one, named) for one in made.values()]
    unknown: Exception | None = None
    with random_kept():
        for trial in trials:
            try:
                found = trial()
            except Exception as error:  # whatever a person's function raises for parameters it never saw
                unknown = error
                continue
            if found:
                raise PlanError(found)
            return
    warnings.warn(
        f"whether the optimizer treats every parameter by itself could not be tried on small ones "
        f"({type(unknown).__name__}: {unknown}); if it does not, a pipeline trains otherwise than the plain "
        "loop",
        stacklevel=3,
    )


def stand_ins(named: Named, *, most: int = 3) -> Named:
    """Small parameters under the same names: same dtype, dimensions and wish for a gradient, sizes of at
    most ``most`` to ``most + 2``, and never larger than they are."""
    source, found = torch.Generator().manual_seed(0), []
    for place, (name, parameter) in enumerate(named):
        limits = [most + place % 3] * 2 + [2] * parameter.dim()
        shape = [min(size, limit) for size, limit in zip(parameter.shape, limits, strict=False)]
        value = _random(shape, parameter.dtype, source)
        found.append((name, torch.nn.Parameter(value, requires_grad=parameter.requires_grad)))
    return found


def _difference(optimizer: Make, named: Named, stage_of: Mapping[str, int], *, most: int = 3) -> str:
    """What an optimizer of all parameters does otherwise than one per stage, as a refusal; "" for nothing."""
    joint = make_optimizer(optimizer, together := stand_ins(named, most=most))
    if joint is None:
        return ""
    by_stage: dict[int, Named] = {}
    for pair in stand_ins(named, most=most):
        by_stage.setdefault(stage_of[pair[0]], []).append(pair)
    apart = [(make_optimizer(optimizer, own), own) for own in by_stage.values()]
    if said := _settings_differ(_settings(joint, together), [_settings(*one) for one in apart]):
        return said
    tried = chosen(joint, together, stage_of)
    expected = trained(joint, together, tried)
    for made, own in apart:
        for name, outcome in trained(made, own, tried).items():
            if differ(expected[name], outcome):
                return (
                    "an optimizer works on one stage's parameters at a time and "
                    f"{type(joint).__name__} looks at all together: {name} is updated otherwise than apart; "
                    "use SGD or Adam"
                )
    return ""


def _twins_differ(made: Optimizer, named: Named) -> str:
    """The same of two halves of ``made``'s own groups, whatever the function that made it takes."""
    names = {id(parameter): name for name, parameter in named}
    settings = {names[id(p)]: settings_of(group) for group in made.param_groups for p in group["params"]}
    shown = [(f"{half}{n}", p) for half in "01" for n, p in named if n in settings]

    def make(pairs: Named) -> Optimizer:
        groups: dict[int, tuple[dict[str, Any], list[torch.nn.Parameter]]] = {}
        for name, parameter in pairs:
            mine = settings[name[1:]]
            groups.setdefault(id(mine), (mine, []))[1].append(parameter)
        return optimizer_like(made, list(groups.values()))

    return _difference(make, shown, {name: int(name[0]) for name, _ in shown}, most=32)


def _settings(made: Optimizer | None, named: Named) -> dict[str, dict[str, Any]]:
    """The hyper-parameters that each parameter has."""
    names = {id(parameter): name for name, parameter in named}
    groups = [] if made is None else made.param_groups
    return {names[id(p)]: settings for g in groups for settings in [settings_of(g)] for p in g["params"]}


def _settings_differ(joint: Mapping[str, Any], apart: Sequence[Mapping[str, Any]]) -> str:
    """What a function gives a parameter by its place, or by what else there is."""
    found = {name: settings for one in apart for name, settings in one.items()}
    rule = "the optimizer's function gives a parameter the same whatever others it is called with"
    if strange := sorted(set(joint) ^ set(found)):
        where = "with all of the model's only" if strange[0] in joint else "with those of its stage only"
        return f"{rule}, and takes {strange[0]} {where}; choose by name"
    for name, settings in found.items():
        for key, value in settings.items():
            if key in joint[name] and differ(joint[name][key], value):
                return (
                    f"{rule}, and {key} of {name} is {joint[name][key]} with all of the model's and {value} "
                    "with those of its stage; choose it by name"
                )
    return ""


def chosen(joint: Optimizer, named: Named, stage_of: Mapping[str, int]) -> list[str]:
    """One parameter of every kind, the kinds thinned out evenly where they are too many."""
    names, kinds = {id(parameter): name for name, parameter in named}, dict[tuple[object, ...], str]()
    for number, group in enumerate(joint.param_groups):
        for p in group["params"]:
            if p.requires_grad and p.numel():
                name = names[id(p)]
                kinds.setdefault((stage_of[name], number, p.dtype, p.dim()), name)
    found = list(kinds.values())
    return found[:: math.ceil(len(found) / NUM_TRIED) or 1]


def trained(made: Any, named: Named, tried: Sequence[str]) -> dict[str, Outcome]:
    """What a few updates make of the parameters that are tried."""
    if made is None:
        return {}
    torch.default_generator.manual_seed(0)  # those of GPUs are the person's
    random.seed(0)
    numpy.random.seed(0)
    parameters = dict(named)
    mine = [(place, name, parameters[name]) for place, name in enumerate(tried) if name in parameters]
    for number, scale in enumerate(SCALES):
        for place, _, p in mine:
            source = torch.Generator().manual_seed(len(tried) * number + place)
            p.grad = _random(p.shape, p.dtype, source).mul_(scale)
            if number + 1 == len(SCALES) and place == 0:
                p.grad.view(-1)[0] = math.inf
        made.step()
    settings = _settings(made, named)
    return {name: (p, dict(made.state.get(p, {})), settings.get(name, {})) for _, name, p in mine}


def _random(shape: Sequence[int], dtype: torch.dtype, source: torch.Generator) -> torch.Tensor:
    drawn = dtype if dtype.is_complex else torch.float32
    return torch.randn(shape, generator=source, dtype=drawn).to(dtype)


def differ(a: Any, b: Any) -> bool:
    """Whether tensors or numbers that both hold differ."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return not same_bits(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return any(differ(a[key], b[key]) for key in a if key in b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) != len(b) or any(map(differ, a, b))
    if isinstance(a, bool | int | float) and isinstance(b, bool | int | float):
        return a != b and not (math.isnan(a) and math.isnan(b))
    return False
