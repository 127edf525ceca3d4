"""From seconds and bytes to the rows of ``results.json`` and to a table for people; no process, no clock."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from ...pipeline.run.metrics import DIRECTIONS, ratio
from ...stages.planner.plan import Plan
from ...stages.units import show_bytes, show_rate
from .links import LATENCY_MS, Link

TORCH, PENSTOCK = "torch", "penstock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one contestant took: seconds a step, pairs of neighbouring runs; bytes a step.

    Attributes:
        torch, penstock: seconds of a step; entries of one index were measured next to each other.
        num_bytes: bytes_raw_forward, bytes_sent_forward, bytes_raw_backward, bytes_sent_backward.
    """

    codec: str
    extra_in_flight: int
    torch: list[float]
    penstock: list[float]
    num_bytes: dict[str, float]

    def samples_per_second(self, batch_size: int) -> float:
        """Ours, the median."""
        return batch_size / statistics.median(self.penstock)

    def speedups(self) -> list[float]:
        """How many times as fast as torch, pair by pair."""
        return [theirs / ours for theirs, ours in zip(self.torch, self.penstock, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the ranks of one link found out."""

    facts: dict[str, Any]
    runs: list[Run]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Measured:
        """Read what rank 0 wrote."""
        runs = []
        for line in content["runs"]:
            num_bytes = {name: value for name, value in line.items() if name.startswith("bytes_")}
            rest = {name: value for name, value in line.items() if name not in num_bytes}
            runs.append(Run(**rest, num_bytes=num_bytes))
        return cls(facts=content["facts"], runs=runs)

    def run(self, codec: str, extra_in_flight: int) -> Run:
        """The run of one contestant."""
        return next(run for run in self.runs if (run.codec, run.extra_in_flight) == (codec, extra_in_flight))


def rows_of(
    link: str,
    measured: Measured,
    contestants: Sequence[tuple[str, int]],
    *,
    plan: Plan,
    batch_size: int,
    bound: float,
) -> list[dict[str, Any]]:
    """Return one row for torch and one for each contestant.

    Args: bound: samples per second that the computation alone allows.
    """
    theirs = [seconds for run in measured.runs for seconds in run.torch]
    raw = {f"bytes_{way}": _bytes_of(plan, way) for way in DIRECTIONS}
    num_bytes = {f"bytes_{kind}_{way}": raw[f"bytes_{way}"] for way in DIRECTIONS for kind in ("raw", "sent")}
    common = {"link": link, "bound_samples_per_second": bound}
    rows = [common | _row(TORCH, "none", 0, theirs, [1.0] * len(theirs), num_bytes, batch_size)]
    for codec, extra in contestants:
        run = measured.run(codec, extra)
        facts = (run.penstock, run.speedups(), run.num_bytes, batch_size)
        rows.append(common | _row(PENSTOCK, codec, extra, *facts))
    return rows


def _bytes_of(plan: Plan, direction: str) -> float:
    """Bytes of the tensors that pass all cuts in a step: what torch sends, which packs nothing."""
    return plan.micro_batches * sum(getattr(stage, f"bytes_{direction}") for stage in plan.stages)


def _row(
    side: str,
    codec: str,
    extra_in_flight: int,
    seconds: Sequence[float],
    speedups: Sequence[float],
    num_bytes: Mapping[str, float],
    batch_size: int,
) -> dict[str, Any]:
    ratios = {way: ratio(num_bytes[f"bytes_raw_{way}"], num_bytes[f"bytes_sent_{way}"]) for way in DIRECTIONS}
    slower = max(DIRECTIONS, key=lambda way: num_bytes[f"bytes_sent_{way}"])
    return {
        "side": side,
        "codec": codec,
        "extra_in_flight": extra_in_flight,
        "samples_per_second": batch_size / statistics.median(seconds),
        "samples_per_second_of_runs": [batch_size / one for one in seconds],
        "speedup": statistics.median(speedups),
        "speedup_of_pairs": list(speedups),
        **num_bytes,
        **{f"ratio_{way}": ratios[way] for way in DIRECTIONS},
        "ratio_slower_direction": ratios[slower],
    }


def link_facts(
    link: Link, *, measured: Mapping[str, Any] | None = None, why_not: str | None = None
) -> dict[str, Any]:
    """Return what ``results.json`` says of a link; ``why_not``: why it was not shaped, nor raced on."""
    shaped = link.rate is not None and why_not is None
    facts: dict[str, Any] = {"link": link.name, "shaped": shaped, "why_not": why_not, "rate": link.rate}
    if shaped:
        facts |= {"burst": link.burst, "latency_ms": LATENCY_MS, "delay_ms": link.delay}
    return facts | dict(measured or {})


def describe(link: Mapping[str, Any]) -> str:
    """Return the sentence about a link that stands below the table."""
    if link["why_not"]:
        return f"{link['link']}: could not be shaped and was not raced on: {link['why_not']}"
    found = f", {show_rate(link['rate_measured'])} measured each way" if link.get("rate_measured") else ""
    if not link["shaped"]:
        return f"{link['link']}: not shaped{found}, congestion control {link['congestion_control']}"
    offload = ", ".join(f"{name} {state}" for name, state in link["offload"].items())
    return (
        f"{link['link']}: tc tbf rate {show_rate(link['rate'])} burst {show_bytes(link['burst'])} latency "
        f"{link['latency_ms']} ms, delay {link['delay_ms']:g} ms{found}, "
        f"congestion control {link['congestion_control']}, {offload}"
    )


def table(results: Mapping[str, Any]) -> Table:
    """Return ``results`` for people: medians, and what the pairs of runs ranged over."""
    shown = Table(title=title(results))
    left = ("link", "side", "codec")
    headings = ("in flight", "samples/s", "x torch", "pairs", "bound", "forward sent", "backward sent")
    for heading in (*left, *headings, "slower way"):
        shown.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    for link in results["links"]:
        rows = [row for row in results["rows"] if row["link"] == link["link"]]
        for row in rows:
            shown.add_row(*_cells(row, torch=rows[0]))
        if not rows:
            shown.add_row(link["link"], "could not be shaped", "see below")
        shown.add_section()
    return shown


def title(results: Mapping[str, Any]) -> str:
    """Return what was raced, in a line."""
    job = results["job"]
    return (
        f"{job['model']} cut after {', '.join(job['cuts'])}, {job['micro_batches']} micro-batches of "
        f"{job['batch_size'] // job['micro_batches']}, {job['ranks']} ranks of {results['threads']} thread"
        f"{'s' * (results['threads'] > 1)}"
    )


def _cells(row: Mapping[str, Any], *, torch: Mapping[str, Any]) -> list[str]:
    pairs = row["speedup_of_pairs"]
    ours = row["side"] == PENSTOCK
    return [
        row["link"],
        "torch 1F1B" if not ours else PENSTOCK,
        row["codec"] if ours else "-",
        f"+{row['extra_in_flight']}" if ours else "-",
        f"{row['samples_per_second']:.1f}",
        f"{row['speedup']:.2f}",
        f"{min(pairs):.2f}-{max(pairs):.2f}" if ours else "-",
        f"{row['bound_samples_per_second'] / torch['samples_per_second']:.2f}",
        *(f"{show_bytes(row[f'bytes_sent_{way}'])} ({_times(row[f'ratio_{way}'])})" for way in DIRECTIONS),
        _times(row["ratio_slower_direction"]),
    ]


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
