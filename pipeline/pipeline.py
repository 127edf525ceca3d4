"""Pipeline: a model, a plan and a loss become stages, an engine and steps, for people who write Python.

Started plainly, all stages run in this process and frames are really packed; inside a group of ranks each
rank keeps its own stages. Either way a step has the bits of the plain loop over the same micro-batches."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..compression.errors import PlanError
from ..stages.memory.byte_budget import NO_OPTIONS, MemoryOptions
from ..stages.memory.swap_file import ANYWHERE, DiskOptions
from ..stages.planner.plan import Plan
from .ranks.world import World
from .runtime import facts
from .runtime.arguments import check_gradients
from .runtime.batches import micro_batches
from .runtime.gather import gather_flows, gather_spans
from .runtime.interrupts import held
from .runtime.replica_checks import check_outputs
from .runtime.report import Report, described
from .runtime.running import Running
from .runtime.step import Step
from .runtime.values import Init
from .runtime.where import Given
from .schedules.span import Span
from .weights.optimizers import Named
from .weights.scale import Scaler


class Pipeline(Running):
    """Trains ``model`` as ``plan`` says; every rank passes the same arguments and the same batches.

    They compare it all, and the first difference is refused on every rank; functions (``loss``, ``weight``,
    those of a scheduler) they compare by name only, ``deadline`` and ``memory`` not at all.

    Args:
        model: the plain model, put into train mode if it is in eval mode as a whole; in a group of ranks drop
            your own reference to it: a rank keeps only its layers.
        plan: rank 0's is the one that runs, and ``pipe.plan`` on every rank. Another rank gives None, or a
            plan of its own for which ``partition`` was asked the same: measured seconds may cut elsewhere.
        loss: (outputs, targets) -> mean over the micro-batch, a 0-dim tensor.
        optimizer: list of (name, parameter) -> torch optimizer; called once per stage that has parameters;
            among several ranks before that for all parameters, to compare its settings.
        scheduler: optimizer -> learning-rate scheduler, stepped once after every update.
        clip: largest L2 norm, of all gradients or (``clip_scope="stage"``) of those of each stage, or None.
        scaler: a torch.amp.GradScaler, which a step moves as the plain loop would, on every rank; or a number
            that scales the loss. An overflow anywhere skips the update and the scheduler everywhere (under
            async_1f1b: of its stage).
        autocast: dtype that forward and loss are cast to by torch.autocast, without its weight cache.
        weight: targets -> over how much the loss is a mean (default: the number of samples).
        seed: of random layers (``penstock.layer_seed``). deadline: seconds that any wait for a rank may take.
        world: the ranks that train; None: those of the default process group where one is initialised, else
            this process alone.
        device: where this rank computes: "cpu", "cuda" (by the number of the rank on its machine), "cuda:1",
            "auto". None: where the world says, else where the model's parameters are.
        guard: refuse the first layer whose output, or gradient, is NaN (StageError), before an update.
        memory, disk: how what waits in a tier is moved; what the tier "disk" of this rank may use.
        load_weights: for a model on the meta device: a safetensors file of its state_dict, or the index of
            several, of which a rank reads what its stages hold.
        init_weights: the same without a file, or for the buffers that a file does not have: a function of
            (name, tensor) that writes into the tensor, with random numbers seeded for each by its name.
        shares: how replicas share micro-batches, by rank 0: None: as the plan says; "measured": in proportion
            to speed, from step to step.
    Raises:
        PlanError: the plan was made for another model, a cut cannot be trained exactly, ranks were given
            different things, or another rank refused.
        ScheduleError: the schedule is unknown or would deadlock.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | None,
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
        world: World | None = None,
        device: Given = None,
        guard: bool = False,
        memory: MemoryOptions = NO_OPTIONS,
        disk: DiskOptions = ANYWHERE,
        load_weights: str | Path | None = None,
        init_weights: Init | None = None,
        shares: str | None = None,
    ) -> None:
        self.leaves = world is None
        super().__init__(
            model, plan, loss=loss, optimizer=optimizer, scheduler=scheduler, clip=clip,
            clip_scope=clip_scope, scaler=scaler, autocast=autocast, weight=weight, seed=seed,
            deadline=deadline, world=world or World.default(deadline=deadline), device=device, guard=guard,
            memory=memory, disk=disk, load_weights=load_weights, init_weights=init_weights,
        )  # fmt: skip
        self.share_by(shares)

    def __str__(self) -> str:
        return described(self.plan, here=list(self.stages), num_steps=self.num_steps)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise PlanError("a pipeline is not copied or pickled; save it, or take its state_dict")

    def __repr__(self) -> str:
        first, _, _ = str(self).partition(",")
        return f"<{first}, rank {self.rank}>"

    @held
    def step(self, inputs: Any, targets: Any = None, *, outputs: bool = False) -> Report:
        """Train on one batch: micro-batches through the schedule, one update.

        Args:    inputs: a tensor, a tuple (positional) or a dict (by name) of tensors; dimension 0 is the
                 batch; what the example had beside tensors may stand between them; ``Constant`` tensors go
                 to every micro-batch whole. What is not read here (``reads_inputs``) may be on meta;
                 of a ``Split`` the micro-batches that another replica ``reads``.
                 targets: a tensor, tuple or dict of tensors, split along dimension 0 like the inputs; None
                 for a model that computes its own loss.
                 outputs: keep the model's outputs for the report, on the last stage's rank; of a stream,
                 those of the micro-batches that finished, in their order: the oldest were fed by the last
                 step.
        Returns: the Report, on every rank.
        Raises:  StageError: a layer failed; TransportError: a rank did not answer. Both name rank, stage,
                 micro-batch. PlanError: the model was changed since it was traced.
        """
        began = time.perf_counter()
        self.engine.failures.check()
        check_outputs(self.plan, outputs and not self.world.is_alone)
        with self.same.batch("step", self.num_steps):
            self.engine.model_guards.check("train")
            check_gradients()
            given, call = self.call.columns(inputs), self.call
            ends = {"whole": call.whole, "reads": self.reads, **self.ends}
            batches = micro_batches(given, targets, self.plan.micro_batches, self.weight, **ends)
            self.same.compare(lambda: facts.of_batch(given, call.names, targets))
            step = self.feed.feed(batches, step=self.num_steps, extra=self.policy.extra)
        samples = sum(call.samples_of(batch.inputs) for batch in batches)
        with self.whole():
            report = self._run(step, num_samples=samples, began=began, outputs=outputs)
            others = functools.partial(self.feed.messages, step)
            self.policy.end(others, self.engine.meter.spans, report.seconds)
            self.num_steps += 1
            self.next_shares(report, len(batches))
        return report

    @held
    def drain(self, *, outputs: bool = False) -> Report | None:
        """Finish the micro-batches in flight, if the schedule leaves any; count versions from 0 again.

        Args:    outputs: keep theirs, as ``step`` does.
        Returns: the Report of what this took, on every rank; None where nothing was in flight."""
        if not self.feed.in_flight:
            return None
        began = time.perf_counter()
        self.engine.failures.check()
        spans = self.engine.meter.spans  # those of a step: a drain is none
        step = self.feed.drain(step=self.num_steps)
        with self.whole():
            report = self._run(step, num_samples=0, began=began, outputs=outputs)
            self.engine.meter.spans = spans
            self.feed.restart()
            for stage in self.stages.values():
                stage.weights.drained()
            self.update.begin()
        return report

    @held
    @torch.inference_mode(False)  # its tensors could not be packed
    def evaluate(self, inputs: Any) -> Any:
        """The plain model in eval mode on all of ``inputs`` at once; on the last stage's rank, else None.

        What is in flight is finished first."""
        self.drain()
        self.engine.failures.check()
        with self.same.batch("evaluation", self.same.counts["evaluation"]):
            self.engine.model_guards.check("eval")
            given, call = self.call.tensors(inputs), self.call
            ends = {"whole": call.whole, "reads": self.reads_tests, **self.ends}
            (batch,) = micro_batches(given, None, 1, None, **ends)
            self.same.compare(lambda: facts.of_batch(given, call.names, None))
            messages, program = self.steps.step("eval", [batch.inputs])
        number, whole = self.num_steps, {0: batch}
        step = Step(number=number, messages=messages, program=program, micro_batches=whole, training=False)
        with self.world.device.current():
            return self.engine.evaluate(step)

    @held
    def state_dict(self) -> dict[str, Any]:
        """{"model", "optimizer", "step"} under the model's own names; collective, complete on rank 0.

        What is in flight is finished first."""
        self.drain()
        self.engine.failures.check()
        return self.state.gather(self.update, self.num_steps) | {"versions": self.plan.versions}

    @held
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned on rank 0, on whatever cut; every rank passes all of it.

        What is in flight is finished first. A state of asynchronous training fits the same schedule, policy
        and cuts only, because they decide which weights a micro-batch sees.
        Raises:  PlanError: some of it is damaged or does not suit; on every rank, and nothing changed."""
        self.drain()
        self.engine.failures.check_open()
        with self.agreement.together("loading a state"):
            parts = self.state.checked(self.update, state, self.plan)
            self.agreement.agree("a state to load", lambda: facts.of_state(parts))
            with self.loading():
                self.num_steps = self.state.load(self.update, parts)
        self.begin_shares()
        self.same.restart()

    def timeline(self) -> list[Span]:
        """What all ranks did in the last step, in seconds since it began; collective."""
        return gather_spans(self.world, self.engine.meter.spans)

    def flows(self) -> list[dict[str, Any]]:
        """What travels: values and gradients, their stages, the codec now, bytes raw and sent; collective."""
        return gather_flows(self.world, self.engine.meter.totals, self.policy)

    def close(self, *, keeps_model: bool = True) -> None:
        """Let go of what it holds, and of the ranks unless it was given a world; after a failure the group
        ends with the process.

        Args:    keeps_model: bring all parameters back from their tier; else those that are away are lost."""
        self.close_stages(keeps_model=keeps_model)
        if self.leaves and not self.engine.failures.first:
            self.world.close()
