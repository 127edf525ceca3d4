"""``penstock bench pipeline``: our pipeline against torch's own 1F1B, over loopback and over shaped links.

Same model, cut, micro-batches and optimizer on both sides; only ratios of neighbouring runs are compared,
since the speed of a machine differs from minute to minute."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ...compression.names import AUTO
from ...conf.bench import BenchPipelineConfig
from ...pipeline.run.metrics import DIRECTIONS, ratio
from ...pipeline.run.run_folder import RunFolder
from ...stages.planner.plan import Plan
from ...stages.units import show_bytes, show_rate
from . import contest, picture
from .contest import link_facts, title
from .contestants import ENTRANTS, TORCH
from .harness import SPEEDS, Record, Row, compared, spread, table
from .picture import GREY, Bars, colour
from .race import Race
from .shaped_links import LOOPBACK, Link, links_of, why_not

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Contestants = Sequence[tuple[str, int | str]]
"""Codecs, each with its micro-batches in flight beyond plain 1f1b."""


def bench(config: BenchPipelineConfig, record: Record) -> None:
    """Race over every link; what is done is kept, link by link.

    Raises: PenstockError: an option does not fit, the model cannot be cut so, or a rank failed.
    """
    plan = contest.plans_of(config, {"1f1b": ENTRANTS["1f1b"]})["1f1b"]
    contest.begin(record, config, plan, {}, links=[], rows=[])
    plan.save(record.folder.plan)
    for link, rows in races(config, plan, record.folder):
        record.keep(links=[link], rows=rows)
        record.say(describe(link))
    record.screen.print(shown(record.content))


def races(
    config: BenchPipelineConfig, plan: Plan, folder: RunFolder
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Race on every link; yield, link after link, its facts and its rows.

    The loopback device always comes first: without a link that holds it back, raw frames show what the
    computation alone allows, and every row has this bound beside it.
    """
    contestants = [(codec, extra) for codec in config.codecs for extra in config.extra_in_flight]
    links, reference = links_of(config), ("raw", config.extra_in_flight[0])

    def race(link: Link, sides: Contestants) -> dict[str, Any]:
        plans = {side(*one): plan_of(plan, *one) for one in sides}
        told = Race(config=config, link=link, rivals=dict.fromkeys(plans, TORCH))
        return contest.raced(told, plans, folder)

    free = contestants if any(link.rate is None for link in links) else []
    on_loopback = race(Link(name=LOOPBACK), [*free, *([] if reference in free else [reference])])
    bound = config.batch_size / statistics.median(on_loopback["runs"][side(*reference)]["penstock"])
    for link in links:
        if reason := why_not(link):
            yield link_facts(link, {}, why_not=reason), []
            continue
        found = on_loopback if link.rate is None else race(link, contestants)
        torch, ours, *_ = found["facts"].pop("first_losses").values()
        losses = {"first_loss_torch": torch, "first_loss_penstock": ours}
        common = {"link": link.name, "bound_samples_per_second": bound}
        rows = rows_of(found["runs"], contestants, plan=plan, batch_size=config.batch_size)
        yield link_facts(link, found["facts"] | losses), [common | row for row in rows]


def plan_of(plan: Plan, codec: str, extra_in_flight: int | str) -> Plan:
    """``plan`` as a contestant runs it."""
    if extra_in_flight == AUTO:
        return replace(plan, codec=codec)
    most = extra_in_flight
    return replace(plan, codec=codec, extra_in_flight=most, most_extra_in_flight=most)


def side(codec: str, extra_in_flight: int | str) -> str:
    """What a contestant is called."""
    more = extra_in_flight if extra_in_flight == AUTO else f"+{extra_in_flight}"
    return f"{codec}, {more} in flight" if extra_in_flight else codec


def rows_of(
    runs: Mapping[str, Mapping[str, Any]], contestants: Contestants, *, plan: Plan, batch_size: int
) -> list[dict[str, Any]]:
    """Return one row for torch and one for each contestant."""
    theirs = [seconds for run in runs.values() for seconds in run["rival"]]
    # What torch sends, which packs nothing: the tensors that pass all cuts in a step.
    passed = {
        f"bytes_{kind}_{way}": plan.micro_batches * sum(getattr(s, f"bytes_{way}") for s in plan.stages)
        for way in DIRECTIONS
        for kind in ("raw", "sent")
    }
    rows: list[dict[str, Any]] = [{"side": TORCH, "codec": "none", "extra_in_flight": 0} | passed]
    rows[0] |= compared(theirs, theirs, batch_size)
    for codec, extra in contestants:
        run = runs[side(codec, extra)]
        row = {"side": "penstock", "codec": codec, "extra_in_flight": extra} | {
            name: run[name] for name in (*passed, "flew")
        }
        best = run["simulated_seconds"]
        row["of_simulated"] = best and best / statistics.median(run["penstock"])
        rows.append(row | compared(run["penstock"], run["rival"], batch_size))
    for row in rows:
        slower = max(DIRECTIONS, key=lambda way: row[f"bytes_sent_{way}"])
        row |= {
            f"ratio_{way}": ratio(row[f"bytes_raw_{way}"], row[f"bytes_sent_{way}"]) for way in DIRECTIONS
        }
        row["ratio_slower_direction"] = row[f"ratio_{slower}"]
    return rows


