"""``penstock bench pipeline``: our pipeline against torch's own 1F1B, over loopback and over shaped links.

Same model, cut, micro-batches and optimizer on both sides; only ratios of neighbouring runs are compared,
since the speed of a machine differs from minute to minute."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ...compression.names import AUTO
from ...conf.bench import BenchPipelineConfig
from ...pipeline.run import console
from ...pipeline.run.decide import decide
from ...pipeline.run.metrics import DIRECTIONS, ratio
from ...pipeline.run.run_folder import RunFolder
from ...stages.planner.plan import Plan
from ...stages.units import show_bytes, show_rate
from . import contest, picture, refusals
from .contest import link_facts
from .harness import SPEEDS, speeds, speedups
from .picture import GREY, Bars, colour
from .race import Race
from .shaped_links import LOOPBACK, Link, why_not
from .table import spread, table
from .torch_pipelines import stages_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TORCH, PENSTOCK = "torch", "penstock"
Contestants = Sequence[tuple[str, int | str]]


def bench(config: BenchPipelineConfig, folder: RunFolder, typed: Sequence[str]) -> None:
    """Race over every link; what is done is kept, link by link.

    Raises: PenstockError: an option does not fit, the model cannot be cut so, or a rank failed.
    """
    links = refusals.links(config)
    job, samples, model = contest.model_of(config)
    plan = decide(job, samples, model=model)
    stages_of(model, plan)
    folder.begin(console.warn)
    plan.save(folder.plan)
    record = contest.record(config, plan, folder, typed, {}, links=[], rows=[])
    record.begin(title(record.content))
    for link, rows in races(config, plan, links, folder):
        record.keep(links=[link], rows=rows)
        record.say(describe(link))
    record.draw(figure)
    record.screen.print(shown(record.content))
    record.end()


def races(
    config: BenchPipelineConfig, plan: Plan, links: Sequence[Link], folder: RunFolder
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Race on each of ``links``; yield, link after link, its facts and its rows.

    The loopback device always comes first: without a link that holds it back, raw frames show what the
    computation alone allows, and every row has this bound beside it.
    """
    contestants = [(codec, extra) for codec in config.codecs for extra in config.extra_in_flight]
    reference = ("raw", config.extra_in_flight[0])

    def race(link: Link, sides: Contestants) -> dict[str, Any]:
        plans = {side(*one): plan_of(plan, *one) for one in sides}
        told = Race(config=config, link=link, rivals=dict.fromkeys(plans, TORCH))
        return contest.raced(told, plans, folder)

    free = contestants if any(link.rate is None for link in links) else []
    on_loopback = race(Link(name=LOOPBACK), list(dict.fromkeys([*free, reference])))
    bound = config.batch_size / statistics.median(on_loopback["runs"][side(*reference)]["penstock"])
    for link in links:
        if link.rate is not None and (reason := why_not(link)):
            yield link_facts(link, {}, why_not=reason), []
            continue
        measured = on_loopback if link.rate is None else race(link, contestants)
        common = {"link": link.name, "bound_samples_per_second": bound}
        rows = rows_of(measured["runs"], contestants, plan=plan, batch_size=config.batch_size)
        yield link_facts(link, _facts(measured["facts"])), [common | row for row in rows]


def plan_of(plan: Plan, codec: str, extra_in_flight: int | str) -> Plan:
    """``plan`` as a contestant runs it."""
    if extra_in_flight == AUTO:
        return dataclasses.replace(plan, codec=codec)
    most = extra_in_flight
    return dataclasses.replace(plan, codec=codec, extra_in_flight=most, most_extra_in_flight=most)


def side(codec: str, extra_in_flight: int | str) -> str:
    """What a contestant is called."""
    return f"{codec}, +{extra_in_flight} in flight" if extra_in_flight else codec


def _facts(found: Mapping[str, Any]) -> dict[str, Any]:
    """What ranks found out of a link, with the two first losses by name."""
    facts = dict(found)
    torch, ours, *_ = facts.pop("first_losses").values()
    return facts | {"first_loss_torch": torch, "first_loss_penstock": ours}


