"""What a bench of codecs shows: a table per tensor in 110 columns, and a picture of ratio against speed.

A codec is worth its time only where it lies to the right of the link; the table alone does not show that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from ...stages.units import show_bytes
from . import picture
from .picture import COLOURS
from .table import table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SPEEDS = {"pack": "copy", "unpack": "copy", "encode": "clone", "decode": "clone"}
_TABLE: dict[str, Any] = {"title_justify": "left", "box": box.SIMPLE_HEAD, "width": 106, "left": ("codec",)}
_OTHERS = (("#555555", "v"), ("#777777", "^"), ("#999999", "<"), ("#BBBBBB", ">"))
_MOST_RATIO = 64  # a tensor of nearly nothing but zeros would press all others to the floor
CAPTION = """\
Speeds are multiples, on one thread: pack and unpack, in kept memory, of a plain copy to kept memory; encode
and decode, with their new memory, of tensor.clone(). Behind an arrow: what the tensor was really sent as."""


def shown(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The rows of one tensor; pack and unpack as multiples of the copy beside them, the rest of the clone."""
    first = rows[0]
    rates = (f"{verb} {first['num_bytes'] / first[verb] / 1e9:.1f} GB/s" for verb in ("copy", "clone"))
    facts = (
        first["class"],
        first["dtype"],
        show_bytes(first["num_bytes"]),
        f"{first['density']:.1%} not zero",
        *rates,
    )
    columns = {
        "codec": _name,
        "ratio": lambda row: f"{row['ratio']:.3f}",
        "bound": lambda row: f"{row['bound']:.3f}" if row["bound"] else "",
        "of bound": lambda row: f"{row['ratio'] / row['bound']:.1%}" if row["bound"] else "",
        **{verb: lambda row, verb=verb, of=of: f"{row[of] / row[verb]:.2f}" for verb, of in _SPEEDS.items()},
    }
    return table(
        rows, columns=columns, title=f"[bold]{first['tensor']}[/bold]\n{' · '.join(facts)}", **_TABLE
    )


def _name(row: Mapping[str, Any]) -> str:
    if row["by"] == "others":
        return f"[dim]{row['codec']}[/dim]"
    return row["codec"] if row["sent_as"] == row["codec"] else f"{row['codec']} → {row['sent_as']}"


def call_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Microseconds of a call of the public functions on small tensors."""
    found = {(row["codec"], row["num_bytes"]): row for row in rows}
    columns: dict[str, Any] = {"codec": lambda row: row["codec"]}
    for verb in ("encode", "decode"):
        for size in sorted({row["num_bytes"] for row in rows}):
            columns[f"{verb}\n{size >> 10} KiB"] = lambda row, verb=verb, size=size: (
                f"{found[row['codec'], size][verb] * 1e6:.1f}"
            )
    title = "[bold]one call on a small tensor[/bold]\nmicroseconds · float32 · half of it zeros"
    return table(
        [{"codec": codec} for codec in dict.fromkeys(row["codec"] for row in rows)],
        columns=columns,
        title=title,
        **_TABLE,
    )


def figure(results: Mapping[str, Any]) -> Figure:
    """Ratio against speed, a panel for each class of tensors."""
    rows = results["rows"]
    kinds, ours, others = (
        list(dict.fromkeys(row[key] for row in rows if row["by"] in by))
        for key, by in (("class", ("penstock", "others")), ("codec", ("penstock",)), ("codec", ("others",)))
    )
    colours = ("#000000", *COLOURS, "#B8A900")
    styles = {name: {"color": colours[i % len(colours)], "marker": "o"} for i, name in enumerate(ours)}
    styles |= {
        name: dict(zip(("color", "marker"), _OTHERS[i % 4], strict=True)) for i, name in enumerate(others)
    }
    columns = min(3, max(1, len(kinds)))
    size = 4.6 * columns, 4.0 * max(1, -(-len(kinds) // columns)) + 1.2
    made, panels = picture.panels(len(kinds), size=size, columns=columns)
    for axes, kind in zip(panels, kinds, strict=False):
        _panel(axes, [row for row in rows if row["class"] == kind], styles)
        picture.name(
            axes, kind, x="pack and unpack, as a multiple of two copies' speed", y="ratio, before / after"
        )
    handles = {handle.get_label(): handle for axes in made.axes for handle in axes.collections}
    named = [handles[name] for name in styles if name in handles]
    made.legend(
        handles=named, loc="outside lower center", ncols=min(6, max(1, len(named))), frameon=False, fontsize=9
    )
    return made


def _panel(axes: Axes, rows: Sequence[Mapping[str, Any]], styles: Mapping[str, Mapping[str, Any]]) -> None:
    for name, style in styles.items():
        own = [row for row in rows if row["codec"] == name]
        x = [2 * row["copy"] / (row["pack"] + row["unpack"]) for row in own]
        y = [min(row["ratio"], _MOST_RATIO) for row in own]
        if own:
            axes.scatter(x, y, s=12, alpha=0.35, linewidths=0, **style)
            axes.scatter(
                [median(x)],
                [median(y)],
                s=70,
                edgecolors="white",
                linewidths=0.8,
                zorder=3,
                label=name,
                **style,
            )
    axes.axvline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.25)
