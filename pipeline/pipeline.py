"""Pipeline: a model, a plan and a loss become stages, an engine and steps, for people who write Python.

Started plainly, all stages run in this process and frames are really packed; inside a group of ranks each
rank keeps its own stages. Either way a step has the bits of the plain loop over the same micro-batches."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..compression.choose import AUTO
from ..compression.codec import CODECS
from ..compression.errors import PlanError
from ..stages.graph import fingerprint, trace
from ..stages.measure import owned_parameters
from ..stages.memory.keeper import STORES
from ..stages.plan import Plan
from ..stages.rules import STREAM
from ..stages.stage import Stage
from ..stages.weights import weights_named
from . import group
from .arguments import (
    check_arguments,
    check_gradients,
    check_layers,
    check_ranks,
    check_update,
    check_versions_of,
)
from .auto import policy_named
from .batches import MicroBatch, example_of, joined, micro_batches, positional
from .engine import Engine
from .instruction import Instruction
from .messages import Itinerary
from .prices import Flow
from .report import Report, StageReport
from .scale import Scaler
from .state import State
from .steps import Steps
from .stream import Stream
from .timeline import Span
from .transport import GlooTransport, LocalTransport
from .update import Named, Update
from .usage import Resident, Usage


class Pipeline:
    """Trains ``model`` as ``plan`` says; every rank passes the same arguments and the same batches.

    Args:
        model: the plain model, put into train mode if it is in eval mode as a whole; in a group of ranks drop
        your own
            reference to it: a rank keeps only its layers.
        loss: (outputs, targets) -> mean over the micro-batch, a 0-dim tensor.
        optimizer: list of (name, parameter) -> torch optimizer; called once per stage that has parameters.
        scheduler: optimizer -> learning-rate scheduler, stepped once after every update.
        clip: largest L2 norm of the gradients, None for no clipping.
        clip_scope: of all gradients ("global"), or of those of each stage ("stage").
        scaler: a torch.amp.GradScaler, which a step moves as the plain loop would, on every rank; or a number
            that the loss is scaled with throughout; None for no loss scale. An overflow anywhere skips the
            update and the scheduler everywhere (under async_1f1b: of its stage).
        autocast: dtype that forward and loss are cast to by torch.autocast (without its weight cache), None
        for none.
        weight: targets -> over how much the loss is a mean (default: the number of samples).
        seed: what random layers are seeded with, one by one (``penstock.layer_seed``).
        deadline: seconds that any wait for another rank may take.
    Raises:
        PlanError: the plan was made for another model, or a cut cannot be trained exactly.
        ScheduleError: the schedule is unknown or would deadlock.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        loss: Callable[[Any, Any], torch.Tensor],
        optimizer: Callable[[Named], Optimizer],
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        clip: float | None = None,
        clip_scope: str = "global",
        scaler: Scaler = None,
        autocast: torch.dtype | None = None,
        weight: Callable[[Any], float] | None = None,
        seed: int = 0,
        deadline: float = 60.0,
    ) -> None:
        check_arguments(model, plan, optimizer, clip, autocast, deadline)
        check_update(model, plan, clip=clip, scope=clip_scope, scaler=scaler)
        check_gradients()
        check_ranks(plan)
        if not model.training:
            model.train()
        if plan.fingerprint != fingerprint(model):
            raise PlanError(
                "a plan belongs to the model it was made for, and this model has other parameters or "
                "buffers; plan again"
            )
        resident = Resident(model_bytes=sum(t.nbytes for t in (*model.parameters(), *model.buffers())))
        graph = trace(model, example_of(plan), autocast=autocast)
        check_layers(plan, graph)
        self.plan, self.weight, self.num_steps = plan, weight, 0
        self.inputs = [str(node.target) for node in graph.train.inputs]
        self.steps = Steps(plan, graph)
        self.stream = Stream(plan, self.steps) if plan.streams else None
        if self.stream is None:
            self.steps.step("train", [graph.example_inputs] * plan.micro_batches)  # refuse early
        else:
            self.stream.rehearse([graph.example_inputs] * plan.micro_batches)

        self.rank = group.rank()
        here = [s for s in range(plan.num_stages) if not group.joined() or plan.ranks[s] == self.rank]
        stage_of = self.steps.stage_of["train"]
        pairs = zip(stage_of, owned_parameters(graph), strict=True)
        owner = {name: stage for stage, names in pairs for name in names}
        owned = {s: [(n, p) for n, p in model.named_parameters() if owner[n] == s] for s in here}
        self.stages = {s: self._stage(s, model, [p for _, p in owned[s]], autocast) for s in here}
        rank_of = [plan.ranks[s] if group.joined() else 0 for s in range(plan.num_stages)]
        self.state = State(model, graph, stages=self.stages, owner=owner, stage_of=stage_of, rank_of=rank_of)
        self.update = Update(
            parameters=owned,
            dtypes={name: parameter.dtype for name, parameter in model.named_parameters()},
            owner={name: rank_of[stage] for name, stage in owner.items()},
            weights={s: stage.weights for s, stage in self.stages.items()},
            optimizer=optimizer,
            scheduler=scheduler,
            clip=clip,
            scope=clip_scope,
            scaler=scaler,
            together=plan.schedule != STREAM,
        )
        self.policy = policy_named(plan.codec, deadline=deadline)
        self.engine = Engine(
            rank=self.rank,
            stages=self.stages,
            transport=GlooTransport(deadline=deadline) if group.joined() else LocalTransport(),
            policy=self.policy,
            loss=loss,
            update=self.update,
            parameters={id(parameter) for parameter in model.parameters()},
            seed=seed,
        )
        resident.begin()
        tensors = {stage: [parameter for _, parameter in named] for stage, named in owned.items()}
        self.usage = Usage(plan, tensors, self.update.optimizers, resident=resident)

    @property
    def is_last(self) -> bool:
        """Whether this process holds the last stage, where losses and outputs are."""
        return self.plan.num_stages - 1 in self.stages

    def step(self, inputs: Any, targets: Any, *, outputs: bool = False) -> Report:
        """Train on one batch: micro-batches through the schedule, one update.

        Args:    inputs: a tensor, a tuple (positional) or a dict (by name) of tensors; dimension 0 is the
                 batch.
                 targets: a tensor, tuple or dict of tensors, split along dimension 0 like the inputs.
                 outputs: keep the model's outputs for the report, on the last stage's rank; of a stream,
                 those of the micro-batches that finished, in their order: the oldest were fed by the last
                 step.
        Returns: the Report, on every rank.
        Raises:  StageError: a layer failed; TransportError: a rank did not answer. Both name rank, stage,
                 micro-batch.
        """
        began = time.perf_counter()
        self.engine.check()
        check_gradients()
        batches = micro_batches(
            positional(inputs, self.inputs), targets, self.plan.micro_batches, self.weight
        )
        if self.stream is None:
            made, program = self.steps.step("train", [batch.inputs for batch in batches])
            live = {batch.index: dataclasses.replace(batch, step=self.num_steps) for batch in batches}
        else:
            made, program = self.stream.feed(batches, step=self.num_steps)
            live = self.stream.micro_batches()
        self.engine.wanted = outputs
        num_samples = sum(len(batch.inputs[0]) for batch in batches)
        report = self._run(made, program, live, num_samples=num_samples, began=began)
        if outputs and self.is_last:
            report = dataclasses.replace(report, outputs=joined(list(self.engine.outputs.values())))
        self.policy.end(self.engine.spans, report.seconds)
        self.num_steps += 1
        return report

    def drain(self) -> Report | None:
        """Finish the micro-batches in flight, if the schedule leaves any; count versions from 0 again.

        Returns: the Report of what this took, on every rank; None where nothing was in flight."""
        if self.stream is None or not self.stream.in_flight:
            return None
        began = time.perf_counter()
        self.engine.check()
        made, program = self.stream.drain()
        spans = self.engine.spans  # those of a step: a drain is none
        report = self._run(made, program, self.stream.micro_batches(), num_samples=0, began=began)
        self.engine.spans = spans
        self.stream.restart()
        for stage in self.stages.values():
            stage.weights.drained()
        self.update.begin()
        return report

    def evaluate(self, inputs: Any) -> Any:
        """The plain model in eval mode on all of ``inputs`` at once; on the last stage's rank, else None.

        What is in flight is finished first."""
        self.drain()
        self.engine.check()
        (batch,) = micro_batches(positional(inputs, self.inputs), None, 1, None)
        itinerary, program = self.steps.step("eval", [batch.inputs])
        return self.engine.evaluate(program, itinerary, batch.inputs)

    def state_dict(self) -> dict[str, Any]:
        """{"model", "optimizer", "step"} under the model's own names; collective, complete on rank 0.

        What is in flight is finished first."""
        self.drain()
        self.engine.check()
        return self.state.gather(self.update, self.num_steps) | {"versions": self.plan.versions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned on rank 0, on whatever cut; every rank passes all of it.

        What is in flight is finished first. A state of asynchronous training fits the same schedule, policy
        and cuts only, because they decide which weights a micro-batch sees."""
        self.drain()
        check_versions_of(state, self.plan)
        self.num_steps = self.state.load(self.update, state)

    def timeline(self) -> list[Span]:
        """What all ranks did in the last step, in seconds since it began; collective."""
        rows = group.gather_json(
            [[getattr(span, name) for name in Span.__slots__] for span in self.engine.spans]
        )
        return [Span(**dict(zip(Span.__slots__, fields, strict=True))) for row in rows for fields in row]

    def flows(self) -> list[dict[str, Any]]:
        """What travels: values and gradients, their stages, the codec now, bytes raw and sent; collective."""
        rows = group.gather_json([[*flow, *total] for flow, total in self.engine.frames.totals.items()])
        names = (*Flow._fields, "bytes_raw", "bytes_sent")
        found = [dict(zip(names, fields, strict=True)) for row in rows for fields in row]
        codecs = [self.policy.codec(Flow(*(flow[name] for name in Flow._fields))) for flow in found]
        return [flow | {"codec": codec} for flow, codec in zip(found, codecs, strict=True)]

    def close(self) -> None:
        """Leave the group of ranks; after a failure the others may not answer, and the group ends with the
        process."""
        for stage in self.stages.values():
            stage.saved.close()
        if not self.engine.failed:
            group.close()

    def _stage(
        self, index: int, model: nn.Module, parameters: Iterable[nn.Parameter], autocast: torch.dtype | None
    ) -> Stage:
        return Stage(
            index,
            model=model,
            train=self.steps.layers("train", index),
            evaluation=self.steps.layers("eval", index),
            last=index == self.plan.num_stages - 1,
            autocast=autocast,
            store=None if self.plan.tier == "device" else STORES[self.plan.tier](),
            codec=self.plan.codec if self.plan.codec in CODECS else AUTO,  # lossy ones lose on the wire only
            weights=weights_named(
                self.plan.weights,
                parameters=parameters,
                stage=index,
                num_stages=self.plan.num_stages,
                asynchronous=self.plan.schedule == STREAM,
                prediction=self.plan.prediction,
                tier=self.plan.weights_tier,
            ),
            weights_first=self.plan.weights_first,
        )

    def _run(
        self,
        made: Itinerary,
        program: Sequence[Instruction],
        live: Mapping[int, MicroBatch],
        *,
        num_samples: int,
        began: float,
    ) -> Report:
        """Run a step, or what drains a stream; put together the loss, and what each stage did."""
        try:
            losses = self.engine.step(self.num_steps, program, made, live)
        except BaseException:
            if self.stream is not None:
                self.stream.restart()  # what was in flight is lost
            self.usage.restart()
            raise
        if self.stream is not None:
            self.stream.ran(made)
        reports = self.usage.fill(self.engine.reports, self.engine.spans, rank=self.rank)
        mine = [self._loss(losses, live)]
        for stage in range(self.plan.num_stages):
            mine += reports.get(stage, StageReport()).numbers()
        loss, *numbers = [sum(column) for column in zip(*group.exchange(mine), strict=True)]
        size = len(numbers) // self.plan.num_stages
        rows = [numbers[i : i + size] for i in range(0, len(numbers), size)]
        return Report(
            step=self.num_steps,
            loss=loss,
            seconds=time.perf_counter() - began,
            num_samples=num_samples,
            stages=tuple(map(StageReport.of, rows)),
        )

    def _loss(self, losses: Mapping[int, torch.Tensor], live: Mapping[int, MicroBatch]) -> float:
        """The sum of share x loss, ascending, in the loss's dtype, at least float32.

        Of a stream, the mean over those that finished; no number where none did."""
        if not self.is_last:
            return 0.0
        if not losses:
            return math.nan
        dtype = torch.promote_types(next(iter(losses.values())).dtype, torch.float32)
        total = torch.zeros((), dtype=dtype)
        for index, loss in losses.items():
            total += loss.to(dtype) * live[index].share
        return float(total) / (sum(live[index].share for index in losses) if self.stream is not None else 1)
