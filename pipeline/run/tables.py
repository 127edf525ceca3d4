"""Tables for people, by rich: the end of a run, its tiers of memory, and the schedules side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from ...compression.names import show_codec
from ...stages.memory.byte_budget import NAMES
from ...stages.units import show_bytes, show_seconds
from .metrics import predicted_peaks, ratio

if TYPE_CHECKING:
    from ...stages.plan.plan import Plan
    from ..runtime.report import Report
    from .schedule_comparison import Comparison


TURNS = {"by price": "what measured costs say", "as planned": "the plan", "raw": "no packing"}
MOST_FLOWS = 4  # in the closing lines; summary.json has all
MARGIN, UNCOUNTED = 1.1, 64 << 20  # of a budget; bytes of libraries, threads and frames
OF_A_STEP = ("compute", "transfer", "waiting")
KEY = (
    "bubble: share of the steps after the first in which the rank computed nothing",
    "counted: parameters, gradients, optimizer, versions, saved tensors at their most; resident: the process",
    "plan -> run: of a step after the first, as planned and as measured; compute is with packing in a run",
)


def table(
    names: Iterable[str], rows: Iterable[Sequence[str]], *, left: Sequence[str] = (), **how: Any
) -> Table:
    """Return a table without lines, numbers flush right and the columns ``left`` flush left."""
    drawn = Table(box=None, pad_edge=False, header_style="bold", **how)
    for name in names:
        drawn.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in rows:
        drawn.add_row(*map(Text, row))  # names may look like markup
    return drawn


def closing_table(summary: Mapping[str, Any], *, wide: bool = True) -> Table:
    """Return one row for each rank of each stage: how long it computed, what it kept, what it sent each way.

    The stages of a rank share its bubble and its memory, told with the first; ``wide``: bytes of before."""
    stages = summary["stages"]
    on_gpus = any(stage.get("device_bytes") for stage in stages)
    wide = wide and not on_gpus  # whose column takes the room
    sent = packed if wide else lambda *both: packed(*both).rpartition("-> ")[2]
    ways = [f"{name} {'raw -> ' * wide}sent" for name in ("activations", "gradients")]
    names = ("stage", "rank", "compute", "bubble", "counted", "resident", *ways, *["GPU"] * on_gpus)
    rows, seen = [], set[int]()
    for number, one in ((stage["stage"], one) for stage in stages for one in stage.get("ranks", [stage])):
        first = one["rank"] not in seen
        seen.add(one["rank"])
        row = [
            str(number),
            str(one["rank"]),
            f"{one['compute_seconds']:.1f} s",
            f"{one['bubble']:.0%}" * first,
        ]
        row += [_bytes(one["peak_bytes"] or None), _bytes(one["resident_bytes"] or None) * first]
        row += [sent(one[f"bytes_raw_{way}"], one[f"bytes_sent_{way}"]) for way in ("forward", "backward")]
        rows.append(row + [show_bytes(one["device_bytes"])] * on_gpus)
    return table(names, rows, collapse_padding=not wide)


def tier_table(summary: Mapping[str, Any]) -> Table | None:
    """One line for each tier of each rank: bytes predicted and held, and what moving showed of itself; None
    where nothing moves and nothing is limited."""
    tiers, steps, rows = summary.get("tiers", []), max(1, summary["steps"]), []
    if not _is_worth_a_table((row["tier"] for row in tiers), *(row["budget_bytes"] for row in tiers)):
        return None
    has_slots = any(row.get("slots_bytes") for row in tiers)
    for row in tiers:
        raw, kept, on_device = row["bytes_raw"], row["bytes_kept"], row["tier"] == "device"
        times = f" ({raw / kept:.2f}x)" if kept else ""
        moved = f"{show_bytes(raw / steps)} -> {show_bytes(kept / steps)}{times}" if raw else "-"
        sizes = [_bytes(row[f"{name}_bytes"]) for name in ("budget", "predicted_peak", "peak")]
        wait = f"{1000 * row['held_up_seconds' if on_device else 'exposed_seconds'] / steps:.1f} ms"
        waits = ("-", wait) if on_device else (wait, "-")
        placed = row.get("slots_bytes")
        slots = f"{show_bytes(placed)} ({placed / row['slots_live_bytes']:.2f}x)" if placed else ""
        rows.append((str(row["rank"]), row["tier"], *sizes, moved, *waits, *[slots] * has_slots))
    names = ("rank", "tier", "budget", "predicted", "held", "moved -> kept", "exposed", "held up")
    return table((*names, *["slots"] * has_slots), rows)


def prediction_table(summary: Mapping[str, Any], *, wide: bool = True) -> Table | None:
    """One line for each stage: seconds and bytes that the plan predicted -> what was measured; None where
    nothing was. ``wide``: with the error."""
    found, rows = summary.get("prediction"), []
    if not found:
        return None
    for stage, terms in zip(summary["stages"], found["stages"], strict=True):
        row = [str(stage["stage"])]
        row += [_both(terms[name], show_seconds, wide=wide) for name in OF_A_STEP]
        rows.append([*row, _both((stage["predicted_bytes"], stage["peak_bytes"]), show_bytes, wide=wide)])
    names = [f"{name}{' plan -> run' * wide}" for name in (*OF_A_STEP, "counted")]
    return table(("stage", *names), rows, collapse_padding=True)


def _both(pair: Sequence[float | None], show: Callable[[float], str], *, wide: bool) -> str:
    """Return ``"1.2 s -> 1.3 s (+5%)"``, from twice as much on ``(2x)``; a dash is zero, or not known."""
    predicted, measured = pair
    sizes = "->".join(show(size) if size else "-" for size in pair)
    if not wide:
        return sizes
    error = ""
    if predicted and measured:
        times = measured / predicted
        error = f" ({times:.0f}x)" if times >= 2 else f" ({times - 1:+.0%})"
    return sizes.replace("->", " -> ") + error


def _is_worth_a_table(tiers: Iterable[str], *budgets: int | None) -> bool:
    """True if any of the ``tiers`` in use is other than a device, or has a budget."""
    return any(budgets) or any(tier != "device" for tier in tiers)


def foretell(plan: Plan, tell: Callable[[str], None]) -> Callable[[Report], None]:
    """Return a function that reports, after the first step, how much each tier will hold at most; nothing
    where ``tier_table`` would show nothing of that step."""
    first = True

    def see(report: Report) -> None:
        nonlocal first
        if not first:
            return
        ranks = predicted_peaks(report)
        used = (tier for peaks in ranks.values() for tier in peaks if peaks[tier])
        if _is_worth_a_table(used, *(plan.budget([rank]) for rank in ranks)):
            for rank, peaks in sorted(ranks.items()):
                held = ", ".join(f"{tier} {show_bytes(peaks[tier])}" for tier in NAMES if peaks[tier])
                tell(f"rank {rank} will hold at most, by its first step: {held}")
        first = False

    return see


def overrun(plan: Plan, tell: Callable[[str], None]) -> Callable[[Report], None]:
    """Return a function that reports, once for each rank, that its process holds more than its budget."""
    known: set[int] = set()

    def see(report: Report) -> None:
        for one in (one for reports in report.of_ranks for one in reports):
            memory = plan.budget([one.rank]) or float("inf")
            if one.rank not in known and one.resident_bytes > MARGIN * memory + UNCOUNTED:
                known.add(one.rank)
                tell(
                    f"rank {one.rank} holds {show_bytes(one.resident_bytes)} more than before the run, "
                    f"which memory.device={show_bytes(memory)} does not keep to; raise it, or ranks"
                )

    return see


def totals(summary: Mapping[str, Any]) -> list[str]:
    """Return the lines below the table."""
    lines, codec = [], show_codec(summary["codec"])
    if summary["bytes_sent"]:
        lossy = "" if codec == summary["codec"] else f" by {codec}, so not with the bits of the plain loop"
        lines.append(f"sent between stages{lossy}: {packed(summary['bytes_raw'], summary['bytes_sent'])}")
    if summary["bytes_saved_raw"]:
        kept = packed(summary["bytes_saved_raw"], summary["bytes_saved_kept"])
        lines.append(f"saved for the backward: {kept}")
    if summary.get("bytes_exchanged"):
        by_rank = dict[int, int]()
        for one in (one for stage in summary["stages"] for one in stage.get("ranks", ())):
            by_rank[one["rank"]] = by_rank.get(one["rank"], 0) + one["bytes_exchanged"]
        shares = ", ".join(f"{show_bytes(n)} by rank {rank}" for rank, n in sorted(by_rank.items()))
        exchanged = f"gradients and parameters between replicas: {show_bytes(summary['bytes_exchanged'])}"
        lines.append(f"{exchanged}: {shares}" if shares else exchanged)
    lines += _codecs(summary)
    lines.append(
        f"{summary['steps']} step{'s' * (summary['steps'] != 1)}, {summary['samples']:,} samples in "
        f"{clock(summary['seconds'])}: {_number(summary['samples_per_second'], '.0f')} samples/s, "
        f"ranks={summary['ranks']} threads={summary['threads']}, last loss {_number(summary['loss'], '.4f')}"
    )
    if off := (summary.get("prediction") or {}).get("off"):
        lines.append(off)
    lines += _data(summary.get("data", ()))
    if "test_loss" in summary:
        results = [f"test loss {_number(summary['test_loss'], '.4f')}"]
        if "test_accuracy" in summary:
            results.insert(0, f"test accuracy {_number(summary['test_accuracy'], '.2%')}")
        lines.append(", ".join(results))
    if summary.get("ended_early"):
        lines.append(f"ended early: {summary['ended_early']}")
    return lines


def _data(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    if ranks:
        waits = ", ".join(f"{row['waited_seconds']:.1f} s on rank {rank}" for rank, row in enumerate(ranks))
        lines.append(f"waited for samples: {waits}")
    if left_out := max((row["left_out"] for row in ranks), default=0):
        lines.append(f"{left_out} samples that could not be read were left out")
    caches = [row["cache"] for row in ranks if "cache" in row]
    if not caches:
        return lines
    hits, loads = (sum(cache[name] for cache in caches) for name in ("hits", "loads"))
    share, spared = hits / max(1, hits + loads), show_bytes(sum(cache["hit_bytes"] for cache in caches))
    lines.append(f"sample cache: {hits:,} of {hits + loads:,} samples ({share:.1%}) were there, {spared}")
    for times in [cache["times"] for cache in caches if "times" in cache]:
        shown = {name: f"{1000 * seconds:.3g} ms" for name, seconds in times.items()}
        lines.append(
            f"its first epoch: {times['epoch']:.1f} s; of a batch reading {shown['batch_io']} "
            f"({shown['sample_io']} a sample), augmentation {shown['augmentation']}, training "
            f"{shown['training']}; {shown['hidden']} of reading hide behind it"
        )
    return lines


def _codecs(summary: Mapping[str, Any]) -> list[str]:
    """Codec of the largest values and gradients, and how the choice ran against others."""
    searched = summary["codec"] == "auto"
    if not summary["turns"]:
        soon = searched and summary["bytes_sent"]
        return ["codec=auto: the run ended before a choice was made"] if soon else []
    flows = sorted(summary["flows"], key=lambda flow: -flow["bytes_raw"])[:MOST_FLOWS]
    ways, turns = {"F": "down", "B": "up"}, []
    for turn in summary["turns"]:
        name, depth = turn["name"], f", +{turn['extra']} in flight" if turn["extra"] else ""
        seconds = f"{turn['measured']:.3f} s a step (predicted {turn['predicted']:.3f})"
        turns.append(f"{TURNS.get(name, name)}{depth}: {seconds}{', chosen' * bool(turn['stayed'])}")
    shown = [f"{flow['value']} {ways[flow['way']]} {flow['codec']}" for flow in flows]
    chosen = [f"codec=auto: {'; '.join(shown)}"] if searched and shown else []
    return [*chosen, f"{'codec' if searched else 'extra_in_flight'}=auto compared {'; '.join(turns)}"]


def packed(raw: float, sent: float) -> str:
    """Return ``"12.1 MiB -> 6.3 MiB (1.92x)"``, or a dash where nothing was sent."""
    times = ratio(raw, sent)
    return f"{show_bytes(raw)} -> {show_bytes(sent)} ({times:.2f}x)" if times is not None else "-"


def clock(seconds: float) -> str:
    """Return ``"1:05"`` or ``"1:00:05"``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _bytes(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else show_bytes(num_bytes)


def _number(value: float | None, form: str) -> str:
    return "no number" if value is None else format(value, form)


def schedule_table(comparison: Comparison) -> Table:
    """Return one row per schedule that suits, the chosen one marked."""
    rows = []
    for one in comparison.candidates:
        row = [one.plan.schedule, one.plan.weights, show_seconds(one.seconds)]
        row += [f"{comparison.num_samples / one.seconds:.0f}", f"{one.bubble:.0%}"]
        row += [str(max(one.live_micro_batches)), str(max(one.live_versions)), show_bytes(max(one.memory))]
        rows.append([*row, "<- chosen" if one is comparison.chosen else "too large" * (not one.fits)])
    names = ("schedule", "weights", "step", "samples/s", "bubble", "in flight", "versions", "memory", "")
    return table(names, rows, left=("schedule", "weights", ""))


def notes(comparison: Comparison) -> list[str]:
    """Return what stands below: the schedules left out, and how to read the numbers."""
    lines = [f"left out: {name}: {reason}" for name, reason in comparison.left_out.items()]
    lines.append("simulated from measured layers; I and W: half of a backward each; tensors travel unpacked")
    lines.append("memory: of the fullest rank; in flight, versions: of the fullest stage")
    stream = "async_1f1b, double_buffered: no flush, not the bits of the plain loop; never chosen here"
    return lines + [stream] * any(one.plan.streams for one in comparison.candidates)
