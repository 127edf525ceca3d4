"""Race of Penstock's pipeline against torch's own, over loopback and shaped links, or schedule by schedule.

Both sides have the same model, cut, micro-batches and optimizer, and only ratios of neighbouring runs count:
all pipelines live in the same processes, a run of the rival before each of ours."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import cycle
from operator import add
from pathlib import Path
from typing import Any

import harness
import shaped_links
import torch
import torch.distributed as dist
from harness import Job, Options, Results, Row, alternate, ratio_of_pairs, say, speeds, spread, timed
from shaped_links import LATENCY_MS, LOOPBACK, Link
from torch_pipelines import CLASSES, TorchPipeline, stages_of

from penstock.compression.errors import ConfigError, TransportError
from penstock.compression.names import AUTO, check_name
from penstock.conf.schema import TrainConfig
from penstock.pipeline.distributed.launcher import init
from penstock.pipeline.distributed.process_group import World
from penstock.pipeline.partition.partition import partition
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.run.metrics import DIRECTIONS, Totals, ratio
from penstock.pipeline.run.planning import look, model_name
from penstock.pipeline.run.run_folder import RunFolder
from penstock.pipeline.run.training_loop import loss
from penstock.pipeline.schedules.instruction import Instruction, Span
from penstock.pipeline.schedules.messages import Message, StepMessages
from penstock.pipeline.schedules.simulate import durations, simulate
from penstock.stages.plan.plan import Plan
from penstock.stages.units import show_bytes, show_rate

TORCH, ALL = "torch", "all"
BYTES = tuple(f"bytes_{kind}_{way}" for kind in ("raw", "sent") for way in DIRECTIONS)
PROBE_SECONDS, LEAST_PROBE, MOST_PROBE = 0.5, 1 << 20, 1 << 25
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """A schedule with its weights.

    Attributes:
        rival: Side that it takes turns with: ``torch``, or the name of another entrant.
        stream: Whether its steps flow into each other, and only ``drain`` empties the pipeline.
    """

    schedule: str
    weights: str = "latest"
    stages_per_rank: int = 1
    rival: str = TORCH
    stream: bool = False


# torch's pipeline of the same schedule and cut is the rival where there is one, else our plain 1f1b.
# _x2: two neighbouring stages on each rank instead of one.
ENTRANTS = {
    "gpipe": Entrant(schedule="gpipe"),
    "1f1b": Entrant(schedule="1f1b"),
    "zb_h1": Entrant(schedule="zb_h1"),
    "gpipe_x2": Entrant(schedule="gpipe", stages_per_rank=2, rival="gpipe"),
    "1f1b_x2": Entrant(schedule="1f1b", stages_per_rank=2, rival="1f1b"),
    "interleaved": Entrant(schedule="interleaved", stages_per_rank=2),
    "zbv": Entrant(schedule="zbv", stages_per_rank=2),
    "dualpipev": Entrant(schedule="dualpipev", stages_per_rank=2),
    "double_buffered": Entrant(schedule="1f1b", weights="double_buffered", rival="1f1b", stream=True),
    "async_1f1b": Entrant(schedule="async_1f1b", weights="stashed", rival="1f1b", stream=True),
}


def options() -> Any:
    """Return the parser of the command line."""
    made = harness.parser(__doc__, job="data=fake ranks=2 batch_size=128 micro_batches=8", repeats=5)
    listed, count = harness.list_of, harness.at_least(1)
    add = made.add_argument
    names = listed(harness.name_of([ALL, *ENTRANTS]))
    add("--schedules", type=names, help=f"race schedules instead of links: all, or of {', '.join(ENTRANTS)}")
    add("--codecs", type=listed(harness.option(_codec)), default=["raw", "zero_value", "auto"],
        help="codecs of Penstock, a contestant each; for schedules the first")  # fmt: skip
    add("--extra-in-flight", type=listed(harness.option(_extra)), default=[0, AUTO],
        help="micro-batches in flight beyond 1f1b, a contestant each; for schedules the first")  # fmt: skip
    links = [LOOPBACK, "1Gbit", "100Mbit", "20Mbit", "10Mbit"]
    add("--links", type=listed(harness.option(_link)), default=links,
        help="loopback, or rates of the link between two ranks; for schedules the first")  # fmt: skip
    add("--delay", type=float, default=0.0, help="milliseconds that a shaped link adds each way (netem)")
    add("--burst", default="64KiB", help="size of the token bucket of a shaped link")
    add("--warmup", type=count, default=3, help="steps of each side before anything is timed")
    add("--steps", type=count, default=10, help="most steps of a run")
    seconds = "a run has fewer steps where steps would take longer than this"
    add("--seconds", type=harness.between(0), default=4.0, help=seconds)
    return made


def _codec(name: str) -> str:
    check_name(name)
    return name


def _extra(text: str) -> int | str:
    return AUTO if text == AUTO else harness.at_least(0)(text)


def _link(text: str) -> str:
    return shaped_links.parse_link(text).name


def bench(asked: Options, path: Path) -> Results:
    """Race links or schedules; return the results."""
    defaults = {"data": "fake", "data.drop_last": "true", "batch_size": 128, "micro_batches": 8}
    config = harness.train_config(asked.job, defaults, {"schedule": "1f1b", "codec": "raw"})
    if config.batch_size % config.micro_batches or config.ranks < 2:
        raise ConfigError(
            f"torch's pipeline needs ranks=2 or more and micro-batches of one size, found "
            f"ranks={config.ranks} batch_size={config.batch_size} micro_batches={config.micro_batches}; "
            "change one"
        )
    links = [shaped_links.parse_link(name, burst=asked.burst, delay=asked.delay) for name in asked.links]
    links = links[:1] if asked.schedules else links
    if config.ranks > 2 and (shaped := [link.name for link in links if link.rate]):
        raise ConfigError(f"ranks={config.ranks}: a shaped link joins 2; leave {', '.join(shaped)} out")
    names = list(ENTRANTS) if asked.schedules and ALL in asked.schedules else asked.schedules or ["1f1b"]
    job = Job(config)
    plans = plans_of(asked, job, names)
    first = next(iter(plans.values()))
    fields = ("ranks", "batch_size", "micro_batches", "seed")
    facts = {name: getattr(config, name) for name in fields} | {"model": model_name(config)}
    facts |= {"cuts": list(first.cuts)} | {
        n: getattr(asked, n) for n in ("warmup", "repeats", "steps", "seconds")
    }
    results = Results(path, threads=config.threads, job=facts)
    say(f"{facts['model']} cut after {', '.join(first.cuts)}, {config.ranks} ranks, {config.threads} threads")
    with results.folder().private() as folder:

        def race(link: Link, sides: Mapping[str, Plan], rivals: Mapping[str, str], **more: Any) -> Any:
            told = {"link": dataclasses.asdict(link), "rivals": dict(rivals), **more}
            with shaped_links.joined(link, ranks=config.ranks) as ends:
                places: dict[str, Any] = {"ranks": config.ranks, "ends": ends, "device": link.device}
                return harness.measure_on_ranks(
                    "pipeline", folder, asked, config, sides, facts=told, **places
                )

        if asked.schedules:
            race_schedules(results, config, links[0], plans, names, race)
        else:
            race_links(results, config, asked, links, first, race)
    return results


def plans_of(asked: Options, job: Job, names: Sequence[str]) -> dict[str, Plan]:
    """Plan every entrant, and the rivals that are ours, from one measurement of the model."""
    config, plans, model = job.config, {}, job.model()
    extra = AUTO if AUTO in asked.extra_in_flight and not asked.schedules else asked.extra_in_flight[0]
    profile = look(config, job.samples, model=model)
    rivals = [ENTRANTS[name].rival for name in names if ENTRANTS[name].rival != TORCH]
    for name in dict.fromkeys([*names, *rivals]):
        entrant = ENTRANTS[name]
        stages = config.ranks * entrant.stages_per_rank
        cuts = config.cuts
        if cuts is not None and len(cuts) == 2 * config.ranks - 1 and entrant.stages_per_rank == 1:
            cuts = cuts[1::2]  # those for two stages a rank, of which every second one is taken
        plans[name] = partition(
            profile,
            stages=stages,
            cuts=cuts,
            ranks=config.ranks,
            schedule=entrant.schedule,
            micro_batches=config.micro_batches,
            extra_in_flight=0 if entrant.stream else extra,
            codec=asked.codecs[0],
            weights=entrant.weights,
        )
        stages_of(model, plans[name])  # refuses what torch's stages cannot have
    return plans


# Race over links.


def race_links(
    results: Results, config: TrainConfig, asked: Options, links: Sequence[Link], plan: Plan, race: Any
) -> None:
    """Race every codec and depth against torch on every link.

    Loopback always comes first: raw frames on a link that does not limit them are the bound of every row."""
    contestants = {_side(c, extra): (c, extra) for c in asked.codecs for extra in asked.extra_in_flight}
    reference = _side("raw", asked.extra_in_flight[0])

    def on(link: Link, sides: Mapping[str, tuple[str, Any]]) -> Any:
        plans = {name: _plan_of(plan, *one) for name, one in sides.items()}
        return race(link, plans, dict.fromkeys(plans, TORCH))

    free = contestants if any(link.rate is None for link in links) else {}
    loopback = on(Link(name=LOOPBACK), {**free, reference: ("raw", asked.extra_in_flight[0])})
    bound = config.batch_size / statistics.median(loopback["runs"][reference]["penstock"])
    results.keep(links=[], rows=[])
    for link in links:
        if reason := shaped_links.why_not(link):
            results.keep(links=[{"link": link.name, "shaped": False, "why_not": reason}])
            say(f"{link.name}: could not be shaped and was not raced on: {reason}")
            continue
        found = loopback if link.rate is None else on(link, contestants)
        rows = link_rows(found["runs"], contestants, plan=plan, batch_size=config.batch_size)
        common = {"link": link.name, "bound_samples_per_second": bound}
        results.keep(links=[link_facts(link, found["facts"])], rows=[common | row for row in rows])
    harness.show(results.content["rows"], LINK_COLUMNS, left=3)


def _side(codec: str, extra: int | str) -> str:
    return f"{codec}, {extra if extra == AUTO else f'+{extra}'} in flight" if extra else codec


def _plan_of(plan: Plan, codec: str, extra: int | str) -> Plan:
    depths = {} if extra == AUTO else {"extra_in_flight": extra, "most_extra_in_flight": extra}
    return dataclasses.replace(plan, codec=codec, **depths)


def link_facts(link: Link, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of a link that was raced on."""
    facts: dict[str, Any] = {"link": link.name, "shaped": link.rate is not None, "rate": link.rate}
    if link.rate is not None:
        facts |= {"burst": link.burst, "latency_ms": LATENCY_MS, "delay_ms": link.delay}
    rate = measured["rate_measured"]
    say(f"{link.name}: {show_rate(rate)} measured each way" if rate else f"{link.name}: not measured")
    return facts | {"why_not": None} | dict(measured)


