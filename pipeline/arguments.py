"""What Pipeline refuses before anything runs: each a PlanError that says the rule, what was found and the
remedy."""

from __future__ import annotations

from itertools import zip_longest

import torch
from torch import nn
from torch.optim import Optimizer

from ..compression.errors import PlanError
from ..stages.graph import LayerGraph
from ..stages.plan import Plan
from . import group


def check_gradients() -> None:
    """Training records gradients, so they must not be switched off."""
    if not torch.is_grad_enabled():
        raise PlanError("training needs gradients, and they are switched off here; leave torch.no_grad()")


def check_arguments(
    model: object, plan: object, optimizer: object, clip: object, autocast: object, deadline: float
) -> None:
    """What a person may pass to Pipeline."""
    if not isinstance(model, nn.Module) or not isinstance(plan, Plan):
        raise PlanError(
            f"Pipeline takes a torch module and a Plan, found {type(model).__name__} and "
            f"{type(plan).__name__}"
        )
    if isinstance(optimizer, Optimizer) or not callable(optimizer):
        raise PlanError(
            "optimizer is a function of (name, parameter) pairs, called once per stage, found "
            f"{type(optimizer).__name__}; give lambda named: torch.optim.SGD(named, lr=0.1)"
        )
    if clip is not None and not (isinstance(clip, int | float) and clip > 0):
        raise PlanError(f"clip is a largest norm above 0, found {clip}; give None for no clipping")
    if autocast is not None and not isinstance(autocast, torch.dtype):
        raise PlanError(
            f"autocast is a dtype such as torch.bfloat16, found {autocast}; give None for no cast"
        )
    if not deadline > 0:
        raise PlanError(f"deadline is a number of seconds above 0, found {deadline}")


def check_ranks(plan: Plan) -> None:
    """A group of ranks has as many as the plan."""
    if group.joined() and group.num_ranks() != plan.num_ranks:
        raise PlanError(
            f"the plan is made for {plan.num_ranks} ranks, {group.num_ranks()} were started; start as many, "
            "or plan again"
        )


def check_layers(plan: Plan, graph: LayerGraph) -> None:
    """The model has the layers that the plan spreads over stages."""
    planned = [layer for stage in plan.stages for layer in stage.layers]
    for number, (ours, theirs) in enumerate(zip_longest(graph.layers, planned)):
        if ours != theirs:
            raise PlanError(
                f"a plan belongs to the model it was made for: layer {number} is {ours} in the model, "
                f"{theirs} in the plan; plan again"
            )
