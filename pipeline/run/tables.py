"""Table at the end of a run: a row for each stage, and the lines below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ...compression.names import show_codec
from ...stages.units import show_bytes, show_seconds
from .metrics import ratio

if TYPE_CHECKING:
    from .schedule_comparison import Comparison


MOST_FLOWS = 4  # in the closing lines; summary.json has all
KEY = (
    "bubble: share of the steps after the first in which the rank computed nothing",
    "counted: parameters, gradients, optimizer, versions, saved tensors at their most; resident: the process",
)


def closing_table(summary: Mapping[str, Any], *, wide: bool = True) -> Table:
    """Return one row per stage: how long it computed, what it kept, what it sent each way.

    The stages of a rank share its bubble and its memory, told with the first of them.

    Args: wide: also say how much that was before packing.
    """
    on_gpus = any(stage.get("device_bytes") for stage in summary["stages"])
    wide = wide and not on_gpus  # whose column takes the room
    sent = packed if wide else lambda *both: packed(*both).rpartition("-> ")[2]
    table = Table(box=None, pad_edge=False, collapse_padding=not wide, header_style="bold")
    for name in ("stage", "rank", "compute", "bubble", "counted", "resident"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("activations", "gradients"):
        table.add_column(f"{name} {'raw -> ' * wide}sent", justify="right", no_wrap=True)
    if on_gpus:
        table.add_column("GPU", justify="right", no_wrap=True)
    told: set[int] = set()
    for stage in summary["stages"]:
        first = stage["rank"] not in told
        told.add(stage["rank"])
        table.add_row(
            str(stage["stage"]),
            str(stage["rank"]),
            f"{stage['compute_seconds']:.1f} s",
            f"{stage['bubble']:.0%}" if first else "",
            show_bytes(stage["peak_bytes"]) if stage["peak_bytes"] else "-",
            (show_bytes(stage["resident_bytes"]) if stage["resident_bytes"] else "-") if first else "",
            sent(stage["bytes_raw_forward"], stage["bytes_sent_forward"]),
            sent(stage["bytes_raw_backward"], stage["bytes_sent_backward"]),
            *([show_bytes(stage["device_bytes"])] if on_gpus else []),
        )
    return table


def totals(summary: Mapping[str, Any]) -> list[str]:
    """Return the lines below the table."""
    lines = []
    if summary["bytes_sent"]:
        sent = packed(summary["bytes_raw"], summary["bytes_sent"])
        lines.append(f"sent between stages{_lossy(summary['codec'])}: {sent}")
    if summary["bytes_saved_raw"]:
        kept = packed(summary["bytes_saved_raw"], summary["bytes_saved_kept"])
        lines.append(f"saved for the backward: {kept}")
    lines += _codecs(summary)
    lines.append(
        f"{summary['steps']} step{'s' * (summary['steps'] != 1)}, {summary['samples']:,} samples in "
        f"{clock(summary['seconds'])}: {_number(summary['samples_per_second'], '.0f')} samples/s, "
        f"ranks={summary['ranks']} threads={summary['threads']}, last loss {_number(summary['loss'], '.4f')}"
    )
    lines += _data(summary.get("data", ()))
    if "test_accuracy" in summary:
        lines.append(
            f"test accuracy {_number(summary['test_accuracy'], '.2%')}, test loss "
            f"{_number(summary['test_loss'], '.4f')}"
        )
    return lines


def _data(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines about reading samples: the seconds, samples left out, and reads that a cache spared."""
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
    share = hits / max(1, hits + loads)
    spared = show_bytes(sum(cache["hit_bytes"] for cache in caches))
    lines.append(
        f"sample cache: {hits:,} of {hits + loads:,} samples ({share:.1%}) were found there, {spared}"
    )
    for times in [cache["times"] for cache in caches if "times" in cache]:
        shown = {name: f"{1000 * seconds:.3g} ms" for name, seconds in times.items()}
        lines.append(
            f"its first epoch: {times['epoch']:.1f} s; of a batch reading {shown['batch_io']} "
            f"({shown['sample_io']} a sample), augmentation {shown['augmentation']}, training "
            f"{shown['training']}; {shown['hidden']} of reading hide behind it"
        )
    return lines


def _lossy(codec: str) -> str:
    """Text about a codec that loses bits; "" for the others."""
    shown = show_codec(codec)
    return "" if shown == codec else f" by {shown}, so not with the bits of the plain loop"


def _codecs(summary: Mapping[str, Any]) -> list[str]:
    """Codec of the largest values and gradients, and how the choice ran against others."""
    searched = summary["codec"] == "auto"
    if not summary["turns"]:
        soon = searched and summary["bytes_sent"]
        return ["codec=auto: the run ended before a choice was made"] if soon else []
    flows = sorted(summary["flows"], key=lambda flow: -flow["bytes_raw"])[:MOST_FLOWS]
    ways = {"F": "down", "B": "up"}
    shown = [f"{flow['value']} {ways[flow['way']]} {flow['codec']}" for flow in flows]
    turns = [
        turn["name"]
        + (f", +{turn['extra']} in flight:" if turn["extra"] else "")
        + f" {turn['measured']:.3f} s a step (predicted {turn['predicted']:.3f})"
        + ("" if turn["stayed"] else ", switched off")
        for turn in summary["turns"]
    ]
    chosen = [f"codec=auto: {'; '.join(shown)}"] if searched else []
    return [*chosen, f"{'codec' if searched else 'extra_in_flight'}=auto: {'; '.join(turns)}"]


def packed(raw: float, sent: float) -> str:
    """Return ``"12.1 MiB -> 6.3 MiB (1.92x)"``, or a dash where nothing was sent."""
    times = ratio(raw, sent)
    return f"{show_bytes(raw)} -> {show_bytes(sent)} ({times:.2f}x)" if times is not None else "-"


def clock(seconds: float) -> str:
    """Return ``"1:05"`` or ``"1:00:05"``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _number(value: float | None, form: str) -> str:
    return "no number" if value is None else format(value, form)


COLUMNS = ("schedule", "weights", "step", "samples/s", "bubble", "in flight", "versions", "memory", "")


def table(found: Comparison) -> Table:
    """Return one row per schedule that suits, the chosen one marked."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        made.add_column(
            name, justify="left" if name in ("schedule", "weights", "") else "right", no_wrap=True
        )
    best = found.chosen
    for one in found.candidates:
        made.add_row(
            one.plan.schedule,
            one.plan.weights,
            show_seconds(one.seconds),
            f"{found.num_samples / one.seconds:.0f}",
            f"{one.bubble:.0%}",
            str(max(one.live_micro_batches)),
            str(max(one.live_versions)),
            show_bytes(max(one.memory)),
            "<- chosen" if one is best else "" if one.fits else "too large",
        )
    return made


def notes(found: Comparison) -> list[str]:
    """Return what stands below: the schedules left out, and how to read the numbers."""
    lines = [f"left out: {name}: {reason}" for name, reason in found.left_out.items()]
    lines.append("simulated from measured layers; I and W: half of a backward each; tensors travel unpacked")
    lines.append("memory: of the fullest rank; in flight, versions: of the fullest stage")
    if any(one.plan.streams for one in found.candidates):
        lines.append(
            "async_1f1b, double_buffered: no flush, not the bits of the plain loop; never chosen here"
        )
    return lines
