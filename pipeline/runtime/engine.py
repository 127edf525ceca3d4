"""Engine.step: run every instruction of the program. No schedule is known here, no byte of a frame.

    1F3   Frames.receive -> Stage.forward  -> Frames.send
    1B3   Frames.receive -> Stage.backward -> Frames.send
    1U    clip -> optimizer.step
Source: claims A2-A4 of CN115016937A (forward and backward channels, micro-batches that stream in without
        pause)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map_only

from ...compression.errors import PenstockError, StageError, TransportError
from ...stages.seeds import layer_seed
from ...stages.stage.stage import Stage
from ...stages.tracing.flags import Flags
from ..ranks.transport import GlooTransport, Transport
from ..schedules.instruction import Instruction, Op
from ..schedules.messages import Itinerary
from ..schedules.span import Span
from ..weights.update import Update
from .batches import MicroBatch
from .crossing import Crossing
from .frames import Frames
from .loss import Loss, mean_loss, refuse_side_ways
from .policy import Policy
from .report import StageReport

Backward = Callable[[int, Mapping[int, "torch.Tensor | None"]], Mapping[int, "torch.Tensor | None"]]

WORDS = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "backward for the inputs",
    Op.W: "backward for the weights",
    Op.U: "update",
}


class Engine:
    """Runs this process's programs over its stages.

    Args:    parameters: those of the model, held weakly: no loss may read one beside the outputs."""

    def __init__(
        self,
        *,
        rank: int,
        stages: Mapping[int, Stage],
        transport: Transport,
        policy: Policy,
        loss: Loss,
        update: Update,
        flags: Flags,
        parameters: Container[object],
        seed: int,
    ) -> None:
        self.rank, self.stages, self.transport = rank, stages, transport
        self.frames = Frames(transport, policy=policy, noted=any(stage.stores for stage in stages.values()))
        self.crossing = Crossing(self.frames)
        self.loss, self.update, self.parameters, self.seed = loss, update, parameters, seed
        self.flags = flags
        self.run = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._backward_inputs,
            Op.W: self._backward_weights,
            Op.U: self._update,
        }
        self.spans: list[Span] = []
        self.saved: dict[int, tuple[int, int]] = {}
        self.failed = ""
        self.wanted = False  # the outputs of a step

    def step(
        self,
        number: int,
        program: Sequence[Instruction],
        itinerary: Itinerary,
        micro_batches: Mapping[int, MicroBatch],
    ) -> dict[int, torch.Tensor]:
        """Run this process's ``program``; returns the losses by micro-batch where the last stage is."""
        self.number, self.itinerary, self.micro_batches = number, itinerary, micro_batches
        self.losses: dict[int, torch.Tensor] = {}
        self.outputs: dict[int, Any] = {}
        self.spans = []
        with self._told(f"step {number}"):
            self._begin("train")
            if not itinerary.goes_on:
                self.update.begin()
            for instruction, following in zip_longest(program, program[1:]):
                if following is not None and following.op in (Op.B, Op.I):
                    self.stages[following.stage].fetch(following.micro_batch)  # while this one runs
                self._timed(instruction, self.run[instruction.op])
            self.frames.end()
        for index, stage in self.stages.items():
            raw, kept = stage.saved.bytes_raw, stage.saved.bytes_kept
            before = self.saved.get(index, (0, 0))
            self.reports[index].saved_raw += raw - before[0]
            self.reports[index].saved_kept += kept - before[1]
            self.saved[index] = raw, kept
        return self.losses

    def evaluate(
        self, program: Sequence[Instruction], itinerary: Itinerary, inputs: tuple[torch.Tensor, ...]
    ) -> Any:
        """Run one micro-batch forward in eval mode; returns the outputs where the last stage is."""
        self.itinerary = itinerary
        outputs = None
        with self._told("evaluation"):
            self._begin("eval")
            for instruction in program:
                stage = self.stages[instruction.stage]
                with self._told(f"stage {stage.index}, forward"), self.flags.evaluating():
                    received = self.crossing.arrive(instruction, inputs)
                    route = itinerary.routes[0][stage.index]
                    sent, outputs = stage.evaluate(received, record=itinerary.records[0], route=route)
                    self.crossing.leave(instruction, sent)
                    self.frames.let_go(stage.index, itinerary.receives[instruction])
            self.frames.end()
        return outputs

    def check(self) -> None:
        """Refuse to go on after a failure that may have left other ranks elsewhere in the program."""
        if self.failed and isinstance(self.transport, GlooTransport):
            raise TransportError(
                f"these ranks stopped in the middle of a step ({self.failed}); start them anew"
            )

    @contextlib.contextmanager
    def _told(self, where: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._fail(where, error)

    def _fail(self, where: str, error: BaseException) -> NoReturn:
        """Raise what is told of an error, SystemExit in a layer included; Ctrl-C stays what it is."""
        failure = self.failure(where, error)
        if isinstance(error, KeyboardInterrupt):
            raise error
        raise failure from error

    def failure(self, where: str, error: BaseException) -> PenstockError:
        """Say of an error where it was, leave word for the other ranks, and let go of what was running."""
        kind = type(error) if isinstance(error, PenstockError) else StageError
        what = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
        what = what.removesuffix(": ")
        sentence = what if what.startswith("rank ") else f"rank {self.rank}, {where}: {what}"
        if not self.failed:
            self.failed = sentence
            self.transport.fail(sentence)
        for stage in self.stages.values():
            stage.stop()
        return kind(sentence)

    def _begin(self, mode: str) -> None:
        self.began = time.perf_counter()
        self.failed = ""
        self.reports = {index: StageReport(live_versions=1) for index in self.stages}
        for stage in self.stages.values():
            stage.moved = self.flags.moved
            if not self.itinerary.goes_on:
                stage.stop()
        self.crossing.begin(self.itinerary, self.reports)
        self.frames.begin(self.itinerary, training=mode == "train")

    def _timed(self, instruction: Instruction, run: Callable[[Instruction], None]) -> None:
        start = time.perf_counter()
        self.frames.start()
        try:
            run(instruction)
        except BaseException as error:
            of = "" if instruction.micro_batch is None else f" of micro-batch {instruction.micro_batch}"
            what = f"{WORDS[instruction.op]}{of}, step {self.number}"
            self._fail(f"stage {instruction.stage}, {what}", error)
        end, waited = time.perf_counter(), self.frames.waited
        report = self.reports[instruction.stage]
        report.compute_seconds += end - start - waited
        report.waiting_seconds += waited
        self.spans.append(
            Span(
                rank=self.rank,
                stage=instruction.stage,
                op=instruction.op.value,
                micro_batch=instruction.micro_batch,
                start=start - self.began,
                waiting=waited,
                packing=self.frames.packing,
                end=end - self.began,
                bytes_raw=self.frames.bytes_raw,
                bytes_sent=self.frames.bytes_sent,
                codec=" ".join(self.frames.codecs),
            )
        )

    def _forward(self, instruction: Instruction) -> None:
        index = instruction.micro_batch
        assert index is not None
        stage, batch = self.stages[instruction.stage], self.micro_batches[index]
        sent, outputs = stage.forward(
            index,
            self.crossing.arrive(instruction, batch.inputs),
            record=self.itinerary.records[index],
            route=self.itinerary.routes[index][stage.index],
            seed=lambda name: layer_seed(self.seed, batch.step, batch.index, name),
            batch=batch.batch,
        )
        self.crossing.leave(instruction, sent)
        if stage.last:
            self._lose(stage, index, outputs, batch)
            if self.wanted:
                self.outputs[index] = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), outputs)
        # Behind the loss: it may write to the outputs, and a backward reads memory as it is by then.
        stage.offload(index, self.frames.came(instruction), self.frames.went)
        self.frames.let_go(stage.index, [m for m in self.itinerary.receives[instruction] if not m.masked])

    def _lose(self, stage: Stage, index: int, outputs: Any, batch: MicroBatch) -> None:
        with stage.weights.backward(index):  # outputs may be parameters
            mean = mean_loss(self.loss, outputs, batch.targets, autocast=stage.autocast)
        if index == self.itinerary.first:
            refuse_side_ways(mean, outputs, self.parameters)
        stage.lose(index, self.update.scale.apply(mean * batch.share, batch.batch))
        self.losses[index] = mean.detach()

    def _backward(self, instruction: Instruction) -> None:
        self._send_back(instruction, self.stages[instruction.stage].backward)

    def _backward_inputs(self, instruction: Instruction) -> None:
        self._send_back(instruction, self.stages[instruction.stage].backward_inputs)

    def _backward_weights(self, instruction: Instruction) -> None:
        assert instruction.micro_batch is not None
        self.stages[instruction.stage].backward_weights(instruction.micro_batch)

    def _send_back(self, instruction: Instruction, backward: Backward) -> None:
        index = instruction.micro_batch
        assert index is not None
        came, back = self.itinerary.receives[instruction], self.itinerary.sends[instruction]
        self.crossing.leave(instruction, backward(index, self.crossing.receive(instruction)))
        self.frames.let_go(instruction.stage, [message.downstream for message in (*came, *back)])

    def _update(self, instruction: Instruction) -> None:
        stage = instruction.stage
        self.update.step(stage)
        weights, report = self.stages[stage].weights, self.reports[stage]
        report.live_versions = max(report.live_versions, weights.num_live)
        report.versions_bytes = max(report.versions_bytes, weights.num_bytes)
