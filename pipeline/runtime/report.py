"""Report of a step: the loss, the seconds, and per stage its computing, waits, bytes sent and kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...compression.names import show_codec
from ...stages.units import show_bytes
from ..schedules.instruction import Flow

if TYPE_CHECKING:
    from ...stages.plan.plan import Plan
    from ..distributed.process_group import World
    from .auto_codec import Policy


@dataclasses.dataclass(slots=True, kw_only=True)
class StageReport:
    """One stage in one step, counted while it runs: bytes it sent downstream and upstream, unpacked and
    packed; bytes that its forwards saved and a store kept for the backwards; the most micro-batches in flight
    and versions of its weights that it kept, with the bytes of the old ones; seconds.

    ``peak_bytes``: the most that it held, counted: parameters, gradients, state of the optimizer, versions,
    and what the micro-batches in flight saved. ``resident_bytes``: the most memory of its process so far,
    above what it had at the start; all stages of ``rank`` share it. ``device_bytes``: the most that torch's
    allocator has handed out so far on the stage's GPU, for all stages there; 0 on a CPU.

    Of all stages of ``rank`` together: the most bytes that each tier had in the step, on a CPU its device
    (``device_tier``) with the frames that lie there; ``grew_bytes``: what of it was new when the step ended
    and stays; ``held_up_seconds``: waited for room; ``slots_bytes``: of the slots into which what was saved
    comes back, and ``slots_live_bytes``: the most of them that are in use at once.

    ``exchanged_bytes``: gradients and parameters that replicas gave each other. ``exposed_seconds``: a
    backward waited for what its stage had moved away. ``worked_seconds``: those of ``compute_seconds`` that
    are of micro-batches."""

    rank: int = 0
    forward_raw: int = 0
    forward_sent: int = 0
    backward_raw: int = 0
    backward_sent: int = 0
    saved_raw: int = 0
    saved_kept: int = 0
    live_micro_batches: int = 0
    live_versions: int = 0
    versions_bytes: int = 0
    peak_bytes: int = 0
    resident_bytes: int = 0
    device_bytes: int = 0
    device_tier: int = 0
    packed_tier: int = 0
    host_tier: int = 0
    disk_tier: int = 0
    grew_bytes: int = 0
    slots_bytes: int = 0
    slots_live_bytes: int = 0
    held_up_seconds: float = 0.0
    exposed_seconds: float = 0.0
    compute_seconds: float = 0.0
    worked_seconds: float = 0.0
    waiting_seconds: float = 0.0
    exchanged_bytes: int = 0

    def numbers(self) -> list[float]:
        """All fields, for a collective that knows only numbers; the sum with a StageReport() is itself."""
        return [float(getattr(self, name)) for name in self.__slots__]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> StageReport:
        """Inverse of the numbers of a report."""
        return cls(**{name: kind(n) for (name, kind), n in zip(_KINDS.items(), numbers, strict=True)})


DIRECTIONS = ("forward", "backward")
SENT = {f"bytes_{kind}_{way}": f"{way}_{kind}" for kind in ("raw", "sent") for way in DIRECTIONS}
SAVED = {"bytes_saved_raw": "saved_raw", "bytes_saved_kept": "saved_kept"}
SECONDS = {
    f"{name}_seconds": f"{name}_seconds" for name in ("compute", "worked", "waiting", "exposed", "held_up")
}
EXCHANGED = {"bytes_exchanged": "exchanged_bytes"}
SUMS = SENT | SAVED | EXCHANGED | SECONDS
"""Fields of a stage's report by the names under which they are written: those that replicas add up."""


def together(reports: Sequence[StageReport]) -> StageReport:
    """One report of what the replicas of a stage report, the first of whose ranks stands for all."""
    if len(reports) == 1:
        return reports[0]
    pairs = {name: [getattr(one, name) for one in reports] for name in StageReport.__slots__}
    merged = {name: sum(found) if name in SUMS.values() else max(found) for name, found in pairs.items()}
    return StageReport(**merged | {"rank": reports[0].rank})


