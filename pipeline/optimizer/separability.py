"""Separability of optimizers: one that updates each parameter by itself may be divided over stages or layers.

Some do not: they clip by a norm over all gradients, estimate one step size for all, draw random numbers in
turn, or count their steps. The optimizers of torch.optim are known by name. Any other one is tried before
training on small parameters under the model's names: all at once, and part by part."""

import math
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from ...compression.errors import PlanError
from ...stages.device import is_gpu
from ...stages.torch_private import has_global_step_hooks, has_step_hooks, tree_flatten
from ...stages.tracing.verify import same_bits
from .optimizers import Make, Named, make_optimizer, random_kept, settings_of

SEPARABLE = frozenset(
    getattr(torch.optim, name)
    for name in "Adadelta Adafactor Adagrad Adam Adamax AdamW ASGD Muon NAdam RAdam RMSprop Rprop SGD".split()
)
"""The optimizers of torch.optim that update each parameter by its own gradient and state; LBFGS does not."""
SCALES = (1e-3, 1.0, 30.0, 1e3, 1.0)
"""How large the gradients of each update of a trial are; the last has an infinite one."""

BY_ELEMENT = SEPARABLE - {torch.optim.Adafactor, torch.optim.Muon}
"""Those that update each element by itself, so that pieces of a parameter get the same bits."""


def updates_by_element(optimizer: Optimizer) -> bool:
    """True if pieces of its parameters are updated with the bits of the whole: fused kernels round the last
    elements of a tensor otherwise, as do all with 16 bits; nobody tried those of a GPU."""
    groups = optimizer.param_groups
    kernels = any(group.get(name) for group in groups for name in ("fused", "capturable", "differentiable"))
    parameters = [parameter for group in groups for parameter in group["params"]]
    is_plain = all(p.dtype in (torch.float32, torch.float64) and not is_gpu(p.device) for p in parameters)
    return type(optimizer) in BY_ELEMENT and is_separable(optimizer) and is_plain and not kernels


def seems_by_element(optimizer: Make) -> bool:
    """True if ``updates_by_element`` holds for what ``optimizer`` makes of a small parameter."""
    with random_kept():
        try:
            made = make_optimizer(optimizer, [("weight", Parameter(torch.zeros(64, 64)))])
        except Exception:  # it takes other names or shapes
            return False
    return made is not None and updates_by_element(made)


class InTurn:
    """``optimizer``, stepped turn by turn: its groups have the parameters of one turn while it steps."""

    def __init__(self, optimizer: Optimizer, turns: Sequence[Sequence[Parameter]]) -> None:
        """Take ``turns`` that hold every parameter of ``optimizer``."""
        self.optimizer, self.by_element = optimizer, updates_by_element(optimizer)
        members = [{id(parameter) for parameter in turn} for turn in turns]
        groups = [group["params"] for group in optimizer.param_groups]
        self._parts = [[[p for p in group if id(p) in turn] for group in groups] for turn in members]

    def has(self, turn: int) -> bool:
        """True if the optimizer has a parameter of this turn."""
        return any(self._parts[turn])

    def step_of(self, turn: int, pieces: Mapping[int, Parameter] | None = None) -> None:
        """Update the parameters of one turn; those in ``pieces`` alone, by their identity, the piece in place
        of each."""
        parts, groups = self._parts[turn], self.optimizer.param_groups
        if pieces is not None:
            parts = [[pieces[id(p)] for p in part if id(p) in pieces] for part in parts]
        if not any(parts):
            return
        whole = [group["params"] for group in groups]
        try:
            for group, part in zip(groups, parts, strict=True):
                group["params"] = part
            self.optimizer.step()
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params

    def step(self) -> None:
        """Update all turns."""
        for turn in range(len(self._parts)):
            self.step_of(turn)


def is_separable(optimizer: Optimizer) -> bool:
    """True if it is known to update every parameter by itself, and nobody has a part in its steps either."""
    is_touched = has_step_hooks(optimizer) or has_global_step_hooks() or "step" in vars(optimizer)
    return type(optimizer) in SEPARABLE and not is_touched


def check_separable(
    optimizer: Make,
    named: Named,
    part_of: Mapping[str, int],
    made: Sequence[Optimizer],
    *,
    in_turn: bool = False,
) -> None:
    """Refuse an optimizer that does something else with all parameters than with those of each part.

    A warning says that it could not be tried. Hooks are refused, too, where they would count turns.

    Args:
        named: All parameters, of which only names, dtypes and shapes are read, so every rank decides alike.
        part_of: The stage of each by its name, or its turn.
        made: Optimizers that the function made.
        in_turn: One optimizer steps turn by turn; else every stage has one."""
    if hooked := next((one for one in made if in_turn and has_step_hooks(one)), None):
        raise PlanError(
            "with a mirror of the parameters an optimizer steps once for every layer, and "
            f"{type(hooked).__name__} has hooks on its steps; remove them, or leave parameters on the device"
        )
    if len(set(part_of.values())) < 2:
        return
    try:
        with random_kept():
            refusal = _refusal(optimizer, named, part_of, in_turn=in_turn)
    except Exception as error:  # whatever a person's function raises for parameters it never saw
        if not all(map(is_separable, made)):
            warnings.warn(
                "whether the optimizer treats every parameter by itself could not be tried on small ones "
                f"({type(error).__name__}: {error}); if it does not, a pipeline trains otherwise than the "
                "plain loop",
                stacklevel=3,
            )
        return
    if refusal:
        raise PlanError(refusal)


