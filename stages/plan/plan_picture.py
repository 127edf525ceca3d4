"""The picture of a plan: what each stage holds, how long it takes, and what passes between the stages.

A person judges a cut by balance and by the bytes on its links; both are seen here before anything runs."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..units import shortened_name, show_bytes, show_count, show_seconds
from .plan_stage import PlanStage, show_sent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Told apart by colour-blind readers (Okabe and Ito).
FORWARD_COLOR, BACKWARD_COLOR, LINE = "#0072B2", "#E69F00", "#5B6470"
WEIGHT_COLOR, SAVED_COLOR, FRAME_COLOR = "#56B4E9", "#009E73", "#CC79A7"
MIB = 2**20
RANKS = ("#EAF2F8", "#F6F1E7")  # neighbouring ranks differ
WIDTH, GAP = 1.0, 0.42  # of a stage and of the link behind it


def figure(stages: Sequence[PlanStage], *, title: str) -> "Figure":
    """Stages from left to right as blocks, the bytes over each cut between them, their seconds below."""
    from matplotlib.figure import Figure  # takes a second to import, and only a drawing needs it

    width = max(6.5, 1.1 + 2.35 * len(stages))
    kinds = all(stage.weight_bytes is not None for stage in stages)
    made = Figure(figsize=(width, 5.2 + 1.9 * kinds), layout="constrained")
    blocks, bars, *held = made.subplots(2 + kinds, 1, sharex=True, height_ratios=[3, 2, 2][: 2 + kinds])
    several = any(len(stage.ranks) > 1 for stage in stages)  # then every stage has ranks of its own
    for number, stage in enumerate(stages):
        _draw_stage(blocks, number, stage, shade=RANKS[(number if several else stage.ranks[0]) % 2])
        if number + 1 < len(stages):
            _draw_link(blocks, number, stage, local=stages[number + 1].ranks == stage.ranks)
    blocks.set_ylim(0, 1)
    blocks.axis("off")
    _draw_seconds(bars, stages)
    for axes in held:
        _draw_memory(axes, stages)
    longest = int(11 * width)
    lines = len(textwrap.wrap(title, longest))
    even = next(n for n in range(longest // 2, longest + 1) if len(textwrap.wrap(title, n)) <= lines)
    made.suptitle(textwrap.fill(title, even), fontsize=11, fontweight="bold")
    return made


def _write(axes: "Axes", x: float, y: float, text: str, *, size: float = 9, **style: Any) -> None:
    axes.text(x, y, text, fontsize=size, **{"ha": "center", "va": "center", **style})


def _draw_stage(axes: "Axes", number: int, stage: PlanStage, *, shade: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    left, ranks = number * (WIDTH + GAP), ",".join(map(str, stage.ranks))
    look: Any = {"boxstyle": "round,pad=0,rounding_size=0.04", "fc": shade, "ec": LINE}
    axes.add_patch(FancyBboxPatch((left, 0.02), WIDTH, 0.96, gid=f"stage {number}", **look))
    middle = left + WIDTH / 2
    layers = stage.layers[:1] if len(stage.layers) == 1 else (stage.layers[0], "to", stage.layers[-1])
    _write(axes, middle, 0.9, f"stage {number}", size=12, fontweight="bold")
    _write(axes, middle, 0.79, f"rank{'s' * (len(stage.ranks) > 1)} {ranks}", color=LINE)
    _write(axes, middle, 0.54, "\n".join(shortened_name(name, 19) for name in layers), family="monospace")
    facts = (
        f"{len(stage.layers)} layer{'s' * (len(stage.layers) > 1)}",
        f"{show_count(stage.num_parameters)} parameters",
        f"{show_bytes(stage.held_bytes)} of memory",
    )
    _write(axes, middle, 0.19, "\n".join(facts))


def _draw_link(axes: "Axes", number: int, stage: PlanStage, *, local: bool) -> None:
    """Two arrows between neighbours, dashed where both stages are on one rank."""
    start = number * (WIDTH + GAP) + WIDTH + 0.03
    end, middle, style = start + GAP - 0.06, start + GAP / 2 - 0.03, "dashed" if local else "solid"
    flows = (
        (0.62, start, end, FORWARD_COLOR, stage.bytes_forward, stage.packed_forward),
        (0.38, end, start, BACKWARD_COLOR, stage.bytes_backward, stage.packed_backward),
    )
    look = {"arrowstyle": "-|>", "linewidth": 2, "linestyle": style, "mutation_scale": 14}
    for height, tail, head, colour, raw, packed in flows:
        arrow = {**look, "color": colour, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", xy=(head, height), xytext=(tail, height), arrowprops=arrow)
        text = show_sent(raw, packed, arrow="\n→ ")
        _write(axes, middle, height + 0.03, text, size=8.5, va="bottom")


def _draw_seconds(axes: "Axes", stages: Sequence[PlanStage]) -> None:
    """A bar per stage in ms, and a line at the slowest, which sets the pace; replicas share a stage's bar."""
    middles = _middles(stages)
    forward = [1e3 * stage.forward_seconds / len(stage.ranks) for stage in stages]
    backward = [1e3 * stage.backward_seconds / len(stage.ranks) for stage in stages]
    totals = [sum(pair) for pair in zip(forward, backward, strict=True)]
    _draw_bars(axes, middles, {"forward": (FORWARD_COLOR, forward), "backward": (BACKWARD_COLOR, backward)})
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # over the line of the slowest
    for middle, total, stage in zip(middles, totals, stages, strict=True):
        label, number = show_seconds(total / 1e3), len(stage.ranks)
        label += f" ({show_seconds(number * total / 1e3)} by {number})" if number > 1 else ""
        _write(axes, middle, total + 0.02 * max(totals), label, va="bottom", bbox=behind)
    axes.axhline(max(totals), color=LINE, linewidth=1, linestyle="dotted", zorder=0)
    axes.set_ylabel("ms per micro-batch")


