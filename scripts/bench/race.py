"""What every rank of ``penstock bench pipeline`` runs on one link: torch and each contestant in turn.

All of them live in the same processes and take turns, a run of torch before each of ours, so that a busy
machine is busy for both sides of a ratio."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...compression.errors import PenstockError
from ...conf.bench import BenchPipelineConfig
from ...pipeline.pipeline import Pipeline
from ...pipeline.ranks.launch import init, run_rank
from ...pipeline.ranks.world import World
from ...pipeline.run import build
from ...pipeline.run.course import training_batches
from ...pipeline.run.decide import prepare
from ...pipeline.run.metrics import DIRECTIONS, Totals
from ...pipeline.run.train import loss
from ...stages.files import save_json
from ...stages.planner.plan import Plan
from .links import Link
from .offload import switch_off
from .torch_pipelines import TorchPipeline

NUM_BATCHES = 4
"""Batches kept in memory and used in turn: enough for training to differ from step to step."""

TOLERANCE, TOLERANCE_RANDOM = 1e-3, 0.2
"""How far the first losses of the two sides may lie apart, relatively; dropout draws other numbers."""

_PROBE_SECONDS, _PROBE_BYTES = 0.5, (1 << 20, 1 << 25)
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """What one link's ranks are told: a JSON file, so that nothing is pickled.

    Attributes:
        contestants: codec and extra_in_flight of each.
    """

    config: BenchPipelineConfig
    link: Link
    contestants: list[tuple[str, int]]

    def save(self, path: Path) -> None:
        """Write what ``load`` reads."""
        save_json(path, dataclasses.asdict(self))

    @classmethod
    def load(cls, path: Path) -> Race:
        """Read what ``save`` wrote."""
        content = json.loads(path.read_text())
        return cls(
            config=BenchPipelineConfig(**content["config"]),
            link=Link(**content["link"]),
            contestants=[(codec, extra) for codec, extra in content["contestants"]],
        )


class Side:
    """One side of the race on this rank: a way to take a step, and how many make a run."""

    def __init__(
        self, step: Callable[[Tensor, Tensor], Any], batches: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        self._step, self._batches = step, cycle(batches)

    def warm_up(self, config: BenchPipelineConfig) -> Any:
        """Take the steps that are not timed, see how many fit into a run; return what the first one told."""
        first = self.take_step()
        self.num_steps = max(1, config.warmup - 1)
        seconds = World.default().broadcast(self.run(), 0)
        self.num_steps = steps_in(config.seconds, seconds_per_step=seconds, most=config.steps)
        return first

    def take_step(self) -> Any:
        """Take one step on the next batch."""
        return self._step(*next(self._batches))

    def run(self) -> float:
        """Take the steps of one run, together with the other ranks; return the seconds of one step."""
        dist.barrier()
        began = time.perf_counter()
        for _ in range(self.num_steps):
            self.take_step()
        dist.barrier()
        return (time.perf_counter() - began) / self.num_steps


class Ours:
    """A contestant's pipeline, and the bytes of its steps."""

    def __init__(self, pipe: Pipeline) -> None:
        self.pipe, self.totals = pipe, Totals(num_stages=pipe.plan.num_stages)

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Train on one batch; return its loss."""
        report = self.pipe.step(inputs, targets)
        self.totals.add(report)
        return report.loss

    def settle(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take the steps in which ``codec=auto`` still tries."""
        for inputs, targets in cycle(batches):
            if self.pipe.policy.settled:
                return
            self.pipe.step(inputs, targets)

    def bytes_per_step(self) -> dict[str, float]:
        """What crossed the cuts in a step on average, in the names of ``summary.json``."""
        names = [f"bytes_{kind}_{direction}" for kind in ("raw", "sent") for direction in DIRECTIONS]
        return {name: sum(s[name] for s in self.totals.stages) / self.totals.num_steps for name in names}


