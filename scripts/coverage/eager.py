"""The plain loop on the eager model, its random calls seeded one by one as a pipeline seeds its layers.

It shares no code with the recorder: calls are numbered as they come, and a first run shows which of them draw."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ...stages.seeds import layer_seed


class Drawing(TorchFunctionMode):
    """Numbers the calls of a run that are not inside another; ``layers`` are the modules that are one call.

    ``drew`` are the numbers of those that drew. With ``seeds`` (number of a call -> seed) those are seeded."""

    def __init__(self, layers: Mapping[nn.Module, str], seeds: Mapping[int, int] | None = None) -> None:
        super().__init__()
        self.layers, self.seeds = layers, seeds
        self.count, self.inside = 0, 0
        self.drew: list[int] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One call of torch."""
        return self.one(lambda: func(*args, **(kwargs or {})))

    def one(self, run: Callable[[], Any]) -> Any:
        """Run one call, whatever it calls itself."""
        if self.inside:
            return run()
        number, self.count, self.inside = self.count, self.count + 1, 1
        before = torch.get_rng_state()
        try:
            if self.seeds is not None and number in self.seeds:
                torch.manual_seed(self.seeds[number])
                result = run()
                torch.set_rng_state(before)
            else:
                result = run()
                if not torch.equal(before, torch.get_rng_state()):
                    self.drew.append(number)
        finally:
            self.inside = 0
        return result

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The block in which the model runs."""
        call, apply = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module in self.layers:
                return self.one(lambda: call(module, *args, **kwargs))
            return call(module, *args, **kwargs)

        def applied(function: type, *args: Any, **kwargs: Any) -> Any:
            return self.one(lambda: apply.__get__(None, function)(*args, **kwargs))

        nn.Module.__call__, torch.autograd.Function.apply = called, classmethod(applied)  # type: ignore
        try:
            with self:
                yield
        finally:
            nn.Module.__call__, torch.autograd.Function.apply = call, apply


def drawing_calls(
    model: nn.Module, inputs: Sequence[torch.Tensor], layers: Collection[str], names: Sequence[str]
) -> dict[int, str]:
    """The numbers of the calls that draw, each with the name of its layer (``names``, in running order).

    Args:   model: a copy, which is run.
    Raises: AssertionError: there are not as many calls as names."""
    drawing = Drawing({model.get_submodule(path): path for path in layers})
    with drawing.running():
        model(*inputs)
    assert len(drawing.drew) == len(names), f"{len(drawing.drew)} calls draw, {len(names)} layers do"
    return dict(zip(drawing.drew, names, strict=True))


def plain_step(
    model: nn.Module,
    micro_batches: Sequence[tuple[Sequence[torch.Tensor], torch.Tensor]],
    *,
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    layers: Collection[str],
    draws: Mapping[int, str],
) -> list[torch.Tensor]:
    """One step of the plain loop over micro-batches; returns their losses."""
    optimizer.zero_grad()
    total = sum(len(y) for _, y in micro_batches)
    losses = []
    for index, (inputs, targets) in enumerate(micro_batches):
        seeds = {number: layer_seed(0, 0, index, name) for number, name in draws.items()}
        drawing = Drawing({model.get_submodule(path): path for path in layers}, seeds)
        with drawing.running():
            outputs = model(*inputs)
        value = loss(outputs, targets)
        (value * (len(targets) / total)).backward()
        losses.append(value.detach())
    optimizer.step()
    return losses
