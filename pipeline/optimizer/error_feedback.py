"""Error feedback: an update of ``weights=double_buffered`` makes up for the delay of the one before it.

Let u_t be the step (new weights minus old ones, with all that the optimizer does to them: momentum, weight
decay) that an optimizer takes from a gradient at W_t, the weights after t updates. Because of the delay,
update t applies u_(t-1). With error feedback it applies

    u_(t-1) + (u_(t-1) - u_(t-2)),

since the update before applied u_(t-2) and should have applied u_(t-1). Updates count from the last drain:

    update        0      1       2                 3
    gradient at   W_0    W_0     W_1               W_2
    applied       its u  v=u_0   u_1 + (u_1 - v)   u_2 + (u_2 - u_1)

Update 0 has no delay, so that update 1 has no error to make up. One that is skipped (of infinite gradients)
applies nothing and counts as no update before. Source: after the idea of error feedback in arXiv 2606.30634;
the formula is the one given here."""

import contextlib
from collections.abc import Iterator

import torch
from torch.optim import Optimizer

from ...stages.weight_versions.versions import copy_of

PREVIOUS = "previous_step"  # key of the optimizer's state, from the first delayed update to a drain


@contextlib.contextmanager
def error_feedback(optimizer: Optimizer) -> Iterator[None]:
    """The block in which ``optimizer`` steps with delayed gradients; parameters without one stay."""
    updated = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    steps = [copy_of(parameter.data) for parameter in updated]
    yield
    for parameter, step in zip(updated, steps, strict=True):
        torch.sub(parameter.data, step, out=step)
        state = optimizer.state[parameter]
        if PREVIOUS in state:
            parameter.data.add_(step - state[PREVIOUS])
        state[PREVIOUS] = step


def forget_steps(optimizer: Optimizer) -> None:
    """Let no update count as the one before the next."""
    for state in optimizer.state.values():
        state.pop(PREVIOUS, None)
