"""What a real run leaves in a model, and what only the first one does: harmless if a run that finds it
computes what the first one did.

A table of indices made at the first call, a bias gathered once for evaluation, a setting that is guessed
from the first labels: a recording of the first run makes it anew every time. That is the same unless it was
made from the first batch, or from weights that have moved since; so a copy that has run is held against one
that has not, on other data and with moved weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from ...compression.errors import PlanError
from ..meta_watch import watching
from .capture.call_spec import Call, other_data
from .meta_model import needs_values, without_values
from .object_snapshot import contents
from .verify import author, move, observe, refuse_changes, same_bits


def run_eager(root: nn.Module, call: Call, inputs: tuple[torch.Tensor, ...]) -> tuple[set[str], bool]:
    """Run a copy of ``root``: the buffers and frozen parameters that a forward writes to, and whether it
    leaves nothing else behind, no other buffer either.

    Raises: PlanError: it does not run, or changes the model beside these every time."""
    eager, original = copy.deepcopy(root), dict(root.named_parameters())
    parameters = [(name, p, p.untyped_storage()._cdata) for name, p in eager.named_parameters()]
    buffers, cold = dict(eager.named_buffers()), dict(root.named_buffers())
    before, watch = contents(eager, running=True), watching()
    run: Callable[..., Any] = lambda *x: call.run(eager, x)  # noqa: E731
    try:
        observe(run, eager, inputs)
    except PlanError:
        raise
    except Exception as error:
        if watch and needs_values(error):
            raise without_values(eager, error) from error
        shapes = ", ".join(str(tuple(x.shape)) for x in inputs)
        raise PlanError(
            f"the model does not run on inputs of shape {shapes}: {error}; give another example"
        ) from error
    moved = {name for name, p, place in parameters if p.untyped_storage()._cdata != place}
    filled = {name for name, p, _ in parameters if not same_bits(p, original[name])}
    filled |= {name for name, _, place in parameters if watch and place in watch.writes}
    refuse_written(eager, moved, filled)
    clean = refuse_changes(
        before,
        eager,
        again=lambda: observe(run, eager, inputs),
        # Without values nobody can tell what the first run made from the first batch.
        settles=lambda: not watch and settles(eager, copy.deepcopy(root), call.run, other_data(call, inputs)),
    )
    held = {name: buffer for name, buffer in eager.named_buffers() if name in buffers}
    replaced = {name for name, buffer in held.items() if buffer is not buffers[name]}
    written = {name for name, buffer in held.items() if not same_bits(buffer, cold[name])}
    if watch:
        written |= {name for name, b in buffers.items() if b.untyped_storage()._cdata in watch.writes}
    return replaced | written | filled, clean and not replaced


def refuse_written(root: nn.Module, moved: Collection[str], filled: Collection[str]) -> None:
    """Refuse a forward that gives a parameter other memory, or writes to one that is trained.

    Raises: PlanError: it does, with where."""
    for name, parameter in root.named_parameters():
        if name in moved or (name in filled and parameter.requires_grad):
            raise PlanError(
                "a forward may write to buffers, and in place to parameters with requires_grad=False, found "
                f"that it writes to {name}{author(root, name)}; write to one of these, or between steps"
            )


def settles(
    warm: nn.Module,
    cold: nn.Module,
    run: Callable[[nn.Module, Sequence[torch.Tensor]], Any],
    inputs: Sequence[torch.Tensor],
) -> bool:
    """Whether ``warm``, which has run, computes what ``cold`` computes, which has not; both are written to.

    Between two evaluations a model trains, so a copy that evaluates is put into train mode once, and back."""
    if not warm.training:
        warm.train().eval()
    theirs, ours = dict(warm.named_buffers()), dict(cold.named_buffers())
    if list(theirs) != list(ours) or any(theirs[name].shape != ours[name].shape for name in ours):
        return False
    with torch.no_grad():
        for name, buffer in ours.items():
            theirs[name].copy_(buffer)
        for parameter in (*warm.parameters(), *cold.parameters()):
            move(parameter)
    found = [observe(lambda *x, m=model: run(m, x), model, inputs) for model in (warm, cold)]
    return list(found[0]) == list(found[1]) and all(map(same_bits, *(seen.values() for seen in found)))
