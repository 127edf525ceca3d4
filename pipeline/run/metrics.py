"""Metrics of the steps: one line each while they run, and their sums when they are over.

The numbers of ``metrics.jsonl``, ``summary.json`` and the closing table come from here, so they agree."""

from __future__ import annotations

import copy
import json
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...compression.errors import ConfigError
from ...stages.memory.byte_budget import NAMES
from ..runtime.report import DIRECTIONS, EXCHANGED, SAVED, SECONDS, SENT, SUMS, Report, bubble
from ..schedules.replicated import predicted_bytes

if TYPE_CHECKING:
    from ...stages.plan.plan import Plan

OF_TIERS = tuple(f"{tier}_tier" for tier in NAMES)
MOST = (
    "live_micro_batches", "live_versions", "versions_bytes", "peak_bytes", "resident_bytes", "device_bytes",
    "slots_bytes", "slots_live_bytes", *OF_TIERS,
)  # fmt: skip
RECENT = 64  # steps that say how long one takes now
OF_ALL_STAGES = ("num_steps", "num_samples", "seconds", "loss")


class Totals:
    """Sums over all steps, for each rank of each stage and together; of what it keeps the most.

    Attributes:
        ranks: Those of each stage; in one process all stages ran on one.
        of_ranks: The sums of each of them.
        predicted: By rank, the most bytes of each tier, from the first step.
        busy: Seconds in which each rank computed, of ``steady`` seconds: those of all steps but the first,
            which is slow for reasons of its own, unless there is no other.
        here: Steps of this process.
        recent: Seconds of the newest of these steps, and the sums of each stage in them.
    """

    def __init__(self, *, num_stages: int) -> None:
        self.num_steps = self.num_samples = self.here = 0
        self.seconds = 0.0
        self.loss: float | None = None
        self.ranks = [[0] for _ in range(num_stages)]
        self.busy: tuple[float, ...] = ()
        self.steady = 0.0
        self.recent = deque[tuple[float, list[dict[str, Any]]]](maxlen=RECENT)
        self.of_ranks = [[_zeros()] for _ in range(num_stages)]
        self.predicted: dict[str, dict[str, int]] = {}

    @property
    def stages(self) -> list[dict[str, Any]]:
        """For each stage, the sums over its ranks, and the most that one of them kept."""
        return [_together(totals) for totals in self.of_ranks]

    def add(self, report: Report) -> None:
        """Add one step."""
        self.num_steps += 1
        self.num_samples += report.num_samples
        self.seconds += report.seconds
        self.loss = _finite(report.loss)
        self.here += 1
        if self.here <= 2 or len(self.busy) != len(report.busy_seconds):
            self.busy, self.steady = (0.0,) * len(report.busy_seconds), 0.0
            self.recent.clear()
        self.busy = tuple(map(sum, zip(self.busy, report.busy_seconds, strict=True)))
        self.steady += report.seconds
        sums = [
            {name: sum(getattr(one, field) for one in reports) for name, field in SUMS.items()}
            for reports in report.of_ranks
        ]
        self.recent.append((report.seconds, sums))
        self.ranks = [[one.rank for one in reports] for reports in report.of_ranks]
        if self.predicted.keys() != {str(rank) for ranks in self.ranks for rank in ranks}:
            self.predicted = {str(rank): peaks for rank, peaks in predicted_peaks(report).items()}
        for totals, reports in zip(self.of_ranks, report.of_ranks, strict=True):
            if len(totals) != len(reports):  # a run goes on with other replicas
                totals[:] = [_together(totals), *(_zeros() for _ in reports[1:])]
            for total, one in zip(totals, reports, strict=True):
                for name, of_report in SUMS.items():
                    total[name] += getattr(one, of_report)
                for name in MOST:
                    again = self.num_steps == 2 and name in OF_TIERS  # the first step only foretells them
                    total[name] = max(0 if again else total[name], getattr(one, name))

    def kept(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, which ``load`` takes."""
        return {name: value for name, value in vars(self).items() if name != "recent"}

    def load(self, kept: Mapping[str, Any] | None) -> None:
        """Go on from the sums of a run; of stages and ranks only where there are as many stages again."""
        if not kept:
            return
        some = copy.deepcopy(dict(kept))
        if len(some["of_ranks"]) != len(self.of_ranks):
            some = {name: some[name] for name in OF_ALL_STAGES}
        vars(self).update({name: some[name] for name in self.kept() if name in some} | {"here": 0})
        self.of_ranks = [[_zeros() | total for total in totals] for totals in self.of_ranks]
        self.busy = tuple(self.busy)

    def of_step(self, number: int) -> dict[str, float]:
        """The sums of a stage in a step: of each, the median of the recent steps."""
        return {name: statistics.median(sums[number][name] for _, sums in self.recent) for name in SUMS}

    def bubble(self, rank: int) -> float:
        """The share of the steps in which ``rank`` neither computed nor packed."""
        return bubble(self.busy[rank], self.steady) if rank < len(self.busy) else 0.0


def _zeros() -> dict[str, Any]:
    return dict.fromkeys((*SUMS, *MOST), 0) | dict.fromkeys(SECONDS, 0.0)


def _together(totals: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    sums = {name: sum(total[name] for total in totals) for name in SUMS}
    return sums | {name: max(total[name] for total in totals) for name in MOST}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read ``metrics.jsonl``; the last line of a run that was killed may be half there, and is left out."""
    try:
        *whole, _ = path.read_text(encoding="utf-8").split("\n")
        lines = [json.loads(line) for line in whole]
        if not all(isinstance(line, dict) and isinstance(line.get("step"), int) for line in lines):
            raise ValueError("a line is no object with a step")
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}; take it from the run again") from error
    return lines


