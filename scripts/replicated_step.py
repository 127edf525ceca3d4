"""The picture of replicas: a step of two unlike stages, one rank each, and with two ranks for the slow one.

    python -m penstock.scripts.replicated_step docs/replicas.png

Both are the programs that run, simulated: the second stage takes twice as long as the first, and at the end
its replicas sum up their gradients (U)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from matplotlib.figure import Figure

from ..pipeline.run.timeline import Panel
from ..pipeline.run.timeline import figure as drawn
from ..pipeline.schedules.replicated import dealt, step_programs
from ..pipeline.schedules.simulate import simulate_plan
from ..stages.files import save_picture
from ..stages.plan.plan import Plan
from ..stages.plan.plan_stage import PlanStage

SECONDS = (0.010, 0.020), (0.020, 0.040)  # forward and backward of a micro-batch in each stage
NUM_PARAMETERS = 1_000_000
NUM_MICRO_BATCHES = 8


def main(arguments: Sequence[str]) -> int:
    """Draw the picture into the path that ``arguments`` hold."""
    (path,) = arguments
    save_picture(path, figure())
    return 0


def figure() -> Figure:
    """Plain 1F1B above, replicas [1, 2] below, on one axis."""
    plans = {"1F1B, one rank a stage": plan_of((1, 1)), "replicas [1, 2]": plan_of((1, 2))}
    panels = [Panel(title=name, spans=simulate_plan(p, step_programs(p)).spans) for name, p in plans.items()]
    first, second = (panel.seconds for panel in panels)
    return drawn(
        panels,
        title=f"A stage that takes twice as long gets two ranks: {first / second:.2f}x as fast, simulated",
    )


def plan_of(replicas: Sequence[int]) -> Plan:
    """A plan of the two stages on so many ranks each."""
    stages = [
        PlanStage(
            layers=(f"layer{number}",),
            parameters=(f"layer{number}.weight",),
            num_parameters=NUM_PARAMETERS,
            forward_seconds=forward,
            backward_seconds=backward,
            memory_bytes=0,
            bytes_forward=0,
            bytes_backward=0,
            ranks=tuple(ranks),
        )
        for number, ((forward, backward), ranks) in enumerate(zip(SECONDS, dealt(replicas), strict=True))
    ]
    return Plan(
        stages=tuple(stages),
        schedule="1f1b",
        micro_batches=NUM_MICRO_BATCHES,
        extra_in_flight=0,
        codec="raw",
        fingerprint="",
        input_shapes=(),
        input_dtypes=(),
        memory=None,
        link=None,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
