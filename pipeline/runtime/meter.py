"""What a step is seen to take: seconds, waits and bytes of every instruction, and what its stages report.

It stands beside the loop that runs the instructions: started before each of them, stopped after it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping

from ...stages.stage.stage import Stage
from ..schedules.instruction import Instruction, Op
from ..schedules.messages import Flow, Message
from ..schedules.span import Span
from .report import StageReport
from .step import Step


class Meter:
    """Counts for the stages of a rank.

    ``waited`` and ``packing`` are the seconds without a frame, and those of packing and unpacking, of the
    instruction that runs. ``spans`` and ``reports`` are of the last ``step``; ``totals`` has for every flow
    the bytes that it sent in training so far, unpacked and packed."""

    def __init__(self, rank: int, stages: Mapping[int, Stage]) -> None:
        self.rank, self.stages = rank, stages
        self.spans: list[Span] = []
        self.reports: dict[int, StageReport] = {}
        self.totals: defaultdict[Flow, list[int]] = defaultdict(lambda: [0, 0])
        self.saved: dict[int, tuple[int, int]] = dict.fromkeys(stages, (0, 0))
        self.start()

    def begin(self, step: Step) -> None:
        """A step begins."""
        self.step = step
        self.spans, self.reports = [], {index: StageReport(live_versions=1) for index in self.stages}
        self.began = time.perf_counter()

    def start(self) -> None:
        """An instruction begins."""
        self.waited = self.packing = 0.0
        self.bytes_raw = self.bytes_sent = 0
        self.codecs: dict[str, None] = {}
        self.started = time.perf_counter()

    def sent(self, message: Message, raw: int, packed: int, codec: str) -> None:
        """A message was sent: ``raw`` bytes in a frame of ``packed``."""
        total = self.totals[message.flow]
        total[0] += raw
        total[1] += packed
        self.bytes_raw += raw
        self.bytes_sent += packed
        self.codecs[codec] = None

    def stop(self, instruction: Instruction) -> None:
        """The instruction has ended."""
        end, start, waited = time.perf_counter(), self.started, self.waited
        report, op = self.reports[instruction.stage], instruction.op
        report.compute_seconds += end - start - waited
        report.waiting_seconds += waited
        if op is Op.F:
            report.forward_raw += self.bytes_raw
            report.forward_sent += self.bytes_sent
        elif op is Op.U:
            weights = self.stages[instruction.stage].weights
            report.live_versions = max(report.live_versions, weights.num_live)
            report.versions_bytes = max(report.versions_bytes, weights.num_bytes)
        else:
            report.backward_raw += self.bytes_raw
            report.backward_sent += self.bytes_sent
        self.spans.append(
            Span(
                self.rank, instruction.stage, op._value_, instruction.micro_batch, start - self.began, waited,
                end - self.began, self.packing, self.bytes_raw, self.bytes_sent, " ".join(self.codecs),
            )
        )  # fmt: skip

    def end(self) -> None:
        """The step has ended: note what its forwards saved, and what stores kept of it."""
        for index, stage in self.stages.items():
            now, before = (stage.saved.bytes_raw, stage.saved.bytes_kept), self.saved[index]
            self.reports[index].saved_raw += now[0] - before[0]
            self.reports[index].saved_kept += now[1] - before[1]
            self.saved[index] = now
