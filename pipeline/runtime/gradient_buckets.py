"""The sum of gradients over replicas, slice by slice, while the backward goes on.

In the last backward of a step the gradient of a parameter is final as soon as autograd has added to it. When
all of a slice of the flat buffer are, the slice goes out, in an order that is the same on all replicas; what
no backward ended goes out at the update. Nobody waits until then: the sums run in threads of gloo, and the
backward in this one.
Source: Li et al., PyTorch Distributed, VLDB 2020, section 3.2 (buckets of
gradients, filled in the reverse order of a forward)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ...compression.errors import StageError, TransportError
from ..distributed.process_group import ReplicaGroup
from ..optimizer.flat import FlatGradients, Slice


class Slices:
    """The slices of one stage: in each step ``finals`` around its last backward, then ``sums``."""

    def __init__(self, flat: FlatGradients, group: ReplicaGroup) -> None:
        self.flat, self.group = flat, group
        self.start_of = {place: start for pairs in flat.offsets.values() for place, start in pairs}
        self.slice_of = {place: number for number, one in enumerate(flat.slices) for place in one.places}
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self.buffers: dict[torch.dtype, torch.Tensor] = {}
        self.missing = [set(one.places) for one in self.flat.slices]
        self.works: list[dist.Work] = []
        self.taken: dict[int, tuple[torch.Tensor, int]] = {}
        self.lost: TransportError | None = None

    @contextlib.contextmanager
    def finals(self) -> Iterator[None]:
        """The block of the last backward of a step; what hooks of others make of a gradient is in it."""
        parameters = {place: self.flat.named[place][1] for place in self.slice_of}
        handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._final, place))
            for place, parameter in parameters.items()
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def sums(
        self, gathered: dict[torch.dtype, torch.Tensor] | None = None
    ) -> dict[torch.dtype, torch.Tensor]:
        """The sums of all gradients.

        Args:    gathered: buffers of them; None: of the parameters, as far as they have not gone out.
        Raises: StageError: a gradient changed after it went out. TransportError: a replica is lost."""
        if gathered is not None:
            self.buffers = gathered
        for place in self.slice_of if gathered is None else ():
            if place not in self.taken:
                self._take(place)
            self._check(place)
        for missing in self.missing:
            missing.clear()
        self._go_on()
        if self.lost:
            raise self.lost
        for one, work in zip(self.flat.slices, self.works, strict=True):
            self.group.finish(work, self._numbers(one), at=_AT)
        found, self.buffers = self.buffers, {}
        self.works, self.taken = [], {}  # they hold memory
        return found

    def share_parameters(self) -> None:
        """Have every replica take each parameter from the one that updates it.

        Raises:  TransportError: a replica is lost."""
        buffers, works, group = self.flat.buffers(), [], self.group
        for one in self.flat.slices:
            assert one.owner is not None, "somebody updated it"
            if one.owner == group.place:
                self.flat.gather_parameters(buffers, one)
            part = buffers[one.dtype][one.start : one.stop]
            works.append(group.begin_to_broadcast(part, one.owner, at=_UPDATED))
        for one, work in zip(self.flat.slices, works, strict=True):
            group.finish(work, buffers[one.dtype][one.start : one.stop], at=_UPDATED)
            if one.owner != group.place:
                self.flat.spread_parameters(buffers, one)
        self.flat.give_back(buffers)

    def _final(self, place: int, _: torch.Tensor) -> None:
        self._take(place)
        self.missing[self.slice_of[place]].discard(place)
        self._go_on()

    def _take(self, place: int) -> None:
        self.buffers = self.buffers or self.flat.buffers()
        parameter = self.flat.named[place][1]
        self.flat.take(self.buffers[parameter.dtype], place, self.start_of[place], parameter.grad)
        if parameter.grad is not None:
            self.taken[place] = parameter.grad, parameter.grad._version

    def _check(self, place: int) -> None:
        name, parameter = self.flat.named[place]
        if place in self.taken:
            gradient, version = self.taken[place]
            if parameter.grad is not gradient or gradient._version != version:
                raise StageError(
                    f"the gradient of {name} was summed up over replicas when its last backward had ended "
                    "it, and something wrote to it since; write to it in a hook of the optimizer's step"
                )

    def _go_on(self) -> None:
        """Send the next slices, as far as they are whole; an error is raised by the wait."""
        while self.lost is None and len(self.works) < len(self.missing) and not self.missing[len(self.works)]:
            one = self.flat.slices[len(self.works)]
            try:
                numbers = self._numbers(one)
                if one.owner is None:
                    self.works.append(self.group.begin_to_add_up(numbers, at=_AT))
                else:
                    self.works.append(self.group.begin_to_add_up_at(one.owner, numbers, at=_AT))
            except TransportError as error:
                self.lost = error

    def _numbers(self, one: Slice) -> torch.Tensor:
        flat = self.buffers[one.dtype][one.start : one.stop]
        return torch.view_as_real(flat) if flat.is_complex() else flat


_AT, _UPDATED = "the sum of the gradients", "the updated parameters"
