"""Making an optimizer from what a person gives: a function of (name, parameter) pairs."""

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch.optim import LBFGS, Optimizer

from ...compression.errors import PlanError
from ...stages.seeds import TURN, seeded

Named = list[tuple[str, torch.nn.Parameter]]
Make = Callable[[Named], Optimizer]


def make_optimizer(optimizer: Make, named: Iterable[tuple[str, torch.nn.Parameter]]) -> Optimizer | None:
    """The optimizer of these parameters; None where the function leaves it nothing; raises PlanError."""
    pairs = list(named)
    if not pairs:
        return None
    try:
        made = optimizer(pairs)
    except ValueError as error:
        if "empty parameter list" in str(error):  # the caller's choice of names leaves nothing on this stage
            return None
        rule = f"the optimizer of a stage cannot be made: {error}"
        raise PlanError(f"{rule}; leave out groups that are empty") from error
    if not isinstance(made, Optimizer):
        found = type(made).__name__
        raise PlanError(f"optimizer makes a torch optimizer from (name, parameter) pairs, found {found}")
    given = {id(parameter) for _, parameter in pairs}
    if any(id(parameter) not in given for group in made.param_groups for parameter in group["params"]):
        raise PlanError(
            "an optimizer takes parameters of its own stage only; make it from the pairs it is given"
        )
    if isinstance(made, LBFGS):
        raise PlanError(
            "an optimizer works on one stage's parameters at a time and LBFGS needs all at once; use SGD or "
            "Adam"
        )
    return made


def make_optimizers(
    optimizer: Make, parameters: Mapping[int, Named], *, mine: Collection[str] | None
) -> dict[int, Optimizer]:
    """The optimizers of stages that have some of their ``parameters``; raises PlanError.

    Args:    mine: the names of those that this rank updates, where replicas divide them; None: all."""
    found = {}
    for stage, named in parameters.items():
        updated = named if mine is None else [pair for pair in named if pair[0] in mine]
        made = make_optimizer(optimizer, updated)
        if made is not None:
            found[stage] = made
        known = {id(p) for group in (made.param_groups if made else ()) for p in group["params"]}
        left = (n for n, p in updated if p.requires_grad and id(p) not in known)
        if mine is not None and (name := next(left, None)):
            raise PlanError(
                "where replicas divide the update, the optimizer has every parameter that wants a gradient, "
                f"and {name} is in none; set requires_grad=False for it, or take sharded=False"
            )
    return found


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a group, without what it is a group of."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def state_per_byte(optimizer: Make) -> float | None:
    """Bytes that an optimizer keeps for each byte of its parameters, as a step shows: 0 for plain SGD, 2 for
    Adam, without numbers that count steps. None: no telling."""
    weight = torch.nn.Parameter(torch.zeros(64, 64))
    weight.grad = torch.zeros_like(weight)
    with random_kept():
        try:
            made = make_optimizer(optimizer, [("weight", weight)])
            assert made is not None
            made.step()
            kept = [item for item in made.state[weight].values() if isinstance(item, torch.Tensor)]
        except Exception:  # it takes other names, other shapes, a closure, or keeps what it has elsewhere
            return None
    return sum(item.nbytes for item in kept if item.dim()) / weight.nbytes


def update_seconds(optimizer: Make, *, num_bytes: int = 16 << 20, repeats: int = 3) -> float | None:
    """Seconds that an optimizer updates for each byte of its parameters, measured on the CPU on more than
    caches hold. None: no telling."""
    named = [(f"weight{n}", torch.nn.Parameter(torch.zeros(512, 512))) for n in range(num_bytes >> 20)]
    for _, weight in named:
        weight.grad = torch.zeros_like(weight)
    seconds = list[float]()
    with random_kept():
        try:
            made = make_optimizer(optimizer, named)
            assert made is not None
            while len(seconds) <= repeats and sum(seconds) < 1:  # the first makes its state
                begun = time.perf_counter()
                made.step()
                seconds.append(time.perf_counter() - begun)
        except Exception:
            return None
    return statistics.median(seconds[1:] or seconds) / num_bytes


@contextlib.contextmanager
def random_kept() -> Iterator[None]:
    """Put every random state back behind a block."""
    with TURN:
        python, arrays = random.getstate(), numpy.random.get_state()
        try:
            with seeded(None, [torch.default_generator]):
                yield
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)
