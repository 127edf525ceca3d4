"""Engine.step: run every instruction of the program. No schedule is known here, no byte of a frame.

    1F3   transport.receive -> decode -> Stage.forward  -> encode -> transport.send
    1B3   transport.receive -> decode -> Stage.backward -> encode -> transport.send
    1U    clip -> optimizer.step
Source: claims A2-A4 of CN115016937A (forward and backward channels, micro-batches that stream in without
        pause)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..compression.codec import buffer_bytes, decode_received, pack_into
from ..compression.errors import PenstockError, StageError
from ..stages.stage import Stage, layer_seed
from .instruction import Instruction, Op
from .messages import Itinerary, Message
from .report import StageReport
from .timeline import Span
from .transport import Transport
from .update import Update

Loss = Callable[[Any, Any], torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What a micro-batch brings from outside: the model's inputs, targets, its share of the batch."""

    inputs: tuple[torch.Tensor, ...]
    targets: Any
    share: float


class Engine:
    """Runs this process's programs over its stages."""

    def __init__(
        self,
        *,
        rank: int,
        stages: Mapping[int, Stage],
        transport: Transport,
        codec: str,
        loss: Loss,
        update: Update,
        seed: int,
    ) -> None:
        self.rank, self.stages, self.transport, self.codec = rank, stages, transport, codec
        self.loss, self.update, self.seed = loss, update, seed
        self.run = {Op.F: self._forward, Op.B: self._backward, Op.U: self._update}
        self.spans: list[Span] = []

    def step(
        self,
        number: int,
        program: Sequence[Instruction],
        itinerary: Itinerary,
        micro_batches: Sequence[MicroBatch],
    ) -> dict[int, torch.Tensor]:
        """Run this process's ``program``; returns the losses by micro-batch where the last stage is."""
        self.number, self.itinerary, self.micro_batches = number, itinerary, micro_batches
        self.losses: dict[int, torch.Tensor] = {}
        self.spans = []
        self._begin("train")
        self.update.begin()
        for instruction in program:
            self._timed(instruction, self.run[instruction.op])
        self.transport.end()
        return self.losses

    def evaluate(
        self, program: Sequence[Instruction], itinerary: Itinerary, inputs: tuple[torch.Tensor, ...]
    ) -> Any:
        """Run one micro-batch forward in eval mode; returns the outputs where the last stage is."""
        self.itinerary = itinerary
        self._begin("eval")
        outputs = None
        for instruction in program:
            stage = self.stages[instruction.stage]
            sent, outputs = stage.evaluate(
                self._arrive(instruction, inputs),
                record=itinerary.records[0],
                route=itinerary.routes[0][stage.index],
            )
            self._leave(instruction, sent)
        self.transport.end()
        return outputs

    def _begin(self, mode: str) -> None:
        self.began = time.perf_counter()
        self.waited = 0.0
        self.reports = {index: StageReport() for index in self.stages}
        self.tied: dict[tuple[int, int], Any] = {}
        for stage in self.stages.values():
            stage.begin(mode)
        self.transport.begin(self.itinerary)

    def _timed(self, instruction: Instruction, run: Callable[[Instruction], None]) -> None:
        start, self.waited = time.perf_counter(), 0.0
        try:
            run(instruction)
        except PenstockError as error:
            what = {Op.F: "forward", Op.B: "backward", Op.U: "update"}[instruction.op]
            of = "" if instruction.micro_batch is None else f" of micro-batch {instruction.micro_batch}"
            sentence = f"rank {self.rank}, stage {instruction.stage}, {what}{of}, step {self.number}: {error}"
            self.transport.fail(sentence)
            raise type(error)(sentence) from error
        end = time.perf_counter()
        self._count(instruction.stage, compute_seconds=end - start - self.waited, waiting_seconds=self.waited)
        self.spans.append(
            Span(
                rank=self.rank,
                stage=instruction.stage,
                op=instruction.op.value,
                micro_batch=instruction.micro_batch,
                start=start - self.began,
                waiting=self.waited,
                end=end - self.began,
            )
        )

    def _forward(self, instruction: Instruction) -> None:
        index = instruction.micro_batch
        assert index is not None
        stage, batch = self.stages[instruction.stage], self.micro_batches[index]
        sent, outputs = stage.forward(
            index,
            self._arrive(instruction, batch.inputs),
            record=self.itinerary.records[index],
            route=self.itinerary.routes[index][stage.index],
            seed=lambda name: layer_seed(self.seed, self.number, index, name),
        )
        self._leave(instruction, sent)
        if stage.last:
            self._lose(stage, index, outputs, batch)

    def _lose(self, stage: Stage, index: int, outputs: Any, batch: MicroBatch) -> None:
        try:
            with stage.casting():
                loss = self.loss(outputs, batch.targets)
            stage.lose(index, loss * batch.share)
        except Exception as error:
            raise StageError(f"the loss: {type(error).__name__}: {error}") from error
        self.losses[index] = loss.detach()

    def _backward(self, instruction: Instruction) -> None:
        index = instruction.micro_batch
        assert index is not None
        gradients = {
            message.value: self._receive(message) for message in self.itinerary.receives[instruction]
        }
        self._leave(instruction, self.stages[instruction.stage].backward(index, gradients))

    def _update(self, instruction: Instruction) -> None:
        self.update.step(instruction.stage)

    def _arrive(self, instruction: Instruction, inputs: tuple[torch.Tensor, ...]) -> dict[int, Any]:
        """What a forward works on: received values, tied parameters of this step, the model's inputs."""
        stage, index = instruction.stage, instruction.micro_batch or 0
        record, route = self.itinerary.records[index], self.itinerary.routes[index][stage]
        received = {message.value: self._receive(message) for message in self.itinerary.receives[instruction]}
        for number, _ in route.receives:
            if record.values[number].parameter:
                received[number] = self.tied.setdefault((stage, number), received.get(number))
        if stage == 0:
            starts = [i for i, value in enumerate(record.values) if value.producer < 0]
            received |= dict(zip(starts, inputs, strict=True))
        return received

    def _receive(self, message: Message) -> Any:
        began = time.perf_counter()
        buffer = self.transport.receive(message)
        self.waited += time.perf_counter() - began
        item = decode_received(buffer)
        self.transport.pool.give(buffer)
        number = self.itinerary.value(message).number
        return item if number is None or item is None else number(item.item())

    def _leave(self, instruction: Instruction, items: Mapping[int, Any]) -> None:
        """Pack and send what an instruction made."""
        for message in self.itinerary.sends[instruction]:
            value, item = self.itinerary.value(message), items[message.value]
            if value.number is not None:
                item = torch.tensor(item, dtype=value.dtype)
            elif item is not None and (tuple(item.shape), item.dtype) != (value.shape, value.dtype):
                found = f"{tuple(item.shape)} {item.dtype}"
                raise StageError(
                    f"{value.name} was {value.shape} {value.dtype} when it was traced, found {found}"
                )
            buffer = self.transport.pool.take(buffer_bytes(value.shape, value.dtype, self.codec))
            num_bytes = pack_into(item, buffer, codec=self.codec, requires_grad=value.requires_grad)
            raw = 0 if item is None else item.numel() * item.element_size()
            way = "forward" if message.op is Op.F else "backward"
            self._count(message.source, **{f"{way}_raw": raw, f"{way}_sent": num_bytes})
            self.transport.send(message, buffer, num_bytes)

    def _count(self, stage: int, **more: float) -> None:
        report = self.reports[stage]
        self.reports[stage] = dataclasses.replace(
            report, **{name: getattr(report, name) + n for name, n in more.items()}
        )