def link_rows(
    runs: Mapping[str, Row], contestants: Mapping[str, tuple[str, Any]], *, plan: Plan, batch_size: int
) -> list[dict[str, Any]]:
    """Rows of torch, whose tensors pass all cuts as they are, and of each contestant."""
    sent = {
        name: plan.micro_batches * sum(getattr(s, f"bytes_{name.rpartition('_')[2]}") for s in plan.stages)
        for name in BYTES
    }
    theirs = [seconds for run in runs.values() for seconds in run["rival"]]
    rows: list[dict[str, Any]] = [{"side": TORCH, "codec": "none", "extra_in_flight": 0} | sent]
    rows[0] |= speeds(theirs, batch_size) | ratio_of_pairs(theirs, theirs)
    for side, (codec, extra) in contestants.items():
        run, best = runs[side], runs[side]["simulated_seconds"]
        row = {"side": "penstock", "codec": codec, "extra_in_flight": extra, "flew": run["flew"]}
        row |= {name: run[name] for name in BYTES} | speeds(run["penstock"], batch_size)
        row["of_simulated"] = best and best / statistics.median(run["penstock"])
        rows.append(row | ratio_of_pairs(run["rival"], run["penstock"]))
    for row in rows:
        row |= {
            f"ratio_{way}": ratio(row[f"bytes_raw_{way}"], row[f"bytes_sent_{way}"]) for way in DIRECTIONS
        }
        slower = max(DIRECTIONS, key=lambda way: row[f"bytes_sent_{way}"])
        row["ratio_slower_direction"] = row[f"ratio_{slower}"]
    return rows


