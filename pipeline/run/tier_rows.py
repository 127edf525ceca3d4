"""Predicted and measured peaks of the tiers of every rank: as rows, a table and a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ...stages.memory.byte_budget import NAMES
from ...stages.units import show_bytes

if TYPE_CHECKING:
    from ...stages.plan.plan import Plan
    from ...stages.plan.plan_stage import PlanStage
    from ..runtime.report import Report, StageReport

OF_TIERS = tuple(f"{tier}_tier" for tier in NAMES)


def predicted_peaks(first: StageReport) -> dict[str, int]:
    """The most bytes of each tier in every later step, from the first one: what its end left there is on top
    of what it had."""
    found = {tier: getattr(first, f"{tier}_tier") for tier in NAMES}
    return found | {"device": found["device"] + first.grew_bytes}


def tier_rows(
    totals: Sequence[Mapping[str, Any]],
    predicted: Sequence[Mapping[str, int]],
    ranks: Sequence[int],
    plan: Plan,
) -> list[dict[str, Any]]:
    """A row for each tier of each rank that held anything.

    Args:    totals: of every stage; predicted: of its rank; ranks: of every stage, where it ran."""
    rows = []
    for rank in sorted(set(ranks)):
        ours = [number for number, other in enumerate(ranks) if other == rank]
        first = totals[ours[0]]
        for tier in NAMES:
            if not first[f"{tier}_tier"]:
                continue
            row: dict[str, Any] = {"rank": rank, "tier": tier}
            row["predicted_peak_bytes"] = predicted[ours[0]][tier] if predicted else None
            row["peak_bytes"] = first[f"{tier}_tier"]
            moved = [n for n in ours if plan.stages[n].tier == tier != "device"]
            row["bytes_raw"] = sum(totals[n]["bytes_saved_raw"] for n in moved)
            row["bytes_kept"] = sum(totals[n]["bytes_saved_kept"] for n in moved)
            waited = [n for n in ours if _waits_for(plan.stages[n]) == tier != "device"]
            row["exposed_seconds"] = sum(totals[n]["exposed_seconds"] for n in waited)
            row["held_up_seconds"] = first["held_up_seconds"] if tier == "device" else 0.0
            row["budget_bytes"] = _budget(plan, rank, ranks) if tier == "device" else None
            rows.append(row)
    return rows


def _waits_for(stage: PlanStage) -> str:
    """Tier whose waits are shown for a stage: that of its parameters, which is slower to come."""
    return stage.tier if stage.parameters_tier == "device" else stage.parameters_tier


def _budget(plan: Plan, rank: int, ranks: Sequence[int]) -> int | None:
    """Byte budget of a process; one that runs all ranks has the memory of all."""
    if plan.memory is None:
        return None
    return plan.memory * len({plan.owner(s) for s, other in enumerate(ranks) if other == rank})


def foretell(plan: Plan, tell: Callable[[str], None]) -> Callable[[Report], None]:
    """Return a function that reports, after the first step, how much each tier will hold at most.

    It reports nothing where ``tier_table`` would show nothing of that step."""
    told: list[bool] = []

    def see(report: Report) -> None:
        if told:
            return
        told.append(True)
        ranks = {stage.rank: predicted_peaks(stage) for stage in report.stages}
        if not _tells((tier for peaks in ranks.values() for tier in peaks if peaks[tier]), plan.memory):
            return
        for rank, peaks in sorted(ranks.items()):
            held = ", ".join(f"{tier} {show_bytes(peaks[tier])}" for tier in NAMES if peaks[tier])
            tell(f"rank {rank} will hold at most, by its first step: {held}")

    return see


def _tells(tiers: Iterable[str], *budgets: int | None) -> bool:
    """True if any of the ``tiers`` in use is other than a device."""
    return any(budgets) or any(tier != "device" for tier in tiers)


def tier_table(summary: Mapping[str, Any]) -> Table | None:
    """One line for each tier of each rank: bytes predicted and held, and what moving showed of itself.

    None where nothing moves and nothing is limited."""
    rows = summary.get("tiers", [])
    if not _tells((row["tier"] for row in rows), *(row["budget_bytes"] for row in rows)):
        return None
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("rank", "tier", "budget", "predicted", "held", "moved -> kept", "exposed", "held up"):
        table.add_column(name, justify="right", no_wrap=True)
    steps = max(1, summary["steps"])
    for row in rows:
        shown = [row["budget_bytes"], row["predicted_peak_bytes"], row["peak_bytes"]]
        raw, kept = row["bytes_raw"], row["bytes_kept"]
        ratio = f" ({raw / kept:.2f}x)" if kept else ""
        table.add_row(
            str(row["rank"]),
            row["tier"],
            *("-" if num_bytes is None else show_bytes(num_bytes) for num_bytes in shown),
            f"{show_bytes(raw / steps)} -> {show_bytes(kept / steps)}{ratio}" if raw else "-",
            "-" if row["tier"] == "device" else _milliseconds(row["exposed_seconds"], steps),
            _milliseconds(row["held_up_seconds"], steps) if row["tier"] == "device" else "-",
        )
    return table


def _milliseconds(seconds: float, steps: int) -> str:
    return f"{1000 * seconds / steps:.1f} ms"