_KINDS: dict[str, Any] = {field.name: type(field.default) for field in dataclasses.fields(StageReport)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report:
    """One step; the same on every rank but for ``seconds`` and ``outputs``.

    Attributes:
        step: Its number, from 0.
        loss: That of the batch.
        seconds: As this rank measured them.
        num_samples: Of the batch.
        stages: What each stage did and held.
        outputs: The model's on the batch, if they were asked for, where the last stage is: rows of samples
            are joined, what has none is stacked by micro-batch; a list of micro-batches' where sizes differ.
        asked: The largest ``Pipeline.asked`` of all ranks, 0 where nobody was asked for anything.
        replicas: What each rank of every stage reports, where some stage is on several ranks.
        learning_rate: That of this rank's first parameters.
        gradient_norm: Of all gradients before they were clipped by it, else None.
        num_tokens: Elements of the first input of whole numbers of shape (samples, length); None without one.
    """

    step: int
    loss: float
    seconds: float
    num_samples: int
    stages: tuple[StageReport, ...]
    outputs: Any = None
    asked: int = 0
    replicas: tuple[tuple[StageReport, ...], ...] = ()
    learning_rate: float | None = None
    gradient_norm: float | None = None
    num_tokens: int | None = None

    @property
    def of_ranks(self) -> tuple[tuple[StageReport, ...], ...]:
        """For every stage what each of its ranks reports."""
        return self.replicas or tuple((stage,) for stage in self.stages)

    @property
    def bytes_raw(self) -> int:
        """Bytes of all tensors passed between stages, both directions, unpacked."""
        return sum(stage.forward_raw + stage.backward_raw for stage in self.stages)

    @property
    def bytes_sent(self) -> int:
        """Bytes of all frames passed between stages, both directions, headers included."""
        return sum(stage.forward_sent + stage.backward_sent for stage in self.stages)

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """For every rank the seconds in which it computed or packed."""
        return self._by_rank("compute_seconds")

    @property
    def worked_seconds(self) -> tuple[float, ...]:
        """For every rank those of ``busy_seconds`` that are of micro-batches."""
        return self._by_rank("worked_seconds")

    def _by_rank(self, name: str) -> tuple[float, ...]:
        reports = [report for ranks in self.of_ranks for report in ranks]
        found = [0.0] * (1 + max((report.rank for report in reports), default=-1))
        for report in reports:
            found[report.rank] += getattr(report, name)
        return tuple(found)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they neither computed nor packed."""
        return bubble(sum(self.busy_seconds), self.seconds * len(self.busy_seconds))

    @property
    def peak_bytes(self) -> int:
        """Counted bytes of the fullest rank."""
        return int(max(self._by_rank("peak_bytes"), default=0))

    def __str__(self) -> str:
        def packed(before: int, what: str, after: int) -> str:
            times = f" ({before / after:.2f}x)" if after else ""
            return f"{show_bytes(before)} {what} {show_bytes(after)}{times}"

        lines = [
            f"step {self.step}: loss {self.loss:.4f}, {self.num_samples} samples in {self.seconds:.3f} s"
        ]
        sent = packed(self.bytes_raw, "between stages sent as", self.bytes_sent)
        lines.append(sent if self.bytes_raw else "nothing was sent between stages")
        saved, kept = (sum(getattr(one, f"saved_{what}") for one in self.stages) for what in ("raw", "kept"))
        if saved:
            lines.append(packed(saved, "saved for the backward, kept as", kept))
        for number, stage in enumerate(self.stages):
            times = f"computed {stage.compute_seconds:.3f} s, waited {stage.waiting_seconds:.3f} s"
            held = f"held {show_bytes(stage.peak_bytes)} at most"
            lines.append(f"stage {number} on rank {stage.rank}: {times}, {held}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Report of step {self.step}: loss {self.loss:.4f}, {self.seconds:.3f} s>"


def described(plan: Plan, *, here: Sequence[int], num_steps: int) -> str:
    """Describe a pipeline for people: its shape, then a line for each stage; those of this process marked."""
    shape = f"{counted(plan.num_stages, 'stage')} on {counted(plan.num_ranks, 'rank')}"
    batches = counted(plan.micro_batches, "micro-batch", "micro-batches")
    lines = [f"pipeline of {shape}: schedule {plan.schedule}, {batches}, codec {show_codec(plan.codec)}"]
    for number, stage in enumerate(plan.stages):
        ends = " .. ".join(dict.fromkeys([stage.layers[0], stage.layers[-1]]))
        layers = f"{counted(len(stage.layers), 'layer')} ({ends})"
        mark = ", here" if number in here and plan.num_ranks > 1 else ""
        ranks = f"rank{'s' * (len(stage.ranks) > 1)} {', '.join(map(str, stage.ranks))}"
        parameters = counted(stage.num_parameters, "parameter")
        lines.append(f"stage {number} on {ranks}{mark}: {layers}, {parameters}")
    return "\n".join([*lines, f"{counted(num_steps, 'step')} taken"])


def counted(number: int, one: str, several: str = "") -> str:
    """``"1 stage"``, ``"1,280 stages"``."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def bubble(busy: float, seconds: float) -> float:
    """The share of ``seconds`` that is not ``busy``; never negative, as clocks are read one after another."""
    return max(0.0, 1 - busy / seconds) if seconds else 0.0


def gather_reports(
    world: World,
    loss: float,
    reports: Mapping[int, StageReport],
    *,
    ranks: Sequence[Sequence[int]],
    asked: int,
) -> dict[str, Any]:
    """Return of a Report the loss, which one rank has and the others give as 0, what every stage reports, and
    the largest number that a rank was ``asked`` to tell; ``ranks``: those of every stage."""
    mine = [float(asked), loss]
    for stage in range(len(ranks)):
        mine += reports.get(stage, StageReport()).numbers()
    rows = world.all_gather(mine, at="the report of a step")
    asks, losses, *_ = zip(*rows, strict=True)
    size = len(StageReport().numbers())
    found = [
        [StageReport.of(rows[rank][2 + size * stage : 2 + size * (stage + 1)]) for rank in own]
        for stage, own in enumerate(ranks)
    ]
    answer = {"loss": sum(losses), "stages": tuple(map(together, found)), "asked": int(max(asks))}
    return answer if max(map(len, ranks)) == 1 else answer | {"replicas": tuple(map(tuple, found))}


def gather_flows(world: World, totals: Mapping[Flow, Sequence[int]], policy: Policy) -> list[dict[str, Any]]:
    """Return the flows that all ranks send, with their bytes raw and sent, and the codec of each now."""
    rows = world.all_gather_json([[*flow, *total] for flow, total in totals.items()], at="the flows")
    names = (*Flow._fields, "bytes_raw", "bytes_sent")
    found = [dict(zip(names, fields, strict=True)) for row in rows for fields in row]
    codecs = [policy.codec(Flow(*(flow[name] for name in Flow._fields))) for flow in found]
    return [flow | {"codec": codec} for flow, codec in zip(found, codecs, strict=True)]