LINK_COLUMNS = {
    "link": "{link}",
    "side": "{side}",
    "codec": "{codec}",
    "in flight": "+{flew} ({extra_in_flight})",
    "samples/s": "{samples_per_second:.1f}",
    "x torch": "{speedup:.2f}",
    "pairs": lambda row: spread(row["speedup_of_pairs"]),
    "of sim.": "{of_simulated:.2f}",
    "bound": "{bound_samples_per_second:.1f}",
    **{f"{way} sent": lambda row, way=way: show_bytes(row[f"bytes_sent_{way}"]) for way in DIRECTIONS},
    "slower way": "{ratio_slower_direction:.2f}x",
}


# Race of schedules.


def race_schedules(
    results: Results,
    config: TrainConfig,
    link: Link,
    plans: Mapping[str, Plan],
    names: Sequence[str],
    race: Any,
) -> None:
    """Race schedules and policies of the weights against torch's and each other, on one link."""
    if reason := shaped_links.why_not(link):
        raise TransportError(f"{link.name} could not be shaped: {reason}")
    rivals = {n: f"{TORCH} {n}" if ENTRANTS[n].rival == TORCH else ENTRANTS[n].rival for n in names}
    streams = [name for name in plans if ENTRANTS[name].stream]
    found = race(link, plans, rivals, streams=streams)
    rows = [schedule_row(name, run, config.batch_size) for name, run in found["runs"].items()]
    results.keep(link=link_facts(link, found["facts"]), rows=rows)
    harness.show(rows, SCHEDULE_COLUMNS, left=3)


