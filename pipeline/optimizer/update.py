"""The update of the weights: one optimizer per stage, and what all stages must agree on before it.

In a round every stage updates once. The first update of a round finds all gradients of its batch, so it takes
the loss scale off them and clips them by the norm over all stages; where no such moment exists, as without a
flush, every update is a step of its own.

Stages whose parameters are in a mirror are updated layer by layer, with the bits of one update at once:

    if anybody looks at all gradients first    of each turn come, are checked, unscaled, measured, and leave
    then                                       of each turn all comes, is clipped and updated, and leaves

Of an optimizer that updates every element by itself a turn takes one piece at a time."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ...stages.device import CPU
from ...stages.memory.evictable_tensor import EvictableTensor
from ...stages.memory.parameter_offload import OffloadedParameters
from ...stages.stage.nan_check import Guard
from ...stages.weight_versions.versions import WeightVersions
from ..distributed.process_group import World
from .clip import norm_together, norms, total_norm
from .error_feedback import PREVIOUS, error_feedback, forget_steps
from .optimizers import Make, Named, make_optimizers
from .scale import Scale, Scaler
from .separability import InTurn, check_separable
from .shared_scheduler import MakeScheduler, SharedScheduler
from .state_checks import check_kept, check_optimizer, check_part, saved_settings

SCOPES = ("global", "stage")
Has = Callable[[int], bool]  # whether a turn has the tensor with this identity


class Update:
    """Optimizers (and schedulers) of this process's stages; raises PlanError.

    Args:    parameters: per stage its (name, parameter) pairs, in the model's own order.
             owner: the rank of every parameter of the model by name, in the model's own order.
             every: all parameters of the model by name, also those of other ranks.
             together: whether the stages update in rounds; else each on its own, whatever others find.
             exchange: makes the gradients of a stage, which replicas share, those of the whole batch.
             divided: the optimizers here have what ``owner`` says is of this rank only.
             error_feedback: updates behind the first of a stream are delayed, and make up for it.
             mirrors: those of the stages that have one."""

    def __init__(
        self, *, world: World, parameters: Mapping[int, Named], owner: Mapping[str, int],
        weights: Mapping[int, WeightVersions], optimizer: Make, scheduler: MakeScheduler | None, every: Named,
        clip: float | None, scope: str = "global", scaler: Scaler = None, together: bool = True,
        guard: Guard | None = None, exchange: Callable[[int], None] = lambda stage: None,
        divided: bool = False, error_feedback: bool = False,
        mirrors: Mapping[int, OffloadedParameters] | None = None,
    ) -> None:  # fmt: skip
        self.exchange, self.mirrors, self._depth = exchange, mirrors or {}, 0
        self.world, self.scale, self.guard = world, Scale(scaler), guard
        self.error_feedback = error_feedback
        self.parameters, self.weights = parameters, weights
        self.named = {name: parameter for named in parameters.values() for name, parameter in named}
        self.names = {id(parameter): name for name, parameter in self.named.items()}
        self.owner, self.clip, self.scope, self.together, self.divided = owner, clip, scope, together, divided
        mine = {n for n in self.named if owner[n] == world.rank} if divided else None
        self.optimizers = make_optimizers(optimizer, parameters, mine=mine)
        for stage, made in self.optimizers.items():
            weights[stage].bind(made)
        self.scheduler = (
            SharedScheduler(scheduler, optimizer, named=every, stages=self.optimizers) if scheduler else None
        )
        self.norm: torch.Tensor | None = None  # of all gradients, before the last clip by it
        self.begun = 0  # updates of stages that have begun to write
        self.begin()
        self._totals: dict[int, torch.Tensor | None] = {}  # by stage, of what its gradients are a part
        self._norms: dict[str, tuple[float, float]] = {}
        self._device = CPU  # of the gradients, where there are any
        self._in_turn: dict[int, InTurn] = {}
        self._rest: dict[int, list[torch.nn.Parameter]] = {}
        for stage, mirror in self.mirrors.items():
            moved = {id(parameter) for turn in mirror.turns for parameter in turn}
            self._rest[stage] = [p for _, p in parameters[stage] if id(p) not in moved]
            if (made := self.optimizers.get(stage)) is not None:
                mirror.bind(made)
                turns = [*mirror.turns, self._rest[stage]]
                turn_of = {self.names[id(p)]: place for place, turn in enumerate(turns) for p in turn}
                check_separable(optimizer, list(parameters[stage]), turn_of, [made], in_turn=True)
                self._in_turn[stage] = InTurn(made, turns)

    def begin(self) -> None:
        """Nothing is in flight: gradients start from None (sums from zeros lose -0.0), rounds from 0."""
        self.num_updates = dict.fromkeys(self.weights, 0)
        self.num_rounds = 0
        self.skipped = False
        self.scale.begin()
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
            if self.error_feedback:
                forget_steps(optimizer)
        for mirror in self.mirrors.values():
            mirror.begin()

    @contextlib.contextmanager
    def resident(self) -> Iterator[None]:
        """The block in which all is where people look; what is written there stays."""
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
    def learning_rate(self) -> float | None:
        """That of the first parameters here; None where there are none, or it has another name."""
        groups = [settings for made in self.optimizers.values() for settings in made.param_groups]
        return float(groups[0]["lr"]) if groups and "lr" in groups[0] else None

    def offloaded(self) -> Mapping[int, EvictableTensor]:
        """Return the places of offloaded parameters and optimizer states, by identity."""
        kept = {stage: made.state for stage, made in self.optimizers.items()}
        return {
            id(tensor): memory
            for stage, mirror in self.mirrors.items()
            for one in mirror.memories
            for tensor, memory in one.evicted(kept.get(stage, {}).get(one.parameter, {}))
        }

    def step(self, stage: int) -> None:
        """Update the weights of ``stage``; its n-th update belongs to round n, which one stage opens."""
        self.num_updates[stage] += 1
        if not self.together:
            self._ready([stage])
        elif self.num_updates[stage] > self.num_rounds:
            self.num_rounds += 1
            self._ready(list(self.weights))
        self.begun += 1
        feeds = self.error_feedback and self.num_updates[stage] > 1 and not self.skipped
        feedback = error_feedback(self.optimizers[stage]) if feeds and stage in self.optimizers else None
        with self.weights[stage].update(), feedback or contextlib.nullcontext():
            self._step(stage)
        if self.scheduler is not None and stage in self.optimizers and not self.skipped:
            self.scheduler.step(stage)

    def _step(self, stage: int) -> None:
        """Let the optimizer of ``stage`` write its parameters, a mirror's turn by turn."""
        if (mirror := self.mirrors.get(stage)) is None:
            if stage in self.optimizers:
                self._unless_skipped(self.optimizers[stage], self.optimizers[stage].step)
            return
        in_turn = self._in_turn.get(stage)
        calls = not self.skipped or (in_turn and self._steps_when_skipped(in_turn.optimizer))
        if self.clip is None and not calls:
            return
        turns = [*mirror.turns, self._rest[stage]]
        # Of replicas that divide the update, another one updates all of the other turns.
        ours = [n for n in range(len(turns)) if not self.divided or (in_turn and in_turn.has(n))]
        for place, following in zip(ours, [*ours[1:], len(turns)], strict=False):
            by_element = in_turn is not None and in_turn.by_element and not mirror.versions
            mirror.prefetch(following, whole=not by_element)
            is_mirrored, parts = place < len(mirror.turns), [turns[place]]
            if by_element and is_mirrored:
                parts = [[parameter] for parameter in self._step_in_pieces(stage, place)]
            for part in parts:
                with mirror.whole(part) if is_mirrored else contextlib.nullcontext():
                    self._clip_and_step(stage, place, {id(p): p for p in part})

    def _step_in_pieces(self, stage: int, place: int) -> list[torch.nn.Parameter]:
        """Update those parameters of a turn that come in pieces; return the others."""
        mirror, others = self.mirrors[stage], []
        for parameter in mirror.turns[place]:
            pieces = mirror.pieces(parameter, written=self._totals.get(stage) is not None)
            if pieces is None:
                others.append(parameter)
            for piece in pieces or ():
                self._clip_and_step(stage, place, {id(parameter): piece})
        return others

    def _clip_and_step(self, stage: int, place: int, pieces: dict[int, torch.nn.Parameter]) -> None:
        self._scale(stage, [*pieces.values()])
        if (in_turn := self._in_turn.get(stage)) is not None:
            self._unless_skipped(in_turn.optimizer, functools.partial(in_turn.step_of, place, pieces))

    def _steps_when_skipped(self, optimizer: object) -> bool:
        """True for a fused optimizer, which begins its state in a skipped update, too: it is called with
        ``found_inf``, as by ``GradScaler.step``."""
        return self.scale.checks and getattr(optimizer, "_step_supports_amp_scaling", False)

    def _unless_skipped(self, optimizer: Any, step: Callable[[], object]) -> None:
        if self._steps_when_skipped(optimizer):
            optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(float(self.skipped))
            try:
                step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf
        elif not self.skipped:
            step()

    def _ready(self, stages: Sequence[int]) -> None:
        """Make the gradients of ``stages`` ready for their optimizers, and decide whether they are called."""
        for stage in stages:
            self.weights[stage].due()
            self.exchange(stage)
        self.skipped = self._unscale(stages)
        if self.scale.checks and self.together:
            self.skipped = [1.0] in self.world.all_gather([self.skipped], at="the verdict on overflows")
        self.scale.update(overflow=self.skipped)
        self._clip(stages)

    def _unscale(self, stages: Sequence[int]) -> bool:
        """Unscale the gradients, which the guard and a clip look at; return whether one of them
        overflowed."""
        self._norms = {}
        if self.guard is None and self.clip is None and not self.scale.checks:
            return False
        plain = [p for stage in stages if stage not in self.mirrors for _, p in self.parameters[stage]]
        overflow = self._look({self.names[id(p)]: p.grad for p in plain if p.grad is not None}, stages)
        for stage in sorted(self.mirrors.keys() & stages):
            for turn in self.mirrors[stage].turns:
                with self.mirrors[stage].gradients(turn, written=self.scale.checks) as gradients:
                    overflow |= self._look({self.names[k]: g for k, g in gradients.items()}, [stage])
            rest = {self.names[id(p)]: p.grad for p in self._rest[stage] if p.grad is not None}
            overflow |= self._look(rest, [stage])
        return overflow

    def _look(self, gradients: Mapping[str, torch.Tensor], stages: Sequence[int]) -> bool:
        """Check, unscale and measure gradients of ``stages``; return whether one is infinite or no number."""
        if self.guard is not None:
            self.guard.check_update(gradients.items())
        overflow = False
        if self.scale.checks:
            groups = [g for s in stages if s in self.optimizers for g in self.optimizers[s].param_groups]
            known = {id(p) for group in groups for p in group["params"]}
            overflow = self.scale.unscale(g for n, g in gradients.items() if id(self.named[n]) in known)
        if gradients and self.clip is not None and (self.scope == "global" or self.mirrors):
            self._norms |= norms(gradients)
            self._device = next(iter(gradients.values())).device
        return overflow

    def _clip(self, stages: Sequence[int]) -> None:
        """Clip the gradients; those of a mirror are scaled when they come to be updated."""
        self._totals = {}
        plain = [stage for stage in stages if stage not in self.mirrors]
        if self.clip is None:
            return
        if self.scope == "global":
            self.norm = norm_together(self.world, self._norms, owner=self.owner, device=self._device)
            self._totals = dict.fromkeys(stages, self.norm)
            for stage in plain[:1]:
                self._scale(stage, [p for one in plain for _, p in self.parameters[one]])
            return
        for stage in plain:
            torch.nn.utils.clip_grad_norm_([p for _, p in self.parameters[stage]], self.clip)
        for stage in sorted(self.mirrors.keys() & stages):
            found = [self._norms[name] for name, _ in self.parameters[stage] if name in self._norms]
            self._totals[stage] = total_norm(found, device=self._device)

    def _scale(self, stage: int, parameters: Sequence[torch.nn.Parameter]) -> None:
        if self.clip is not None and (total := self._totals.get(stage)) is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip, total)

    def tensors(self) -> list[torch.nn.Parameter]:
        """The parameters that the optimizers of this process have."""
        groups = (group for optimizer in self.optimizers.values() for group in optimizer.param_groups)
        return [parameter for group in groups for parameter in group["params"]]

    def state(self) -> dict[str, dict[str, Any]]:
        """Per parameter name: the optimizer's state of it, and the hyper-parameters of its group."""
        return {
            self.names[id(p)]: {
                "state": {k: v for k, v in optimizer.state.get(p, {}).items() if k != PREVIOUS},
                "group": saved_settings(group),
            }
            for optimizer in self.optimizers.values()
            for group in optimizer.param_groups
            for p in group["params"]
        }

    def scheduler_state(self) -> dict[str, Any] | None:
        """The state of the scheduler, as JSON says it; raises PlanError where it keeps something else."""
        return self.scheduler.state() if self.scheduler is not None and self.optimizers else None

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that does not suit the optimizers, schedulers and scale of this process."""
        for name, kept in state["optimizer"].items():
            check_kept(name, kept)
        for optimizer in self.optimizers.values():
            check_optimizer(state, optimizer, self.names, away=self.offloaded())
        check_part("scheduler", self.scheduler and self.scheduler.state(), state.get("scheduler"))
        check_part("GradScaler", self.scale.state(), state.get("scaler"))

    def turns(self, *, at_once: bool) -> Iterator[Has]:
        """Turns in which tensors are there to be written, or a single one; yields what tells them by
        identity."""
        if at_once or not self.mirrors:
            with self.resident():
                yield lambda _: True
            return
        moved = {id(p) for mirror in self.mirrors.values() for turn in mirror.turns for p in turn}
        for mirror in self.mirrors.values():
            for turn in mirror.turns:
                with mirror.whole(turn):
                    yield {id(p) for p in turn}.__contains__
        yield lambda key: key not in moved

    def load_kept(self, state: Mapping[str, Mapping[str, Any]], *, has: Has) -> None:
        """Take over what ``state`` returned, for those parameters of this process that a turn ``has``."""
        for optimizer in self.optimizers.values():
            for settings in optimizer.param_groups:
                for parameter in (p for p in settings["params"] if has(id(p))):
                    kept = state[self.names[id(parameter)]]
                    ours = {k: v.device for k, v in settings.items() if isinstance(v, torch.Tensor)}
                    settings.update({k: _own(v, ours.get(k, CPU)) for k, v in kept["group"].items()})
                    # As torch has it: a number of steps stays with the host, unless kernels count them.
                    there = parameter.device
                    host = there if settings.get("capturable") or settings.get("fused") else CPU
                    optimizer.state[parameter] = {
                        k: _own(v, host if k == "step" else there) for k, v in kept["state"].items()
                    }


def _own(value: Any, device: torch.device) -> Any:
    """A copy on ``device`` that shares no memory with the state."""
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value, device=device).copy_(value.detach())
    return copy.deepcopy(value)
