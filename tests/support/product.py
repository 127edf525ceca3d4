"""Law L1 over the whole product of models, stages, schedules, codecs and optimizers, in random order.

The tests take a few cases of it; what nobody thought of combining is found by combining everything. It takes
hours, so it is run before a release, and a part of it at any time:

    python tests/support/product.py --models mlp,resnet18 --schedules zb_h1,zbv --limit 100 --seed 1
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from cases import OPTIMIZERS, Case, plan_of
from law import differences

from penstock import ScheduleError
from penstock.pipeline.schedules import SCHEDULES
from penstock.stages.planner.plan import TIERS

# Batches of 11 samples: in 3, 4 or 8 micro-batches the last ones are smaller.
MODELS = {"mlp": 8, "resnet18": 4, "densenet": 3, "gpt_gelu_dropout": 4, "gpt_tied": 4}
"""The micro-batches of each: BatchNorm needs two samples or more in every one."""

STAGES = (1, 2, 3, 4)
CODECS = ("raw", "zero_value", "zero_value+exponent", "byte_plane", "auto")


def _one_each(stages: int) -> list[int]:
    """As many ranks as stages; half as many, so that neighbours share one, where that is something else."""
    return [stages, *([stages // 2] if stages > 2 and stages % 2 == 0 else [])]


def _two_each(stages: int) -> list[int]:
    return [stages // 2] if stages % 2 == 0 else []


RANKS: dict[str, Callable[[int], list[int]]] = {
    "gpipe": _one_each,
    "1f1b": _one_each,
    "zb_h1": _one_each,
    "interleaved": _two_each,
    "zbv": _two_each,
    "dualpipev": _two_each,
}
"""The synchronous schedules, and the numbers of ranks that suit each for a number of stages."""


def product(
    models: Sequence[str],
    stages: Sequence[int],
    schedules: Sequence[str],
    codecs: Sequence[str],
    optimizers: Sequence[str],
) -> Iterator[Case]:
    """Every case of the product; all stages run in this process, whatever their ranks."""
    for model, cuts, schedule in itertools.product(models, stages, schedules):
        for ranks, codec, optimizer in itertools.product(RANKS[schedule](cuts), codecs, optimizers):
            yield Case(
                model=model,
                cuts=cuts,
                ranks=ranks,
                schedule=schedule,
                codec=codec,
                optimizer=optimizer,
                micro_batches=MODELS[model],
                steps=2,
            )


def run(cases: Sequence[Case], *, seconds: float) -> int:
    """Run the cases until the time is over; print a line per failure and a count, return the failures."""
    began, failed, done = time.monotonic(), 0, 0
    unsuitable: set[str] = set()
    for case in cases:
        if time.monotonic() - began > seconds:
            break
        if constraint := _constraint(case):
            unsuitable.add(constraint)
            continue
        done += 1
        if reason := _failure(case):
            failed += 1
            print(f"FAILED {case!r}: {reason}", flush=True)
    for constraint in sorted(unsuitable):
        print(f"left out: {constraint}")
    taken = time.monotonic() - began
    print(f"{done} of {len(cases)} cases run in {taken:.0f} s, {failed} failed", flush=True)
    return failed


def _constraint(case: Case) -> str:
    """Why the schedule itself does not take so many stages, ranks and micro-batches; nothing if it does."""
    try:
        plan, _ = plan_of(case)
        SCHEDULES[case.schedule](plan.stages_of_rank, case.micro_batches)
    except ScheduleError as error:
        return str(error)
    return ""


def _failure(case: Case) -> str:
    """What differs from the plain loop, or what was raised; nothing if the law holds."""
    try:
        found = differences(case)
    except Exception as error:  # whatever it is, the other cases are still to be run
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return f"{len(found)} differences, first {found[0]}" if found else ""


def _some_of(names: Sequence[object], kind: type = str) -> Callable[[str], list]:
    def chosen(text: str) -> list:
        found = [kind(word) for word in text.split(",")]
        if unknown := [name for name in found if name not in names]:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is not known; known are {names}")
        return found

    return chosen


def main() -> int:
    """Run what the command line asks for; the exit code says whether anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    lists = {"models": MODELS, "schedules": RANKS, "codecs": CODECS, "optimizers": OPTIMIZERS}
    for option, names in ((option, list(known)) for option, known in lists.items()):
        parser.add_argument(f"--{option}", type=_some_of(names), default=names, metavar=",".join(names))
    parser.add_argument("--stages", type=_some_of(STAGES, int), default=STAGES, metavar="1,2,3,4")
    parser.add_argument("--limit", type=int, help="run only so many cases")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so many")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument(
        "--late", action="store_true", help="on a device that does everything late, in any tier"
    )
    asked = parser.parse_args()
    for schedule in asked.schedules:
        if schedule not in SCHEDULES:
            print(f"schedule={schedule} is not known here and is skipped")
    schedules = [schedule for schedule in asked.schedules if schedule in SCHEDULES]
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    cases = list(product(asked.models, asked.stages, schedules, asked.codecs, asked.optimizers))
    chance = random.Random(asked.seed)
    chance.shuffle(cases)
    if asked.late:
        cases = [dataclasses.replace(case, late=(0,), tier=chance.choice(TIERS)) for case in cases]
    return 1 if run(cases[: asked.limit], seconds=asked.seconds) else 0


if __name__ == "__main__":
    sys.exit(main())
