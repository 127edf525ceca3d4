"""Crossing: what crosses the cuts at an instruction, as values by number on either side.

Stages know values and no frames, frames know messages and no layers; a step's itinerary joins the two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..schedules.instruction import Instruction, Op
from ..schedules.messages import Itinerary
from .frames import Frames
from .report import StageReport


class Crossing:
    """Brings an instruction what it works on, and sends what it made; ``reports`` count the bytes."""

    def __init__(self, frames: Frames) -> None:
        self.frames = frames

    def begin(self, itinerary: Itinerary, reports: Mapping[int, StageReport]) -> None:
        """Get ready for a step; tied parameters of the one before are gone."""
        self.itinerary, self.reports = itinerary, reports
        self.tied: dict[tuple[int, str], Any] = {}

    def arrive(self, instruction: Instruction, inputs: tuple[torch.Tensor, ...]) -> dict[int, Any]:
        """What a forward works on: received values, tied parameters of this step, the model's inputs."""
        stage, index = instruction.stage, instruction.micro_batch or 0
        record, route = self.itinerary.records[index], self.itinerary.routes[index][stage]
        received = self.receive(instruction)
        for number, _ in route.receives:
            value = record.values[number]  # its number may differ between micro-batches of other sizes
            if value.parameter and number in received:
                self.tied[stage, value.name] = received[number]
            elif value.parameter:  # it came with the first micro-batch of the step
                received[number] = self.tied[stage, value.name]
        if stage == 0:
            starts = [i for i, value in enumerate(record.values) if value.producer < 0]
            received |= dict(zip(starts, inputs, strict=True))
        return received

    def receive(self, instruction: Instruction) -> dict[int, Any]:
        """What came for an instruction; for a backward the gradients of the values that its forward sent."""
        return {
            message.value: self.frames.receive(message) for message in self.itinerary.receives[instruction]
        }

    def leave(self, instruction: Instruction, items: Mapping[int, Any]) -> None:
        """Send what an instruction made."""
        for message in self.itinerary.sends[instruction]:
            raw, sent = self.frames.send(message, items[message.value])
            report = self.reports[message.source]
            if message.op is Op.F:
                report.forward_raw += raw
                report.forward_sent += sent
            else:
                report.backward_raw += raw
                report.backward_sent += sent