def schedule_row(name: str, run: Row, batch_size: int) -> dict[str, Any]:
    """Row of an entrant: speeds of both sides, ratios of pairs, bubbles and versions."""
    entrant, theirs, ours = ENTRANTS[name], run["rival"], run["penstock"]
    facts = {field: getattr(entrant, field) for field in ("schedule", "weights", "stages_per_rank", "rival")}
    facts |= {"name": name, "rival_class": CLASSES[entrant.schedule] if entrant.rival == TORCH else None}
    rest = {key: one for key, one in run.items() if key not in ("rival", "penstock", *BYTES)}
    return (
        facts
        | speeds(ours, batch_size)
        | ratio_of_pairs(theirs, ours)
        | speeds(theirs, batch_size, "rival_")
        | rest
    )


def _percents(shares: Sequence[float]) -> str:
    return " ".join(f"{100 * share:.0f}" for share in shares) + " %"


SCHEDULE_COLUMNS = {
    "schedule": "{name}",
    "stages": "{num_stages}",
    "rival": "{rival}",
    "samples/s": "{samples_per_second:.1f}",
    "rival's": "{rival_samples_per_second:.1f}",
    "x": "{speedup:.2f}",
    "pairs": lambda row: spread(row["speedup_of_pairs"]),
    "bubble": lambda row: _percents(row["bubble"]),
    "simulated": lambda row: _percents(row["bubble_simulated"]),
    "versions": lambda row: " ".join(str(stage["num_live"]) for stage in row["versions"]),
    "bytes of them": lambda row: show_bytes(sum(stage["num_bytes"] for stage in row["versions"])),
}


