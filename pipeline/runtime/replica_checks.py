"""What replicas of a stage would train otherwise than one rank, refused by name.

A replica sees some micro-batches, its part of a gradient, and what it was told itself; one rank sees all."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

from ...compression.errors import Disagreement, PlanError, StageError
from ...stages.planner.plan import Plan
from ...stages.tracing.layers import is_local
from ...stages.tracing.tracer import LayerGraph
from .running_statistics import BUFFERS, batch_norms

Named = Iterable[tuple[str, torch.Tensor]]


def check_hooks(named: Named) -> None:
    """Refuse hooks that see a gradient behind each backward: of one rank the sum until then, here a part.

    Raises:  PlanError: a parameter has one."""
    if name := next((name for name, p in named if getattr(p, "_post_accumulate_grad_hooks", None)), ""):
        raise PlanError(
            f"replicas add up what each has of a gradient, and {name} has a hook that sees it behind each "
            "backward (register_post_accumulate_grad_hook); take a hook of the optimizer's step, or one rank "
            "a stage"
        )


def check_apart(named: Named) -> None:
    """Refuse gradients in one memory, as autograd gives them to two views of one shape that are added up:
    a backward behind it adds to both what is meant for each.

    Raises:  StageError: two are."""
    seen = dict[int, str]()
    for name, parameter in named:
        gradient = parameter.grad
        if gradient is None or gradient.layout != torch.strided or not gradient.numel():
            continue
        if (first := seen.setdefault(gradient.data_ptr(), name)) != name:
            raise StageError(
                f"replicas add up the gradient of each parameter, and autograd gave {first} and {name} one "
                "tensor for both, to which every backward adds twice; read a copy of one in forward: "
                f"{name}.clone()"
            )


def trained(named: Named) -> tuple[torch.Tensor, torch.Tensor]:
    """For each parameter 1 if it requires a gradient, else 0; and the other way round."""
    asks = torch.tensor([int(parameter.requires_grad) for _, parameter in named], dtype=torch.uint8)
    return asks, 1 - asks


def check_trained(named: Named, found: torch.Tensor, *, stage: int) -> None:
    """Refuse a parameter that replicas of ``stage`` do not all train: the sum would lack a part.

    Args:    found: the largest of what they have ``trained``.
    Raises:  Disagreement: there is one."""
    for (name, _), both in zip(named, (found[0] & found[1]).tolist(), strict=True):
        if both:
            raise Disagreement(
                f"replicas of a stage train the same parameters: {name} of stage {stage} requires a gradient "
                "on some of their ranks and on others none; set requires_grad alike on all of them"
            )


def check_replicated(plan: Plan, model: nn.Module, graph: LayerGraph) -> None:
    """Refuse what replicas would train otherwise than one.

    Raises:  PlanError: the model has something of the kind."""
    if max(plan.replicas) == 1:
        return
    check_hooks(model.named_parameters())
    if sparse := next((n for n, m in model.named_modules() if getattr(m, "sparse", False) is True), ""):
        raise PlanError(
            f"replicas add up dense gradients, and {sparse} gives sparse ones; make it with sparse=False, or "
            "take one rank a stage"
        )
    norms = batch_norms(dict(model.named_modules(remove_duplicate=False)))
    statistics = {f"{name}.{key}" for name in norms for key in BUFFERS}
    if found := sorted(graph.written - statistics):
        raise PlanError(
            f"replicas see some micro-batches each, and a forward writes to {found[0]}, which is no running "
            "statistic of a batch norm; take one rank a stage"
        )
    traced = graph.train
    nodes = [*(layer.node for layer in traced.layers), traced.output]
    read = {str(source.target) for node in nodes for source in node.all_input_nodes if is_local(source)}
    if found := sorted(_buffers(model, read) & _buffers(model, graph.written)):
        raise PlanError(
            "replicas add running statistics at the update, and only a module of torch.nn that is called may "
            f"read or write them, found a forward that uses {found[0]} by itself (F.batch_norm, or a class "
            "of one's own); call a module of torch.nn instead, or take one rank a stage"
        )
    if graph.written and any(stage.recompute for stage in plan.stages):
        raise PlanError(
            f"replicas set the running statistics of batch norms aside, found {min(graph.written)} and "
            "recompute=true; take recompute=false, or one rank a stage"
        )


def _buffers(model: nn.Module, names: Collection[str]) -> set[str]:
    """Return the first name of each buffer among these names."""
    first = {id(buffer): name for name, buffer in model.named_buffers()}
    named = model.named_buffers(remove_duplicate=False)
    return {first[id(buffer)] for name, buffer in named if name in names}


def check_outputs(plan: Plan, asked: bool) -> None:
    """Refuse to hand out the outputs of a step where replicas have them; raises PlanError."""
    if asked and plan.replicas[-1] > 1:
        raise PlanError(
            f"each of {plan.replicas[-1]} replicas of the last stage has outputs of its own micro-batches, "
            "found outputs=True; evaluate the batch, or give the last stage one rank"
        )
