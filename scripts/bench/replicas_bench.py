"""``penstock bench replicas``: what several ranks for one stage are worth.

All sides of all parts take turns on the same ranks, which are started once."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...compression.errors import ConfigError, TransportError
from ...conf.bench_replicas import BenchReplicasConfig
from ...pipeline.planner.partition import partition
from ...pipeline.ranks.launch import start_ranks
from ...pipeline.run import build
from ...pipeline.run.decide import look, model_name, prepare
from ...stages.files import save_json
from ...stages.planner.layer_profile import Profile
from ...stages.planner.plan import Plan
from . import picture, replicas_ranks
from . import replicas_sides as sides
from .harness import Record, table
from .picture import GREY, Bars, colour
from .replicas_rows import byte_rows, cells, described, speed_rows, turn_rows
from .replicas_sides import ALONE, PARTS, TWO

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FACTS = ("parts", "batch_size", "micro_batches", "codec", "factors", "steps", "seconds", "repeats", "threads")


def bench(config: BenchReplicasConfig, record: Record) -> None:
    """Measure the parts, and show them.

    Raises: PenstockError: an option does not fit, or a rank failed.
    """
    if "bytes" in config.parts and not replicas_ranks.COUNTED.exists():
        raise ConfigError(
            f"parts=[bytes] reads what the system counted in {replicas_ranks.COUNTED}, which is not "
            "there; leave it out"
        )
    job = config.job()
    samples = prepare(job)
    build.optimizer(config.optimizer)
    plans = plans_of(config, look(job, samples))
    record.begin(job={"model": model_name(job)} | {name: getattr(config, name) for name in FACTS})
    record.keep(plans={name: described(plan) for name, plan in plans.items()})
    with record.folder.private() as told:
        save_json(told.path / "race.json", dataclasses.asdict(config))
        told.plans.mkdir(exist_ok=True)
        for name, plan in plans.items():
            plan.save(told.plans / f"{name}.json")
        stages = [[rank] for rank in range(max(2, *(plan.num_ranks for plan in plans.values())))]
        words = [str(told.path), *config.parts]
        start_ranks(replicas_ranks.__name__, words, errors=told.errors, stages_of_rank=stages)
        if not (measured := told.path / "measured.json").exists():
            raise TransportError("the ranks ended without a result; look at their output above")
        found = json.loads(measured.read_text())
    for part in config.parts:
        rows = ROWS[part](found[part], plans, config)
        record.keep(**{part: rows})
        record.screen.print(table(list(map(cells, rows)), left=["side"], title=TITLES[part]))


def plans_of(config: BenchReplicasConfig, profile: Profile) -> dict[str, Plan]:
    """The plans of everybody who takes part, from one measurement; shares by speed where plans have such."""
    common: dict[str, Any] = {
        "micro_batches": config.micro_batches,
        "codec": config.codec,
        "extra_in_flight": 0,
    }
    wanted = sides.sides_of(config.parts)
    first = [sides.CUT_AS[name] for name in wanted if name in sides.CUT_AS]
    found: dict[str, Plan] = {}
    for name in dict.fromkeys([*first, *wanted]):
        asked = dict(sides.SIDES[name])
        if name in sides.CUT_AS:
            asked["cuts"] = found[sides.CUT_AS[name]].cuts
        found[name] = partition(profile, **asked, **common)
    if "speeds" in config.parts and "shares" in inspect.signature(partition).parameters:
        for factor in config.factors:
            shares = sides.dealt(factor, config.micro_batches)
            asked = {"replicas": [2], "shares": shares, **common}
            found[sides.weighted(factor)] = partition(profile, **asked)
    return found


ROWS: dict[str, Callable[..., list[dict[str, Any]]]] = {
    "speeds": speed_rows,
    "stages": turn_rows,
    "exact": turn_rows,
    "bytes": byte_rows,
}
TITLES = {
    "speeds": "two ranks for one stage, one of them slower: of the speed that both have on their own",
    "stages": f"more ranks than stages, beside {TWO}",
    "exact": f"one stage on two ranks, beside {ALONE}",
    "bytes": "bytes that all ranks send in a step",
}


def figure(results: Mapping[str, Any]) -> Figure:
    """A panel for each part."""
    there = [part for part in PARTS if results.get(part)]
    made, panels = picture.panels(len(there), size=(11.0, 3.4 * len(there)), columns=1)
    for axes, part in zip(panels, there, strict=True):
        _DRAWN[part](axes, results[part])
        axes.set_title(TITLES[part], loc="left", fontsize=11, fontweight="bold")
    return made


def _draw_speeds(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    names, factors = (list(dict.fromkeys(row[key] for row in rows)) for key in ("side", "factor"))
    found = {(row["side"], row["factor"]): row for row in rows}
    drawn = [
        Bars(name, colour(number), [found[name, f]["share"] for f in factors],
             runs=[found[name, f]["share_of_pairs"] for f in factors])
        for number, name in enumerate(names)
    ]  # fmt: skip
    drawn.append(Bars("even shares, at most", GREY, [sides.even_share(factor) for factor in factors]))
    picture.bars(axes, [f"1:{factor}" for factor in factors], drawn, form="%.2f")
    picture.name(axes, y="of the summed speed")


def _draw_turns(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    measured = Bars("measured", colour(0), [r["seconds"] for r in rows], [r["seconds_of_runs"] for r in rows])
    simulated = Bars("simulated from its own\ninstructions", colour(1), [row["simulated"] for row in rows])
    predicted = Bars("predicted from layers\nmeasured alone", colour(2), [row["predicted"] for row in rows])
    names = [f"{row['side']}\n{row['ranks']} rank{'s' * (row['ranks'] > 1)}" for row in rows]
    picture.bars(axes, names, [measured, simulated, predicted], form="%.2f")
    picture.name(axes, y="seconds of a step")


def _draw_bytes(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    kinds = ("activations", "gradients", "exchange", "rest")
    drawn = [Bars(kind, colour(n), [row[kind] / 2**20 for row in rows]) for n, kind in enumerate(kinds)]
    picture.bars(axes, [row["side"] for row in rows], drawn, form="%.1f")
    picture.name(axes, y="MiB a step")


_DRAWN = {"speeds": _draw_speeds, "stages": _draw_turns, "exact": _draw_turns, "bytes": _draw_bytes}