# Ranks.


class Racer:
    """A pipeline on this rank that takes turns: torch's, or Penstock's (``Ours``)."""

    def __init__(self, pipe: Any, plan: Plan, batches: Sequence[Any]) -> None:
        self.pipe, self.plan, self._batches, self.num_steps = pipe, plan, cycle(batches), 1

    def take_step(self) -> float | None:
        """Take a step on the next batch; return its loss, which torch has on the last stage's rank alone."""
        return self.pipe.step(*next(self._batches))

    def warm_up(self, asked: Options) -> float:
        """Take the steps that are not timed, and see how many fit into a run; return the first loss."""
        world = World.default()
        first = world.broadcast(self.take_step() or 0.0, self.plan.owner(-1))
        self.num_steps = max(1, asked.warmup - 1)
        seconds = world.broadcast(self.run(), 0)
        self.num_steps = max(1, min(asked.steps, int(asked.seconds / seconds)))
        return first

    def run(self) -> float:
        """Take the steps of a run together with the other ranks; return the seconds of one step."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(self.num_steps):
            self.take_step()
        dist.barrier()
        return (time.perf_counter() - start) / self.num_steps


class Ours(Racer):
    """Our pipeline; counts the bytes of its steps, and how much of a run the ranks waited."""

    def __init__(self, pipe: Pipeline, batches: Sequence[Any], *, stream: bool) -> None:
        super().__init__(pipe, pipe.plan, batches)
        self.stream = stream
        self._reset()

    def _reset(self) -> None:
        self.totals, self.busy = Totals(num_stages=self.plan.num_stages), [0.0] * self.plan.num_ranks
        self.bubbles: list[list[float]] = []
        self.spans: list[Span] = []

    def take_step(self) -> float:
        """Take a step on the next batch; return its loss."""
        report = self.pipe.step(*next(self._batches))
        self.totals.add(report)
        self.busy = list(map(add, self.busy, report.busy_seconds))
        return report.loss

    def warm_up(self, asked: Options) -> float:
        """As every side's; also the steps in which ``codec=auto`` still tries."""
        first = super().warm_up(asked)
        while not (self.stream or self.pipe.policy.settled):
            self.take_step()
        self._reset()
        return first

    def run(self) -> float:
        """Take the steps of a run; a stream is filled before and drained after: others will use the group."""
        if self.stream:
            self.take_step()
        self.busy = [0.0] * self.plan.num_ranks
        seconds = super().run()
        self.bubbles.append([1 - busy / (seconds * self.num_steps) for busy in self.busy])
        self.spans += self.pipe.timeline()
        if self.stream:
            self.pipe.drain()
        return seconds

    def measured(self, parameter_bytes: Mapping[str, int], *, rate: float | None) -> dict[str, Any]:
        """Bytes, bubbles, most versions of the weights, and the depth and best step that ``auto`` found."""
        messages, totals, policy = self.pipe.meter.step.messages, self.totals, self.pipe.policy
        sizes = [sum(parameter_bytes.get(name, 0) for name in s.parameters) for s in self.plan.stages]
        return {name: sum(stage[name] for stage in totals.stages) / totals.num_steps for name in BYTES} | {
            "flew": policy.extra,
            "simulated_seconds": min((turn.predicted for turn in policy.turns), default=None),
            "num_stages": self.plan.num_stages,
            "cuts": list(self.plan.cuts),
            "ranks_of_stages": list(self.plan.ranks),
            "num_instructions": [len(program) for program in messages.programs],
            "bubble": [statistics.median(runs) for runs in zip(*self.bubbles, strict=True)],
            "bubble_simulated": bubbles(messages, durations(self.spans), rate=rate, stream=self.stream),
            "versions": [
                {
                    "num_live": s["live_versions"],
                    "num_bytes": s["versions_bytes"] + size,
                    "parameter_bytes": size,
                }
                for s, size in zip(totals.stages, sizes, strict=True)
            ],
        }


