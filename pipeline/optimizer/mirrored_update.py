"""The update of stages whose parameters are in a mirror: layer by layer, with the bits of one at once.

    if anybody looks at all gradients first    of each turn come, are checked, unscaled, measured, and leave
    then                                       of each turn all comes, is clipped and updated, and leaves

Of an optimizer that updates every element by itself it takes one piece at a time. Parameters, gradients and
states come back to the device for their turn of the update."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ...stages.device import CPU
from ...stages.memory.evictable_tensor import EvictableTensor
from ...stages.memory.parameter_offload import OffloadedParameters
from .clip import device_of, norm_together, norms, total_norm
from .separability import InTurn, check_separable
from .update import Has, Update

Gradients = Mapping[str, torch.Tensor]


class MirroredUpdate(Update):
    """An ``Update`` of stages of which some have a mirror; takes what that takes, and the ``mirrors``."""

    def __init__(self, *, mirrors: Mapping[int, OffloadedParameters], **settings: Any) -> None:
        """Raises: PlanError: an optimizer cannot update layer by layer."""
        self.mirrors = mirrors
        self._depth = 0
        super().__init__(**settings)
        self._totals: dict[int, torch.Tensor | None] = {}
        self._norms: dict[str, tuple[float, float]] = {}
        self._device = CPU  # of the gradients, where there are any
        self._in_turn: dict[int, InTurn] = {}
        self._rest: dict[int, list[torch.nn.Parameter]] = {}
        for stage, mirror in mirrors.items():
            away = {id(parameter) for turn in mirror.turns for parameter in turn}
            self._rest[stage] = [p for _, p in self.parameters[stage] if id(p) not in away]
            if (made := self.optimizers.get(stage)) is not None:
                mirror.bind(made)
                turns = [*mirror.turns, self._rest[stage]]
                turn_of = {self.names[id(p)]: place for place, turn in enumerate(turns) for p in turn}
                check_separable(self.optimizer, list(self.parameters[stage]), turn_of, [made], in_turn=True)
                self._in_turn[stage] = InTurn(made, turns)

    def begin(self) -> None:
        """Nothing is in flight."""
        super().begin()
        for mirror in self.mirrors.values():
            mirror.begin()

    @contextlib.contextmanager
    def resident(self) -> Iterator[None]:
        """The block in which everything is near; what is written there stays."""
        self._depth += 1
        try:
            for mirror in self.mirrors.values() if self._depth == 1 else ():
                mirror.pull_all()
            yield
        finally:
            self._depth -= 1
            for mirror in self.mirrors.values() if not self._depth else ():
                mirror.push_all()

    @property
    def streams(self) -> bool:
        """A mirror is there because not all fits."""
        return bool(self.mirrors)

    def offloaded(self) -> Mapping[int, EvictableTensor]:
        """Return the places of the offloaded tensors of the mirrors, by their identity."""
        kept = {stage: made.state for stage, made in self.optimizers.items()}
        return {
            id(tensor): memory
            for stage, mirror in self.mirrors.items()
            for one in mirror.memories
            for tensor, memory in one.evicted(kept.get(stage, {}).get(one.parameter, {}))
        }

    def turns(self, *, at_once: bool) -> Iterator[Has]:
        """Those of the mirrors, then what is always near."""
        if at_once:
            yield from super().turns(at_once=True)
            return
        moved = {id(p) for mirror in self.mirrors.values() for turn in mirror.turns for p in turn}
        for mirror in self.mirrors.values():
            for turn in mirror.turns:
                with mirror.whole(turn):
                    yield {id(p) for p in turn}.__contains__
        yield lambda key: key not in moved

    def _unscale(self, stages: Sequence[int]) -> bool:
        """Look at the gradients as ``Update`` does, those of one turn after the other."""
        plain = [stage for stage in stages if stage not in self.mirrors]
        overflow = super()._unscale(plain)
        self._norms = {}
        if self.guard is None and self.clip is None and not self.scale.checks:
            return overflow
        for stage in stages:
            if stage in plain:
                self._measure({name: p.grad for name, p in self.parameters[stage] if p.grad is not None})
                continue
            for turn in self.mirrors[stage].turns:
                with self.mirrors[stage].gradients(turn, written=self.scale.checks) as gradients:
                    overflow |= self._looked_at({self.names[key]: g for key, g in gradients.items()}, stage)
            rest = {self.names[id(p)]: p.grad for p in self._rest[stage] if p.grad is not None}
            overflow |= self._looked_at(rest, stage)
        return overflow

    def _looked_at(self, gradients: Gradients, stage: int) -> bool:
        """Check, unscale and measure a few gradients; return whether one of them is infinite or no number."""
        if self.guard is not None:
            self.guard.check_update(gradients.items())
        made = self.optimizers.get(stage)
        known = {id(p) for group in made.param_groups for p in group["params"]} if made else set()
        scaled = [g for name, g in gradients.items() if id(self.named[name]) in known]
        overflow = self.scale.unscale(scaled)
        self._measure(gradients)
        return overflow

    def _measure(self, gradients: Gradients) -> None:
        if self.clip is not None and gradients:
            self._norms |= norms(gradients)
            self._device = device_of(gradients)

    def _clip(self, stages: Sequence[int]) -> None:
        """Compute the norm; gradients of a mirror are scaled when they come to be updated."""
        self._totals = {}
        if self.clip is None:
            return
        if self.scope == "global":
            self.norm = norm_together(self.world, self._norms, owner=self.owner, device=self._device)
            self._totals = dict.fromkeys(stages, self.norm)
        else:
            for stage in stages:
                found = [self._norms[name] for name, _ in self.parameters[stage] if name in self._norms]
                self._totals[stage] = total_norm(found, device=self._device)
        for stage in stages:
            if stage not in self.mirrors:
                self._scale(stage, [p for _, p in self.parameters[stage]])

    def _scale(self, stage: int, parameters: Sequence[torch.nn.Parameter]) -> None:
        if self.clip is not None and (total := self._totals.get(stage)) is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip, total)

    def _step(self, stage: int) -> None:
        """Update turn by turn."""
        if stage not in self.mirrors:
            super()._step(stage)
            return
        mirror, in_turn = self.mirrors[stage], self._in_turn.get(stage)
        if (
            self.skipped
            and self.clip is None
            and not (in_turn and self._steps_when_skipped(in_turn.optimizer))
        ):
            return
        turns = [*mirror.turns, self._rest[stage]]
        # Of replicas that divide the update, another one updates all of the other turns.
        ours = [n for n in range(len(turns)) if not self.divided or (in_turn and in_turn.has(n))]
        for place, following in zip(ours, [*ours[1:], len(turns)], strict=False):
            turn = turns[place]
            by_element = in_turn is not None and in_turn.by_element and mirror.has_one_version
            mirror.prefetch(following, whole=not by_element)
            is_mirrored, parts = place < len(mirror.turns), [turn]
            if by_element and is_mirrored:
                parts = [[parameter] for parameter in self._step_in_pieces(stage, place)]
            for part in parts:
                with mirror.whole(part) if is_mirrored else contextlib.nullcontext():
                    self._scale(stage, part)
                    if in_turn is not None:
                        step = functools.partial(in_turn.step_of, place, {id(p): p for p in part})
                        self._unless_skipped(in_turn.optimizer, step)

    def _step_in_pieces(self, stage: int, place: int) -> list[torch.nn.Parameter]:
        """Update those parameters of a turn that come in pieces; return the others."""
        mirror, in_turn, others = self.mirrors[stage], self._in_turn[stage], []
        for parameter in mirror.turns[place]:
            pieces = mirror.pieces(parameter, written=self._totals.get(stage) is not None)
            if pieces is None:
                others.append(parameter)
                continue
            for piece in pieces:
                self._scale(stage, [piece])
                step = functools.partial(in_turn.step_of, place, {id(parameter): piece})
                self._unless_skipped(in_turn.optimizer, step)
        return others
