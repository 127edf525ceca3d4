"""The other side of the race: torch's own ``PipelineStage`` and ``Schedule1F1B`` on the very same cut.

Its stages are made from the same trace and hold the same layers as ours, so only the pipelines differ."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module

from ...compression.errors import PlanError
from ...pipeline import group
from ...stages.plan import Plan

Named = Iterable[tuple[str, nn.Parameter]]


class Torch1F1B:
    """One rank's stage in torch's 1F1B; every rank passes the same arguments and the same batches."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: Callable[[Named], torch.optim.Optimizer],
    ) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        self.rank, self.last = group.rank(), plan.num_ranks - 1
        module = stages_of(model, plan)[self.rank]
        stage = PipelineStage(module, self.rank, plan.num_ranks, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, plan.micro_batches, loss_fn=loss)
        self.optimizer = optimizer(module.named_parameters())

    def step(self, inputs: Tensor, targets: Tensor) -> float | None:
        """Train on one batch; return the mean of its micro-batches' losses on the last rank, else None."""
        losses: list[Tensor] = []
        self.optimizer.zero_grad()
        given = (inputs,) if self.rank == 0 else ()
        wanted: dict[str, Any] = {"target": targets, "losses": losses} if self.rank == self.last else {}
        self.schedule.step(*given, **wanted)
        self.optimizer.step()
        return float(torch.stack(losses).detach().mean()) if losses else None


def stages_of(model: nn.Module, plan: Plan) -> list[nn.Module]:
    """Split ``model`` as ``plan`` does, into modules whose outputs are the inputs of the next.

    Raises: PlanError: a stage needs what the one before it does not return, which torch's stages cannot.
    """
    stage_of = {layer: number for number, stage in enumerate(plan.stages) for layer in stage.layers}
    traced = fx.symbolic_trace(model)
    whole = split_module(traced, model, lambda node: stage_of[node.name])
    calls = [node for node in whole.graph.nodes if node.op == "call_module"]
    for before, after in pairwise(calls):
        if [_source(argument) for argument in after.args] != _outputs(whole, before):
            raise PlanError(
                f"torch's stages pass their outputs to the next one alone, and the stage behind "
                f"{plan.cuts[calls.index(before)]} takes others; name another cut with cuts="
            )
    return [whole.get_submodule(str(node.target)) for node in calls]


def _source(argument: Any) -> tuple[fx.Node, int]:
    """The stage that made an argument, and which of its outputs it is."""
    if argument.target is operator.getitem:
        return argument.args[0], argument.args[1]
    return argument, 0


def _outputs(whole: fx.GraphModule, call: fx.Node) -> list[tuple[fx.Node, int]]:
    inner = whole.get_submodule(str(call.target))
    assert isinstance(inner, fx.GraphModule), "split_module makes graph modules"
    returned = next(iter(reversed(inner.graph.nodes))).args[0]
    return [(call, index) for index in range(len(returned) if isinstance(returned, tuple) else 1)]
