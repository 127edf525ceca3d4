"""What every rank of ``penstock bench pipeline`` runs: each contestant in turn with its rival.

All pipelines live in the same processes and take turns, a run of the rival before each of ours, so that a
busy machine is busy for both sides of a ratio."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from operator import add
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ...conf.bench import BenchPipelineConfig
from ...pipeline.pipeline import Pipeline
from ...pipeline.ranks.launch import init, run_rank
from ...pipeline.ranks.world import World
from ...pipeline.run import build
from ...pipeline.run.decide import prepare
from ...pipeline.run.epochs import loss
from ...pipeline.run.metrics import DIRECTIONS, Totals
from ...pipeline.run.run_length import training_batches
from ...pipeline.schedules.instruction import Instruction
from ...pipeline.schedules.messages import Message, StepMessages
from ...pipeline.schedules.simulate import durations, simulate
from ...pipeline.schedules.span import Span
from ...stages.files import save_json
from ...stages.planner.plan import Plan
from .fairness import is_random, measured_rate, refuse_other_losses
from .harness import alternate
from .instruction_cost import instruction_cost
from .shaped_links import Link, switch_off
from .torch_pipelines import TorchPipeline

Batches = Sequence[tuple[Tensor, Tensor]]

NUM_BATCHES = 4
"""Batches kept in memory and used in turn: enough for training to differ from step to step."""

_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """What the ranks are told: a JSON file, so that nothing is pickled. ``plans/NAME.json`` lie beside it.

    Attributes:
        rivals: for each contestant whom it takes turns with: one that has a plan, or torch's pipeline.
        streams: those whose steps flow into each other. instructions: whether to measure what one costs.
    """

    config: BenchPipelineConfig
    link: Link
    rivals: dict[str, str]
    streams: list[str] = dataclasses.field(default_factory=list)
    instructions: bool = False

    @classmethod
    def load(cls, path: Path) -> Race:
        """Read the file."""
        content = json.loads(path.read_text())
        config, link = BenchPipelineConfig(**content.pop("config")), Link(**content.pop("link"))
        return cls(config=config, link=link, **content)


class Racer:
    """A pipeline on this rank that takes turns: torch's, or Penstock's (``Ours``)."""

    def __init__(self, pipe: Any, plan: Plan, batches: Batches) -> None:
        self.pipe, self.plan, self._batches = pipe, plan, cycle(batches)
        self.num_steps = 1

    def take_step(self) -> float | None:
        """Take one step on the next batch; return its loss, which torch tells the last stage's rank alone."""
        return self.pipe.step(*next(self._batches))

    def warm_up(self, config: BenchPipelineConfig) -> float:
        """Take the steps that are not timed, see how many fit into a run; return the loss of the first."""
        world = World.default()
        first = world.broadcast(self.take_step() or 0.0, self.plan.owner(-1))
        self.num_steps = max(1, config.warmup - 1)
        seconds = world.broadcast(self.run(), 0)
        self.num_steps = steps_in(config.seconds, seconds_per_step=seconds, most=config.steps)
        return first

    def run(self) -> float:
        """Take the steps of one run, together with the other ranks; return the seconds of one step."""
        dist.barrier()
        began = time.perf_counter()
        for _ in range(self.num_steps):
            self.take_step()
        dist.barrier()
        return (time.perf_counter() - began) / self.num_steps


class Ours(Racer):
    """Our pipeline: also the bytes of its steps, and how much of each run the ranks stood still."""

    def __init__(self, pipe: Pipeline, batches: Batches, *, stream: bool) -> None:
        super().__init__(pipe, pipe.plan, batches)
        self.stream = stream
        self._forget()

    def _forget(self) -> None:
        self.totals, self.busy = Totals(num_stages=self.plan.num_stages), [0.0] * self.plan.num_ranks
        self.bubbles: list[list[float]] = []
        self.spans: list[Span] = []

    def take_step(self) -> float:
        """Take one step on the next batch; return its loss."""
        report = self.pipe.step(*next(self._batches))
        self.totals.add(report)
        self.busy = list(map(add, self.busy, report.busy_seconds))
        return report.loss

    def warm_up(self, config: BenchPipelineConfig) -> float:
        """As every side's; also the steps in which ``codec=auto`` still tries."""
        first = super().warm_up(config)
        while not (self.stream or self.pipe.policy.settled):
            self.take_step()
        self._forget()
        return first

    def run(self) -> float:
        """One run; a stream is filled before it and drained after it: others will use the group."""
        if self.stream:
            self.take_step()
        self.busy = [0.0] * self.plan.num_ranks
        seconds = super().run()
        self.bubbles.append([1 - busy / (seconds * self.num_steps) for busy in self.busy])
        self.spans += self.pipe.timeline()
        if self.stream:
            self.pipe.drain()
        return seconds

    def found(self, parameter_bytes: Mapping[str, int], *, rate: float | None) -> dict[str, Any]:
        """What is known of its steps: bytes, bubbles, the most versions of the weights, instructions; what
        ``auto`` made fly, and the best step that it simulated from its prices."""
        messages, totals = self.pipe.engine.meter.step.messages, self.totals
        names = [f"bytes_{kind}_{way}" for kind in ("raw", "sent") for way in DIRECTIONS]
        return {name: sum(stage[name] for stage in totals.stages) / totals.num_steps for name in names} | {
            "flew": self.pipe.policy.extra,
            "simulated_seconds": min((turn.predicted for turn in self.pipe.policy.turns), default=None),
            "num_stages": self.plan.num_stages,
            "cuts": list(self.plan.cuts),
            "ranks_of_stages": list(self.plan.ranks),
            "num_instructions": [len(program) for program in messages.programs],
            "bubble": [statistics.median(runs) for runs in zip(*self.bubbles, strict=True)],
            "bubble_simulated": simulated(messages, durations(self.spans), rate=rate, stream=self.stream),
            "versions": self.versions(parameter_bytes),
        }

    def versions(self, parameter_bytes: Mapping[str, int]) -> list[dict[str, int]]:
        """The most versions of the weights that were alive at once on each stage, and their bytes."""
        own = [sum(parameter_bytes.get(name, 0) for name in stage.parameters) for stage in self.plan.stages]
        # Weights count what they keep beside the parameters, which are the newest version.
        return [
            {"num_live": s["live_versions"], "num_bytes": s["versions_bytes"] + size, "parameter_bytes": size}
            for s, size in zip(self.totals.stages, own, strict=True)
        ]


