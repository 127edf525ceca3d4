"""``penstock bench pipeline schedule=all``: every schedule and every policy of the weights on one job.

Where the number of stages is the same, so is the cut: rows differ in the order of the work alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ...compression.errors import TransportError
from ...conf.bench import BenchPipelineConfig
from ...stages.units import show_bytes
from . import contest, picture
from .contest import link_facts, title
from .contestants import ENTRANTS, TORCH, entrants, rivals
from .harness import SPEEDS, Record, Row, compared, speeds, spread, table
from .instruction_cost import instruction_cost, sentence
from .picture import COLOURS, GREY, Bars, colour
from .race import Race
from .shaped_links import links_of, why_not
from .torch_pipelines import CLASSES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STAGES_OF_COST = 4
"""Stages in one process on which the cost of an instruction is measured as well."""

THEIRS, PLAIN = "torch, the same schedule and cut", "penstock 1f1b or gpipe, a stage a rank"
CAPTION = (
    "samples/s: medians of runs that take turns with those of the rival; x: median of the ratios of "
    "neighbouring runs. bubble: share of a step in which a rank computes nothing, measured, and simulated "
    "with the median durations of the same instructions (of a stream: by what the busiest rank has to do). "
    "versions: the most distinct versions of the weights alive at once on each stage, and all their bytes."
)


def bench(config: BenchPipelineConfig, record: Record) -> None:
    """Race schedules and policies of the weights against torch's and each other.

    Raises: PenstockError: an option does not fit, the link cannot be shaped here, or a rank failed.
    """
    link, chosen = links_of(config)[0], entrants(config.schedule)
    plans = contest.plans_of(config, chosen | rivals(chosen))
    job = {"codec": config.codecs[0], "schedules": list(chosen)}
    contest.begin(record, config, next(iter(plans.values())), job, link=link_facts(link, {}))
    contest.save_plans(plans, record.folder)
    if reason := why_not(link):
        raise TransportError(f"links=[{link.name}] could not be shaped: {reason}")
    turns = {name: f"{TORCH} {name}" if one.rival == TORCH else one.rival for name, one in chosen.items()}
    streams = [name for name in plans if ENTRANTS[name].stream]
    told = Race(config=config, link=link, rivals=turns, streams=streams, instructions=True)
    found = contest.raced(told, plans, record.folder)
    facts = found["facts"]
    options: dict[str, Any] = {"micro_batches": config.micro_batches, "repeats": config.repeats}
    facts["first_losses"] = {name: loss for name, loss in facts["first_losses"].items() if name in plans}
    costs = [instruction_cost(stages=STAGES_OF_COST, **options), *facts.pop("overhead")]
    rows = [row_of(name, run, config.batch_size) for name, run in found["runs"].items()]
    record.keep(link=link_facts(link, facts), rows=rows, overhead=costs)
    record.screen.print(shown(record.content))
    record.say(CAPTION, *map(sentence, costs))


def row_of(name: str, found: Mapping[str, Any], batch_size: int) -> dict[str, Any]:
    """Return the row of an entrant: speeds of both sides, ratios of pairs, and what was measured besides."""
    entrant, theirs, ours = ENTRANTS[name], found["rival"], found["penstock"]
    facts = {field: getattr(entrant, field) for field in ("schedule", "weights", "stages_per_rank", "rival")}
    facts |= {"name": name, "rival_class": CLASSES[entrant.schedule] if entrant.rival == TORCH else None}
    rest = {key: one for key, one in found.items() if key not in ("rival", "penstock") and "bytes" not in key}
    return facts | compared(ours, theirs, batch_size) | speeds(theirs, batch_size, "rival_") | rest


def shown(results: Mapping[str, Any]) -> Table:
    """Return ``results`` for people."""
    rows = [_words(row) for row in results["rows"]]
    return table(rows, left=("schedule", "stages", "rival"), title=title(results))


def _words(row: Row) -> dict[str, str]:
    live = " ".join(str(stage["num_live"]) for stage in row["versions"])
    return {
        "schedule": row["name"],
        "stages": str(row["num_stages"]),
        "samples/s": f"{row['samples_per_second']:.1f}",
        "rival": row["rival"],
        "rival's": f"{row['rival_samples_per_second']:.1f}",
        "x": f"{row['speedup']:.2f}",
        "pairs": spread(row["speedup_of_pairs"]),
        "bubble": _shares(row["bubble"]),
        "simulated": _shares(row["bubble_simulated"]),
        "versions": f"{live}  {show_bytes(sum(stage['num_bytes'] for stage in row['versions']))}",
    }


def _shares(of_ranks: Sequence[float]) -> str:
    return " ".join(f"{100 * share:.0f}" for share in of_ranks) + " %"


def figure(results: Mapping[str, Any]) -> Figure:
    """Samples per second, ours and the rival's, above; bubbles of the ranks, which explain them, below."""
    rows = results["rows"]
    size = 3.5 + 1.15 * len(rows), 6.4
    made, (above, below) = picture.panels(2, size=size, columns=1, sharex=True, height_ratios=(3, 2))
    kinds = [(THEIRS, GREY) if row["rival_class"] else (PLAIN, COLOURS[4]) for row in rows]
    labels = ["_" if kind in kinds[:i] else kind[0] for i, kind in enumerate(kinds)]
    (heights, runs), (others, their_runs) = (
        [[row[who + key] for row in rows] for key in SPEEDS] for who in ("", "rival_")
    )
    ours = Bars("penstock", COLOURS[0], heights, runs)
    theirs = Bars(labels, [fill for _, fill in kinds], others, their_runs)
    picture.bars(above, list(map(_label, rows)), [ours, theirs], form=picture.speed)
    picture.name(above, title(results), y=picture.SPEED)
    _dots(below, rows)
    return made


def _label(row: Row) -> str:
    policy = f"\n{row['weights']}" if row["weights"] not in ("latest", row["name"]) else ""
    return f"{row['name']}{policy}\n{row['num_stages']} stages"


def _dots(axes: Axes, rows: Sequence[Row]) -> None:
    """A full dot for the measured bubble of each rank, an empty one for the simulated."""
    num_ranks = max((len(row["bubble"]) for row in rows), default=0)
    for rank in range(num_ranks):
        places = [number + 0.22 * (rank - (num_ranks - 1) / 2) for number in range(len(rows))]
        own = colour(rank + 1)
        measured, on_paper = (
            [100 * row[key][rank] for row in rows] for key in ("bubble", "bubble_simulated")
        )
        style: dict[str, Any] = {"s": 34, "zorder": 3, "edgecolor": own}
        axes.scatter(places, measured, label=f"rank {rank}, measured", facecolor=own, **style)
        axes.scatter(places, on_paper, label=f"rank {rank}, simulated", facecolor="none", **style)
        axes.vlines(places, measured, on_paper, color=own, linewidth=0.8)
    picture.name(axes, y="bubble, % of a step")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#E4E7EB", linewidth=0.8)
    axes.set_axisbelow(True)
    picture.legend(axes)