def _middles(stages: Sequence[PlanStage]) -> list[float]:
    return [number * (WIDTH + GAP) + WIDTH / 2 for number in range(len(stages))]


def _draw_bars(axes: "Axes", middles: list[float], parts: dict[str, tuple[str, list[float]]]) -> None:
    """Bars of a stage's parts on each other, each in its colour."""
    below = [0.0] * len(middles)
    for label, (colour, values) in parts.items():
        axes.bar(middles, values, WIDTH * 0.62, bottom=below, color=colour, label=label)
        below = [sum(pair) for pair in zip(below, values, strict=True)]
    axes.set_ylim(0, max(*below, 1e-9) * 1.2)
    axes.set_xlim(-0.12, middles[-1] + WIDTH / 2 + 0.12)
    axes.set_xticks(middles, [f"stage {number}" for number in range(len(middles))])
    axes.tick_params(axis="x", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.1), ncols=len(parts), frameon=False, fontsize=9)


def _draw_memory(axes: "Axes", stages: Sequence[PlanStage]) -> None:
    """A bar per stage in MiB, of what a rank holds at its most."""
    weights = [(stage.weight_bytes or 0) / MIB for stage in stages]
    saved = [(stage.memory_bytes - (stage.weight_bytes or 0)) / MIB for stage in stages]
    frames = [stage.frame_bytes / MIB for stage in stages]
    parts = {
        "weights, gradients, optimizer": (WEIGHT_COLOR, weights),
        "saved tensors": (SAVED_COLOR, saved),
        "frames": (FRAME_COLOR, frames),
    }
    _draw_bars(axes, _middles(stages), parts)
    for middle, stage in zip(_middles(stages), stages, strict=True):
        text = show_bytes(stage.held_bytes)
        _write(axes, middle, stage.held_bytes / MIB * 1.02, text, va="bottom")
    axes.set_ylabel("MiB on a rank")
