"""Race of Penstock's pipeline against torch's own, over loopback and shaped links, or schedule by schedule.

Both sides have the same model, cut, micro-batches and optimizer, and only ratios of neighbouring runs count:
all pipelines live in the same processes, a run of the rival before each of ours."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import harness
import shaped_links
from harness import Job, Options, Results, alternate, ratio_of_pairs, spread, together
from shaped_links import LOOPBACK, Link, parse_link
from torch_pipeline import TorchPipeline, stages_of

from penstock.compression.errors import ConfigError, TransportError
from penstock.compression.names import AUTO, check_name
from penstock.conf.schema import TrainConfig
from penstock.pipeline.distributed.launcher import init
from penstock.pipeline.distributed.process_group import World
from penstock.pipeline.distributed.transport import measured_rates
from penstock.pipeline.partition.partition import partition
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.run.losses import cross_entropy as loss
from penstock.pipeline.run.metrics import Totals, ratio
from penstock.pipeline.run.planning import model_name, record
from penstock.pipeline.run.run_folder import RunFolder
from penstock.pipeline.runtime.report import DIRECTIONS, Report
from penstock.stages.plan.plan import Plan
from penstock.stages.units import show_bytes, show_rate

TORCH, ALL = "torch", "all"
BYTES = tuple(f"bytes_{kind}_{way}" for kind in ("raw", "sent") for way in DIRECTIONS)
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """Options of one pipeline of ours.

    Attributes:
        rival: Side that it takes turns with: ``torch`` with the same schedule and cut, or another entrant.
        stream: True if its steps flow into each other, and only ``drain`` empties the pipeline.
    """

    schedule: str = "1f1b"
    weights: str = "latest"
    stages_per_rank: int = 1
    codec: str = "raw"
    extra_in_flight: int | str = 0
    rival: str = TORCH
    stream: bool = False

    @property
    def side(self) -> str:
        """The rival's name among all sides."""
        return f"{TORCH} {self.schedule}" if self.rival == TORCH else self.rival


SCHEDULES = {
    "1f1b": Entrant(),
    "gpipe": Entrant(schedule="gpipe"),
    "zb_h1": Entrant(schedule="zb_h1"),
    "interleaved": Entrant(schedule="interleaved", stages_per_rank=2),
    "zbv": Entrant(schedule="zbv", stages_per_rank=2),
    "dualpipev": Entrant(schedule="dualpipev", stages_per_rank=2),
    "double_buffered": Entrant(weights="double_buffered", rival="1f1b", stream=True),
    "async_1f1b": Entrant(schedule="async_1f1b", weights="stashed", rival="1f1b", stream=True),
}
COLUMNS: dict[str, Any] = {
    "link": "{link}",
    "side": "{side}",
    "schedule": "{schedule}",
    "codec": "{codec}",
    "in flight": "+{flew} ({extra_in_flight})",
    "samples/s": "{samples_per_second:.1f}",
    "x rival": "{speedup:.2f}",
    "pairs": lambda row: spread(row["speedup_of_pairs"]),
    "of sim.": "{of_simulated:.2f}",
    "bubble": lambda row: " ".join(f"{share:.0%}" for share in row["bubble"]),
    "versions": lambda row: " ".join(map(str, row["live_versions"])),
    **{way: lambda row, way=way: show_bytes(row[f"bytes_sent_{way}"]) for way in DIRECTIONS},
    "ratio": lambda row: f"{ratio(*(sum(row[n] for n in BYTES if k in n) for k in ('raw', 'sent'))):.2f}x",
}


