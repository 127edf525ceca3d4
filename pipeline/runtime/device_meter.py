"""What a step takes on devices: marks in the course of their computing, read when the step has ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from ...compression.buffers import Frame
from ...stages.device import Device
from ...stages.stage.stage import Stage
from ..schedules.instruction import Instruction
from ..schedules.messages import Message
from .meter import Meter
from .step import Step

T = TypeVar("T")
Marks = Mapping[Device, Any]
"""One point in the course of each device."""


class _Passed(NamedTuple):
    """An instruction that was queued: its marks, those of its waits and packings, and what it sent."""

    instruction: Instruction
    marks: tuple[Marks, Marks]
    waits: list[tuple[Marks, Marks]]
    packings: list[tuple[Device, Any, Any]]
    sent: list[tuple[Message, int, Frame, str]]


class DeviceMeter(Meter):
    """Counts as ``Meter`` does, by the clocks of ``devices``; how long a frame became is known at the end.

    ``waits`` of the instruction that runs: between two marks the computing waited for a frame."""

    def __init__(self, rank: int, stages: Mapping[int, Stage], devices: Mapping[int, Device]) -> None:
        self.devices, self.several = devices, tuple(dict.fromkeys(devices.values()))
        self.now = self._marks
        self.passed: list[_Passed] = []
        self._forget()
        super().__init__(rank, stages)

    def _marks(self) -> Marks:
        return {device: device.now() for device in self.several}

    def _forget(self) -> None:
        self.waits: list[tuple[Marks, Marks]] = []
        self.packings: list[tuple[Device, Any, Any]] = []
        self.noted: list[tuple[Message, int, Frame, str]] = []

    def begin(self, step: Step) -> None:
        """A step begins."""
        self.passed = []
        self._forget()
        super().begin(step)

    def timed(self, device: Device, task: Callable[[], T]) -> Callable[[], T]:
        """``task``, whose seconds on a stream of ``device`` count as packing."""
        packings = self.packings

        def run() -> T:
            begin = device.now()
            value = task()
            packings.append((device, begin, device.now()))
            return value

        return run

    def sent(self, message: Message, raw: int, frame: Frame, codec: str) -> None:
        """A message was sent: ``raw`` bytes in ``frame``."""
        self.noted.append((message, raw, frame, codec))

    def stop(self, instruction: Instruction, started: Marks) -> None:
        """The instruction that began at ``started`` was queued; the next one may begin."""
        marks = started, self._marks()
        self.passed.append(_Passed(instruction, marks, self.waits, self.packings, self.noted))
        self._forget()

    def end(self) -> None:
        """The step has ended: read all marks."""
        for device in self.several:
            device.synchronize()
        for instruction, (start, end), waits, packings, sent in self.passed:
            for message, raw, frame, codec in sent:
                super().sent(message, raw, frame, codec)
            device = self.devices[instruction.stage]
            self.waited = sum(device.seconds(begin[device], until[device]) for begin, until in waits)
            self.packing = sum(where.seconds(begin, until) for where, begin, until in packings)
            began = self.began[device]
            self._note(instruction, device.seconds(began, start[device]), device.seconds(began, end[device]))
        super().end()
