"""Meter of a step: seconds, waits and bytes of every instruction, and the reports of its stages.

The loop that runs the instructions calls it at the end of each of them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from ...compression.buffers import Frame
from ...stages.stage.stage import Stage
from ..schedules.instruction import Instruction, Op
from ..schedules.messages import Flow, Message
from ..schedules.span import Span
from .report import StageReport
from .step_planner import Step


class Meter:
    """Counts for the stages of a rank.

    ``waited`` and ``packing`` are the seconds without a frame, and those of packing and unpacking, of the
    instruction that runs, by the clock ``now``. ``spans`` and ``reports`` are of the last ``step``;
    ``totals`` has for every flow the bytes that it sent in training so far, unpacked and packed."""

    now: Callable[[], Any] = staticmethod(time.perf_counter)

    def __init__(self, rank: int, stages: Mapping[int, Stage]) -> None:
        self.rank, self.stages = rank, stages
        self.spans: list[Span] = []
        self.reports: dict[int, StageReport] = {}
        self.totals: defaultdict[Flow, list[int]] = defaultdict(lambda: [0, 0])
        self.saved: dict[int, tuple[int, int, float]] = dict.fromkeys(stages, (0, 0, 0.0))
        self._start()

    def begin(self, step: Step) -> None:
        """A step begins."""
        self.step = step
        self.spans, self.reports = [], {index: StageReport(live_versions=1) for index in self.stages}
        self._start()
        self.began = self.now()

    def _start(self) -> None:
        self.waited = self.packing = 0.0
        self.bytes_raw = self.bytes_sent = 0
        self.codecs = ""

    def sent(self, message: Message, raw: int, frame: Frame, codec: str) -> None:
        """A message was sent: ``raw`` bytes in ``frame``."""
        packed = frame.num_bytes
        total = self.totals[message.flow]
        total[0] += raw
        total[1] += packed
        self.bytes_raw += raw
        self.bytes_sent += packed
        if codec not in self.codecs.split():
            self.codecs = f"{self.codecs} {codec}" if self.codecs else codec

    def stop(self, instruction: Instruction, started: Any) -> None:
        """The instruction that began at ``started`` has ended; the next one may begin."""
        self._note(instruction, started - self.began, time.perf_counter() - self.began)

    def _note(self, instruction: Instruction, start: float, end: float) -> None:
        stage, op, micro_batch = instruction
        if op is Op.U:
            report, weights = self.reports[stage], self.stages[stage].weights
            report.live_versions = max(report.live_versions, weights.num_live)
            report.versions_bytes = max(report.versions_bytes, weights.num_bytes)
        self.spans.append(
            Span(
                self.rank, stage, op._value_, micro_batch, start, self.waited,
                end, self.packing, self.bytes_raw, self.bytes_sent, self.codecs,
            )
        )  # fmt: skip
        self._start()

    def end(self) -> None:
        """The step has ended: report its spans, what its forwards saved, and what stores kept of it."""
        for _, index, op, _, start, waited, end, _, raw, sent, _ in self.spans:
            report = self.reports[index]
            report.compute_seconds += end - start - waited
            report.worked_seconds += (end - start - waited) * (op != "U")  # there replicas wait for others
            report.waiting_seconds += waited
            if op == "F":
                report.forward_raw += raw
                report.forward_sent += sent
            else:
                report.backward_raw += raw
                report.backward_sent += sent
        for index, stage in self.stages.items():
            saved, before = stage.saved.counts, self.saved[index]
            now = saved.bytes_raw, saved.bytes_kept, stage.exposed_seconds
            self.reports[index].saved_raw += now[0] - before[0]
            self.reports[index].saved_kept += now[1] - before[1]
            self.reports[index].exposed_seconds += now[2] - before[2]
            self.saved[index] = now