def options() -> Any:
    """Return the parser of the command line."""
    made = harness.parser(__doc__, job="data=fake ranks=2 batch_size=128 micro_batches=8", repeats=5)
    listed, count, add = harness.list_of, harness.at_least(1), made.add_argument
    names = listed(known=[ALL, *SCHEDULES])
    add("--schedules", type=names, help=f"race schedules instead of codecs: all, or {', '.join(SCHEDULES)}")
    codec = lambda name: check_name(name) or name  # noqa: E731
    add("--codecs", type=listed(codec), default=["raw", "zero_value", "auto"],
        help="codecs of Penstock, a contestant each; for schedules the first")  # fmt: skip
    depth = lambda text: AUTO if text == AUTO else harness.at_least(0)(text)  # noqa: E731
    add("--extra-in-flight", type=listed(depth), default=[0, AUTO],
        help="micro-batches in flight beyond 1f1b, a contestant each; for schedules the first")  # fmt: skip
    link = lambda text: parse_link(text).name  # noqa: E731
    add("--links", type=listed(link), default=[LOOPBACK, "1Gbit", "100Mbit", "20Mbit", "10Mbit"],
        help="loopback, or rates of each rank's link to the others")  # fmt: skip
    add("--steps", type=count, default=10, help="most steps of a run")
    seconds = "a run has fewer steps where steps would take longer than this"
    add("--seconds", type=harness.at_least(0.0), default=4.0, help=seconds)
    return made


def bench(asked: Options, path: Path) -> Results:
    """Race all entrants on every link; return the results."""
    defaults = {"data": "fake", "data.drop_last": "true", "batch_size": 128, "micro_batches": 8}
    config = harness.train_config(asked.job, defaults, {"schedule": "1f1b", "codec": "raw"})
    if config.batch_size % config.micro_batches or config.ranks < 2:
        raise ConfigError(
            f"torch's pipeline needs ranks=2 or more and micro-batches of one size, found "
            f"ranks={config.ranks} batch_size={config.batch_size} micro_batches={config.micro_batches}; "
            "change one"
        )
    links = [parse_link(name) for name in asked.links]
    entrants = entrants_of(asked)
    plans = plans_of(config, entrants)
    fields = ("ranks", "batch_size", "micro_batches", "seed", "threads")
    facts = {name: getattr(config, name) for name in fields} | {"model": model_name(config)}
    facts |= {name: getattr(asked, name) for name in ("repeats", "steps", "seconds")}
    facts["cuts"] = {name: list(plan.cuts) for name, plan in plans.items()}
    results = Results(path, job=facts, links=[], rows=[])
    with results.folder().private() as folder:
        for link in links:
            shared = {name: dataclasses.asdict(one) for name, one in entrants.items()}
            told = {"link": dataclasses.asdict(link), "entrants": shared}
            places: dict[str, Any] = {"ranks": config.ranks, "device": link.device, "facts": told}
            try:
                with shaped_links.joined(link, ranks=config.ranks) as places["ends"]:
                    measured = harness.measure_on_ranks("pipeline", folder, asked, config, plans, **places)
            except TransportError as error:
                if link.rate is None or "ends" in places:
                    raise
                results.keep(links=[{"link": link.name, "why_not": str(error)}])
                print(f"{link.name}: could not be shaped and was not raced on: {error}", flush=True)
                continue
            rate = measured["facts"]["rate_measured"]
            results.keep(links=[told["link"] | {"why_not": None} | measured["facts"]])
            print(f"{link.name}: {show_rate(rate) if rate else 'no rate'} measured", flush=True)
            results.keep(rows=rows_of(link, measured["runs"], entrants, plans, config.batch_size))
    harness.show(results.content["rows"], COLUMNS, left=4)
    return results


def entrants_of(asked: Options) -> dict[str, Entrant]:
    """Return the schedules that are asked for, else 1f1b with every codec and depth."""
    if not asked.schedules:
        pairs = [(codec, extra) for codec in asked.codecs for extra in asked.extra_in_flight]
        return {f"{c}, +{e}": Entrant(codec=c, extra_in_flight=e) for c, e in pairs}
    names = list(SCHEDULES) if ALL in asked.schedules else asked.schedules
    rivals = [SCHEDULES[name].rival for name in names if SCHEDULES[name].rival != TORCH]
    known = {name: SCHEDULES[name] for name in (*rivals, *names)}
    depths = {name: 0 if one.stream else asked.extra_in_flight[0] for name, one in known.items()}
    return {
        name: dataclasses.replace(one, codec=asked.codecs[0], extra_in_flight=depths[name])
        for name, one in known.items()
    }


