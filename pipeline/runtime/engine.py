"""Engine.step: run every instruction of the program. No schedule is known here, no byte of a frame.

    1F3   Frames.gather_inputs -> Stage.forward  -> Frames.send_outputs
    1B3   Frames.receive       -> Stage.backward -> Frames.send_outputs
    1U    clip -> optimizer.step

The parts are handed in: what counts, checks and moves is none of this module's business."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ...stages.seeds import layer_seed, seeded
from ...stages.torch_private import tree_map_only
from ..schedules.instruction import Instruction, Op

if TYPE_CHECKING:
    from ...stages.memory.prefetch import MemoryThread
    from ...stages.stage.stage import Stage
    from ...stages.tracing.guards import ModelGuards
    from ..optimizer.update import Update
    from .auto_codec import Policy
    from .batches import Criterion, MicroBatch
    from .failures import Failures, Interrupts
    from .frames import Frames
    from .guards import Guards
    from .meter import Meter
    from .replicas import Replicas
    from .step_planner import Step

_BACKWARDS = (Op.B, Op.I)


@dataclasses.dataclass(kw_only=True, eq=False)
class Engine:
    """Runs this process's programs over its stages.

    Attributes:
        frames: Brings an instruction its inputs, and sends what it made.
        interrupts: Delays Ctrl-C to the gap between two instructions.
        policy: Chooses codecs, and the micro-batch whose tensors it looks at.
        memory: Moves what forwards save, and gets the position in the program.
        replicas: Sum up gradients after each backward, and exchange what an update needs.
        guards: Watch what the loss, backwards and updates reach; ``model_guards`` whether the model changed.
        losses: Those of the last step by micro-batch, where the last stage is; ``outputs`` likewise.
    """

    stages: Mapping[int, Stage]
    frames: Frames
    meter: Meter
    failures: Failures
    interrupts: Interrupts
    policy: Policy
    criterion: Criterion
    update: Update
    seed: int
    memory: MemoryThread
    replicas: Replicas
    guards: Guards
    model_guards: ModelGuards
    losses: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict, init=False)
    outputs: dict[int, Any] = dataclasses.field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.fetches = not all(stage.plain for stage in self.stages.values())
        self.run: dict[Op, Callable[[Step, Instruction], None]] = dict.fromkeys(_BACKWARDS, self._backward)
        self.run |= {Op.F: self._forward, Op.W: self._backward_weights, Op.U: self._update}

    def step(self, step: Step) -> None:
        """Run a step of training; raises StageError, and TransportError where a rank did not answer."""
        # 1. Get ready: a watched step runs each instruction under guards.
        step = dataclasses.replace(step, observed=self.policy.observed(step.messages))
        self.losses, self.outputs, instruction = {}, {}, None
        run, now, stop = self.guards.watched(step, self.run), self.meter.now, self.meter.stop
        fetches, begun = self.fetches, self.update.begun
        self.meter.begin(step)
        try:
            self._begin(step)
            if not step.messages.continues:
                self.update.begin()
            self.replicas.begin(step)
            if fetches:
                self.memory.begin(step.passes)
            # 2. Run the program. Ctrl-C takes effect here only: all of an update or nothing.
            for number, instruction in enumerate(step.program):
                if self.update.begun == begun:
                    self.interrupts.check()
                if fetches:
                    self._prefetch(step.program, number)
                started = now()
                run[instruction.op](step, instruction)
                stop(instruction, started)
            # 3. Wait for what was sent.
            instruction = None
            self.frames.end(step)
            if fetches:
                self.memory.end()
        except BaseException as error:
            self._fail(step, instruction, error)
        self.meter.end()
        self.guards.ran()

    def evaluate(self, step: Step) -> Any:
        """Run one micro-batch forward in eval mode; return the outputs where the last stage is."""
        outputs = instruction = None
        try:
            self._begin(step)
            with self.model_guards.evaluating():
                for instruction in step.program:
                    self.interrupts.check()
                    outputs = self._evaluate(step, instruction)
            instruction = None
            self.frames.end(step)
        except BaseException as error:
            self._fail(step, instruction, error)
        return outputs

    def _prefetch(self, program: Sequence[Instruction], number: int) -> None:
        """Pass the position to the memory thread; weights of the next backward come while this runs."""
        self.memory.at(number)
        following = program[number + 1] if number + 1 < len(program) else None
        if following is not None and following.op in _BACKWARDS:
            self.stages[following.stage].fetch(following.micro_batch)

    def _fail(self, step: Step, instruction: Instruction | None, error: BaseException) -> NoReturn:
        """Raise the described error, SystemExit in a layer included; Ctrl-C stays what it is."""
        failure = self.failures.of_step(step, instruction, error)
        if isinstance(error, KeyboardInterrupt):
            raise error
        raise failure from error

    def _begin(self, step: Step) -> None:
        self.failures.first = ""
        for stage in self.stages.values():
            stage.moved = self.model_guards.moved
            if not step.messages.continues:
                stage.stop()
        self.frames.begin(step)

    def _forward(self, step: Step, instruction: Instruction) -> None:
        index = instruction.micro_batch
        assert index is not None
        stage, batch = self.stages[instruction.stage], step.micro_batches[index]
        # 1. Inputs come, layers run, outputs go.
        items = self.frames.gather_inputs(step, instruction)
        with self.replicas.forward(stage.index, index):
            sent, outputs = stage.forward(
                index,
                items,
                route=step.messages.routes[index][stage.index],
                seed=lambda name: layer_seed(self.seed, batch.step, batch.index, name),
                batch=batch.batch,
            )
        self.frames.send_outputs(step, instruction, sent)
        # 2. The last stage has a loss, from which the backward begins.
        if stage.last:
            self._set_loss(step, stage, index, outputs, batch)
            if step.keeps_outputs:
                self.outputs[index] = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), outputs)
        # 3. After the loss, which may write to the outputs: a backward reads memory as it is by then.
        if stage.stores:
            stage.saved.offload(index, self.frames.packed)
        self.frames.release_inputs(step, instruction)

    def _evaluate(self, step: Step, instruction: Instruction) -> Any:
        stage, index = self.stages[instruction.stage], instruction.micro_batch or 0
        items, route = self.frames.gather_inputs(step, instruction), step.messages.routes[index][stage.index]
        sent, outputs = stage.evaluate(items, route=route)
        self.frames.send_outputs(step, instruction, sent)
        self.frames.release_inputs(step, instruction)
        return outputs

    def _set_loss(self, step: Step, stage: Stage, index: int, outputs: Any, batch: MicroBatch) -> None:
        # Outputs may be parameters. The loss is seeded like a layer, as it may draw.
        own = seeded(layer_seed(self.seed, batch.step, batch.index, "loss"), stage.generators)
        with stage.weights.backward(index), self.guards.loss(stage.index, self.criterion.loss), own:
            mean = self.criterion(outputs, batch.targets)
        if index == step.messages.first:
            self.criterion.check_reads(mean, outputs)
        if (watch := stage.running[index].watch) is not None:
            watch.check_loss(mean)
        stage.set_loss(index, self.update.scale.apply(mean * batch.share, batch.batch))
        self.losses[index] = mean.detach()

    def _backward(self, step: Step, instruction: Instruction) -> None:
        """Run all of a backward, or the half of it that other stages wait for."""
        stage, index = self.stages[instruction.stage], instruction.micro_batch
        assert index is not None
        run = stage.backward if instruction.op is Op.B else stage.backward_inputs
        arrived = self.frames.receive(step, instruction)
        with self.replicas.backward(stage.index, index, ends=instruction.op is Op.B):
            gradients = run(index, arrived)
        self.frames.send_outputs(step, instruction, gradients)
        self.frames.release(step, instruction)

    def _backward_weights(self, step: Step, instruction: Instruction) -> None:
        stage, index = self.stages[instruction.stage], instruction.micro_batch
        assert index is not None
        with self.replicas.backward(stage.index, index):
            stage.backward_weights(index)

    def _update(self, step: Step, instruction: Instruction) -> None:
        self.update.step(instruction.stage)
        self.replicas.updated(instruction.stage)
