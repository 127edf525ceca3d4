"""The plain loop on the eager model, its random calls seeded one by one as a pipeline seeds its layers.

It shares no code with the recorder: calls are numbered as they come, and a first run shows which of them
draw."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from network import Batch, Inputs, given
from torch import nn
from torch.overrides import TorchFunctionMode

from penstock.stages.seeds import layer_seed
from penstock.stages.torch_private import paused
from penstock.stages.tracing.capture.recorder import Patches, kinds_that_are_called, overridden


class Drawing(TorchFunctionMode):
    """Numbers the calls of a run that are not inside another; ``layers`` are the modules that are one call.

    ``drew`` are the numbers of those that drew. Those in ``seeds`` (number of a call -> seed) are seeded."""

    def __init__(self, layers: Collection[nn.Module], seeds: Mapping[int, int]) -> None:
        super().__init__()
        self.layers, self.seeds = layers, seeds
        self.count, self.inside = 0, 0
        self.drew: list[int] = []
        self.patches = Patches(self._patches())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call of torch."""
        return self.one(lambda: func(*args, **(kwargs or {})))

    def one(self, run: Callable[[], Any]) -> Any:
        """Run one call, whatever it calls itself."""
        if self.inside:
            return run()
        number, self.count, self.inside = self.count, self.count + 1, 1
        try:
            with self.patches.on(off=True), paused(self):
                if number in self.seeds:
                    with torch.random.fork_rng(devices=()):
                        torch.manual_seed(self.seeds[number])
                        return run()
                before, result = torch.get_rng_state(), run()
                if not torch.equal(before, torch.get_rng_state()):
                    self.drew.append(number)
                return result
        finally:
            self.inside = 0

    def run(self, model: nn.Module, batch: Batch) -> Any:
        """Outputs of the model."""
        inputs = given(batch)
        with self.patches.on(), self:
            return outputs_of(model, inputs)

    def _patches(self) -> Iterator[tuple[Any, str, Any]]:
        for kind in kinds_that_are_called():
            yield kind, "__call__", self._called(kind.__call__)
        apply = torch.autograd.Function.__dict__["apply"]
        one = classmethod(lambda kind, *a, **k: self.one(lambda: apply.__get__(None, kind)(*a, **k)))
        yield torch.autograd.Function, "apply", one
        yield torch.overrides, "has_torch_function", overridden

    def _called(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            run = functools.partial(call, module, *args, **kwargs)
            return self.one(run) if module in self.layers else run()

        return called


def outputs_of(model: nn.Module, inputs: Inputs) -> Any:
    """Outputs of the model on what ``given`` returned."""
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def takes(model: nn.Module, batch: Batch) -> bool:
    """True if a copy of the model runs on such a batch: not all take any length, or a mask."""
    try:
        outputs_of(copy.deepcopy(model), given(batch))
    except Exception:
        return False
    return True


def drawing_calls(
    model: nn.Module, batch: Batch, layers: Collection[str], names: Sequence[str]
) -> dict[int, str]:
    """The numbers of the calls that draw, each with the name of its layer (``names``, in running order), by a
    run of ``model``."""
    drawing = Drawing({model.get_submodule(path) for path in layers}, {})
    drawing.run(model, batch)
    assert len(drawing.drew) == len(names), f"{len(drawing.drew)} calls draw, {len(names)} layers do"
    return dict(zip(drawing.drew, names, strict=True))


class MicroBatch(NamedTuple):
    """Inputs and targets, the modules that are one call, and the calls that draw with the names of layers."""

    batch: Batch
    targets: torch.Tensor
    layers: Collection[str]
    draws: Mapping[int, str]


def plain_step(
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    *,
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    step: int,
    cast: torch.autocast,
) -> list[torch.Tensor]:
    """One step of the plain loop over micro-batches, forward and loss under ``cast``; returns the losses."""
    optimizer.zero_grad()
    total, losses = sum(len(one.targets) for one in micro_batches), []
    for index, (batch, targets, layers, draws) in enumerate(micro_batches):
        seeds = {number: layer_seed(0, step, index, name) for number, name in draws.items()}
        drawing = Drawing({model.get_submodule(path) for path in layers}, seeds)
        with cast:
            value = loss(drawing.run(model, batch), targets)
        (value * (len(targets) / total)).backward()
        losses.append(value.detach())
    optimizer.step()
    return losses
