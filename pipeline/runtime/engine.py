"""Engine.step: run every instruction of the program. No schedule is known here, no byte of a frame.

    1F3   Frames.gather_inputs -> Stage.forward  -> Frames.send_outputs
    1B3   Frames.receive       -> Stage.backward -> Frames.send_outputs
    1U    clip -> optimizer.step

Forwards and backwards alternate, so that micro-batches stream in without pause."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map_only

from ...stages.device import Device
from ...stages.memory.prefetch import MemoryThread, Pass
from ...stages.seeds import layer_seed
from ...stages.stage.stage import Stage
from ...stages.tracing.guards import ModelGuards
from ..distributed.transport import Transport
from ..optimizer.update import Update
from ..schedules.instruction import Instruction, Op
from .auto_codec import Policy
from .batches import Loss, MicroBatch, check_loss_uses_outputs_only, mean_loss
from .device_frames import frames_of
from .failures import Failures, place
from .guards import Guards
from .interrupts import Interrupts
from .replicas import Replicas
from .step_planner import Step

_BACKWARDS = (Op.B, Op.I)
_READS = (*_BACKWARDS, Op.W)


class Engine:
    """Runs this process's programs over its stages.

    ``losses`` and ``outputs`` are those of the last step by micro-batch, where the last stage is.

    Args:    parameters: those of the model, held weakly: no loss may read one beside the outputs.
             memory: moves what forwards save, and is told where the program is.
             replicas: are told when a micro-batch has gone backward, and when a stage is updated.
             guards: watch what the loss, backwards and updates reach."""

    def __init__(
        self,
        *,
        rank: int,
        stages: Mapping[int, Stage],
        transport: Transport,
        policy: Policy,
        loss: Loss,
        update: Update,
        model_guards: ModelGuards,
        parameters: Container[object],
        seed: int,
        devices: Mapping[int, Device],
        memory: MemoryThread,
        replicas: Replicas,
        guards: Guards,
    ) -> None:
        self.memory, self.replicas, self.guards = memory, replicas, guards
        self.stages, self.transport, self.policy = stages, transport, policy
        self.failures = Failures(rank, stages, transport)
        self.interrupts = Interrupts(self.failures)
        self.meter, self.frames = frames_of(devices, transport, rank=rank, stages=stages, policy=policy)
        self.fetches = not all(stage.plain for stage in stages.values())
        self.loss, self.update, self.parameters, self.seed = loss, update, parameters, seed
        self.model_guards = model_guards
        self.run: dict[Op, Callable[[Step, Instruction], None]] = dict.fromkeys(_BACKWARDS, self._backward)
        self.run |= {Op.F: self._forward, Op.W: self._backward_weights, Op.U: self._update}
        self.losses: dict[int, torch.Tensor] = {}
        self.outputs: dict[int, Any] = {}

    def step(self, step: Step) -> None:
        """Run a step of training."""
        step = dataclasses.replace(step, observed=self.policy.observed(step.messages))
        self.losses, self.outputs, instruction = {}, {}, None
        run, now, stop = self.guards.watched(step, self.run), self.meter.now, self.meter.stop
        fetches = self.fetches
        begun = self.update.begun
        self.meter.begin(step)
        try:
            self._begin(step)
            if not step.messages.continues:
                self.update.begin()
            self.replicas.begin(step)
            if fetches:
                self.memory.begin([_pass(instruction) for instruction in step.program])
            for number, instruction in enumerate(step.program):
                if self.update.begun == begun:  # all of an update or nothing
                    self.interrupts.check()
                if fetches:
                    self._ahead(step.program, number)
                started = now()
                run[instruction.op](step, instruction)
                stop(instruction, started)
            instruction = None
            self.frames.end(step)
        except BaseException as error:
            self._fail(step, instruction, error)
        self.meter.end()
        self.guards.ran()

    def evaluate(self, step: Step) -> Any:
        """Run one micro-batch forward in eval mode; returns the outputs where the last stage is."""
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

    def _ahead(self, program: Sequence[Instruction], number: int) -> None:
        """Pass the position to the memory thread; weights of the next backward come while this runs."""
        self.memory.at(number)
        following = program[number + 1] if number + 1 < len(program) else None
        if following is not None and following.op in _BACKWARDS:
            self.stages[following.stage].fetch(following.micro_batch)

    def _fail(self, step: Step, instruction: Instruction | None, error: BaseException) -> NoReturn:
        """Raise the described error, SystemExit in a layer included; Ctrl-C stays what it is."""
        failure = self.failures.worded(place(step, instruction), error)
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
        if stage.last:
            self._set_loss(step, stage, index, outputs, batch)
            if step.keeps_outputs:
                self.outputs[index] = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), outputs)
        # Behind the loss: it may write to the outputs, and a backward reads memory as it is by then.
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
        # Outputs may be parameters.
        with stage.weights.backward(index), self.guards.loss(stage.index, self.loss):
            mean = mean_loss(self.loss, outputs, batch.targets, autocast=stage.autocast)
        if index == step.messages.first:
            check_loss_uses_outputs_only(mean, outputs, self.parameters)
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
        with self.replicas.backward(stage.index, index):
            gradients = run(index, arrived)
        if self.replicas.keeps:
            self.replicas.keep(stage.index, index)
        self.frames.send_outputs(step, instruction, gradients)
        self.frames.release(step, instruction)

    def _backward_weights(self, step: Step, instruction: Instruction) -> None:
        assert instruction.micro_batch is not None
        self.stages[instruction.stage].backward_weights(instruction.micro_batch)

    def _update(self, step: Step, instruction: Instruction) -> None:
        self.update.step(instruction.stage)
        self.replicas.updated(instruction.stage)


def _pass(instruction: Instruction) -> Pass:
    return Pass(instruction.stage, instruction.micro_batch, instruction.op in _READS)