def plans_of(config: TrainConfig, entrants: Mapping[str, Entrant]) -> dict[str, Plan]:
    """Plan every entrant from one measurement of the model; those of as many stages have the same cuts."""
    job, plans, cuts = Job(config), dict[str, Plan](), dict[int, Any]()
    model = job.model()
    profile = record(config, job.samples, model=model).measure()
    for name, entrant in entrants.items():
        stages = config.ranks * entrant.stages_per_rank
        chosen = config.cuts if config.cuts is not None and len(config.cuts) == stages - 1 else None
        asks: dict[str, Any] = {"ranks": config.ranks, "micro_batches": config.micro_batches}
        asks |= {key: getattr(entrant, key) for key in ("schedule", "extra_in_flight", "codec", "weights")}
        plans[name] = partition(profile, stages=stages, cuts=cuts.get(stages, chosen), **asks)
        cuts[stages] = plans[name].cuts
        stages_of(model, plans[name])  # refuses what torch's stages cannot have
    return plans


def rows_of(
    link: Link, runs: Mapping[str, Any], entrants: Mapping[str, Entrant], plans: Mapping[str, Plan], size: int
) -> list[dict[str, Any]]:
    """Return a row of each side: samples per second, those relative to its rival's, and bytes of a step."""
    rows: dict[str, dict[str, Any]] = {}

    def speeds(seconds: Sequence[float]) -> dict[str, Any]:
        runs = [size / one for one in seconds]
        return {"samples_per_second": statistics.median(runs), "samples_per_second_of_runs": runs}

    for name, entrant in entrants.items():
        run, plan, row = runs[name], plans[name], {"link": link.name, "schedule": entrant.schedule}
        if entrant.rival == TORCH and entrant.side not in rows:  # its tensors pass all cuts as they are
            cuts = {way: sum(getattr(stage, f"bytes_{way}") for stage in plan.stages) for way in DIRECTIONS}
            passed = {field: plan.micro_batches * cuts[field.rpartition("_")[2]] for field in BYTES}
            passed |= {"side": TORCH, "codec": "none", "extra_in_flight": 0}
            rows[entrant.side] = row | passed | speeds(run["rival"])
        row |= {"side": "penstock", "name": name, "rival": entrant.side, "weights": entrant.weights}
        row |= {"codec": entrant.codec, "extra_in_flight": entrant.extra_in_flight, "stages": plan.num_stages}
        row |= {key: one for key, one in run.items() if key not in ("rival", "penstock")}
        rows[name] = row | speeds(run["penstock"]) | ratio_of_pairs(run["rival"], run["penstock"])
        if run["simulated_seconds"]:
            rows[name]["of_simulated"] = run["simulated_seconds"] / statistics.median(run["penstock"])
    return list(rows.values())


# Ranks.