def race_rank(folder: Path) -> None:
    """Race on this rank; rank 0 writes ``measured.json``: ``facts`` of the link, ``runs`` by name."""
    race = Race.load(folder / "race.json")
    config, link = race.config, race.link
    facts: dict[str, Any] = {} if link.rate is None else {"offload": switch_off(link.device)}
    world = init(deadline=config.deadline)
    facts["rate_measured"] = measured_rate(world, link)
    facts["congestion_control"] = _CONGESTION.read_text().strip() if _CONGESTION.exists() else "unknown"
    samples = prepare(config.job())

    def model() -> nn.Module:
        return build.model(config.model, describe=samples.describe, seed=config.seed).train()

    batches = list(islice(training_batches(config.job(), samples, epoch=0), NUM_BATCHES))
    sides = sides_of(race, folder, model, batches)
    first = {name: side.warm_up(config) for name, side in sides.items()}
    facts["first_losses"] = {name: one for name, one in first.items() if name not in race.streams}
    refuse_other_losses(facts["first_losses"], random=is_random(model()))
    turns: dict[tuple[str, str], Any] = {}
    for name, rival in race.rivals.items():  # a run of the rival before each of ours
        turns |= {(name, "rival"): sides[rival].run, (name, "penstock"): sides[name].run}
    taken = alternate(turns, config.repeats)
    sizes = {name: parameter.nbytes for name, parameter in model().named_parameters()}
    found = {name: sides[name].found(sizes, rate=facts["rate_measured"]) for name in race.rivals}
    for (name, who), seconds in taken.items():
        found[name][who] = seconds
    if race.instructions:
        options: Any = {"micro_batches": config.micro_batches, "repeats": config.repeats}
        facts["overhead"] = [instruction_cost(stages=config.ranks, **options)]
    if world.rank == 0:
        save_json(folder / "measured.json", {"facts": facts, "runs": found})
    world.close()


def sides_of(race: Race, folder: Path, model: Any, batches: Batches) -> dict[str, Any]:
    """All pipelines of this rank by name, torch's first; they train the same job from the same start."""
    config = race.config
    common = {"loss": loss, "optimizer": build.optimizer(config.optimizer)}
    plans = {path.stem: Plan.load(path) for path in sorted((folder / "plans").glob("*.json"))}
    sides: dict[str, Any] = {}
    for name, rival in race.rivals.items():
        if rival not in plans and rival not in sides:
            sides[rival] = Racer(TorchPipeline(model(), plans[name], **common), plans[name], batches)
    common |= {"seed": config.seed, "deadline": config.deadline}
    for name in dict.fromkeys([*race.rivals, *plans]):
        sides[name] = Ours(Pipeline(model(), plans[name], **common), batches, stream=name in race.streams)
    return sides


def steps_in(seconds: float, *, seconds_per_step: float, most: int) -> int:
    """How many steps a run takes: as many as fit, at least one, at most ``most``."""
    return max(1, min(most, int(seconds / seconds_per_step)))


def simulated(
    messages: StepMessages, seconds: Mapping[tuple[int, str], float], *, rate: float | None, stream: bool
) -> list[float]:
    """The share of a step in which each rank would wait, if every instruction took its usual time.

    Args: rate: bits per second between ranks, None: no time at all.
          stream: the step has no end of its own: a rank waits only for the one that has the most to do.
    """

    def work(instruction: Instruction) -> float:
        return seconds.get((instruction.stage, instruction.op.value), 0.0)

    def transfer(message: Message) -> float:
        return 8 * message.raw_bytes / rate if rate else 0.0

    if not stream:
        return list(simulate(messages, work=work, transfer=transfer).bubble)
    busy = [sum(map(work, program)) for program in messages.programs]
    return [1 - of_rank / max(busy) for of_rank in busy]


if __name__ == "__main__":
    where = Path(sys.argv[1])
    run_rank(lambda: race_rank(where), where / "errors")
