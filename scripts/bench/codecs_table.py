"""The rows of a bench of codecs for people: a table per tensor, in 110 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

_SPEEDS = {"pack": "copy", "unpack": "copy", "encode": "clone", "decode": "clone"}
_WIDTH = 106
CAPTION = """\
Speeds are multiples, on one thread: pack and unpack, in kept memory, of a plain copy to kept memory; encode
and decode, with their new memory, of tensor.clone(). Behind an arrow: what the tensor was really sent as."""


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The rows of one tensor; pack and unpack as multiples of the copy beside them, the rest of the clone."""
    shown = Table(title=_title(rows[0]), title_justify="left", box=box.SIMPLE_HEAD, width=_WIDTH)
    shown.add_column("codec", no_wrap=True)
    for heading in ("ratio", "bound", "of bound", *_SPEEDS):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        shown.add_row(_name(row), *_ratios(row), *(_speed(row, verb) for verb in _SPEEDS))
    return shown


def _title(row: Mapping[str, Any]) -> str:
    rates = (f"{verb} {row['num_bytes'] / row[verb] / 1e9:.1f} GB/s" for verb in ("copy", "clone"))
    size = f"{row['num_bytes'] / (1 << 20):.2f} MiB"
    facts = (row["class"], row["dtype"], size, f"{row['density']:.1%} not zero", *rates)
    return f"[bold]{row['tensor']}[/bold]\n{' · '.join(facts)}"


def _name(row: Mapping[str, Any]) -> str:
    if row["by"] == "others":
        return f"[dim]{row['codec']}[/dim]"
    return row["codec"] if row["sent_as"] == row["codec"] else f"{row['codec']} → {row['sent_as']}"


def _ratios(row: Mapping[str, Any]) -> tuple[str, str, str]:
    best = row["bound"]
    if best is None:
        return f"{row['ratio']:.3f}", "", ""
    return f"{row['ratio']:.3f}", f"{best:.3f}", f"{row['ratio'] / best:.1%}"


def _speed(row: Mapping[str, Any], verb: str) -> str:
    return f"{row[_SPEEDS[verb]] / row[verb]:.2f}" if verb in row else ""


def overhead_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Microseconds of a call of the public functions on small tensors."""
    title = "[bold]one call on a small tensor[/bold]\nmicroseconds · float32 · half of it zeros"
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, width=_WIDTH)
    sizes = sorted({row["num_bytes"] for row in rows})
    shown.add_column("codec", no_wrap=True)
    for verb in ("encode", "decode"):
        for size in sizes:
            shown.add_column(f"{verb} {size >> 10} KiB", justify="right")
    for codec in dict.fromkeys(row["codec"] for row in rows):
        found = {row["num_bytes"]: row for row in rows if row["codec"] == codec}
        times = (f"{found[size][verb] * 1e6:.1f}" for verb in ("encode", "decode") for size in sizes)
        shown.add_row(codec, *times)
    return shown
