"""What every rank of ``penstock bench pipeline schedule=all`` runs: each entrant in turn with its rival.

All pipelines live in the same processes, so a busy machine is busy for both sides of a ratio."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...conf.bench import BenchPipelineConfig
from ...pipeline.pipeline import Pipeline
from ...pipeline.ranks.launch import init, run_rank
from ...pipeline.ranks.world import World
from ...pipeline.run import build
from ...pipeline.run.course import training_batches
from ...pipeline.run.decide import prepare
from ...pipeline.run.train import loss
from ...pipeline.runtime.report import Report
from ...stages.files import save_json
from ...stages.planner.plan import Plan
from .bubbles import durations, simulated
from .entrants import ENTRANTS, TORCH, Entrant
from .links import Link
from .offload import switch_off
from .overhead import overhead
from .race import NUM_BATCHES, Side, is_random, measured_rate, refuse_other_losses
from .torch_pipelines import TorchPipeline
from .versions import peak_versions

Batches = Sequence[tuple[Tensor, Tensor]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the ranks are told: a JSON file, so that nothing is pickled. Plans lie beside it, one per name.

    Attributes:
        raced: names of entrants that get a row. beside: those that only serve as rivals.
    """

    config: BenchPipelineConfig
    link: Link
    raced: list[str]
    beside: list[str]

    def save(self, path: Path) -> None:
        """Write what ``load`` reads."""
        save_json(path, dataclasses.asdict(self))

    @classmethod
    def load(cls, path: Path) -> Told:
        """Read what ``save`` wrote."""
        content = json.loads(path.read_text())
        config, link = BenchPipelineConfig(**content.pop("config")), Link(**content.pop("link"))
        return cls(config=config, link=link, **content)


class Ours(Side):
    """Our pipeline of one entrant: runs, and how much of each the ranks stood still."""

    def __init__(self, entrant: Entrant, pipe: Pipeline, batches: Batches) -> None:
        super().__init__(self._take, batches)
        self.entrant, self.pipe = entrant, pipe
        self.bubbles: list[list[float]] = []
        self.busy = [0.0] * pipe.plan.num_ranks

    def _take(self, inputs: Tensor, targets: Tensor) -> Report:
        report = self.pipe.step(inputs, targets)
        for rank, stage in zip(self.pipe.plan.ranks, report.stages, strict=True):
            self.busy[rank] += stage.compute_seconds
        return report

    def run(self) -> float:
        """One run; a stream is filled before it and drained after it: others will use the group."""
        if self.entrant.stream:
            self.take_step()
        self.busy = [0.0] * self.pipe.plan.num_ranks
        seconds = super().run()
        self.bubbles.append([1 - busy / (seconds * self.num_steps) for busy in self.busy])
        self.end()
        return seconds

    def end(self) -> None:
        """Leave no frame on its way."""
        if self.entrant.stream:
            self.pipe.drain()

    def row(self, *, rate: float | None) -> dict[str, Any]:
        """What is known of a step: bubbles, versions, instructions; collective, and takes steps."""
        versions = peak_versions(self.pipe, lambda: [self.take_step() for _ in range(3)])
        steps = []
        for _ in range(3):
            self.take_step()
            steps.append(self.pipe.timeline())
        itinerary = self.pipe.engine.itinerary
        on_paper = simulated(itinerary, durations(steps), rate=rate, stream=self.entrant.stream)
        self.end()
        measured = [statistics.median(runs) for runs in zip(*self.bubbles, strict=True)]
        return {
            "num_stages": self.pipe.plan.num_stages,
            "cuts": list(self.pipe.plan.cuts),
            "ranks_of_stages": list(self.pipe.plan.ranks),
            "num_instructions": [len(program) for program in itinerary.programs],
            "bubble": measured,
            "bubble_simulated": on_paper,
            "versions": versions,
        }


class Job:
    """The pipelines of this rank by entrant, and torch's; all of them train the same job from the start."""

    def __init__(self, told: Told, folder: Path) -> None:
        self.config = told.config
        self.samples = prepare(self.config.job())
        batches = list(islice(training_batches(self.config.job(), self.samples, epoch=0), NUM_BATCHES))
        self.optimizer = build.optimizer(self.config.optimizer)
        self.ours: dict[str, Ours] = {}
        self.theirs: dict[str, Side] = {}
        for name in [*told.raced, *told.beside]:
            plan, entrant = Plan.load(folder / "plans" / f"{name}.json"), ENTRANTS[name]
            common = {"loss": loss, "optimizer": self.optimizer}
            pipe = Pipeline(
                self.model(), plan, **common, seed=self.config.seed, deadline=self.config.deadline
            )
            self.ours[name] = Ours(entrant, pipe, batches)
            if entrant.rival == TORCH and name in told.raced:
                self.theirs[name] = Side(TorchPipeline(self.model(), plan, **common).step, batches)

    def model(self) -> nn.Module:
        """The network as it starts."""
        return build.model(self.config.model, describe=self.samples.describe, seed=self.config.seed).train()

    def rival(self, name: str) -> Side:
        """What an entrant takes turns with."""
        return self.theirs[name] if name in self.theirs else self.ours[ENTRANTS[name].rival]

    def warm_up(self) -> dict[str, float]:
        """Take the first steps of everybody; return the first losses of the synchronous ones.

        Raises: PenstockError: the two sides do not train the same.
        """
        random = is_random(self.model())
        first = {}
        for name, side in self.ours.items():
            report = side.warm_up(self.config)
            last = side.pipe.plan.ranks[-1]
            if name in self.theirs:
                # Only the rank of the last stage knows torch's loss.
                expected = World.default().broadcast(self.theirs[name].warm_up(self.config) or 0.0, last)
                refuse_other_losses(expected, [report.loss], random=random)
            if not side.entrant.stream:
                first[name] = report.loss
        for one in first.values():  # whatever the schedule, the first step trains on the same weights
            refuse_other_losses(next(iter(first.values())), [one], random=random)
        return first


def race_rank(folder: Path) -> None:
    """Race on this rank; rank 0 writes ``measured.json``."""
    told = Told.load(folder / "race.json")
    facts: dict[str, Any] = {} if told.link.rate is None else {"offload": switch_off(told.link.device)}
    init(deadline=told.config.deadline)
    facts["rate_measured"] = measured_rate(told.link)
    job = Job(told, folder)
    facts["first_losses"] = job.warm_up()
    taken: dict[str, dict[str, list[float]]] = {name: {"rival": [], "penstock": []} for name in told.raced}
    for _ in range(told.config.repeats):
        for name, seconds in taken.items():
            seconds["rival"].append(job.rival(name).run())
            seconds["penstock"].append(job.ours[name].run())
    rows = [
        {"name": name, **seconds, **job.ours[name].row(rate=facts["rate_measured"])}
        for name, seconds in taken.items()
    ]
    ranks, micro_batches = told.config.ranks, told.config.micro_batches
    facts["overhead"] = overhead(stages=ranks, micro_batches=micro_batches, repeats=told.config.repeats)
    if World.default().rank == 0:
        save_json(folder / "measured.json", {"facts": facts, "rows": rows})
    World.default().close()


if __name__ == "__main__":
    where = Path(sys.argv[1])
    run_rank(lambda: race_rank(where), where / "errors")
