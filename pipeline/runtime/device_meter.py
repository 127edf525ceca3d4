"""What a step takes on a device: marks in the course of its computing, read when the step has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from ...compression.pool import Frame
from ...stages.device import Device
from ..schedules.instruction import Instruction
from ..schedules.messages import Message
from .meter import Meter
from .step import Step

T = TypeVar("T")
Marks = tuple[Any, Any]


class _Passed(NamedTuple):
    """An instruction that was queued: its marks, those of its waits and packings, and what it sent."""

    instruction: Instruction
    marks: Marks
    waits: list[Marks]
    packings: list[Marks]
    sent: list[tuple[Message, int, Frame, str]]


class DeviceMeter(Meter):
    """Counts as ``Meter`` does, by the clock of ``device``; how long a frame became is known at the end.

    ``waits`` of the instruction that runs: between two marks the computing waited for a frame."""

    def __init__(self, rank: int, stages: Any, device: Device) -> None:
        self.device, self.now = device, device.now
        self.waits: list[Marks] = []
        self.packings: list[Marks] = []
        self.noted: list[tuple[Message, int, Frame, str]] = []
        self.passed: list[_Passed] = []
        super().__init__(rank, stages)

    def begin(self, step: Step) -> None:
        """A step begins."""
        self.passed = []
        super().begin(step)

    def timed(self, task: Callable[[], T]) -> Callable[[], T]:
        """``task``, whose seconds on its stream count as packing."""

        def run() -> T:
            begin = self.device.now()
            value = task()
            packings.append((begin, self.device.now()))
            return value

        packings = self.packings
        return run

    def sent(self, message: Message, raw: int, frame: Frame, codec: str) -> None:
        """A message was sent: ``raw`` bytes in ``frame``."""
        self.noted.append((message, raw, frame, codec))

    def stop(self, instruction: Instruction, started: Any) -> None:
        """The instruction that began at the mark ``started`` was queued; the next one may begin."""
        marks = started, self.device.now()
        self.passed.append(_Passed(instruction, marks, self.waits, self.packings, self.noted))
        self.waits, self.packings, self.noted = [], [], []

    def end(self) -> None:
        """The step has ended: read all marks."""
        self.device.synchronize()
        seconds = self.device.seconds
        for instruction, marks, waits, packings, sent in self.passed:
            for message, raw, frame, codec in sent:
                super().sent(message, raw, frame, codec)
            self.waited = sum(seconds(*wait) for wait in waits)
            self.packing = sum(seconds(*packing) for packing in packings)
            self._note(instruction, seconds(self.began, marks[0]), seconds(self.began, marks[1]))
        super().end()
