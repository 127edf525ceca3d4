"""Torch's own stages and schedules, made from the same trace with the same layers as ours."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed import pipelining
from torch.fx.node import map_arg

from penstock.compression.errors import PlanError
from penstock.pipeline.distributed.process_group import World
from penstock.stages.device import CPU
from penstock.stages.plan.plan import Plan

# The class in ``torch.distributed.pipelining`` that has the schedule which we call so.
CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb_h1": "ScheduleInterleavedZeroBubble",  # with one stage on each rank
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
_ONE_STAGE = ("gpipe", "1f1b")  # their classes take a stage, all others a list of them


class TorchPipeline:
    """One rank's stages in torch's schedule; every rank passes the same arguments and the same batches."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
    ) -> None:
        self.own, self.last = plan.stages_of_rank[World.default().rank], plan.num_stages - 1
        parts = stages_of(model, plan)
        self.parts = {s: parts[s] for s in self.own}
        stages: Any = [pipelining.PipelineStage(parts[s], s, plan.num_stages, CPU) for s in self.own]
        given = stages[0] if plan.schedule in _ONE_STAGE else stages
        self.schedule = getattr(pipelining, CLASSES[plan.schedule])(given, plan.micro_batches, loss_fn=loss)
        named = {s: parts[s].named_parameters() for s in self.own}
        self.optimizer = optimizer([(f"{s}.{name}", one) for s in self.own for name, one in named[s]])

    def step(self, inputs: Tensor, targets: Tensor) -> float | None:
        """Train on one batch; return its micro-batches' mean loss on the last stage's rank, else None."""
        losses: list[Tensor] = []
        self.optimizer.zero_grad()
        wanted: dict[str, Any] = {"target": targets, "losses": losses} if self.last in self.own else {}
        self.schedule.step(*((inputs,) if 0 in self.own else ()), **wanted)
        self.optimizer.step()
        return float(torch.stack(losses).detach().mean()) if losses else None


def stages_of(model: nn.Module, plan: Plan) -> list[fx.GraphModule]:
    """Split ``model`` as ``plan`` does, into modules whose outputs are the inputs of the next.

    Raises:  PlanError: two stages would share a parameter, whose gradients torch's stages do not add up.
    """
    traced = fx.symbolic_trace(model)
    stage_of = {layer: number for number, stage in enumerate(plan.stages) for layer in stage.layers}
    at = {node: stage_of.get(node.name, 0) for node in traced.graph.nodes if node.op != "get_attr"}
    at[_output(traced)] = plan.num_stages - 1
    stages = [fx.GraphModule(model, _part(traced, at, number)) for number in range(plan.num_stages)]
    owner: dict[int, int] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            if owner.setdefault(id(parameter), number) != number:
                raise PlanError(
                    f"torch's stages share no parameter, and {name} is used in stages "
                    f"{owner[id(parameter)]} and {number}; race with another cut or model"
                )
    return stages


def _part(traced: fx.GraphModule, at: Mapping[fx.Node, int], stage: int) -> fx.Graph:
    """The layers of one stage; what they read of the model itself is read in every stage that needs it."""
    graph, output = fx.Graph(), _output(traced)
    ours = {node: graph.placeholder(node.name) for node in _entering(traced, at, stage)}
    for node in traced.graph.nodes:
        needed = node.op == "get_attr" and any(at[user] == stage for user in node.users)
        if needed or (node.op not in ("get_attr", "placeholder", "output") and at[node] == stage):
            ours[node] = graph.node_copy(node, ours.__getitem__)
    if at[output] == stage:
        graph.output(map_arg(output.args[0], ours.__getitem__))
    else:
        leaving = [ours[node] for node in _entering(traced, at, stage + 1)]
        graph.output(leaving[0] if len(leaving) == 1 else tuple(leaving))
    return graph


def _entering(traced: fx.GraphModule, at: Mapping[fx.Node, int], stage: int) -> list[fx.Node]:
    """Values from before a stage that it or a later one uses; the first takes the inputs."""
    if stage == 0:
        return [node for node in traced.graph.nodes if node.op == "placeholder"]
    before = (node for node, number in at.items() if number < stage)
    return [node for node in before if any(at.get(user, -1) >= stage for user in node.users)]


def _output(traced: fx.GraphModule) -> fx.Node:
    return next(iter(reversed(traced.graph.nodes)))