def _refusal(optimizer: Make, named: Named, part_of: Mapping[str, int], *, in_turn: bool) -> str:
    """Compare an optimizer part by part with one over all parameters; return the difference, "" for none."""
    together, divided = _stand_ins(named), _stand_ins(named)
    joint = make_optimizer(optimizer, together)
    if joint is None:
        return ""
    parts = [[pair for pair in divided if part_of[pair[0]] == part] for part in sorted(set(part_of.values()))]
    pairs_of_optimizers = [divided] if in_turn else parts
    optimizers = [(make_optimizer(optimizer, pairs), pairs) for pairs in pairs_of_optimizers]
    # 1. settings: a parameter has the same ones in both
    known = _settings(joint, together)
    if message := _settings_differ(known, [_settings(one, pairs) for one, pairs in optimizers]):
        return message
    if is_separable(joint):
        return ""
    # 2. updates: a parameter, its state and its settings have the same bits in both
    tried = [name for name, p in together if name in known and p.requires_grad and p.numel()]
    expected = _outcomes(joint, joint.step, together, tried)
    for one, pairs in optimizers:
        if one is None:
            continue
        step = InTurn(one, [[p for _, p in part] for part in parts]).step if in_turn else one.step
        for name, outcome in _outcomes(one, step, pairs, tried).items():
            if _differ(expected[name], outcome):
                mirror = "with a mirror of the parameters " * in_turn
                return (
                    f"{mirror}an optimizer works on one {'layer' if in_turn else 'stage'}'s parameters at a "
                    f"time and {type(joint).__name__} looks at all together, or draws random numbers: {name} "
                    f"is updated otherwise than {'in turn' if in_turn else 'apart'}; use SGD or Adam"
                    f"{', or leave parameters on the device' * in_turn}"
                )
    return ""


def _stand_ins(named: Named) -> Named:
    """Small parameters under the same names, with the same dtype, dimensions and wish for a gradient."""
    source, stand_ins = torch.Generator().manual_seed(0), []
    for place, (name, parameter) in enumerate(named):
        limits = [3 + place % 3] * 2 + [2] * parameter.dim()
        shape = [min(size, limit) for size, limit in zip(parameter.shape, limits, strict=False)]
        value = _random(shape, parameter.dtype, source)
        stand_ins.append((name, Parameter(value, requires_grad=parameter.requires_grad)))
    return stand_ins


def _settings(optimizer: Optimizer | None, named: Named) -> dict[str, dict[str, Any]]:
    names = {id(parameter): name for name, parameter in named}
    groups = [] if optimizer is None else optimizer.param_groups
    return {names[id(p)]: settings_of(group) for group in groups for p in group["params"]}


def _settings_differ(joint: Mapping[str, Any], divided: Sequence[Mapping[str, Any]]) -> str:
    """First setting that a parameter gets by its place, or by the presence of others."""
    of_parts = {name: settings for one in divided for name, settings in one.items()}
    rule = "the optimizer's function gives a parameter the same whatever others it is called with"
    if strange := sorted(joint.keys() ^ of_parts.keys()):
        where = "with all of the model's only" if strange[0] in joint else "with those of its stage only"
        return f"{rule}, and takes {strange[0]} {where}; choose by name"
    for name, settings in of_parts.items():
        for key, value in settings.items():
            if _differ(joint[name].get(key), value):
                return (
                    f"{rule}, and {key} of {name} is {joint[name].get(key)} with all of the model's and "
                    f"{value} with those of its stage; choose it by name"
                )
    return ""


def _outcomes(
    optimizer: Optimizer, step: Callable[[], Any], named: Named, tried: Sequence[str]
) -> dict[str, tuple[torch.Tensor, dict[str, Any], dict[str, Any]]]:
    """The parameters that are tried, with the optimizer's state and settings of them, after some updates."""
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
        step()
    settings = _settings(optimizer, named)
    return {name: (p, dict(optimizer.state.get(p, {})), settings[name]) for _, name, p in mine}


def _random(shape: Sequence[int], dtype: torch.dtype, source: torch.Generator) -> torch.Tensor:
    drawn = dtype if dtype.is_complex else torch.float32
    return torch.randn(shape, generator=source, dtype=drawn).to(dtype)


def _differ(a: Any, b: Any) -> bool:
    """True if tensors or numbers in these trees differ."""

    def is_other(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return not same_bits(a, b)
        return isinstance(a, int | float) and isinstance(b, int | float) and a != b and (a == a or b == b)

    (leaves, form), (others, other_form) = tree_flatten(a), tree_flatten(b)
    return form != other_form or any(map(is_other, leaves, others))