def bubbles(
    messages: StepMessages, seconds: Mapping[tuple[int, str], float], *, rate: float | None, stream: bool
) -> list[float]:
    """Share of a step in which each rank would wait, if every instruction took its usual time.

    Args:
        rate: Bits per second between ranks; None: transfers take no time.
        stream: The step has no end: a rank only waits for the one that has the most to do.
    """

    def work(instruction: Instruction) -> float:
        return seconds.get((instruction.stage, instruction.op.value), 0.0)

    def transfer(message: Message) -> float:
        return 8 * message.raw_bytes / rate if rate else 0.0

    if not stream:
        return list(simulate(messages, work=work, transfer=transfer).bubble)
    busy = [sum(map(work, program)) for program in messages.programs]
    return [1 - of_rank / max(busy) for of_rank in busy]


def race_rank(folder: RunFolder, asked: Options) -> dict[str, Any]:
    """Race on this rank; return ``facts`` of the link and ``runs`` by contestant."""
    link, config, streams = Link(**asked.link), folder.read_config(), vars(asked).get("streams", ())
    facts: dict[str, Any] = {} if link.rate is None else {"offload": shaped_links.switch_off(link.device)}
    world = init(deadline=config.deadline)
    facts["rate_measured"] = measured_rate(world, link)
    facts["congestion_control"] = CONGESTION.read_text().strip() if CONGESTION.exists() else "unknown"
    job, plans = Job(config), harness.load_plans(folder)
    batches, sides = job.batches(), dict[str, Racer]()
    common: dict[str, Any] = {"loss": loss, "optimizer": job.optimizer}
    for name, rival in asked.rivals.items():
        if rival not in plans and rival not in sides:
            sides[rival] = Racer(TorchPipeline(job.model(), plans[name], **common), plans[name], batches)
    common |= {"seed": config.seed, "deadline": config.deadline}
    for name in dict.fromkeys([*asked.rivals, *plans]):
        sides[name] = Ours(Pipeline(job.model(), plans[name], **common), batches, stream=name in streams)
    first = {name: side.warm_up(asked) for name, side in sides.items()}
    facts["first_losses"] = {name: one for name, one in first.items() if name not in streams}
    harness.refuse_other_losses(facts["first_losses"], random=harness.is_random(job.model()))
    turns: dict[tuple[str, str], Any] = {}
    for name, rival in asked.rivals.items():  # a run of the rival before each of ours
        turns |= {(name, "rival"): sides[rival].run, (name, "penstock"): sides[name].run}
    taken = alternate(turns, asked.repeats)
    sizes = {name: parameter.nbytes for name, parameter in job.model().named_parameters()}
    runs: dict[str, Any] = {}
    for name in asked.rivals:
        side = sides[name]
        assert isinstance(side, Ours), "contestants are ours"
        runs[name] = side.measured(sizes, rate=facts["rate_measured"])
        runs[name] |= {who: taken[name, who] for who in ("rival", "penstock")}
    world.close()
    return {"facts": facts, "runs": runs}


def measured_rate(world: World, link: Link) -> float | None:
    """Bits per second that two ranks get through the link, both ways at once; None with more ranks."""
    if world.size != 2:
        return None
    num_bytes = int(link.rate / 8 * PROBE_SECONDS) if link.rate else MOST_PROBE
    num_bytes = min(max(num_bytes, LEAST_PROBE), MOST_PROBE)
    ours, theirs = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))

    def exchange() -> None:
        transfers = world.irecv(theirs, 1 - world.rank, tag=0), world.isend(ours, 1 - world.rank, tag=0)
        for transfer in transfers:
            transfer.wait()
        world.barrier()

    exchange()  # also opens the connection and its window
    return 8 * num_bytes / timed(exchange, 1)()


if __name__ == "__main__":
    harness.main(options(), bench, rank=race_rank)
