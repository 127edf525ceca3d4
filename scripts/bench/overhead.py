"""What an instruction costs beside the work it stands for: layers of one number, so that little else is left.

A schedule with many small instructions is worth nothing if each costs more than it saves. Measured: seconds
of the processor between call and return of a step, which leaves waiting out, less those that packed frames,
less the same layers, loss, backwards, updates and transfers called directly in a loop; divided by the number
of instructions. The step's report counts as overhead. Both take turns, medians of pairs count."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...pipeline.pipeline import Pipeline
from ...pipeline.ranks.world import World
from ...pipeline.run.train import loss
from ...stages.planner.measure import measure
from ...stages.planner.partition import partition
from ...stages.planner.plan import Plan
from ...stages.tracing.graph import trace
from .torch_pipelines import TorchPipeline

CLASSES = 2
FRAME_BYTES = 128
"""About a header and a few bytes, as the frames of one number are."""

STEPS = 20
"""Steps in one run: enough for the clock to see, few enough for both sides to take turns."""


def overhead(*, stages: int, micro_batches: int, repeats: int, schedule: str = "1f1b") -> dict[str, Any]:
    """Measure in this process, or on all ranks of the group, which call it together; a stage a rank there.

    Returns: ``ranks``, ``stages``, ``micro_batches``, ``schedule`` and, of the busiest rank: ``instructions``
             a step, ``microseconds`` of overhead for each (the median), ``microseconds_of_runs``;
             ``microseconds_direct``: the same work called directly. On ranks also ``microseconds_of_steps``
             and ``microseconds_of_torch_steps``: a whole step, waiting included, divided by the number of
             instructions, by us and by torch's pipeline.
    """
    plan = _plan(stages=stages, micro_batches=micro_batches, schedule=schedule)
    batch = torch.randn(micro_batches, 1), torch.arange(micro_batches) % CLASSES
    pipe = Pipeline(_model(stages), plan, loss=loss, optimizer=_optimizer)
    direct = _Direct(plan, micro_batches)
    sides = {
        "penstock": lambda: _steps(pipe, batch),
        "direct": lambda: _seconds(direct.step, clock=time.thread_time),
    }
    if not World.default().is_alone:
        theirs = TorchPipeline(_model(stages), plan, loss=loss, optimizer=_optimizer)
        sides["torch"] = lambda: _seconds(lambda: theirs.step(*batch), clock=time.perf_counter)
    taken = _alternate(sides, repeats)
    own = plan.stages_of_rank[World.default().rank] if not World.default().is_alone else range(stages)
    num = len(own) * (2 * micro_batches + 1)  # F, B and U
    runs = [
        1e6 * (ours[0] - alone) / num for ours, alone in zip(taken["penstock"], taken["direct"], strict=True)
    ]
    found = {"instructions": num, "microseconds": statistics.median(runs), "microseconds_of_runs": runs}
    found["microseconds_direct"] = 1e6 * statistics.median(taken["direct"]) / num
    if not World.default().is_alone:
        found["microseconds_of_steps"] = (
            1e6 * statistics.median(whole for _, whole in taken["penstock"]) / num
        )
        found["microseconds_of_torch_steps"] = 1e6 * statistics.median(taken["torch"]) / num
    busiest = max(World.default().all_gather_json(found), key=lambda of_rank: of_rank["microseconds"])
    common = {
        "ranks": World.default().size,
        "stages": stages,
        "micro_batches": micro_batches,
        "schedule": schedule,
    }
    return common | busiest


def _model(stages: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(1, CLASSES if s == stages - 1 else 1) for s in range(stages)))


def _optimizer(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.0)


def _plan(*, stages: int, micro_batches: int, schedule: str) -> Plan:
    example = (torch.randn(1, 1),)
    profile = measure(trace(_model(stages), example), example, repeats=1)
    cuts = [layer.name for layer in profile.layers[:-1]]
    return partition(
        profile, cuts=cuts, ranks=stages, schedule=schedule, micro_batches=micro_batches, codec="raw"
    )


class _Direct:
    """The work of this rank's stages (in a plain process, of all), called in a loop as one would write it."""

    def __init__(self, plan: Plan, micro_batches: int) -> None:
        layers = list(_model(plan.num_stages).children())
        own = (
            plan.stages_of_rank[World.default().rank]
            if not World.default().is_alone
            else range(plan.num_stages)
        )
        self.layers = [(layers[s], s == plan.num_stages - 1) for s in own]
        self.optimizers = [_optimizer(layer.parameters()) for layer, _ in self.layers]
        self.inputs = torch.randn(1, 1)
        self.targets, self.gradient = torch.zeros(1, dtype=torch.long), torch.ones(1, 1)
        self.micro_batches = micro_batches

        here = World.default().rank
        self.neighbours = [r for r in (here - 1, here + 1) if 0 <= r < World.default().size]
        self.frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8)

    def step(self) -> None:
        """Every forward with its backward, the updates, and as many transfers as there are frames."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for _ in range(self.micro_batches):
            for layer, last in self.layers:
                outputs = layer(self.inputs.detach().requires_grad_())
                if last:
                    (loss(outputs, self.targets) / self.micro_batches).backward()
                else:
                    outputs.backward(self.gradient)
        for optimizer in self.optimizers:
            optimizer.step()
        self._transfer()

    def _transfer(self) -> None:
        """One frame each way over every cut for each micro-batch, two of them posted ahead."""
        frames = [torch.empty_like(self.frame) for _ in self.neighbours]
        open_works: deque[dist.Work | None] = deque()
        for _ in range(self.micro_batches):
            for neighbour, frame in zip(self.neighbours, frames, strict=True):
                open_works += [dist.irecv(frame, neighbour), dist.isend(self.frame, neighbour)]
            while len(open_works) > 4 * len(self.neighbours):
                _wait(open_works.popleft())
        while open_works:
            _wait(open_works.popleft())


def _wait(work: dist.Work | None) -> None:
    assert work is not None, "all ranks are in the group"
    work.wait()


def _steps(pipe: Pipeline, batch: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Seconds of the processor in a step, without packing, and seconds by the clock; the mean over a run."""
    packing: dict[tuple[int, str], list[float]] = {}
    began, busy = time.perf_counter(), time.thread_time()
    for _ in range(STEPS):
        pipe.step(*batch)
        for span in pipe.engine.spans:
            packing.setdefault((span.stage, span.op), []).append(span.packing)
    busy, taken = time.thread_time() - busy, time.perf_counter() - began
    # Packing is timed by the clock, so a few spans hold what others on the machine took: medians do not.
    packed = sum(len(seconds) * statistics.median(seconds) for seconds in packing.values())
    return (busy - packed) / STEPS, taken / STEPS


def _seconds(step: Callable[[], object], *, clock: Callable[[], float]) -> float:
    began = clock()
    for _ in range(STEPS):
        step()
    return (clock() - began) / STEPS


def _alternate(sides: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[Any]]:
    """What the runs of each side took, in turn; the first of each warms up and is left out."""
    taken: dict[str, list[Any]] = {name: [] for name in sides}
    for _ in range(repeats + 1):
        for name, run in sides.items():
            taken[name].append(run())
    return {name: list(islice(runs, 1, None)) for name, runs in taken.items()}
