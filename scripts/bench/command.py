"""``penstock bench TOPIC``: measures one subject, prints its table and writes ``results.json``.

A number is worth what stands beside it, so the file says on which machine, with which versions, by which
command and when it was taken."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...compression.errors import ConfigError
from ...conf.bench import BenchPipelineConfig
from ...conf.bench_codecs import BenchCodecsConfig
from ...conf.convergence import BenchConvergenceConfig
from ...pipeline.run.run_folder import RunFolder
from ...stages.files import save_json
from .. import usage
from . import asked

if TYPE_CHECKING:
    from ...stages.planner.plan import Plan

WIDTH_OF_CODECS = 110
WIDTH_OF_A_RACE = 150
WIDTH_OF_SCHEDULES = 140
RESULTS = ("results.json", "results.png")


def main(arguments: Sequence[str]) -> int:
    """Run the topic that ``arguments`` begins with; return the exit code.

    Raises: ConfigError: there is no such topic, or an option of it does not fit.
    """
    topic = arguments[0] if arguments else None
    if usage.wanted(arguments[:1]):
        print(f"penstock bench TOPIC [KEY=VALUE ...]\n\nTOPIC, each with a --help: {', '.join(TOPICS)}")
        return 0
    if topic not in TOPICS:
        named = topic and not topic.startswith("-")
        found = f"{topic} is no topic of penstock bench" if named else "penstock bench needs a topic first"
        raise ConfigError(f"{found}; known are {', '.join(TOPICS)}")
    rest = arguments[1:]
    if usage.wanted(rest):
        print(usage.text(f"bench {topic}", TOPICS[topic].schema))
        return 0
    from ..application import run

    chosen = TOPICS[topic]
    return run(
        f"bench_{topic}",
        chosen.schema,
        chosen.task,
        arguments=rest,
        early=chosen.early,
        command=f"bench {topic}",
    )


def codecs(config: BenchCodecsConfig, folder: RunFolder, typed: Sequence[str]) -> None:
    """Measure every codec on every class of tensors; what is done is printed and kept, tensor by tensor."""
    import torch

    from ...compression.kernels import jit
    from ...pipeline.run import console
    from .codecs import bench_codecs, call_overhead
    from .codecs_peers import missing, versions
    from .codecs_picture import draw
    from .codecs_table import CAPTION, overhead_table, table

    folder.begin(console.warn)
    config.threads = config.threads or 1
    torch.set_num_threads(config.threads)
    screen, results = console.screen(width_of_a_log=WIDTH_OF_CODECS), circumstances("codecs", typed)
    results |= {
        "threads": config.threads,
        "isa": config.isa or jit.host_isas()[0],
        "load_before": os.getloadavg(),
    }
    results["versions"] |= versions()
    results |= {"rows": [], "overhead": []}
    for rows in bench_codecs(config):
        results["rows"] += rows
        screen.print(table(rows))
        save_json(folder.path / "results.json", results)
    if config.isa is None:
        results["overhead"] = call_overhead(config)
        screen.print(overhead_table(results["overhead"]))
    screen.print(CAPTION, highlight=False)
    save_json(folder.path / "results.json", results | {"load_after": os.getloadavg()})
    draw(results, folder.path / "results.png")
    for line in filter(None, (missing(), *(console.short(folder.path / name) for name in RESULTS))):
        print(line)


def pipeline(config: BenchPipelineConfig, folder: RunFolder, typed: Sequence[str]) -> None:
    """Race our pipeline against torch's own 1F1B over every link; what is done is kept, link by link."""
    if config.schedule != "1f1b":
        schedules(config, folder, typed)
        return
    from ...pipeline.run import console
    from .pipeline import bench_pipeline, plan_of
    from .pipeline_picture import draw
    from .pipeline_rows import describe, table, title

    links = asked.links(config)
    plan = plan_of(config)
    folder.begin(console.warn)
    plan.save(folder.plan)
    screen = console.screen(width_of_a_log=WIDTH_OF_A_RACE)
    results = circumstances("pipeline", typed) | {"threads": config.threads, "job": _job(config, plan)}
    results |= {"load_before": os.getloadavg(), "links": [], "rows": []}
    screen.print(f"{console.short(folder.path)}: {title(results)}", highlight=False, soft_wrap=True)
    for found in bench_pipeline(config, plan, links, folder=folder.path):
        results["links"].append(found["link"])
        results["rows"] += found["rows"]
        save_json(folder.path / "results.json", results)
        screen.print(describe(found["link"]), highlight=False, soft_wrap=True)
    draw(results, folder.path / "results.png")
    screen.print(table(results))
    for name in RESULTS:
        print(console.short(folder.path / name))