def race_rank(folder: Path) -> None:
    """Race on this rank; rank 0 writes ``measured.json``."""
    race, plan = Race.load(folder / "race.json"), Plan.load(folder / "plan.json")
    config = race.config
    facts: dict[str, Any] = {} if race.link.rate is None else {"offload": switch_off(race.link.device)}
    init(deadline=config.deadline)
    facts["rate_measured"] = measured_rate(race.link)
    facts["congestion_control"] = _CONGESTION.read_text().strip() if _CONGESTION.exists() else "unknown"
    samples = prepare(config.job())
    batches = list(islice(training_batches(config.job(), samples, epoch=0), NUM_BATCHES))
    optimizer = build.optimizer(config.optimizer)

    def model() -> nn.Module:
        return build.model(config.model, describe=samples.describe, seed=config.seed).train()

    def ours(codec: str, extra: int) -> Ours:
        own = dataclasses.replace(plan, codec=codec, extra_in_flight=extra)
        common = {"loss": loss, "optimizer": optimizer, "seed": config.seed}
        return Ours(Pipeline(model(), own, **common, deadline=config.deadline))

    torch_side = Side(TorchPipeline(model(), plan, loss=loss, optimizer=optimizer).step, batches)
    pipes = [ours(codec, extra) for codec, extra in race.contestants]
    sides = [Side(pipe.step, batches) for pipe in pipes]
    # Only the last rank knows torch's loss.
    expected = World.default().broadcast(torch_side.warm_up(config) or 0.0, plan.ranks[-1])
    found = [side.warm_up(config) for side in sides]
    for pipe in pipes:
        pipe.settle(batches)
    refuse_other_losses(expected, found, random=is_random(model()))
    for pipe in pipes:
        pipe.totals = Totals(num_stages=plan.num_stages)
    taken = alternate(torch_side.run, [side.run for side in sides], repeats=config.repeats)
    if World.default().rank == 0:
        losses = {"first_loss_torch": expected, "first_loss_penstock": found[0]}
        runs = [
            {"codec": codec, "extra_in_flight": extra, **seconds, **pipe.bytes_per_step()}
            for (codec, extra), seconds, pipe in zip(race.contestants, taken, pipes, strict=True)
        ]
        save_json(folder / "measured.json", {"facts": facts | losses, "runs": runs})
    World.default().close()


def alternate(
    theirs: Callable[[], float], ours: Sequence[Callable[[], float]], *, repeats: int
) -> list[dict[str, list[float]]]:
    """Run theirs and each of ours in turn; return, for each of ours, the ``repeats`` pairs of what they took.

    Returns: ``{"torch": [...], "penstock": [...]}`` for each of ours; entries of one index are neighbours.
    """
    taken: list[dict[str, list[float]]] = [{"torch": [], "penstock": []} for _ in ours]
    for _ in range(repeats):
        for seconds, run in zip(taken, ours, strict=True):
            seconds["torch"].append(theirs())
            seconds["penstock"].append(run())
    return taken


def steps_in(seconds: float, *, seconds_per_step: float, most: int) -> int:
    """How many steps a run takes: as many as fit, at least one, at most ``most``."""
    return max(1, min(most, int(seconds / seconds_per_step)))


def refuse_other_losses(expected: float, found: Sequence[float], *, random: bool) -> None:
    """Refuse to race two sides that do not train the same thing.

    Raises: PenstockError: a first loss is not torch's, but for rounding (or for what random layers draw).
    """
    tolerance = TOLERANCE_RANDOM if random else TOLERANCE
    for one in found:
        if not math.isclose(one, expected, rel_tol=tolerance):
            raise PenstockError(
                f"both sides must train the same, and their first losses are {expected:.6f} with torch and "
                f"{one:.6f} with Penstock; this is a fault of the bench or of torch's stages with this model"
            )


def measured_rate(link: Link) -> float | None:
    """Bits per second that two ranks really get through the link, both ways at once; None with more ranks."""
    if World.default().size != 2:
        return None
    wanted = int(link.rate / 8 * _PROBE_SECONDS) if link.rate else _PROBE_BYTES[1]
    num_bytes = min(max(wanted, _PROBE_BYTES[0]), _PROBE_BYTES[1])
    ours, theirs = torch.zeros(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)
    other, seconds = 1 - World.default().rank, 0.0
    for _ in range(2):  # the first one also opens the connection and its window
        dist.barrier()
        began = time.perf_counter()
        transfers = [dist.irecv(theirs, other), dist.isend(ours, other)]
        for transfer in transfers:
            assert transfer is not None, "both ranks are in the group"
            transfer.wait()
        dist.barrier()
        seconds = time.perf_counter() - began
    return 8 * num_bytes / seconds


def is_random(model: nn.Module) -> bool:
    """Whether a layer draws numbers, which torch's stages draw otherwise than ours."""
    return any(getattr(module, "p", 0) for module in model.modules() if "Drop" in type(module).__name__)


if __name__ == "__main__":
    where = Path(sys.argv[1])
    run_rank(lambda: race_rank(where), where / "errors")
