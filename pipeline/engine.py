"""Engine.step: run every instruction of the program. No schedule is known here, no byte of a frame.

    1F3   transport.receive -> decode -> Stage.forward  -> encode -> transport.send
    1B3   transport.receive -> decode -> Stage.backward -> encode -> transport.send
    1U    clip -> optimizer.step
Source: claims A2-A4 of CN115016937A (forward and backward channels, micro-batches that stream in without
        pause)."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..compression.codec import buffer_bytes, decode_received, pack_into
from ..compression.errors import PenstockError, StageError, TransportError
from ..compression.geometry import geometry
from ..stages.probe import Value
from ..stages.stage import Stage, layer_seed
from .instruction import Instruction, Op
from .loss import Loss, mean_loss, refuse_side_ways
from .messages import Itinerary, Message
from .report import StageReport
from .timeline import Span
from .transport import GlooTransport, Transport
from .update import Update


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What a micro-batch brings from outside: the model's inputs, targets, its share of the batch."""

    inputs: tuple[torch.Tensor, ...]
    targets: Any
    share: float


class Engine:
    """Runs this process's programs over its stages.

    Args:    parameters: id() of every parameter of the model, which no loss may read beside the outputs."""

    def __init__(
        self,
        *,
        rank: int,
        stages: Mapping[int, Stage],
        transport: Transport,
        codec: str,
        loss: Loss,
        update: Update,
        parameters: Collection[int],
        seed: int,
    ) -> None:
        self.rank, self.stages, self.transport, self.codec = rank, stages, transport, codec
        self.loss, self.update, self.parameters, self.seed = loss, update, parameters, seed
        self.run = {Op.F: self._forward, Op.B: self._backward, Op.U: self._update}
        self.spans: list[Span] = []
        self.failed = ""

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
        with self._told(f"step {number}"):
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
        outputs = None
        with self._told("evaluation"):
            self._begin("eval")
            for instruction in program:
                stage = self.stages[instruction.stage]
                with self._told(f"stage {stage.index}, forward"):
                    received = self._arrive(instruction, inputs)
                    route = itinerary.routes[0][stage.index]
                    sent, outputs = stage.evaluate(received, record=itinerary.records[0], route=route)
                    self._leave(instruction, sent)
            self.transport.end()
        return outputs

    def check(self) -> None:
        """Refuse to go on after a failure that may have left other ranks elsewhere in the program."""
        if self.failed and isinstance(self.transport, GlooTransport):
            raise TransportError(
                f"these ranks stopped in the middle of a step ({self.failed}); start them anew"
            )

    @contextlib.contextmanager
    def _told(self, where: str) -> Iterator[None]:
        """Say of any error where it was, leave word for the other ranks, and let go of what was running."""
        try:
            yield
        except Exception as error:
            kind = type(error) if isinstance(error, PenstockError) else StageError
            what = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
            sentence = what if what.startswith("rank ") else f"rank {self.rank}, {where}: {what}"
            if not self.failed:
                self.transport.fail(sentence)
            self.failed = sentence
            for stage in self.stages.values():
                stage.running.clear()
            raise kind(sentence) from error

    def _begin(self, mode: str) -> None:
        self.began = time.perf_counter()
        self.waited, self.failed = 0.0, ""
        self.reports = {index: StageReport() for index in self.stages}
        self.tied: dict[tuple[int, str], Any] = {}
        for stage in self.stages.values():
            stage.begin(mode)
        self.transport.begin(self.itinerary)

    def _timed(self, instruction: Instruction, run: Callable[[Instruction], None]) -> None:
        start, self.waited = time.perf_counter(), 0.0
        what = {Op.F: "forward", Op.B: "backward", Op.U: "update"}[instruction.op]
        of = "" if instruction.micro_batch is None else f" of micro-batch {instruction.micro_batch}"
        with self._told(f"stage {instruction.stage}, {what}{of}, step {self.number}"):
            run(instruction)
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
        mean = mean_loss(self.loss, outputs, batch.targets, autocast=stage.autocast)
        if index == 0:
            refuse_side_ways(mean, outputs, self.parameters)
        stage.lose(index, mean * batch.share)
        self.losses[index] = mean.detach()

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
            value = record.values[number]  # its number may differ between micro-batches of other sizes
            if value.parameter:
                received[number] = self.tied.setdefault((stage, value.name), received.get(number))
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
            elif item is not None:
                _check_tensor(message, value, item)
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


def _check_tensor(message: Message, value: Value, tensor: torch.Tensor) -> None:
    """Refuse what the receiver does not expect, or would get in another geometry than it has here."""
    if (tuple(tensor.shape), tensor.dtype) != (value.shape, value.dtype):
        found = f"{tuple(tensor.shape)} {tensor.dtype}"
        raise StageError(f"{value.name} was {value.shape} {value.dtype} when it was traced, found {found}")
    if not geometry(tuple(tensor.shape), tensor.stride(), tensor.itemsize).travels:
        what = "the gradient of " if message.op is Op.B else ""
        raise StageError(
            f"{what}{value.name} has strides {tensor.stride()} for shape {value.shape}, which no frame "
            "keeps, and others would change the bits; cut elsewhere"
        )