def schedules(config: BenchPipelineConfig, folder: RunFolder, typed: Sequence[str]) -> None:
    """Race schedules and policies of the weights against torch's and each other."""
    from ...pipeline.run import console
    from .entrants import ALL, left_out
    from .pipeline_rows import link_facts
    from .schedules import bench_schedules, plans_of
    from .schedules_picture import draw
    from .schedules_rows import CAPTION, overhead_lines, rows_of, table, title

    link, chosen = asked.contestants(config)
    plans = plans_of(config, chosen)
    folder.begin(console.warn)
    folder.plans.mkdir(exist_ok=True)
    for name, plan in plans.items():
        plan.save(folder.plans / f"{name}.json")
    screen = console.screen(width_of_a_log=WIDTH_OF_SCHEDULES)
    job = _job(config, next(iter(plans.values()))) | {"codec": config.codecs[0], "schedules": list(chosen)}
    results = circumstances("pipeline", typed) | {"threads": config.threads, "job": job}
    results |= {"load_before": os.getloadavg(), "link": link_facts(link), "rows": [], "overhead": []}
    screen.print(f"{console.short(folder.path)}: {title(results)}", highlight=False, soft_wrap=True)
    found = bench_schedules(config, chosen, link, folder=folder.path)
    results["overhead"] = found["facts"].pop("overhead")
    results["link"] = link_facts(link, measured=found["facts"])
    results["rows"] = rows_of(found["rows"], batch_size=config.batch_size)
    save_json(folder.path / "results.json", results | {"load_after": os.getloadavg()})
    draw(results, folder.path / "results.png")
    screen.print(table(results))
    missing = left_out() if config.schedule == ALL else []
    told = [f"Left out, for want of the schedule: {', '.join(missing)}."] if missing else []
    for line in (CAPTION, *told, *overhead_lines(results["overhead"])):
        screen.print(line, highlight=False, soft_wrap=True)
    for name in RESULTS:
        print(console.short(folder.path / name))


def convergence(config: BenchConvergenceConfig, folder: RunFolder, typed: Sequence[str]) -> None:
    """Train under every policy of the weights; what is done is told and kept, run by run."""
    from ...pipeline.run import console
    from .convergence import bench_convergence, check
    from .convergence_picture import curves, draw

    runs = check(config)
    folder.begin(console.warn)
    names = ("cuts", "batch_size", "micro_batches", "points", "test_samples", "optimizer", "scheduler")
    job = {"model": _name(config.model), **{name: getattr(config, name) for name in names}}
    results = circumstances("convergence", typed) | {"threads": 1, "job": job, "runs": []}
    for number, found in enumerate(bench_convergence(config, runs), start=1):
        results["runs"].append(found)
        save_json(folder.path / "results.json", results)
        told = f"{found['set']} {found['policy']} seed {found['seed']}: {found['accuracy'][-1]:.2%} after"
        told += f" {found['updates']} updates from lr {found['lr']:g}, {found['seconds']:.0f} s"
        print(f"{number}/{len(runs)} {told}", flush=True)
    draw(results, folder.path / "results.png")
    for name in config.sets:
        for policy, curve in curves([run for run in results["runs"] if run["set"] == name]).items():
            ends = f"{curve['mean'][-1]:.2%} ({curve['least'][-1]:.2%}-{curve['most'][-1]:.2%})"
            print(f"{name:<15} {policy:<17} {ends}")
    for name in RESULTS:
        print(console.short(folder.path / name))


def _name(model: dict[str, Any]) -> str:
    return model.get("name") or model["_target_"].rpartition(".")[2]


def _job(config: BenchPipelineConfig, plan: Plan) -> dict[str, Any]:
    names = ("ranks", "batch_size", "micro_batches", "warmup", "repeats", "steps", "seconds", "seed")
    return {
        "model": _name(config.model),
        "cuts": list(plan.cuts),
        **{name: getattr(config, name) for name in names},
    }


def circumstances(topic: str, typed: Sequence[str]) -> dict[str, Any]:
    """Return what a number needs beside it: command, hardware, versions, date."""
    import torch

    return {
        "command": shlex.join(["penstock", "bench", topic, *typed]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": {"cpu": _cpu(), "cores": os.cpu_count(), "machine": platform.machine()},
        "versions": {
            "penstock": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "system": f"{platform.system()} {platform.release()}",
    }


def _cpu() -> str:
    """Return the processor's name as its maker writes it, where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """One subject: its options, and what measures it."""

    schema: type[Any]
    task: Callable[[Any, RunFolder, Sequence[str]], None]
    early: Callable[[Any, Sequence[str]], None]


TOPICS = {
    "codecs": Topic(schema=BenchCodecsConfig, task=codecs, early=asked.codecs),
    "convergence": Topic(schema=BenchConvergenceConfig, task=convergence, early=asked.convergence),
    "pipeline": Topic(schema=BenchPipelineConfig, task=pipeline, early=asked.pipeline),
}
