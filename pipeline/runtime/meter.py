"""Meters of a step: seconds, waits and bytes of every instruction, and the memory of stages.

Of memory, what the system says and what can be counted are reported next to each other."""

import contextlib
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...compression.buffers import Frame, Pool
from ...stages.device import Device, is_gpu
from ...stages.memory.byte_budget import Tiers
from ...stages.memory.parameter_offload import OffloadedParameters
from ...stages.plan.memory_model import copies
from ...stages.plan.plan import Plan
from ...stages.stage.stage import Stage
from ..schedules.instruction import Flow, Instruction, Op, Span
from ..schedules.messages import Message
from .report import StageReport
from .step_planner import Step


class Meter:
    """Counts for the stages of a rank: of the instruction that runs the seconds without a frame (``waited``)
    and of ``packing``, of the last ``step`` the ``spans`` and ``reports``, of the training so far the bytes
    of every flow, unpacked and packed (``totals``)."""

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


STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class ResidentMemory:
    """The most bytes of this process since ``begin``, above what it had without ``model_bytes``.

    Linux tells it as VmHWM and lets it start anew; elsewhere it is the most since the process began."""

    def __init__(self, *, model_bytes: int) -> None:
        self.base = max(0, _status("VmRSS") - model_bytes)

    def begin(self) -> None:
        """Forget what was reached so far."""
        with contextlib.suppress(OSError):
            CLEAR.write_text("5")
        # The system's own count is asked without a file; it may have begun with the process before this one.
        self.counts = _most_of_all() <= _status("VmHWM")

    def most(self) -> int:
        """Bytes."""
        return max(0, (_most_of_all() if self.counts else _status("VmHWM")) - self.base)


class Usage:
    """Memory of the stages of this process, step by step.

    Args:
        parameters: Those of every stage; optimizers: theirs, where a stage has one.
        tiers: Those of the process; pool: of frames on their way."""

    def __init__(
        self, plan: Plan, parameters: Mapping[int, Sequence[torch.Tensor]],
        optimizers: Mapping[int, Optimizer], *, resident: ResidentMemory, devices: Mapping[int, Device],
        mirrors: Mapping[int, OffloadedParameters], tiers: Tiers | None = None, pool: Pool | None = None,
    ) -> None:  # fmt: skip
        self.tiers, self.pool, self.mirrors = tiers or Tiers(), pool or Pool(), mirrors
        self.plan, self.parameters, self.optimizers, self.resident = plan, parameters, optimizers, resident
        self.devices = devices
        for device in dict.fromkeys(devices.values()):
            device.reset_peak()
        self.live, self.waited = dict.fromkeys(parameters, 0), 0.0
        self.held: dict[int, tuple[object, int]] = {}
        self.tiers.fix(sum(map(self._stays, parameters)))
        self.tiers.begin()

    def restart(self) -> None:
        """Nothing is in flight."""
        self.live = dict.fromkeys(self.live, 0)

    def fill(
        self, reports: Mapping[int, StageReport], spans: Iterable[Span], *, rank: int
    ) -> Mapping[int, StageReport]:
        """Complete the reports of a step by what the stages held: a micro-batch what its forward was measured
        to save, less what a store spared of it."""
        most, live = dict(self.live), self.live
        forwards = dict.fromkeys(live, 0)
        for _, stage, op, *_ in spans:
            forwards[stage] += op == "F"
            live[stage] += (op == "F") - (op in "BW")
            most[stage] = max(most[stage], live[stage])
        resident, kept, fixed = self.resident.most(), 0, 0
        for stage, report in reports.items():
            planned = self.plan.stages[stage]
            left = planned.saved_bytes - (report.saved_raw - report.saved_kept) // max(1, forwards[stage])
            device, mirror = self.devices[stage], self.mirrors.get(stage)
            options = {"tier": planned.tier, "recompute": planned.recompute, "device": device.torch.type}
            if planned.recompute:
                left = planned.kept_bytes
            sizes = {"saved": planned.saved_bytes, "near": planned.near_bytes, "packed": left}
            saved = copies(most[stage], **options).of(**sizes, entered=self.plan.bytes_entering(stage))
            kept += saved * (planned.tier == "device")
            report.device_bytes = device.peak_bytes or 0
            report.rank, report.live_micro_batches, report.resident_bytes = rank, most[stage], resident
            moved = 0 if mirror is None else mirror.peak_bytes + mirror.kept_bytes
            stays = self._stays(stage) + report.versions_bytes
            report.peak_bytes = stays + moved + saved
            fixed += stays
        fixed += self.pool.num_bytes + self.tiers.slots_bytes
        grew = max(0, fixed - self.tiers.fixed)  # by what an optimizer made at its first step, and frames
        peaks = self.tiers.peaks
        for report in reports.values():
            report.device_tier, report.packed_tier = peaks["device"] + kept, peaks["packed"]
            report.host_tier, report.disk_tier, report.grew_bytes = peaks["host"], peaks["disk"], grew
            report.held_up_seconds = self.tiers.seconds_waited - self.waited
            report.slots_bytes, report.slots_live_bytes = self.tiers.slots_bytes, self.tiers.slots_live_bytes
        self.waited = self.tiers.seconds_waited
        self.tiers.fix(fixed)
        self.tiers.begin()
        return reports

    def _stays(self, stage: int) -> int:
        """The ``state_bytes`` of what a stage does not move, counted anew where they changed."""
        parameters, optimizer = self.parameters[stage], self.optimizers.get(stage)
        asked = len(optimizer.state) if optimizer else 0, [p.requires_grad for p in parameters]
        if stage not in self.held or self.held[stage][0] != asked:
            self.held[stage] = asked, state_bytes(parameters, optimizer)
        return self.held[stage][1]  # all that a mirror moves is away now


def bytes_in_memory(model: nn.Module) -> int:
    """Return the bytes of parameters and buffers in this process's own memory, on no device."""
    tensors = (t for t in (*model.parameters(), *model.buffers()) if not t.is_meta)
    return sum(t.nbytes for t in tensors if not is_gpu(t.device))


def state_bytes(parameters: Iterable[torch.Tensor], optimizer: Optimizer | None) -> int:
    """Bytes of parameters, their gradients in a step, and what the optimizer keeps for them."""
    total = sum(p.nbytes * (1 + p.requires_grad) for p in parameters)
    states = [] if optimizer is None else optimizer.state.values()
    kept = [item for state in states for item in state.values() if isinstance(item, torch.Tensor)]
    return total + sum(item.numel() * item.itemsize for item in kept)  # of a sparse one as of a dense one


def _status(name: str) -> int:
    """A line of /proc/self/status in bytes; without one, the high-water mark that every Unix has."""
    with contextlib.suppress(OSError):
        _, found, rest = STATUS.read_bytes().partition(b"\n%b:" % name.encode())
        if found:
            return 1024 * int(rest.split(maxsplit=1)[0])
    return _most_of_all()


def _most_of_all() -> int:
    """The high-water mark that every Unix has, in bytes."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most
