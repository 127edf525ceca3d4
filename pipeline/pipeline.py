"""Pipeline: a model, a plan and a loss become stages, an engine and steps, for people who write Python.

Started plainly, all stages run in this process and frames are really packed; inside a group of ranks each
rank keeps its own stages. Either way a step has the bits of the plain loop over the same micro-batches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import WeakTensorKeyDictionary

from ..compression.errors import PenstockError, PlanError
from ..stages.device import Device, home_of
from ..stages.memory.byte_budget import NO_OPTIONS, MemoryOptions, Tiers
from ..stages.memory.disk import ANYWHERE, DiskOptions
from ..stages.memory.prefetch import MemoryThread
from ..stages.memory.slots import SlotPool
from ..stages.memory.stores import StoreOptions
from ..stages.plan.plan import Plan
from ..stages.plan.validation import STREAM
from ..stages.profiling.examples import graph_of
from ..stages.profiling.measure import measure
from ..stages.stage.nan_check import Guard
from ..stages.tracing.capture.call_spec import Examples
from ..stages.tracing.model_checks import Leaf
from ..stages.tracing.tracer import LayerGraph, trace
from .distributed.gpu_transport import identity_of, transport_of
from .distributed.launcher import check_joined, init
from .distributed.process_group import World
from .optimizer.optimizers import Named, state_per_byte, update_seconds
from .optimizer.scale import Scaler
from .optimizer.separability import check_separable, seems_by_element
from .optimizer.update import Update
from .partition.partition import partition
from .runtime import arguments, fingerprints
from .runtime.agreement import Agreement, SameBatches
from .runtime.arguments import Options, check_gradients
from .runtime.auto_codec import Policy
from .runtime.batches import Criterion, Weight, joined, micro_batches, tokens_of, total_loss
from .runtime.device_frames import frames_of
from .runtime.device_placement import (
    Given,
    Init,
    check_devices,
    give_values,
    rank_device,
    spread,
    stage_devices,
    values_of,
)
from .runtime.engine import Engine
from .runtime.evaluation import Means, Metrics, check_metrics, pairs
from .runtime.failures import Failures, Interrupts, held
from .runtime.guards import Guards
from .runtime.load_balancing import NONE, LoadBalancer, Seconds, Shares, check_asked
from .runtime.meter import ResidentMemory, Usage, bytes_in_memory
from .runtime.ownership import Ownership, disk_of, make_stages, ownership
from .runtime.replicas import Replicas, check_outputs, check_replicated
from .runtime.report import Report, described, gather_flows, gather_reports
from .runtime.state import State
from .runtime.step_planner import Step, Steps, StreamFeed, SynchronousFeed
from .schedules.instruction import Span


def check_settings(settings: Iterable[str]) -> None:
    """Raise TypeError for a setting that ``Pipeline.of`` does not take."""
    takers = partition, Pipeline, Pipeline.of
    known = {name for taker in takers for name in inspect.signature(taker).parameters}
    if odd := {*settings} - (known - {"profile", "settings"}):
        raise TypeError(f"Pipeline.of() got an unexpected keyword argument {min(odd)!r}")


class Pipeline:
    """Trains ``model`` as ``plan`` says; every rank passes the same arguments and the same batches.

    They compare it all, and the first difference is refused on every rank; functions (``loss``, ``weight``,
    those of a scheduler) they compare by name only, ``deadline`` and ``memory`` not at all.

    Args:
        model: the plain model, put into train mode if it is in eval mode as a whole; in a group of ranks drop
            your own reference to it: a rank keeps only its layers.
        plan: rank 0's is the one that runs, and ``pipe.plan`` on every rank. Another rank gives None, or a
            plan of its own for which ``partition`` was asked the same: measured seconds may cut elsewhere.
        loss: (outputs, targets) -> mean over the micro-batch, a 0-dim tensor.
        optimizer: list of (name, parameter) -> torch optimizer; called once per stage that has parameters;
            among several ranks before that for all parameters, to compare its settings.
        scheduler: optimizer -> learning-rate scheduler, stepped once after every update.
        clip: largest L2 norm, of all gradients or (``clip_scope="stage"``) of those of each stage, or None.
        scaler: a torch.amp.GradScaler, which a step moves as the plain loop would, on every rank; or a number
            that scales the loss. An overflow anywhere skips the update and the scheduler everywhere (under
            async_1f1b: of its stage).
        autocast: dtype that forward and loss are cast to by torch.autocast, without its weight cache.
        weight: targets -> over how much the loss is a mean (default: the number of samples). "summed": the
            losses of micro-batches add up to that of the batch, as they are.
        seed: of random layers (``penstock.layer_seed``).
        deadline: seconds that any wait for a rank may take.
        world: the ranks that train; None: those of the default process group where one is initialised, else
            this process alone.
        device: where this rank computes: "cpu", "cuda" (by the number of the rank on its machine), "cuda:1",
            "auto". None: where the world says, else where the model's parameters are.
        detect_anomaly: refuse the first layer whose output is NaN, or its gradient NaN or infinite, and a
            loss that is not finite (StageError), before an update. ``guard``: its old name, refused.
        memory: how what waits in a tier is moved.
        disk: what the tier "disk" of this rank may use.
        load_weights: for a model on the meta device: a safetensors file of its state_dict, or the index of
            several, of which a rank reads what its stages hold.
        init_weights: the same without a file, or for the buffers that a file does not have: a function of
            (name, tensor) that writes into the tensor, with random numbers seeded for each by its name.
        shares: how replicas share micro-batches, by rank 0: None: as the plan says; "measured": in proportion
            to speed, from step to step.
        graph: what ``trace`` returned for ``model``; None: the plan's, or on a rank without one, the model is
            traced with made-up inputs.

    Raises:
        PlanError: the plan was made for another model, a cut cannot be trained exactly, ranks were given
            different things, or another rank refused.
        ScheduleError: the schedule is unknown or would deadlock.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | None,
        *,
        loss: Callable[[Any, Any], torch.Tensor],
        optimizer: Callable[[Named], Optimizer],
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        clip: float | None = None,
        clip_scope: str = "global",
        scaler: Scaler = None,
        autocast: torch.dtype | None = None,
        weight: Weight = None,
        seed: int = 0,
        deadline: float = 60.0,
        world: World | None = None,
        device: Given = None,
        detect_anomaly: bool = False,
        guard: None = None,
        memory: MemoryOptions = NO_OPTIONS,
        disk: DiskOptions = ANYWHERE,
        load_weights: str | Path | None = None,
        init_weights: Init | None = None,
        shares: str | None = None,
        graph: LayerGraph | None = None,
    ) -> None:
        options = Options(
            loss=loss, optimizer=optimizer, scheduler=scheduler, clip=clip, clip_scope=clip_scope,
            scaler=scaler, autocast=autocast, weight=weight, seed=seed, deadline=deadline,
            detect_anomaly=detect_anomaly, memory=memory, disk=disk,
        )  # fmt: skip
        if guard is not None:
            name = "guard= is called detect_anomaly= now"
            raise PlanError(f"{name}, found guard={guard!r}; give detect_anomaly={guard!r}")
        self.leaves, self.asked, self.num_steps = world is None, 0, 0
        self.world = world or check_joined(World.default(deadline=deadline))
        self.rank, self.agreement = self.world.rank, Agreement(self.world)
        self.weight: Weight = weight
        with self.agreement.all_or_none("making a Pipeline"):
            arguments.check_options(model, plan, options)
            self.values = values_of(model, load_weights=load_weights, init_weights=init_weights, seed=seed)
            home = rank_device(model, self.world, device)
            self._agree(model, plan, options, home)
            self._place(model, home)
            resident = ResidentMemory(model_bytes=bytes_in_memory(model))
            own = self._cut(model, options, graph)
            self._make_optimizers(model, own, options)
            self._make_engine(model, own, options, resident)
        with self.agreement.all_or_none("sharing out micro-batches"):
            check_asked(shares, self.plan)
            (shares, *_) = self.agreement.exchange("its shares", shares)
        self.load_balancer = LoadBalancer(follows=shares is not None and not self.world.is_alone)
        self.begin_shares()

    @classmethod
    def of(
        cls,
        model: nn.Module,
        example: Examples,
        *,
        loss: Callable[[Any, Any], torch.Tensor],
        optimizer: Callable[[Named], Optimizer],
        leaves: Iterable[Leaf] = (),
        autocast: torch.dtype | None = None,
        world: World | None = None,
        deadline: float = 60.0,
        **settings: Any,
    ) -> Pipeline:
        """Trace, measure and cut ``model``, and make its Pipeline: the four calls in one.

        Rank 0 measures and cuts for all ranks. Where torchrun or ``penstock train`` started this process, it
        joins the other ranks first, as ``penstock.init`` does.

        Args:
            example: one micro-batch: a tuple by position, or a dict by name, or a list of several, as
                ``trace`` takes it.
            leaves: what is one layer each, as ``trace`` takes it.
            settings: of ``partition`` (``stages``, ``cuts``, ``micro_batches``, ``codec`` ...), of Pipeline.
                ``memory`` may be the budget of the one ("2GiB") or the options of the other, ``shares`` the
                list of the one or "measured". ``optimizer_state``, ``update_seconds`` and
                ``by_element`` follow ``optimizer``, ``ranks`` those that there are.

        Raises:
            PenstockError: One of the four calls refuses, here or on another rank.
            TypeError: None of them takes a setting.
        """
        check_settings(settings)
        asked = {*inspect.signature(partition).parameters} - {"profile"}
        ours = {"memory": MemoryOptions, "shares": str}
        wishes = {
            name: settings.pop(name)
            for name in asked & settings.keys()
            if not isinstance(settings[name], ours.get(name, ()))
        }
        ranks, at, plan = world or init(deadline=deadline), "cutting a model", None
        agreement, plans = Agreement(ranks), ranks.rank == 0
        with agreement.all_or_none(at):
            with ranks.notices.busy() if plans and not ranks.is_alone else contextlib.nullcontext():
                agreement.agree(at, list)  # its signs of life have begun
                graph = trace(model, example, autocast=autocast, leaves=leaves)
                if plans:
                    wishes.setdefault("optimizer_state", state_per_byte(optimizer))
                    wishes.setdefault("by_element", seems_by_element(optimizer))
                    wishes.setdefault("update_seconds", update_seconds(optimizer))
                    if not ranks.is_alone:
                        wishes.setdefault("ranks", ranks.size)
                    has_links = not {"link", "cluster"}.isdisjoint(wishes)
                    plan = partition(measure(graph, example, packs=has_links), **wishes)
            if not plans:
                ranks.notices.wait_for(0, deadline=deadline)
        settings |= {"autocast": autocast, "world": world, "deadline": deadline}
        settings["graph"] = graph.without_memory()
        return cls(model, plan, loss=loss, optimizer=optimizer, **settings)

    # The five steps of making one, in their order.

    def _agree(self, model: nn.Module, plan: Plan | None, options: Options, home: Device) -> None:
        """1. Compare the arguments of all ranks, and take the plan of rank 0."""
        compared = options.compared()
        if self.values:
            compared |= {"load_weights or init_weights": self.values.description}
        given = model, options.optimizer, options.scheduler, compared, home.torch
        self.agreement.agree("its arguments", lambda: fingerprints.of_pipeline(*given))
        self.plan = plan = self.agreement.agree_on_plan(plan)
        arguments.check_update(
            model, plan, clip=options.clip, scope=options.clip_scope, scaler=options.scaler
        )
        check_gradients()
        arguments.check_plan(plan, model, self.world)
        alone = [(0,)] * plan.num_stages
        self.ranks_of_stages = alone if self.world.is_alone else [stage.ranks for stage in plan.stages]

    def _place(self, model: nn.Module, device: Device) -> None:
        """2. Choose the devices of the stages of this process, and move ``model`` to that of its rank.

        ``device`` is for stages whose device the plan leaves open."""
        self.devices = stage_devices(self.plan, self.world, device)
        check_devices(self.agreement, self.plan, self.devices)
        self.ends = {"first": self.devices.get(0), "last": self.devices.get(self.plan.num_stages - 1)}
        known = list(self.devices.values())
        self.world.device = device if device in known else known[0]
        if not self.values and home_of(model) != self.world.device.torch:
            model.to(self.world.device.torch)

    def _cut(self, model: nn.Module, options: Options, graph: LayerGraph | None) -> Ownership:
        """3. Trace ``model`` and cut it into the stages of this process; return the parameters' owners."""
        autocast, memory = options.autocast, options.memory
        self.nan_check = Guard(options.checks_gradients) if options.detect_anomaly else None
        if not model.training:
            model.train()
        graph = graph_of(model, self.plan, autocast, graph)
        self.agreement.agree("the layers of a model", lambda: fingerprints.of_layers(graph))
        arguments.check_layers(self.plan, graph)
        arguments.check_written(self.plan, model, graph)
        if not self.world.is_alone:
            check_replicated(self.plan, model, graph)
        self.call = graph.train.call
        self.steps = Steps(self.plan, graph, model, self.agreement)
        self.feed = StreamFeed(self.plan, self.steps) if self.plan.streams else SynchronousFeed(self.steps)
        self.feed.rehearse([graph.example_inputs] * self.plan.micro_batches)
        arguments.check_codecs(self.plan, *self.steps.routed("train", [graph.example_inputs]))
        own = ownership(model, self.plan, graph, self.steps, self.world)
        if self.values:
            parts = {"own": own, "steps": self.steps, "graph": graph, "devices": self.devices}
            give_values(model, self.values, **parts)
            own = ownership(model, self.plan, graph, self.steps, self.world)
        spread(model, own, self.steps, self.devices)
        limit = self.plan.budget(range(self.plan.num_ranks) if self.world.is_alone else [self.rank])
        tiers = Tiers(device=limit, host=memory.host_bytes, on_gpu=self.world.device.is_gpu)
        self.memory = MemoryThread(memory, num_layers=Counter(own.layers), tiers=tiers)
        self.disk = disk_of(own, self.plan, options.disk, tiers)
        self.stages = make_stages(
            own, model=model, plan=self.plan, steps=self.steps, autocast=autocast, devices=self.devices,
            memory=self.memory, guard=self.nan_check, stores=StoreOptions(disk=self.disk, tiers=tiers),
        )  # fmt: skip
        self.reads_inputs = 0 in self.stages  # of a batch; else they may be on the meta device
        self.reads_targets = self.plan.num_stages - 1 in self.stages or callable(self.weight)
        self.state = State(model, graph, world=self.world, stages=self.stages, own=own)
        homes = {name: {stage} for name, stage in own.stage_of.items()}
        homes |= {name: self.state.readers.get(id(buffer), {0}) for name, buffer in model.named_buffers()}
        self.guards = Guards(
            model, homes=homes, written=graph.written, here=[*self.stages],
            replicated=max(self.plan.replicas) > 1 and not self.world.is_alone,
            moves=any(stage.mirror is not None for stage in self.stages.values()),
        )  # fmt: skip
        return own

    def _make_optimizers(self, model: nn.Module, own: Ownership, options: Options) -> None:
        """4. Make one optimizer for each stage here, after the sum of its replicas' gradients."""
        plan, held, every = self.plan, self.state.stages, [*model.named_parameters()]
        self.replicas = Replicas(plan, self.world, own=own, stages=self.stages, held=held)
        self.mirrors = {s: stage.mirror for s, stage in self.stages.items() if stage.mirror is not None}
        self.update = Update(
            world=self.world, parameters=own.here, owner={name: own.ranks[name] for name, _ in every},
            weights={s: stage.weights for s, stage in self.stages.items()}, every=every,
            optimizer=arguments.explain_errors("optimizer", options.optimizer),
            scheduler=arguments.explain_errors("scheduler", options.scheduler) if options.scheduler else None,
            clip=options.clip, scope=options.clip_scope, scaler=options.scaler, guard=self.nan_check,
            together=plan.schedule != STREAM, exchange=self.replicas.exchange, divided=plan.sharded,
            mirrors=self.mirrors, error_feedback=plan.error_feedback,
        )  # fmt: skip
        arguments.check_momentum(model, self.update.optimizers.values())
        if (shared := self.update.scheduler) is not None:
            self.agreement.agree("its scheduler", lambda: fingerprints.of_scheduler(shared.made))
        check_separable(options.optimizer, every, own.parts, [*self.update.optimizers.values()])

    def _make_engine(
        self, model: nn.Module, own: Ownership, options: Options, resident: ResidentMemory
    ) -> None:
        """5. Make the engine, and the counters of its memory."""
        plan, device, deadline = self.plan, self.world.device, options.deadline
        extra = plan.extra_in_flight, plan.most_extra_in_flight
        self.policy = Policy(self.world, plan.named_codecs, codec=plan.codec, extra=extra, deadline=deadline)
        gpus = self.agreement.exchange("its GPU", identity_of(device))
        transport = transport_of(self.world, device=device, gpus=gpus, deadline=deadline, pool=SlotPool())
        self.meter, frames = frames_of(
            self.devices, transport, rank=self.rank, stages=self.stages, policy=self.policy
        )
        self.failures = Failures(self.rank, self.stages, transport)
        self.interrupts = Interrupts(self.failures)
        parameters = WeakTensorKeyDictionary({parameter: None for parameter in model.parameters()})
        self.engine = Engine(
            stages=self.stages, frames=frames, meter=self.meter, failures=self.failures,
            interrupts=self.interrupts, policy=self.policy, update=self.update, seed=options.seed,
            criterion=Criterion(options.loss, options.autocast, parameters), memory=self.memory,
            replicas=self.replicas, guards=self.guards, model_guards=self.steps.model_guards(model),
        )  # fmt: skip
        self.steps.record_others()
        self.same = SameBatches(self.agreement, self.failures.describe)
        resident.begin()
        for mirror in self.mirrors.values():
            mirror.push_all()
        if self.disk:
            self.disk.drain()
        self.usage = Usage(
            plan, own.tensors, self.update.optimizers,
            resident=resident, devices=self.devices, mirrors=self.mirrors,
            tiers=self.memory.tiers, pool=transport.pool,
        )  # fmt: skip

    def __str__(self) -> str:
        return described(self.plan, here=list(self.stages), num_steps=self.num_steps)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise PlanError("a pipeline is not copied or pickled; save it, or take its state_dict")

    def __repr__(self) -> str:
        first, _, _ = str(self).partition(",")
        return f"<{first}, rank {self.rank}>"

    @held
    def step(self, inputs: Any, targets: Any = None, *, outputs: bool = False) -> Report:
        """Train on one batch: micro-batches through the schedule, one update.

        Args:
            inputs: Tensor, tuple (positional) or dict (by name) of tensors of shape (batch, ...). What the
                example had besides tensors may stand between them; ``Constant`` tensors go to every
                micro-batch whole. What is not read here (``reads_inputs``) may be on the meta device; so may
                the parts of a ``Split`` that another replica ``reads``.
            targets: Tensor, tuple or dict of tensors, split along dimension 0 like the inputs; None for a
                model that computes its own loss.
            outputs: Keep the model's outputs for the report, on the last stage's rank; of a stream, those of
                the micro-batches that finished, in their order: the oldest were fed by the last step.

        Returns:
            The Report, on every rank.

        Raises:
            StageError: A layer failed; rank, stage and micro-batch are named.
            TransportError: A rank did not answer; the same are named.
            PlanError: The model was changed since it was traced.
        """
        began = time.perf_counter()
        self.failures.check()
        check_outputs(self.plan, outputs and not self.world.is_alone)
        with self.same.batch("step", self.num_steps):
            self.engine.model_guards.check("train")
            check_gradients()
            given, call = self.call.columns(inputs), self.call
            ends = {"whole": call.whole, "reads": self.reads, **self.ends}
            batches = micro_batches(given, targets, self.plan.micro_batches, self.weight, **ends)
            self.same.compare(lambda: fingerprints.of_batch(given, call.names, targets))
            step = self.feed.feed(batches, step=self.num_steps, extra=self.policy.extra)
        samples = sum(call.samples_of(batch.inputs) for batch in batches)
        with self.whole():
            counts = {"num_samples": samples, "num_tokens": tokens_of(batches)}
            report = self._run(step, **counts, began=began, outputs=outputs)
            others = functools.partial(self.feed.messages, step)
            self.policy.end(others, self.meter.spans, report.seconds)
            self.num_steps += 1
            seconds = report.worked_seconds
            self._take(self.load_balancer.after(self.plan, number=len(batches), seconds=seconds))
        return report

    @held
    def drain(self, *, outputs: bool = False) -> Report | None:
        """Finish the micro-batches in flight, if the schedule leaves any; count versions from 0 again.

        Args:
            outputs: Keep theirs, as ``step`` does.

        Returns:
            The Report of what this took, on every rank; None where nothing was in flight.
        """
        if not isinstance(self.feed, StreamFeed) or not self.feed.in_flight:
            return None
        began = time.perf_counter()
        self.failures.check()
        spans = self.meter.spans  # those of a step: a drain is none
        step = self.feed.drain(step=self.num_steps)
        with self.whole():
            report = self._run(step, num_samples=0, began=began, outputs=outputs)
            self.meter.spans = spans
            self.feed.restart()
            for stage in self.stages.values():
                stage.weights.drained()
            self.update.begin()
        return report

    @held
    @torch.inference_mode(False)  # its tensors could not be packed
    def evaluate(self, inputs: Any, *, metrics: Metrics | None = None) -> Any:
        """The plain model in eval mode on all of ``inputs`` at once; on the last stage's rank, else None.

        With ``metrics`` the mean of each over all batches, weighted by their samples, on every rank. Where a
        loss weighs classes or counts tokens, that is not the loss of all batches at once. What is in flight
        is finished first.

        Args:
            inputs: Those of one batch; with ``metrics`` batches, each a pair of inputs and targets.
            metrics: By name, functions of outputs and targets that return a number; the rank of the last
                stage calls them.

        Raises:
            PenstockError: A metric fails, or there is no batch; on every rank.
        """
        if metrics is not None:
            with self.agreement.all_or_none("the metrics of a test"):
                check_metrics(metrics)
            means = Means(metrics, autocast=self.engine.criterion.autocast)
            for given, targets in pairs(inputs):
                if (outputs := self.evaluate(given)) is not None:
                    means.add(outputs, targets, self.call.samples_of(self.call.tensors(given)))
            return means.on_all_ranks(self.agreement, self.plan)
        self.drain()
        self.failures.check()
        with self.same.batch("evaluation", self.same.counts["evaluation"]):
            self.engine.model_guards.check("eval")
            given, call = self.call.tensors(inputs), self.call
            ends = {"whole": call.whole, "reads": self.reads_tests, **self.ends}
            (batch,) = micro_batches(given, None, 1, None, **ends)
            self.same.compare(lambda: fingerprints.of_batch(given, call.names, None))
            messages, program = self.steps.step("eval", [batch.inputs])
        number, whole = self.num_steps, {0: batch}
        step = Step(number=number, messages=messages, program=program, micro_batches=whole, training=False)
        with self.world.device.current():
            return self.engine.evaluate(step)

    @held
    def state_dict(self) -> dict[str, Any]:
        """{"model", "optimizer", "step"} under the model's own names; collective, complete on rank 0.

        What is in flight is finished first."""
        self.drain()
        self.failures.check()
        return self.state.gather(self.update, self.num_steps) | {"versions": self.plan.versions}

    @held
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned on rank 0, on whatever cut; every rank passes all of it.

        What is in flight is finished first. A state of asynchronous training fits the same schedule, policy
        and cuts only, because they decide which weights a micro-batch sees.

        Raises:
            PlanError: Some of it is damaged or does not suit; on every rank, and nothing changed.
        """
        self.drain()
        self.failures.check_open()
        with self.agreement.all_or_none("loading a state"):
            parts = self.state.checked(self.update, state, self.plan)
            self.agreement.agree("a state to load", lambda: fingerprints.of_state(parts))
            with self.loading():
                self.num_steps = self.state.load(self.update, parts)
        self.begin_shares()
        self.same.counts.clear()  # compare the next batch of every kind

    def timeline(self) -> list[Span]:
        """Return the spans of all ranks in the last step, in seconds since it began; collective."""
        rows = self.world.all_gather_json(list(self.meter.spans), at="the timeline")
        return [Span(*fields) for row in rows for fields in row]

    def flows(self) -> list[dict[str, Any]]:
        """Return the traffic by flow: value or gradient, stages, codec, bytes raw and sent; collective."""
        return gather_flows(self.world, self.meter.totals, self.policy)

    def parameters_resident(self) -> contextlib.AbstractContextManager[None]:
        """Hold offloaded parameters in memory in a ``with`` block between steps.

        Their gradients and the state of the optimizers are there too; what is written to them stays.
        """
        return self.update.resident()

    def near(self) -> contextlib.AbstractContextManager[None]:
        """Old name of ``parameters_resident``."""
        text = "Pipeline.near() is called Pipeline.parameters_resident() now, and goes in the next release"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return self.parameters_resident()

    def close_stages(self, *, keeps_model: bool = True) -> None:
        """Do what ``close`` does, and keep the group of ranks."""
        self.failures.closed = "was closed"
        for stage in self.stages.values():
            if stage.mirror and keeps_model:
                stage.mirror.pull_all()
            stage.close()
        self.memory.close()
        if self.disk:
            self.disk.close()

    def close(self, *, keeps_model: bool = True) -> None:
        """Let go of what it holds, and of the ranks unless it was given a world; after a failure the group
        ends with the process.

        Args:
            keeps_model: Bring all parameters back from their tier; else those that are offloaded are lost.
        """
        self.close_stages(keeps_model=keeps_model)
        if self.leaves and not self.failures.first:
            self.world.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_last(self) -> bool:
        """True if this process holds the last stage (its first replica), which has losses and outputs."""
        return self.world.is_alone or self.plan.owner(-1) == self.rank

    def reads(self, micro_batch: int) -> bool:
        """True if this process reads the inputs of a micro-batch of the next step, on the first stage."""
        return self.world.is_alone or self.plan.rank_of(0, micro_batch) == self.rank

    def reads_tests(self, _: int = 0) -> bool:
        """True if this process reads the batches of an evaluation: one replica of the first stage does."""
        return self.world.is_alone or self.plan.owner(0) == self.rank

    def begin_shares(self, kept: Shares = (), seconds: Seconds = NONE) -> None:
        """Begin with the step that is next; ``kept``, ``seconds``: those of a checkpoint that was loaded."""
        self._take(self.load_balancer.begin(self.plan, kept, seconds))

    def _take(self, plan: Plan) -> None:
        if plan is not self.plan:
            self.plan = self.steps.plan = self.replicas.plan = plan

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """The block in which a step trains: one that breaks off behind the begin of its update leaves weights
        of two steps, so that only a state that is loaded goes on."""
        before = self.update.begun
        try:
            yield
        except BaseException as error:
            if self.update.begun != before:
                self.failures.over = (
                    f"the update of step {self.num_steps} was broken off by {type(error).__name__}, so "
                    "weights are of two steps; load a checkpoint or a state_dict of before"
                )
            raise

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """The block in which a checked state is taken over: one that breaks off leaves parts of two."""
        failures, before = self.failures, self.failures.over
        failures.over = "a load was broken off, so parts are of two states; load it again"
        try:
            yield
            failures.over = ""
            self.guards.loaded()
        except PenstockError:  # refused ahead of the first byte
            failures.over = before
            raise

    def _run(
        self, step: Step, *, num_samples: int, began: float, outputs: bool, num_tokens: int | None = None
    ) -> Report:
        """Run a step, or the drain of a stream; put together the loss and the reports of the stages."""
        engine, rate, self.update.norm = self.engine, self.update.learning_rate, None
        try:
            with self.world.device.current():
                engine.step(dataclasses.replace(step, keeps_outputs=outputs))
        except BaseException:
            self.feed.restart()  # what was in flight is lost
            self.usage.restart()
            raise
        self.feed.ran(step)
        reports = self.usage.fill(self.meter.reports, self.meter.spans, rank=self.rank)
        losses = self.replicas.losses(engine.losses)
        for stage, num_bytes in self.replicas.exchanged_bytes().items():
            reports[stage].exchanged_bytes = num_bytes
        shares = {index: step.micro_batches[index].share for index in losses}
        mine = (
            total_loss(losses, shares, mean=self.plan.streams and self.weight != "summed")
            if self.is_last
            else 0.0
        )
        told = gather_reports(self.world, mine, reports, ranks=self.ranks_of_stages, asked=self.asked)
        norm = None if self.update.norm is None else float(self.update.norm)
        samples = [self.call.samples_of(step.micro_batches[index].inputs) for index in engine.outputs]
        return Report(
            step=self.num_steps, seconds=time.perf_counter() - began, num_samples=num_samples,
            num_tokens=num_tokens, outputs=joined([*engine.outputs.values()], samples), learning_rate=rate,
            gradient_norm=norm, **told,
        )  # fmt: skip