def step_line(report: Report) -> dict[str, Any]:
    """Return one line of ``metrics.jsonl``; a loss that is no number is null: JSON has no word for it."""
    return {
        "step": report.step,
        "loss": _finite(report.loss),
        "seconds": report.seconds,
        "samples_per_second": report.num_samples / report.seconds,
        "tokens_per_second": None if report.num_tokens is None else report.num_tokens / report.seconds,
        "learning_rate": _finite(report.learning_rate),
        "gradient_norm": _finite(report.gradient_norm),
        "bytes_raw": report.bytes_raw,
        "bytes_sent": report.bytes_sent,
        "bubble": report.bubble,
        "peak_bytes": report.peak_bytes,
        **{name: sum(getattr(stage, field) for stage in report.stages) for name, field in SENT.items()},
    }


def numbers_of_test(results: Mapping[str, float]) -> dict[str, float | None]:
    """Return the results of a test as files have them."""
    return {f"test_{name}": _finite(value) for name, value in results.items()}


def summarise(
    totals: Totals, plan: Plan, *, sizes: Mapping[str, int], test: Mapping[str, float], **facts: Any
) -> dict[str, Any]:
    """Return what ``summary.json`` holds and the closing table shows.

    Args: sizes: elements of each parameter; test: results by name; facts: of the run, kept as they are."""
    stages, predicted = [], predicted_bytes(plan, [total["live_micro_batches"] for total in totals.stages])
    for number, (stage, total) in enumerate(zip(plan.stages, totals.stages, strict=True)):
        entry: dict[str, Any] = {"stage": number, "rank": plan.owner(number)}
        entry |= {"layers": len(stage.layers), "first_layer": stage.layers[0], "last_layer": stage.layers[-1]}
        entry |= {"parameters": sum(sizes[name] for name in stage.parameters)} | total
        ranks = totals.ranks[number]
        entry |= {"bubble": totals.bubble(ranks[0]), "predicted_bytes": predicted[number]}
        for direction in DIRECTIONS:
            raw, sent = (entry[f"bytes_{kind}_{direction}"] for kind in ("raw", "sent"))
            entry[f"ratio_{direction}"] = ratio(raw, sent)
        if len(ranks) > 1:
            pairs = zip(ranks, totals.of_ranks[number], strict=True)
            entry["ranks"] = [{"rank": rank, "bubble": totals.bubble(rank)} | one for rank, one in pairs]
        stages.append(entry)
    together = {name: sum(entry[name] for entry in stages) for name in SENT | SAVED | EXCHANGED}
    for kind in ("raw", "sent"):
        together[f"bytes_{kind}"] = sum(together[f"bytes_{kind}_{way}"] for way in DIRECTIONS)
    return {
        **numbers_of_test(test),
        "loss": totals.loss,
        "steps": totals.num_steps,
        "samples": totals.num_samples,
        "seconds": totals.seconds,
        "samples_per_second": totals.num_samples / totals.seconds if totals.seconds else None,
        **together,
        "ratio": ratio(together["bytes_raw"], together["bytes_sent"]),
        "bubble": bubble(sum(totals.busy), totals.steady * len(totals.busy)),
        **facts,
        "tiers": tier_rows(totals.of_ranks, totals.predicted, totals.ranks, plan),
        "stages": stages,
    }


def ratio(raw: float, sent: float) -> float | None:
    """Return before / after; None where nothing was sent."""
    return raw / sent if sent else None


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def predicted_peaks(first: Report) -> dict[int, dict[str, int]]:
    """By rank, the most bytes of each tier in later steps: those of the first, and what its end left."""
    peaks = {}
    for one in (report for reports in first.of_ranks for report in reports):
        peaks[one.rank] = {tier: getattr(one, f"{tier}_tier") for tier in NAMES}
        peaks[one.rank]["device"] += one.grew_bytes
    return peaks


def tier_rows(
    totals: Sequence[Sequence[Mapping[str, Any]]],
    predicted: Mapping[str, Mapping[str, int]],
    ranks: Sequence[Sequence[int]],
    plan: Plan,
) -> list[dict[str, Any]]:
    """A row for each tier of each rank that held anything; ``totals`` and ``ranks`` are by stage."""
    rows, of_rank = [], dict[int, dict[int, Mapping[str, Any]]]()
    for number, (own, found) in enumerate(zip(ranks, totals, strict=True)):
        for rank, total in zip(own, found, strict=True):
            of_rank.setdefault(rank, {})[number] = total
    for rank, ours in sorted(of_rank.items()):
        first, *_ = ours.values()
        # A process that runs all ranks has the memory of all.
        budget = plan.budget({plan.owner(number) for number in ours})
        for tier in (name for name in NAMES if first[f"{name}_tier"]):
            device, moved, waited = tier == "device", [], []
            for number, total in ours.items() if not device else ():
                stage = plan.stages[number]
                moved += [total] if stage.tier == tier else []
                # Waits are shown with the tier of the parameters, which is slower to come.
                slower = stage.tier if stage.parameters_tier == "device" else stage.parameters_tier
                waited += [total] if slower == tier else []
            rows.append({
                "rank": rank,
                "tier": tier,
                "predicted_peak_bytes": predicted.get(str(rank), {}).get(tier),
                "peak_bytes": first[f"{tier}_tier"],
                "bytes_raw": sum(total["bytes_saved_raw"] for total in moved),
                "bytes_kept": sum(total["bytes_saved_kept"] for total in moved),
                "exposed_seconds": sum(total["exposed_seconds"] for total in waited),
                "held_up_seconds": first["held_up_seconds"] if device else 0.0,
                **{name: first[name] if device else 0 for name in ("slots_bytes", "slots_live_bytes")},
                "budget_bytes": budget if device else None,
            })  # fmt: skip
    return rows