class Racer:
    """A pipeline on this rank that takes turns: torch's, or Penstock's, whose steps are counted."""

    def __init__(
        self, pipe: TorchPipeline | Pipeline, plan: Plan, batches: Sequence[Any], stream: bool
    ) -> None:
        self.pipe, self.plan, self.stream = pipe, plan, stream
        self._batches, self.num_steps = cycle(batches), 1
        self.totals = Totals(num_stages=plan.num_stages)

    def take_step(self) -> float:
        """Take a step on the next batch; return its loss, which torch has on the last stage's rank alone."""
        found = self.pipe.step(*next(self._batches))
        if isinstance(found, Report):
            self.totals.add(found)
            return found.loss
        return found or 0.0

    def warm_up(self, asked: Options) -> float:
        """Take the steps that are not timed, and see how many fit into a run; return the first loss."""
        world = World.default()
        first = world.broadcast(self.take_step(), self.plan.owner(-1))
        self.num_steps = 2
        seconds = world.broadcast(self.run(), 0)
        self.num_steps = max(1, min(asked.steps, int(asked.seconds / seconds)))
        while isinstance(self.pipe, Pipeline) and not (self.stream or self.pipe.policy.settled):
            self.take_step()  # ``codec=auto`` still tries
        self.totals = Totals(num_stages=self.plan.num_stages)
        return first

    def run(self) -> float:
        """Take the steps of a run together with the other ranks; return the seconds of one step.

        A stream is filled before and drained after: others will use the group."""
        if self.stream:
            self.take_step()
        seconds = together(self.take_step, self.num_steps)
        if self.stream and isinstance(self.pipe, Pipeline):
            self.pipe.drain()
        return seconds

    def measured(self, policy: Any) -> dict[str, Any]:
        """Bytes and bubbles of a step, most versions of the weights, the depth and best step of ``auto``."""
        totals = self.totals
        return {name: sum(stage[name] for stage in totals.stages) / totals.num_steps for name in BYTES} | {
            "flew": policy.extra,
            "simulated_seconds": min((turn.predicted for turn in policy.turns), default=None),
            "bubble": [totals.bubble(rank) for rank in range(self.plan.num_ranks)],
            "live_versions": [stage["live_versions"] for stage in totals.stages],
        }


def race_rank(folder: RunFolder, asked: Options) -> dict[str, Any]:
    """Race on this rank; return ``facts`` of the link and ``runs`` by contestant."""
    link, config = Link(**asked.link), folder.read_config()
    entrants = {name: Entrant(**one) for name, one in asked.entrants.items()}
    facts: dict[str, Any] = {}
    if link.rate is not None:
        facts["offloads_off"] = shaped_links.switch_off_offloads(link.device)
    world = init(deadline=config.deadline)
    rate = measured_rates(world, [(0, 1)], deadline=config.deadline).get((0, 1))
    facts |= {"rate_measured": rate and 8 * rate, "congestion_control": CONGESTION.read_text().strip()}
    job, plans, sides = Job(config), harness.load_plans(folder), dict[str, Racer]()
    batches, pipes = job.batches(), dict[str, Pipeline]()
    common: dict[str, Any] = {"loss": loss, "optimizer": job.optimizer}
    for name, entrant in entrants.items():
        if entrant.rival == TORCH and entrant.side not in sides:
            rival = TorchPipeline(job.model(), plans[name], **common)
            sides[entrant.side] = Racer(rival, plans[name], batches, stream=False)
    common |= {"seed": config.seed, "deadline": config.deadline}
    for name, entrant in entrants.items():
        pipe = pipes[name] = Pipeline(job.model(), plans[name], **common)
        sides[name] = Racer(pipe, pipe.plan, batches, stream=entrant.stream)
    first = {name: side.warm_up(asked) for name, side in sides.items()}
    streams = {name for name, entrant in entrants.items() if entrant.stream}
    facts["first_losses"] = {name: value for name, value in first.items() if name not in streams}
    harness.refuse_other_losses(facts["first_losses"], job.model())
    turns: dict[tuple[str, str], Any] = {}
    for name, entrant in entrants.items():  # a run of the rival before each of ours
        turns |= {(name, "rival"): sides[entrant.side].run, (name, "penstock"): sides[name].run}
    taken = alternate(turns, asked.repeats)
    runs = {
        name: sides[name].measured(pipe.policy) | {who: taken[name, who] for who in ("rival", "penstock")}
        for name, pipe in pipes.items()
    }
    world.close()
    return {"facts": facts, "runs": runs}


if __name__ == "__main__":
    harness.main(options(), bench, rank=race_rank)
