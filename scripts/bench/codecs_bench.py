"""``penstock bench codecs``: each codec on each tensor, its ratio beside a bound, its speed beside a copy's.

Multiples of one run are what can be compared: the speed of memory differs from host to host, hour to hour."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from rich import box
from rich.table import Table

from ...compression.codec import CODECS, decode, encode
from ...compression.kernels import jit
from ...conf.bench_codecs import BenchCodecsConfig
from ...stages.units import show_bytes
from . import picture
from .codecs_bounds import bound, words_of
from .codecs_peers import PEERS, missing, peers, versions
from .codecs_sides import Bench, applies, codecs_of, decoded
from .codecs_subjects import Subject, subjects
from .harness import Record, Row, alternate, medians, table, timed
from .picture import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMALL_BYTES = (1 << 10, 16 << 10, 64 << 10)
_BATCH_BYTES = 2 << 20  # a small tensor is timed many times over
_SECONDS = 0.4  # for all runs of one codec on one tensor, but for one run at least
_CALLS = 50
_SPEEDS = {"pack": "copy", "unpack": "copy", "encode": "clone", "decode": "clone"}
_TABLE: dict[str, Any] = {"title_justify": "left", "box": box.SIMPLE_HEAD, "width": 106, "left": ("codec",)}
_OTHERS = (("#555555", "v"), ("#777777", "^"), ("#999999", "<"), ("#BBBBBB", ">"))
_MOST_RATIO = 64  # a tensor of nearly nothing but zeros would press all others to the floor
CAPTION = """\
Speeds are multiples, on one thread: pack and unpack, in kept memory, of a plain copy to kept memory; encode
and decode, with their new memory, of tensor.clone(). Behind an arrow: what the tensor was really sent as."""


def bench(config: BenchCodecsConfig, record: Record) -> None:
    """Measure every codec on every class of tensors; what is done is printed and kept, tensor by tensor."""
    config.threads = config.threads or 1
    torch.set_num_threads(config.threads)
    isa = config.isa or jit.host_isas()[0]
    record.begin(threads=config.threads, isa=isa, rows=[], overhead=[])
    record.content["versions"] |= versions()
    for rows in bench_codecs(config):
        record.keep(rows=rows)
        record.screen.print(shown(rows))
    if config.isa is None:
        record.keep(overhead=call_overhead(config))
        record.screen.print(call_table(record.content["overhead"]))
    record.say(CAPTION, *missing())


def bench_codecs(config: BenchCodecsConfig) -> Iterator[list[dict[str, Any]]]:
    """Measure all codecs on one tensor after another, each checked bit for bit before.

    Yields: the rows of a tensor, one per codec: ``class``, ``tensor``, ``dtype``, ``num_bytes``, ``density``
            (share of words that are not zero), ``mask`` (whether one was reused), ``codec``, ``by``
            ("penstock" or "others"), ``sent_as``, ``ratio`` (before / after, headers left out), ``bound``
            (None for the others, and where nothing has to travel), ``runs``, and median seconds (of the
            processor, on one thread) of ``copy``, ``clone``, ``pack``, ``unpack`` and, where the public
            functions were timed, ``encode`` and ``decode``.
    Raises: CodecError: the instruction set is not known.
    """
    names, codecs = config.codecs or [*CODECS, *PEERS], codecs_of(config.isa)
    for subject in subjects(config):
        yield list(_rows(subject, names, Bench(subject, codecs, public=config.isa is None), config.repeats))


def _rows(subject: Subject, names: Sequence[str], bench: Bench, repeats: int) -> Iterator[dict[str, Any]]:
    tensor, words, mask = subject.tensor, words_of(subject.tensor), subject.mask
    chosen = words != 0 if mask is None else words_of(decoded(mask)) != 0
    facts = {"class": subject.kind, "tensor": subject.name, "dtype": str(tensor.dtype).removeprefix("torch.")}
    facts |= {"num_bytes": tensor.nbytes, "density": float(chosen.mean()), "mask": mask is not None}
    batch = max(1, _BATCH_BYTES // max(1, tensor.nbytes))
    for name in names:
        if name not in CODECS or not applies(name, subject):
            continue
        side, best = bench.ours(name), bound(name, words, tensor.dtype, None if mask is None else chosen)
        row = facts | {"by": "penstock", "bound": best if isfinite(best) else None}
        yield row | side.facts | _measured(bench.common | side.routes, repeats, batch)
    for side in map(bench.theirs, peers(names) if mask is None else ()):
        row = facts | {"by": "others", "bound": None}
        yield row | side.facts | _measured(bench.common | side.routes, repeats, batch)


def _measured(routes: Mapping[str, Callable[[], Any]], repeats: int, batch: int) -> dict[str, Any]:
    """How many runs there were, and median seconds of a call of each route; all have run once before."""
    # Processor time does not count what others on the machine run in between; it is of one thread alone.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    sides = {name: timed(call, batch, clock=clock) for name, call in routes.items()}
    taken = alternate(sides, repeats, seconds=_SECONDS, clock=clock)
    return {"runs": len(taken["clone"]), **medians(taken)}


def call_overhead(config: BenchCodecsConfig) -> list[dict[str, Any]]:
    """Seconds of a call of the public functions on tensors so small that little else counts.

    Returns: a row per codec and size: ``codec``, ``num_bytes``, ``encode``, ``decode``, ``clone``; float32,
             half of it zeros; the median of alternating batches.
    """
    rows = []
    for num_bytes in SMALL_BYTES:
        tensor = torch.relu(torch.randn(num_bytes // 64, 16, generator=torch.Generator().manual_seed(0)))
        for name in (name for name in config.codecs or CODECS if name in CODECS and name != "narrow"):
            routes = {"clone": tensor.clone, **_public(tensor, name)}
            seconds = _measured(routes, config.repeats, _CALLS)
            rows.append({"codec": name, "num_bytes": num_bytes} | {route: seconds[route] for route in routes})
    return rows


def _public(tensor: torch.Tensor, name: str) -> dict[str, Callable[[], Any]]:
    frame = encode(tensor, name)
    return {"encode": lambda: encode(tensor, name), "decode": lambda: decode(frame)}


def shown(rows: Sequence[Row]) -> Table:
    """The rows of one tensor; pack and unpack as multiples of the copy beside them, the rest of the clone."""
    first = rows[0]
    facts = [
        first["class"],
        first["dtype"],
        show_bytes(first["num_bytes"]),
        f"{first['density']:.1%} not zero",
    ]
    facts += [f"{verb} {first['num_bytes'] / first[verb] / 1e9:.1f} GB/s" for verb in ("copy", "clone")]
    title = f"[bold]{first['tensor']}[/bold]\n{' · '.join(facts)}"
    return table([_words(row) for row in rows], title=title, **_TABLE)


def _words(row: Row) -> dict[str, str]:
    sent_as = "" if row["sent_as"] == row["codec"] else f" → {row['sent_as']}"
    name = f"[dim]{row['codec']}[/dim]" if row["by"] == "others" else f"{row['codec']}{sent_as}"
    words = {"codec": name, "ratio": f"{row['ratio']:.3f}", "bound": "", "of bound": ""}
    if row["bound"]:
        words |= {"bound": f"{row['bound']:.3f}", "of bound": f"{row['ratio'] / row['bound']:.1%}"}
    return words | {verb: f"{row[of] / row[verb]:.2f}" for verb, of in _SPEEDS.items() if verb in row}


def call_table(rows: Sequence[Row]) -> Table:
    """Microseconds of a call of the public functions on small tensors."""
    words = {row["codec"]: {"codec": row["codec"]} for row in rows}
    for verb in ("encode", "decode"):
        for row in rows:
            words[row["codec"]][f"{verb}\n{row['num_bytes'] >> 10} KiB"] = f"{row[verb] * 1e6:.1f}"
    title = "[bold]one call on a small tensor[/bold]\nmicroseconds · float32 · half of it zeros"
    return table([*words.values()], title=title, **_TABLE)


def figure(results: Mapping[str, Any]) -> Figure:
    """Ratio against speed, a panel for each class of tensors."""
    rows = results["rows"]
    kinds = list(dict.fromkeys(row["class"] for row in rows))
    ours, others = (
        list(dict.fromkeys(row["codec"] for row in rows if row["by"] == by)) for by in ("penstock", "others")
    )
    colours = ("#000000", *COLOURS, "#B8A900")
    styles = {name: (colours[i % len(colours)], "o") for i, name in enumerate(ours)}
    styles |= {name: _OTHERS[i % len(_OTHERS)] for i, name in enumerate(others)}
    columns = min(3, max(1, len(kinds)))
    size = 4.6 * columns, 4.0 * max(1, -(-len(kinds) // columns)) + 1.2
    made, panels = picture.panels(len(kinds), size=size, columns=columns)
    for axes, kind in zip(panels, kinds, strict=False):
        _panel(axes, [row for row in rows if row["class"] == kind], styles)
        x = "pack and unpack, as a multiple of two copies' speed"
        picture.name(axes, kind, x=x, y="ratio, before / after")
    handles = {handle.get_label(): handle for axes in made.axes for handle in axes.collections}
    named = [handles[name] for name in styles if name in handles]
    columns = min(6, max(1, len(named)))
    made.legend(handles=named, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return made


def _panel(axes: Axes, rows: Sequence[Row], styles: Mapping[str, tuple[str, str]]) -> None:
    """A faint mark for each tensor, a large one for the median of a codec."""
    for name, (colour, marker) in styles.items():
        if own := [row for row in rows if row["codec"] == name]:
            x = [2 * row["copy"] / (row["pack"] + row["unpack"]) for row in own]
            y = [min(row["ratio"], _MOST_RATIO) for row in own]
            style: dict[str, Any] = {"color": colour, "marker": marker}
            large = style | {"edgecolors": "white", "linewidths": 0.8, "zorder": 3, "label": name}
            axes.scatter(x, y, s=12, alpha=0.35, linewidths=0, **style)
            axes.scatter([median(x)], [median(y)], s=70, **large)
    axes.axvline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.25)
