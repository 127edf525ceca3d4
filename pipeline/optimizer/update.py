"""The update of the weights: one optimizer per stage, and what all stages must agree on before it.

In a round every stage updates once. The first update of a round finds all gradients of its batch, so it takes
the loss scale off them and clips them by the norm over all stages; where no such moment exists, as without a
flush, every update is a step of its own."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ...stages.device import CPU
from ...stages.memory.evictable_tensor import EvictableTensor
from ...stages.stage.nan_check import Guard
from ...stages.weight_versions.versions import WeightVersions
from ..distributed.process_group import World
from .clip import clip_together
from .optimizers import Make, Named, make_optimizers
from .scale import Scaler, scale_of
from .shared_scheduler import MakeScheduler, SharedScheduler
from .state_checks import check_kept, check_optimizer, check_part, saved_settings

SCOPES = ("global", "stage")
Has = Callable[[int], bool]  # whether a turn has the tensor with this identity


class Update:
    """Optimizers (and schedulers) of this process's stages.

    Args:    parameters: per stage its (name, parameter) pairs, in the model's own order.
             owner: the rank of every parameter of the model by name, in the model's own order.
             weights: the versions of each stage's parameters.
             scheduler: stepped after every update that was not skipped for an overflow.
             every: all parameters of the model by name, also those of other ranks.
             clip: largest L2 norm of the gradients, or None; ``scope``: of all, or of each stage.
             together: whether the stages update in rounds; else each on its own, whatever others find.
             guard: checks the gradients before an update; None: nothing does.
             exchange: makes the gradients of a stage, which replicas share, those of the whole batch.
             divided: the optimizers here have what ``owner`` says is of this rank only."""

    def __init__(
        self,
        *,
        world: World,
        parameters: Mapping[int, Named],
        owner: Mapping[str, int],
        weights: Mapping[int, WeightVersions],
        optimizer: Make,
        scheduler: MakeScheduler | None,
        every: Named,
        clip: float | None,
        scope: str = "global",
        scaler: Scaler = None,
        together: bool = True,
        guard: Guard | None = None,
        exchange: Callable[[int], None] = lambda stage: None,
        divided: bool = False,
    ) -> None:
        self.exchange = exchange
        self.world, self.scale, self.guard = world, scale_of(scaler), guard
        self.parameters, self.weights = parameters, weights
        self.named = {name: parameter for named in parameters.values() for name, parameter in named}
        self.names = {id(parameter): name for name, parameter in self.named.items()}
        self.owner, self.optimizer = owner, optimizer
        self.clip, self.scope, self.together = clip, scope, together
        self.divided = divided
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

    def begin(self) -> None:
        """Nothing is in flight: gradients start from None (sums that start from zeros lose -0.0), rounds
        from 0."""
        self.num_updates = dict.fromkeys(self.weights, 0)
        self.num_rounds = 0
        self.skipped = False
        self.scale.begin()
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()

    def resident(self) -> contextlib.AbstractContextManager[None]:
        """The block in which parameters, gradients and the state of the optimizers are where people look."""
        return contextlib.nullcontext()

    @property
    def learning_rate(self) -> float | None:
        """That of the first parameters here; None where there are none, or it has another name."""
        groups = [settings for made in self.optimizers.values() for settings in made.param_groups]
        return float(groups[0]["lr"]) if groups and "lr" in groups[0] else None

    @property
    def streams(self) -> bool:
        """True if the updated tensors are not all to be resident at once, not even to be saved."""
        return False

    def offloaded(self) -> Mapping[int, EvictableTensor]:
        """Return the places of offloaded parameters and optimizer states, by identity."""
        return {}

    def step(self, stage: int) -> None:
        """Update the weights of ``stage``; its n-th update belongs to round n, which one stage opens."""
        self.num_updates[stage] += 1
        if not self.together:
            self._ready([stage])
        elif self.num_updates[stage] > self.num_rounds:
            self.num_rounds += 1
            self._ready(list(self.weights))
        self.begun += 1
        with self.weights[stage].update():
            self._step(stage)
        if self.scheduler is not None and stage in self.optimizers and not self.skipped:
            self.scheduler.step(stage)

    def _step(self, stage: int) -> None:
        """Let the optimizer of ``stage`` write its parameters, unless the update is skipped."""
        if stage in self.optimizers:
            self._unless_skipped(self.optimizers[stage], self.optimizers[stage].step)

    def _steps_when_skipped(self, optimizer: object) -> bool:
        """True for a fused optimizer, which is called in a skipped update, too, with ``found_inf``, as by
        ``GradScaler.step``.

        It begins its state then."""
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
            self.skipped = any(self.world.all_reduce([self.skipped], at="the verdict on overflows"))
        self.scale.update(overflow=self.skipped)
        self._clip(stages)

    def _unscale(self, stages: Sequence[int]) -> bool:
        """Unscale the gradients, which the guard looks at; return whether one of them overflowed."""
        if self.guard is not None:
            for stage in stages:
                self.guard.check_update((name, p.grad) for name, p in self.parameters[stage])
        optimizers = [self.optimizers[stage] for stage in stages if stage in self.optimizers]
        settings = [settings for optimizer in optimizers for settings in optimizer.param_groups]
        return self.scale.unscale(p.grad for some in settings for p in some["params"] if p.grad is not None)

    def _clip(self, stages: Sequence[int]) -> None:
        if self.clip is not None and self.scope == "global":
            self.norm = clip_together(self.world, self.named, self.clip, owner=self.owner)
        elif self.clip is not None:
            for stage in stages:
                own = dict(self.parameters[stage])
                torch.nn.utils.clip_grad_norm_([own[name] for name in self.owner if name in own], self.clip)

    def tensors(self) -> list[torch.nn.Parameter]:
        """The parameters that the optimizers of this process have."""
        groups = [settings for optimizer in self.optimizers.values() for settings in optimizer.param_groups]
        return [parameter for settings in groups for parameter in settings["params"]]

    def state(self) -> dict[str, dict[str, Any]]:
        """Per parameter name: the optimizer's state of it, and the hyper-parameters of its group."""
        found: dict[str, dict[str, Any]] = {}
        for optimizer in self.optimizers.values():
            for settings in optimizer.param_groups:
                for parameter in settings["params"]:
                    found[self.names[id(parameter)]] = {
                        "state": dict(optimizer.state.get(parameter, {})),
                        "group": saved_settings(settings),
                    }
        return found

    def scheduler_state(self) -> dict[str, Any] | None:
        """The state of the scheduler, as JSON says it.

        Raises: PlanError: it keeps something else."""
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
        """Turns in which tensors are near to be written; yields what tells them by identity, each once.

        Args:    at_once: in a single turn."""
        with self.resident():
            yield lambda _: True

    def load_kept(self, state: Mapping[str, Mapping[str, Any]], *, has: Has) -> None:
        """Take over what ``state`` returned, for those parameters of this process that a turn ``has``."""
        for optimizer in self.optimizers.values():
            for settings in optimizer.param_groups:
                for parameter in (p for p in settings["params"] if has(id(p))):
                    kept = state[self.names[id(parameter)]]
                    ours = {k: v.device for k, v in settings.items() if isinstance(v, torch.Tensor)}
                    settings.update({k: _own(v, ours.get(k, CPU)) for k, v in kept["group"].items()})
                    # As torch has it: a number of steps stays with the host, unless kernels count them.
                    there = parameter.device if settings.get("capturable") or settings.get("fused") else CPU
                    homes = {"step": there}
                    optimizer.state[parameter] = {
                        k: _own(v, homes.get(k, parameter.device)) for k, v in kept["state"].items()
                    }

    def load_course(self, scheduler: Mapping[str, Any] | None) -> None:
        """Take over what ``scheduler_state`` returned; behind ``load_kept``."""
        if self.scheduler is not None:
            self.scheduler.load(scheduler)


def _own(value: Any, device: torch.device) -> Any:
    """A copy on ``device`` that shares no memory with the state."""
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value, device=device).copy_(value.detach())
    return copy.deepcopy(value)
