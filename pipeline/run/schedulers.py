"""``scheduler=warmup``: the learning rate goes up in a line, then down along a cosine."""

import functools
import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ...compression.errors import ConfigError


def warmup(optimizer: Optimizer, total_steps: int, *, warm_up: float = 0.1, final: float = 0.0) -> LambdaLR:
    """Return a schedule from near 0 up to the learning rate, then down to a part of it.

    Args:
        warm_up: Part of the steps that goes up; of 1 or more, that many steps.
        final: Part of the learning rate that the last step has.
    """
    steps = round(warm_up * total_steps) if warm_up < 1 else int(warm_up)
    if not 0 <= steps <= total_steps or not 0 <= final <= 1:
        raise ConfigError(
            f"scheduler.warm_up={warm_up} scheduler.final={final} do not fit a run of {total_steps} steps; "
            "warm_up is a part of it or a number of steps, final is from 0 to 1"
        )
    return LambdaLR(optimizer, functools.partial(_factor, total_steps - 1, steps, final))


def _factor(last: int, up: int, final: float, step: int) -> float:
    if step < up:
        return (step + 1) / (up + 1)
    done = min(1.0, (step - up) / max(1, last - up))
    return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2