def rows_of(
    runs: Mapping[str, Mapping[str, Any]], contestants: Contestants, *, plan: Plan, batch_size: int
) -> list[dict[str, Any]]:
    """Return one row for torch and one for each contestant."""
    theirs = [seconds for run in runs.values() for seconds in run["rival"]]
    # What torch sends, which packs nothing: the tensors that pass all cuts in a step.
    passed = {
        way: plan.micro_batches * sum(getattr(s, f"bytes_{way}") for s in plan.stages) for way in DIRECTIONS
    }
    raw = {f"bytes_{kind}_{way}": passed[way] for way in DIRECTIONS for kind in ("raw", "sent")}
    rows = [{"side": TORCH, "codec": "none", "extra_in_flight": 0, **speeds(theirs, batch_size)}]
    rows[0] |= speedups([1.0] * len(theirs)) | raw
    for codec, extra in contestants:
        run = runs[side(codec, extra)]
        row = {
            "side": PENSTOCK,
            "codec": codec,
            "extra_in_flight": extra,
            **speeds(run["penstock"], batch_size),
        }
        row |= speedups([torch / own for torch, own in zip(run["rival"], run["penstock"], strict=True)])
        rows.append(row | {name: run[name] for name in raw})
    return [row | _ratios(row) for row in rows]


def _ratios(row: Mapping[str, Any]) -> dict[str, float | None]:
    ratios = {way: ratio(row[f"bytes_raw_{way}"], row[f"bytes_sent_{way}"]) for way in DIRECTIONS}
    slower = max(DIRECTIONS, key=lambda way: row[f"bytes_sent_{way}"])
    return {f"ratio_{way}": ratios[way] for way in DIRECTIONS} | {"ratio_slower_direction": ratios[slower]}


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
        torch = rows[0]["samples_per_second"] if rows else 1.0
        missing = {"link": link, "side": "could not be shaped", "codec": "see below"}
        groups.append([row | {"bound": row["bound_samples_per_second"] / torch} for row in rows] or [missing])
    columns = {
        "link": lambda row: row["link"],
        "side": lambda row: "torch 1F1B" if row["side"] == TORCH else row["side"],
        "codec": lambda row: _of_ours(row, row["codec"]),
        "in flight": lambda row: _of_ours(row, f"+{row['extra_in_flight']}"),
        "samples/s": lambda row: f"{row['samples_per_second']:.1f}",
        "x torch": lambda row: f"{row['speedup']:.2f}",
        "pairs": lambda row: _of_ours(row, spread(row["speedup_of_pairs"])),
        "bound": lambda row: f"{row['bound']:.2f}",
        **{
            f"{way} sent": lambda row, way=way: (
                f"{show_bytes(row[f'bytes_sent_{way}'])} ({_times(row[f'ratio_{way}'])})"
            )
            for way in DIRECTIONS
        },
        "slower way": lambda row: _times(row["ratio_slower_direction"]),
    }
    return table(*groups, columns=columns, left=("link", "side", "codec"), title=title(results))


def _of_ours(row: Mapping[str, Any], words: str) -> str:
    return "-" if row["side"] == TORCH else words


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def title(results: Mapping[str, Any]) -> str:
    """Return what was raced, in a line."""
    job = results["job"]
    return f"{job['model']} cut after {', '.join(job['cuts'])}, {contest.title(results)}"


def figure(results: Mapping[str, Any]) -> Figure:
    """Samples per second by link: torch first, and the bound; links that could not be shaped are left out."""
    rows = {(row["link"], _side(row)): row for row in results["rows"]}
    links, sides = (list(dict.fromkeys(names)) for names in zip(*rows, strict=True)) if rows else ([], [])
    codecs = list(dict.fromkeys(row["codec"] for row in rows.values()))
    made, (axes,) = picture.panels(1, size=(4.5 + 2.2 * len(links), 4.6))
    if rows:
        bound = results["rows"][0]["bound_samples_per_second"]
        axes.axhline(bound, color="black", lw=1, ls="--", label="computation alone (raw on loopback)")
    drawn = []
    for one in sides:
        own = [rows.get((link, one)) for link in links]
        first = next(filter(None, own))
        fill = GREY if first["side"] == TORCH else colour(codecs.index(first["codec"]) - 1)
        heights, runs = ([row and row[key] for row in own] for key in SPEEDS)
        drawn.append(Bars(one, fill, heights, runs, "//" if first["extra_in_flight"] else None))
    picture.bars(axes, links, drawn, form=picture.speed)
    picture.name(axes, title(results), x="link between the ranks, each direction", y=picture.SPEED)
    return made


def _side(row: Mapping[str, Any]) -> str:
    return "torch 1F1B" if row["side"] == TORCH else side(row["codec"], row["extra_in_flight"])
