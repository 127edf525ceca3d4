"""What an instruction costs beside the work it stands for: layers of one number, so that little else is left.

A schedule with many small instructions is worth nothing if each costs more than it saves. Measured: seconds
of the processor between call and return of a step, which leaves waiting out, less those that packed frames,
less the same layers, loss, backwards, updates and transfers called directly in a loop; divided by the number
of instructions. The step's report counts as overhead. Both take turns, medians of pairs count."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...pipeline.pipeline import Pipeline
from ...pipeline.planner.partition import partition
from ...pipeline.ranks.world import World
from ...pipeline.run.epochs import loss
from ...stages.planner.measure import measure
from ...stages.planner.plan import Plan
from ...stages.tracing.graph import trace
from .harness import alternate, timed
from .torch_pipelines import TorchPipeline

CLASSES = 2
FRAME_BYTES = 128
"""About a header and a few bytes, as the frames of one number are."""

STEPS = 20
"""Steps in one run: enough for the clock to see, few enough for both sides to take turns."""


def instruction_cost(
    *, stages: int, micro_batches: int, repeats: int, schedule: str = "1f1b"
) -> dict[str, Any]:
    """Measure in this process, or on all ranks of the group, which call it together; a stage a rank there.

    Returns: ``ranks``, ``stages``, ``micro_batches``, ``schedule`` and, of the busiest rank: ``instructions``
             a step, ``microseconds`` of overhead for each (the median), ``microseconds_of_runs``;
             ``microseconds_direct``: the same work called directly. On ranks also ``microseconds_of_steps``
             and ``microseconds_of_torch_steps``: a whole step, waiting included, divided by the number of
             instructions, by us and by torch's pipeline.
    """
    world = World.default()
    plan = _plan(stages=stages, micro_batches=micro_batches, schedule=schedule)
    batch = torch.randn(micro_batches, 1), torch.arange(micro_batches) % CLASSES
    pipe = Pipeline(_model(stages), plan, loss=loss, optimizer=_optimizer)
    own = range(stages) if world.is_alone else plan.stages_of_rank[world.rank]
    sides: dict[str, Callable[[], Any]] = {
        "penstock": lambda: _steps(pipe, batch),
        "direct": timed(_Direct(own, stages, micro_batches).step, STEPS, clock=time.thread_time),
    }
    if not world.is_alone:
        theirs = TorchPipeline(_model(stages), plan, loss=loss, optimizer=_optimizer)
        sides["torch"] = timed(lambda: theirs.step(*batch), STEPS)
    alternate(sides, 1)  # warms up
    taken, num = alternate(sides, repeats), len(own) * (2 * micro_batches + 1)  # F, B and U
    runs = [ours[0] - direct for ours, direct in zip(taken["penstock"], taken["direct"], strict=True)]
    seconds = {"": runs, "_direct": taken["direct"]}
    if not world.is_alone:
        seconds |= {"_of_steps": [whole for _, whole in taken["penstock"]], "_of_torch_steps": taken["torch"]}
    found: dict[str, Any] = {"instructions": num, "microseconds_of_runs": [1e6 * one / num for one in runs]}
    found |= {f"microseconds{name}": 1e6 * statistics.median(of) / num for name, of in seconds.items()}
    facts = {"ranks": world.size, "stages": stages, "micro_batches": micro_batches, "schedule": schedule}
    return facts | max(world.all_gather_json(found), key=lambda of_rank: of_rank["microseconds"])


def sentence(found: Mapping[str, Any]) -> str:
    """Say what an instruction costs beside its work, in one process or on ranks."""
    where = "in one process" if found["ranks"] == 1 else "on {ranks} ranks"
    line = f"scheduling overhead {where}, {{stages}} stages of one number, {{micro_batches}} micro-batches: "
    line += "{microseconds:.0f} us for each of {instructions} instructions (the same work called directly: "
    line += "{microseconds_direct:.0f} us)"
    if found["ranks"] > 1:
        line += "; a whole step, waiting included: {microseconds_of_steps:.0f} us an instruction, torch "
        line += "{microseconds_of_torch_steps:.0f} us"
    return line.format_map(found)


def _model(stages: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(1, CLASSES if s == stages - 1 else 1) for s in range(stages)))


def _optimizer(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.0)


def _plan(*, stages: int, **options: Any) -> Plan:
    example = (torch.randn(1, 1),)
    profile = measure(trace(_model(stages), example), example, repeats=1)
    cuts = [layer.name for layer in profile.layers[:-1]]
    return partition(profile, cuts=cuts, ranks=stages, codec="raw", **options)


class _Direct:
    """The work of this rank's stages (in a plain process, of all), called in a loop as one would write it."""

    def __init__(self, own: Sequence[int], stages: int, micro_batches: int) -> None:
        model, world = _model(stages), World.default()
        self.layers = [(model[s], s == stages - 1) for s in own]
        self.optimizers = [_optimizer(layer.parameters()) for layer, _ in self.layers]
        self.inputs, self.gradient = torch.randn(1, 1), torch.ones(1, 1)
        self.targets, self.micro_batches = torch.zeros(1, dtype=torch.long), micro_batches
        self.frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
        neighbours = [rank for rank in (world.rank - 1, world.rank + 1) if 0 <= rank < world.size]
        self.frames = {rank: torch.empty_like(self.frame) for rank in neighbours}

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
        ahead: deque[Any] = deque()  # a frame each way over every cut for each micro-batch, two posted ahead
        for _ in range(self.micro_batches):
            for neighbour, frame in self.frames.items():
                ahead += [dist.irecv(frame, neighbour), dist.isend(self.frame, neighbour)]
            while len(ahead) > 4 * len(self.frames):
                ahead.popleft().wait()
        for transfer in ahead:
            transfer.wait()


def _steps(pipe: Pipeline, batch: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Seconds of the processor in a step, without packing, and seconds by the clock; the mean over a run."""
    packing: dict[tuple[int, str], list[float]] = {}
    began, busy = time.perf_counter(), time.thread_time()
    for _ in range(STEPS):
        pipe.step(*batch)
        for span in pipe.engine.meter.spans:
            packing.setdefault((span.stage, span.op), []).append(span.packing)
    busy, taken = time.thread_time() - busy, time.perf_counter() - began
    # Packing is timed by the clock, so a few spans hold what others on the machine took: medians do not.
    packed = sum(len(seconds) * statistics.median(seconds) for seconds in packing.values())
    return (busy - packed) / STEPS, taken / STEPS
