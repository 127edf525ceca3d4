"""Predictions of the planner: cuts of published graphs beside the optimum, steps of networks beside runs.

Each network is planned and trained anew for every repeat, so that measurement and run are neighbours: the
speed of a machine differs from minute to minute."""

import dataclasses
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np
import shaped_links
from harness import Options, Results
from shaped_links import ADDRESSES, LOOPBACK, Link, parse_link

from penstock.compression.errors import TransportError
from penstock.pipeline.distributed.launcher import private_folder
from penstock.pipeline.partition.partition import partition
from penstock.pipeline.schedules.simulate import simulate_step
from penstock.stages.plan.plan import Plan
from penstock.stages.profiling.network_profile import Profile

WORKERS, RATES = (2, 4, 8, 16), ("100Mbit", "1Gbit", "10Gbit", "100Gbit")
NETWORKS = ("resnet50", "vgg16_bn", "densenet121", "mobilenet_v3_large", "gpt", "llama")
TEXT = "data=text batch_size=16 micro_batches=4"
JOBS = {"gpt": f"model=gpt model.width=256 {TEXT}", "llama": f"model._target_=llama_logits.Llama {TEXT}"}
JOB = "data=fake data.num_samples=512 batch_size=32 micro_batches=4"
FIXED = "ranks=2 threads=1 extra_in_flight=0 epochs=9"
GRAPH_COLUMNS = {
    "graph": "{graph}", "layers": "{layers}", "ranks": "{ranks}", "link": "{link}",
    "slowest rank": "{seconds:.4f} s", "optimum": "{optimum:.4f} s", "over it": "{over:.1%}",
    "its step": "{exact_step:.3f} s", "the plan's": "{step:.3f} s", "speed": "{faster:.2f}x",
    "planned in": "{took:.2f} s",
}  # fmt: skip
STEP_COLUMNS = {
    "network": "{network}", "link": "{link}", "predicted": "{predicted:.3f} s",
    "measured": "{measured:.3f} s", "error": "{error:+.1%}", "errors": "{errors}",
    "half the range of runs": "{half_range:.1%}", "bytes": "{bytes:+.1%}", "packing": "{packing:.2%}",
}  # fmt: skip


def options() -> Any:
    """Return the options."""
    made = harness.parser(__doc__, repeats=5)
    made.add_argument("--graphs", type=Path, help="folder with graph files of PipeDream; none: no such table")
    names = harness.list_of()
    made.add_argument(
        "--networks", type=names, default=list(NETWORKS), help="model=NAME of each run, or llama"
    )
    made.add_argument("--links", type=names, default=[LOOPBACK, "100Mbit"], help="loopback, or rates")
    made.add_argument("--codec", default="raw", help="codec of every run")
    made.add_argument("--steps", type=harness.at_least(4), default=12, help="steps of a run")
    return made


def bench(asked: Options, path: Path) -> Results:
    """Cut the graphs, and plan and train the networks; return the results."""
    facts = {"steps": asked.steps, "repeats": asked.repeats, "job": JOB, "jobs": JOBS, "fixed": FIXED}
    facts["codec"] = asked.codec
    results = Results(path, job=facts, graphs=[], rows=[])
    for file in sorted(asked.graphs.glob("*.txt")) if asked.graphs else ():
        results.keep(graphs=list(_cuts(file)))
    if results.content["graphs"]:
        harness.show(results.content["graphs"], GRAPH_COLUMNS)
    for name, link in itertools.product(asked.networks, map(parse_link, asked.links)):
        runs = [_run(name, link, asked.steps, asked.codec) for _ in range(asked.repeats)]
        results.keep(rows=[_row(name, link, runs)])
        harness.show([results.content["rows"][-1]], STEP_COLUMNS)
    if results.content["rows"]:
        harness.show(results.content["rows"], STEP_COLUMNS)
    return results


