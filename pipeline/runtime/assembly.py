"""What a pipeline is made of in this process: put together in order, and agreed on by all ranks."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import WeakTensorKeyDictionary

from ...stages.device import Device, is_gpu
from ...stages.memory.arena import Arena
from ...stages.memory.byte_budget import MemoryOptions, Tiers
from ...stages.memory.prefetch import MemoryThread
from ...stages.memory.stores import StoreOptions
from ...stages.memory.swap_file import DiskOptions
from ...stages.places import home_of
from ...stages.planner.examples import graph_of
from ...stages.planner.plan import Plan
from ...stages.planner.rules import STREAM
from ...stages.stage.nan_check import Guard
from ..ranks.nccl import identity_of, transport_of
from ..ranks.transport import Transport
from ..ranks.world import World
from ..weights.mirrored_update import MirroredUpdate
from ..weights.optimizers import Named
from ..weights.scale import Scaler, scale_of
from ..weights.separability import check_separable
from ..weights.update import Update
from . import facts
from .agreement import Agreement, SameBatches
from .arguments import (
    check_arguments,
    check_codecs,
    check_functions,
    check_gradients,
    check_layers,
    check_momentum,
    check_plan,
    check_update,
    check_written,
    optimizer_of,
    scheduler_of,
)
from .auto import policy_named
from .engine import Engine
from .guards import Guards
from .ownership import Ownership, disk_of, make_stages, ownership
from .process_memory import ResidentMemory, Usage
from .replica_checks import check_replicated
from .replicas import Replicas
from .state import State
from .steps import Steps, SynchronousFeed
from .stream import StreamFeed
from .values import Init, give_values, values_of
from .where import Given, check_devices, rank_device, spread, stage_devices


class Assembly:
    """The parts; arguments and errors are those of ``Pipeline``."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | None,
        *,
        loss: Callable[[Any, Any], torch.Tensor],
        optimizer: Callable[[Named], Optimizer],
        scheduler: Callable[[Optimizer], LRScheduler] | None,
        clip: float | None,
        clip_scope: str,
        scaler: Scaler,
        autocast: torch.dtype | None,
        weight: Callable[[Any], float] | None,
        seed: int,
        deadline: float,
        world: World,
        device: Given,
        guard: bool,
        memory: MemoryOptions,
        disk: DiskOptions,
        load_weights: str | Path | None,
        init_weights: Init | None,
    ) -> None:
        self.world, self.rank, self.agreement = world, world.rank, Agreement(world)
        with self.agreement.together("making a Pipeline"):
            check_arguments(model, plan, optimizer, clip, autocast, deadline)
            check_functions(loss, scheduler, weight, seed, guard)
            rest = {"loss": loss, "weight": weight, "seed": seed, "clip": clip, "clip_scope": clip_scope}
            rest |= {"scaler": scaler, "autocast": autocast, "guard": guard}
            self.values = values_of(model, load_weights=load_weights, init_weights=init_weights, seed=seed)
            if self.values:
                rest |= {"load_weights or init_weights": self.values.said}
            here = rank_device(model, world, device)
            told = functools.partial(facts.of_pipeline, model, optimizer, scheduler, rest, here.torch)
            self.agreement.agree("its arguments", told)
            self.plan = plan = self.agreement.agree_on_plan(plan)
            check_update(model, plan, clip=clip, scope=clip_scope, scaler=scaler)
            check_gradients()
            check_plan(plan, model, self.world)
            self.weight, self.num_steps = weight, 0
            alone = [(0,)] * plan.num_stages
            self.ranks_of_stages = alone if self.world.is_alone else [stage.ranks for stage in plan.stages]
            self._place(model, here)
            tensors = [t for t in (*model.parameters(), *model.buffers()) if not t.is_meta]
            resident = ResidentMemory(model_bytes=sum(t.nbytes for t in tensors if not is_gpu(t.device)))
            gradients = autocast is not torch.float16 and not scale_of(scaler).checks
            watching = Guard(gradients) if guard else None
            own = self._cut(model, autocast, watching, memory, disk)
            self.reads_inputs = 0 in self.stages  # of a batch; else they may be on the meta device
            self.reads_targets = plan.num_stages - 1 in self.stages or weight is not None
            self.replicas = Replicas(plan, world, own=own, stages=self.stages, held=self.state.of_stage)
            mirrors = {s: stage.mirror for s, stage in self.stages.items() if stage.mirror is not None}
            make = functools.partial(MirroredUpdate, mirrors=mirrors) if mirrors else Update
            every = [*model.named_parameters()]
            self.update = make(
                world=self.world,
                parameters=own.here,
                owner={name: own.ranks[name] for name, _ in model.named_parameters()},
                weights={s: stage.weights for s, stage in self.stages.items()},
                optimizer=optimizer_of(optimizer),
                scheduler=scheduler_of(scheduler) if scheduler else None,
                every=every,
                clip=clip,
                scope=clip_scope,
                scaler=scaler,
                together=plan.schedule != STREAM,
                guard=watching,
                exchange=self.replicas.exchange,
                divided=plan.sharded,
            )
            check_momentum(model, self.update.optimizers.values())
            if (shared := self.update.scheduler) is not None:
                self.agreement.agree("its scheduler", lambda: facts.of_scheduler(shared.made))
            check_separable(optimizer, every, own.parts, [*self.update.optimizers.values()])
            self.policy = policy_named(
                plan.codec,
                named=plan.named_codecs,
                extra=(plan.extra_in_flight, plan.most_extra_in_flight),
                world=self.world,
                deadline=deadline,
            )
            self.engine = Engine(
                rank=self.rank,
                stages=self.stages,
                transport=self._transport(deadline),
                policy=self.policy,
                loss=loss,
                update=self.update,
                model_guards=self.steps.model_guards(model),
                parameters=WeakTensorKeyDictionary({parameter: None for parameter in model.parameters()}),
                seed=seed,
                devices=self.devices,
                memory=self.memory,
                replicas=self.replicas,
                guards=self.guards,
            )
            self.same = SameBatches(self.agreement, self.engine.failures.worded)
            resident.begin()
            for mirror in mirrors.values():
                mirror.push_all()
            if self.disk:
                self.disk.drain()
            self.usage = Usage(
                plan, own.tensors, self.update.optimizers,
                resident=resident, devices=self.devices, mirrors=mirrors,
                tiers=self.memory.tiers, pool=self.engine.transport.pool,
            )  # fmt: skip

    def near(self) -> contextlib.AbstractContextManager[None]:
        """The block, between steps, in which parameters whose tier is not the device are in memory.

        With them are their gradients and the state of the optimizers; what is written to them stays."""
        return self.update.near()

    def close_stages(self, *, keeps_model: bool = True) -> None:
        """End the threads of the stages, and let go of what they keep on disk; ``keeps_model``: bring
        parameters back ahead of it."""
        self.engine.failures.closed = "was closed"
        for stage in self.stages.values():
            if stage.mirror and keeps_model:
                stage.mirror.pull_all()
            stage.saved.close()
        self.memory.close()
        if self.disk:
            self.disk.close()

    def _transport(self, deadline: float) -> Transport:
        device = self.world.device
        gpus = self.agreement.exchange("its GPU", identity_of(device))
        return transport_of(self.world, device=device, gpus=gpus, deadline=deadline, pool=Arena())

    def _place(self, model: nn.Module, device: Device) -> None:
        """Decide where the stages of this process compute, on ``device`` if the plan names no other for them,
        and move ``model`` to where its rank does."""
        self.devices = stage_devices(self.plan, self.world, device)
        check_devices(self.agreement, self.plan, self.devices)
        self.ends = {"first": self.devices.get(0), "last": self.devices.get(self.plan.num_stages - 1)}
        known = list(self.devices.values())
        self.world.device = device if device in known else known[0]
        if not self.values and home_of(model) != self.world.device.torch:
            model.to(self.world.device.torch)

    def _cut(
        self,
        model: nn.Module,
        autocast: torch.dtype | None,
        guard: Guard | None,
        memory: MemoryOptions,
        disk: DiskOptions,
    ) -> Ownership:
        """Cut ``model`` into the stages of this process; return who owns what."""
        if not model.training:
            model.train()
        graph = graph_of(model, self.plan, autocast)
        self.agreement.agree("the layers of a model", lambda: facts.of_layers(graph))
        check_layers(self.plan, graph)
        check_written(self.plan, model, graph)
        if not self.world.is_alone:
            check_replicated(self.plan, model, graph)
        self.call = graph.train.call
        self.steps = Steps(self.plan, graph, model, self.world)
        self.feed = StreamFeed(self.plan, self.steps) if self.plan.streams else SynchronousFeed(self.steps)
        self.feed.rehearse([graph.example_inputs] * self.plan.micro_batches)
        check_codecs(self.plan, *self.steps.routed("train", [graph.example_inputs]))
        own = ownership(model, self.plan, graph, self.steps, self.world)
        if self.values:
            last, parts = self.plan.num_stages - 1, {"steps": self.steps, "graph": graph}
            give_values(model, self.values, own=own, devices=self.devices, last=last, **parts)
            own = ownership(model, self.plan, graph, self.steps, self.world)
        spread(model, own, self.steps, self.devices, last=self.plan.num_stages - 1)
        limit = self.plan.memory
        if limit is not None and self.world.is_alone:  # this process is all ranks
            limit *= self.plan.num_ranks
        tiers = Tiers(device=limit, host=memory.host_bytes, on_gpu=self.world.device.is_gpu)
        self.memory = MemoryThread(memory, num_layers=Counter(own.layers), tiers=tiers)
        self.disk = disk_of(own, self.plan, disk, tiers)
        self.stages = make_stages(
            own,
            model=model,
            plan=self.plan,
            steps=self.steps,
            autocast=autocast,
            devices=self.devices,
            memory=self.memory,
            guard=guard,
            stores=StoreOptions(disk=self.disk, tiers=tiers),
        )
        self.state = State(model, graph, world=self.world, stages=self.stages, own=own)
        homes = {name: {stage} for name, stage in own.stage_of.items()}
        homes |= {name: self.state.readers.get(id(buffer), {0}) for name, buffer in model.named_buffers()}
        shared = max(self.plan.replicas) > 1 and not self.world.is_alone
        self.guards = Guards(
            model,
            homes=homes,
            written=graph.written,
            here=[*self.stages],
            replicated=shared,
            moves=any(stage.mirror is not None for stage in self.stages.values()),
        )
        return own