def describe(link: Mapping[str, Any]) -> str:
    """Return the sentence about a link that stands above the table."""
    if link["why_not"]:
        return f"{link['link']}: could not be shaped and was not raced on: {link['why_not']}"
    found = f", {show_rate(link['rate_measured'])} measured each way" if link.get("rate_measured") else ""
    found += f", congestion control {link['congestion_control']}"
    if not link["shaped"]:
        return f"{link['link']}: not shaped{found}"
    bucket = f"tc tbf rate {show_rate(link['rate'])} burst {show_bytes(link['burst'])}"
    bucket += f" latency {link['latency_ms']} ms, delay {link['delay_ms']:g} ms"
    offload = ", ".join(f"{name} {state}" for name, state in link["offload"].items())
    return f"{link['link']}: {bucket}{found}, {offload}"


def shown(results: Mapping[str, Any]) -> Table:
    """Return ``results`` for people: medians, and what the pairs of runs ranged over."""
    groups = []
    for link in [link["link"] for link in results["links"]]:
        rows = [row for row in results["rows"] if row["link"] == link]
        missing = {"link": link, "side": "could not be shaped", "codec": "see below"}
        groups.append([_words(row, rows[0]) for row in rows] or [missing])
    return table(*groups, left=("link", "side", "codec"), title=title(results))


def _words(row: Row, torch: Row) -> dict[str, str]:
    ours = row["side"] != TORCH
    words = {
        "link": row["link"],
        "side": row["side"] if ours else "torch 1F1B",
        "codec": row["codec"] if ours else "-",
        "in flight": _in_flight(row) if ours else "-",
        "samples/s": f"{row['samples_per_second']:.1f}",
        "x torch": f"{row['speedup']:.2f}",
        "pairs": spread(row["speedup_of_pairs"]) if ours else "-",
        "of sim.": f"{row['of_simulated']:.2f}" if row.get("of_simulated") else "-",
        "bound": f"{row['bound_samples_per_second'] / torch['samples_per_second']:.2f}",
    }
    times = {key: "-" if (value := row[f"ratio_{key}"]) is None else f"{value:.2f}x" for key in _RATIOS}
    sent = {f"{way} sent": f"{show_bytes(row[f'bytes_sent_{way}'])} ({times[way]})" for way in DIRECTIONS}
    return words | sent | {"slower way": times["slower_direction"]}


def _in_flight(row: Row) -> str:
    asked = row["extra_in_flight"]
    return f"+{row['flew']} auto" if asked == AUTO else f"+{asked}"


_RATIOS = (*DIRECTIONS, "slower_direction")


def figure(results: Mapping[str, Any]) -> Figure:
    """Samples per second by link: torch first, and the bound; links that could not be shaped are left out."""
    rows = {(row["link"], _label(row)): row for row in results["rows"]}
    links, labels = (list(dict.fromkeys(names)) for names in zip(*rows, strict=True)) if rows else ([], [])
    codecs = list(dict.fromkeys(row["codec"] for row in rows.values()))
    made, (axes,) = picture.panels(1, size=(4.5 + 2.2 * len(links), 4.6))
    if rows:
        bound = results["rows"][0]["bound_samples_per_second"]
        axes.axhline(bound, color="black", lw=1, ls="--", label="computation alone (raw on loopback)")
    drawn = []
    for label in labels:
        own = [rows.get((link, label)) for link in links]
        first = next(filter(None, own))
        fill = GREY if first["side"] == TORCH else colour(codecs.index(first["codec"]) - 1)
        heights, runs = ([row and row[key] for row in own] for key in SPEEDS)
        drawn.append(Bars(label, fill, heights, runs, "//" if first["extra_in_flight"] else None))
    picture.bars(axes, links, drawn, form=picture.speed)
    picture.name(axes, title(results), x="link between the ranks, each direction", y=picture.SPEED)
    return made


def _label(row: Row) -> str:
    return "torch 1F1B" if row["side"] == TORCH else side(row["codec"], row["extra_in_flight"])