def _cuts(file: Path) -> Iterator[dict[str, Any]]:
    profile, name = Profile.from_pipedream(file), file.name.partition(".")[0]
    for ranks, link in itertools.product((n for n in WORKERS if n <= len(profile.layers)), RATES):
        asks: Any = {"stages": ranks, "link": link, "micro_batches": 2 * ranks, "codec": "raw"}
        plan, began = partition(profile, **asks, looks=0), time.perf_counter()
        chosen = partition(profile, **asks)
        took = time.perf_counter() - began
        steps = [simulate_step(one)[1].seconds for one in (plan, chosen)]
        assert plan.link is not None, "it was given"
        seconds = max(
            max(one.forward_seconds + one.backward_seconds, 8 * one.bytes_forward / plan.link)
            for one in plan.stages
        )
        least = optimum(profile, ranks, plan.link)
        yield {
            "graph": name, "layers": len(profile.layers), "ranks": ranks, "link": link, "took": took,
            "seconds": seconds, "optimum": least, "over": seconds / least - 1,
            "exact_step": steps[0], "step": steps[1], "faster": steps[0] / steps[1],
        }  # fmt: skip


def optimum(profile: Profile, parts: int, rate: float) -> float:
    """The least seconds of the costliest of so many parts, by a table of all their starts and ends."""
    seconds = [layer.forward_seconds + layer.backward_seconds for layer in profile.layers]
    sums, number = np.concatenate([[0], np.cumsum(seconds)]), len(seconds)
    passing = np.zeros(number + 1)
    for value in profile.values:
        passing[value.producer + 1 : max(value.users, default=value.producer) + 1] += value.num_bytes
    edge, spans = 8 * passing / rate, sums[None, :] - sums[:, None]
    spans[np.tril_indices(number + 1)] = np.inf
    best = np.where(np.arange(number + 1) > 0, np.maximum(sums, edge), np.inf)
    for _ in range(parts - 1):
        best = np.maximum(np.min(np.maximum(best[:, None], spans), axis=0), edge)
    return float(best[-1])


def _run(name: str, link: Link, steps: int, codec: str) -> dict[str, Any]:
    """Plan and train a network on two ranks; return the prediction of its summary."""
    with private_folder() as folder, shaped_links.joined(link) as ends:
        typed = f"{JOBS.get(name, f'model={name} {JOB}')} {FIXED} codec={codec} max_steps={steps}"
        typed += f" hydra.run.dir={folder}/run"
        typed += "" if link.rate is None else f" link={link.name}"
        address = "127.0.0.1" if link.rate is None else ADDRESSES[0]
        meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(_free_port())}
        meeting |= {"GLOO_SOCKET_IFNAME": link.device, "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        started = [
            subprocess.Popen(
                [*end, sys.executable, "-m", "penstock", "train", *typed.split()],
                env=os.environ | meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=Path(__file__).parent,  # of llama_logits.py
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank, end in enumerate(ends)
        ]  # fmt: skip
        said = [process.communicate()[0] for process in started]
        if any(process.returncode for process in started):
            raise TransportError(f"penstock train {typed} failed: {said[0].strip().splitlines()[-1]}")
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
        packing = _packing(Plan.load(Path(folder) / "run" / "plan.json"))
    pairs = [(stage["predicted_bytes"], stage["peak_bytes"]) for stage in summary["stages"]]
    return summary["prediction"] | {"bytes": pairs, "packing": packing}


def _packing(plan: Plan) -> float:
    """By how much packing lengthens a simulated step: the most that frames in parts could save, which are
    packed, sent and unpacked at once."""
    none = {"packing_forward": 0.0, "packing_backward": 0.0}
    free = dataclasses.replace(plan, stages=tuple(dataclasses.replace(s, **none) for s in plan.stages))
    return simulate_step(plan)[1].seconds / simulate_step(free)[1].seconds - 1


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


def _row(name: str, link: Link, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median step as predicted and as measured; how far the measured ones lie apart, and errors of bytes."""
    predicted, measured = zip(*(run["step_seconds"] for run in runs), strict=True)
    errors = sorted(one / other - 1 for one, other in zip(predicted, measured, strict=True))
    middle = statistics.median(measured)
    most = max((a / b - 1 for run in runs for a, b in run["bytes"]), key=abs)
    return {
        "network": name, "link": link.name, "predicted": statistics.median(predicted), "measured": middle,
        "error": statistics.median(errors), "errors": f"{errors[0]:+.0%} to {errors[-1]:+.0%}", "bytes": most,
        "half_range": (max(measured) - min(measured)) / 2 / middle, "runs": runs,
        "packing": max(run["packing"] for run in runs),
    }  # fmt: skip


if __name__ == "__main__":
    harness.main(options(), bench)
