"""``penstock bench pipeline schedule=all``: every schedule and every policy of the weights on one job.

Where the number of stages is the same, so is the cut: rows differ in the order of the work alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ...compression.errors import ConfigError, TransportError
from ...conf.bench import BenchPipelineConfig
from ...pipeline.planner.partition import partition
from ...pipeline.run import console
from ...pipeline.run.decide import look
from ...pipeline.run.run_folder import RunFolder
from ...stages.planner.plan import Plan
from ...stages.units import show_bytes
from . import contest, picture, refusals
from .contest import link_facts
from .contestants import ENTRANTS, TORCH, Entrant, rivals
from .harness import SPEEDS, speeds, speedups
from .instruction_cost import instruction_cost, sentence
from .picture import COLOURS, GREY, Bars, colour
from .race import Race
from .shaped_links import why_not
from .table import spread, table
from .torch_pipelines import CLASSES, stages_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BUBBLES = ("bubble", "bubble_simulated")
STAGES_OF_COST = 4
"""Stages in one process on which the cost of an instruction is measured as well."""

THEIRS, PLAIN = "torch, the same schedule and cut", "penstock 1f1b or gpipe, a stage a rank"
CAPTION = (
    "samples/s: medians of runs that take turns with those of the rival; x: median of the ratios of "
    "neighbouring runs. bubble: share of a step in which a rank computes nothing, measured, and simulated "
    "with the median durations of the same instructions (of a stream: by what the busiest rank has to do). "
    "versions: the most distinct versions of the weights alive at once on each stage, and all their bytes."
)


def bench(config: BenchPipelineConfig, folder: RunFolder, typed: Sequence[str]) -> None:
    """Race schedules and policies of the weights against torch's and each other.

    Raises: PenstockError: an option does not fit, the link cannot be shaped here, or a rank failed.
    """
    link, chosen = refusals.contestants(config)
    plans = plans_of(config, chosen)
    folder.begin(console.warn)
    contest.save_plans(plans, folder)
    job = {"codec": config.codecs[0], "schedules": list(chosen)}
    record = contest.record(config, next(iter(plans.values())), folder, typed, job, link=link_facts(link, {}))
    record.begin(title(record.content))
    if reason := why_not(link):
        raise TransportError(f"links=[{link.name}] could not be shaped: {reason}")
    turns = {name: f"{TORCH} {name}" if one.rival == TORCH else one.rival for name, one in chosen.items()}
    streams = [name for name in plans if ENTRANTS[name].stream]
    found = contest.raced(
        Race(config=config, link=link, rivals=turns, streams=streams, instructions=True), plans, folder
    )
    facts = found["facts"]
    facts["first_losses"] = {name: loss for name, loss in facts["first_losses"].items() if name in plans}
    costs = [
        instruction_cost(stages=STAGES_OF_COST, micro_batches=config.micro_batches, repeats=config.repeats)
    ]
    costs += facts.pop("overhead")
    rows = [row_of(name, run, config.batch_size) for name, run in found["runs"].items()]
    record.keep(link=link_facts(link, facts), rows=rows, overhead=costs)
    record.draw(figure)
    record.screen.print(shown(record.content))
    record.say(CAPTION, *map(sentence, costs))
    record.end()


def plans_of(config: BenchPipelineConfig, chosen: Mapping[str, Entrant]) -> dict[str, Plan]:
    """Make the plan of every entrant and rival from one measurement, and fill in the threads of ``config``.

    Raises: PenstockError: an option does not fit, or the model cannot be cut so, by us or for torch's side.
    """
    job, samples, model = contest.model_of(config)
    profile, plans = look(job, samples, model=model), {}
    for name, entrant in (dict(chosen) | rivals(dict(chosen))).items():
        stages = config.ranks * entrant.stages_per_rank
        plans[name] = partition(
            profile,
            stages=stages,
            cuts=_cuts(config, stages),
            ranks=config.ranks,
            schedule=entrant.schedule,
            micro_batches=config.micro_batches,
            extra_in_flight=0 if entrant.stream else config.extra_in_flight[0],
            codec=config.codecs[0],
            weights=entrant.weights,
        )
        stages_of(model, plans[name])
    return plans


def _cuts(config: BenchPipelineConfig, stages: int) -> list[str] | None:
    """The given cuts; with one stage on each rank, every second of those for two."""
    if config.cuts is None or len(config.cuts) == stages - 1:
        return config.cuts
    if stages == config.ranks and len(config.cuts) == 2 * config.ranks - 1:
        return config.cuts[1::2]
    raise ConfigError(
        f"{stages} stages need {stages - 1} cuts, found {len(config.cuts)}; give {2 * config.ranks - 1}, of "
        "which schedules with one stage on each rank take every second, or leave cuts out"
    )


def row_of(name: str, found: Mapping[str, Any], batch_size: int) -> dict[str, Any]:
    """Return the row of an entrant: speeds of both sides, ratios of pairs, and what was measured besides."""
    entrant, theirs, ours = ENTRANTS[name], found["rival"], found["penstock"]
    return {
        "name": name,
        **{field: getattr(entrant, field) for field in ("schedule", "weights", "stages_per_rank", "rival")},
        "rival_class": CLASSES[entrant.schedule] if entrant.rival == TORCH else None,
        **speeds(ours, batch_size),
        **speeds(theirs, batch_size, "rival_"),
        **speedups([rival / own for rival, own in zip(theirs, ours, strict=True)]),
        **{
            key: value
            for key, value in found.items()
            if key not in ("rival", "penstock") and "bytes" not in key
        },
    }


def shown(results: Mapping[str, Any]) -> Table:
    """Return ``results`` for people."""
    columns = {
        "schedule": lambda row: row["name"],
        "stages": lambda row: str(row["num_stages"]),
        "samples/s": lambda row: f"{row['samples_per_second']:.1f}",
        "rival": lambda row: row["rival"],
        "rival's": lambda row: f"{row['rival_samples_per_second']:.1f}",
        "x": lambda row: f"{row['speedup']:.2f}",
        "pairs": lambda row: spread(row["speedup_of_pairs"]),
        "bubble": lambda row: _shares(row["bubble"]),
        "simulated": lambda row: _shares(row["bubble_simulated"]),
        "versions": lambda row: _versions(row["versions"]),
    }
    return table(results["rows"], columns=columns, left=("schedule", "stages", "rival"), title=title(results))


def _shares(of_ranks: Sequence[float]) -> str:
    return " ".join(f"{100 * share:.0f}" for share in of_ranks) + " %"


def _versions(of_stages: Sequence[Mapping[str, int]]) -> str:
    live = " ".join(str(stage["num_live"]) for stage in of_stages)
    return f"{live}  {show_bytes(sum(stage['num_bytes'] for stage in of_stages))}"


def title(results: Mapping[str, Any]) -> str:
    """Return what was raced, in a line."""
    job = results["job"]
    return f"{job['model']}, {contest.title(results)}, codec {job['codec']}, {results['link']['link']}"


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


def _label(row: Mapping[str, Any]) -> str:
    policy = f"\n{row['weights']}" if row["weights"] not in ("latest", row["name"]) else ""
    return f"{row['name']}{policy}\n{row['num_stages']} stages"


def _dots(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """A full dot for the measured bubble of each rank, an empty one for the simulated."""
    num_ranks = max((len(row["bubble"]) for row in rows), default=0)
    for rank in range(num_ranks):
        places = [number + 0.22 * (rank - (num_ranks - 1) / 2) for number in range(len(rows))]
        own = colour(rank + 1)
        measured, on_paper = ([100 * row[key][rank] for row in rows] for key in BUBBLES)
        for heights, kind, fill in ((measured, "measured", own), (on_paper, "simulated", "none")):
            axes.scatter(
                places, heights, 34, zorder=3, label=f"rank {rank}, {kind}", facecolor=fill, edgecolor=own
            )
        axes.vlines(places, measured, on_paper, color=own, linewidth=0.8)
    picture.name(axes, y="bubble, % of a step")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#E4E7EB", linewidth=0.8)
    axes.set_axisbelow(True)
    picture.legend(axes)
