"""The tensors that really cross a cut: activations and gradients of a job that has trained for a while.

A bench on random numbers says how fast a codec is; only real tensors say what it saves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

from torch import Tensor, fx

from ...conf.bench_codecs import BenchCodecsConfig
from ...pipeline.run import build
from ...pipeline.run.course import training_batches
from ...pipeline.run.decide import decide, prepare
from ...pipeline.run.train import loss
from ...stages.planner.plan import Plan


class Listening(fx.Interpreter):
    """Runs a traced model and keeps what crosses the cuts, and the gradients that come back."""

    def __init__(self, module: fx.GraphModule, *, cuts: Sequence[str]) -> None:
        super().__init__(module)
        names = [node.name for node in module.graph.nodes]
        self.kept: dict[str, Tensor] = {}
        self.crossing = {
            node.name
            for cut in map(names.index, cuts)
            for index, node in enumerate(module.graph.nodes)
            if index <= cut and any(names.index(user.name) > cut for user in node.users)
        }

    def run_node(self, n: fx.Node) -> Any:
        """Run one layer and keep its output if it crosses."""
        value = super().run_node(n)
        if n.name in self.crossing and isinstance(value, Tensor) and value.is_floating_point():
            self.kept[f"{n.name} activation"] = value.detach()
            if value.requires_grad:
                value.register_hook(lambda gradient: self.keep(f"{n.name} gradient", gradient))
        return value

    def keep(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor under a name."""
        self.kept[name] = tensor.detach()


def capture(config: BenchCodecsConfig, *, num_steps: int) -> dict[str, Tensor]:
    """Train the job for ``num_steps`` steps in this process; return what crossed in its last micro-batch.

    Raises: PenstockError: the job cannot be planned.
    """
    samples = prepare(config)
    plan = decide(config, samples)
    model = build.model(config.model, describe=samples.describe, seed=config.seed)
    optimizer = build.optimizer(config.optimizer)(model.named_parameters())
    listening = Listening(fx.symbolic_trace(model), cuts=plan.cuts)
    batches = cycle(training_batches(config, samples, epoch=0))
    for inputs, targets in islice(batches, num_steps):
        optimizer.zero_grad()
        _accumulate(listening, inputs, targets, plan)
        optimizer.step()
    return listening.kept


def _accumulate(listening: Listening, inputs: Tensor, targets: Tensor, plan: Plan) -> None:
    """Run one step's micro-batches, forward and backward."""
    num_parts = min(plan.micro_batches, len(inputs))
    for x, y in zip(inputs.tensor_split(num_parts), targets.tensor_split(num_parts), strict=True):
        (loss(listening.run(x.clone()), y) * (len(x) / len(inputs))).backward()
