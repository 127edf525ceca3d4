"""What the graph proves about zeros: behind a ReLU no gradient passes where the output is zero.

So the gradient of such an output needs to travel only where the output is not zero (mask reuse): the upstream
ReLU makes zeros of the rest, whatever stands there, NaN included. Only a ReLU, a ReLU6 or a max-pool over one
proves that; dropout does not (a kept element may be zero with a live gradient, a dropped one gets -0.0)."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from .layers import Layer, Parts, Traced
from .probe_record import Outputs
from .reach import is_foreign

RELU_MODULES = (nn.ReLU, nn.ReLU6)
RELU_CALLS = {F.relu, F.relu_, F.relu6, torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_}
POOL_MODULES = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
POOL_CALLS = {F.max_pool1d, F.max_pool2d, F.max_pool3d, torch.max_pool1d, torch.max_pool2d, torch.max_pool3d}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def zeros_that_stop(
    traced: Traced,
    parts: Parts,
    outputs: Mapping[fx.Node, Outputs],
    last_writer: Callable[[int, int], int],
    watched: Collection[int],
) -> set[tuple[int, int]]:
    """(layer, value) for every layer that left zeros in its only output that stop every gradient there.

    ``last_writer(value, reader)``: the layer that wrote last to the value's memory before ``reader`` ran.
    ``watched``: values with hooks of their own, which see the whole gradient.
    """
    found: set[tuple[int, int]] = set()
    for index, layer in enumerate(traced.layers):
        made = outputs[layer.node].values
        if len(made) != 1 or made[0] in watched:
            continue
        if _is(layer, parts, RELU_MODULES, RELU_CALLS):
            found.add((index, made[0]))
        elif len(layer.node.all_input_nodes) == 1 and _is(layer, parts, POOL_MODULES, POOL_CALLS):
            (pooled,) = outputs[layer.node.all_input_nodes[0]].values
            if (last_writer(pooled, index), pooled) in found:
                found.add((index, made[0]))
    return found


def _is(layer: Layer, parts: Parts, modules: tuple[type[nn.Module], ...], calls: set[object]) -> bool:
    """Whether a layer is one of these and no other, which nobody watches through hooks."""
    if layer.node.op != "call_module":  # a parameter may be called "relu"
        return layer.node.op != "get_attr" and layer.node.target in calls
    module = parts.modules[str(layer.node.target)]
    return type(module) in modules and is_itself(module) and not getattr(module, "min_val", 0)


def may_prove(module: nn.Module) -> bool:
    """Whether zeros that a module leaves may stop gradients, if nobody watches it."""
    return type(module) in (*RELU_MODULES, *POOL_MODULES)


def functions_of_proofs() -> list[object]:
    """What such modules call."""
    return [vars(F)[name] for name in ("relu", "relu6", "hardtanh", "max_pool1d", "max_pool2d", "max_pool3d")]


def hooks_on_all_modules() -> list[tuple[Any, ...]]:
    """The hooks that torch calls for every module."""
    return [tuple(getattr(nn.modules.module, f"_global{name}")) for name in HOOKS]


def is_itself(module: nn.Module) -> bool:
    """Whether nothing but its class says what a module does: no hooks, no forward of its own."""
    hooks = [*hooks_on_all_modules(), *(getattr(module, name) for name in HOOKS)]
    return not any(hooks) and "forward" not in vars(module)


def is_of_torch(module: nn.Module) -> bool:
    """Whether torch alone says what a module and all in it do: no code of a person's is held there."""
    for m in module.modules():
        torch_says = type(m).__module__.startswith("torch.nn.") and is_itself(m)
        if not torch_says or any(map(_is_own, vars(m).values())):
            return False
    return True


def _is_own(item: object) -> bool:
    """Whether it is code of a person's, as an activation may be."""
    if isinstance(item, types.FunctionType):
        return not is_foreign(item)
    return callable(item) and not isinstance(item, type | types.BuiltinFunctionType)
