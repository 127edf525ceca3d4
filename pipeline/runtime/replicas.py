"""Replicas of stages: one exact sum of the gradients, so that all of them update alike.

Every micro-batch counts with its share of the whole batch, which its loss was multiplied by, so the gradient
of the batch is a plain sum over the replicas: nothing is averaged, and a replica may have had nothing to
do."""

import contextlib
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from ...compression.errors import Disagreement, PlanError
from ...stages.plan.plan import Plan
from ...stages.plan.validation import check_statistics
from ...stages.safetensors_io import bytes_of
from ...stages.stage.stage import Stage
from ...stages.tracing.layers import is_local
from ...stages.tracing.tracer import LayerGraph
from ..distributed.process_group import ReplicaGroup, World
from ..optimizer.clip import DTYPES
from ..schedules.instruction import Op
from .gradient_exchange import OWN, GradientExchange
from .ownership import Ownership
from .running_statistics import BUFFERS, RunningStatistics, batch_norms, norms_of
from .step_planner import Step

Named = Iterable[tuple[str, torch.Tensor]]


def check_hooks(named: Named, *, known: Collection[int] = ()) -> None:
    """Refuse hooks that see a gradient behind each backward, which of one rank is the sum until then, here a
    part; ``known``: numbers of hooks that may."""
    hooks = ((name, getattr(p, "_post_accumulate_grad_hooks", None) or ()) for name, p in named)
    if name := next((name for name, numbers in hooks if set(numbers) - set(known)), ""):
        raise PlanError(
            f"replicas add up what each has of a gradient, and {name} has a hook that sees it behind each "
            "backward (register_post_accumulate_grad_hook); take a hook of the optimizer's step, or one rank "
            "a stage"
        )


def check_replicated(plan: Plan, model: nn.Module, graph: LayerGraph) -> None:
    """Refuse a model that replicas would train otherwise than one rank; raises PlanError."""
    if max(plan.replicas) == 1:
        return
    check_hooks(model.named_parameters())
    if sparse := next((n for n, m in model.named_modules() if getattr(m, "sparse", False) is True), ""):
        raise PlanError(
            f"replicas add up dense gradients, and {sparse} gives sparse ones; make it with sparse=False, or "
            "take one rank a stage"
        )
    norms = batch_norms(dict(model.named_modules(remove_duplicate=False)))
    statistics = {f"{name}.{key}" for name in norms for key in BUFFERS}
    if found := sorted(graph.written - statistics):
        raise PlanError(
            f"replicas see some micro-batches each, and a forward writes to {found[0]}, which is no running "
            "statistic of a batch norm; take one rank a stage"
        )
    traced = graph.train
    nodes = [*(layer.node for layer in traced.layers), traced.output]
    read = {str(source.target) for node in nodes for source in node.all_input_nodes if is_local(source)}
    if found := sorted(_buffers(model, read) & _buffers(model, graph.written)):
        raise PlanError(
            "replicas add running statistics at the update, and only a module of torch.nn that is called may "
            f"read or write them, found a forward that uses {found[0]} by itself (F.batch_norm, or a class "
            "of one's own); call a module of torch.nn instead, or take one rank a stage"
        )
    if any(stage.recompute for stage in plan.stages):
        check_statistics(graph.written)


def _buffers(model: nn.Module, names: Collection[str]) -> set[str]:
    """Return the first name of each buffer among these names."""
    first = {id(buffer): name for name, buffer in model.named_buffers()}
    named = model.named_buffers(remove_duplicate=False)
    return {first[id(buffer)] for name, buffer in named if name in names}


def check_outputs(plan: Plan, asked: bool) -> None:
    """Refuse to hand out the outputs of a step where replicas have them; raises PlanError."""
    if asked and plan.replicas[-1] > 1:
        raise PlanError(
            f"each of {plan.replicas[-1]} replicas of the last stage has outputs of its own micro-batches, "
            "found outputs=True; evaluate the batch, or give the last stage one rank"
        )


_NOTHING = contextlib.nullcontext()
EVERY = 100  # updates from one at which replicas are compared to the next


class Replicas:
    """Work of the stages of this process together with their replicas on other ranks, if there are any;
    ``held``: all tensors of each stage by name, which are the same on every replica."""

    def __init__(
        self, plan: Plan, world: World, *, own: Ownership, stages: Mapping[int, Stage],
        held: Mapping[int, Mapping[str, torch.Tensor]],
    ) -> None:  # fmt: skip
        self.plan, self.held, self.every = plan, held, EVERY
        several = [] if world.is_alone else [stage for stage in own.here if plan.replicas[stage] > 1]
        if max(plan.replicas) > 1 and not world.is_alone:
            world.level()
        self.groups = {s: ReplicaGroup(world, plan.stages[s].ranks, stage=s) for s in several}
        # One exchange for all parameters of a stage; of offloaded ones one a turn, and one of the rest.
        self.exchanges: dict[int, list[GradientExchange]] = {}
        for s, group in self.groups.items():
            named, mirror = own.here[s], stages[s].mirror
            owners = {name: group.ranks.index(own.updaters[name]) for name, _ in named if own.updaters}
            turns = mirror.turns if mirror is not None else []
            turn_of = {id(parameter): place for place, turn in enumerate(turns) for parameter in turn}
            self.exchanges[s] = []
            for place in range(len(turns) + 1):
                some = [pair for pair in named if turn_of.get(id(pair[1]), len(turns)) == place]
                offloaded = mirror if place < len(turns) else None
                self.exchanges[s].append(GradientExchange(some, group, owners=owners, mirror=offloaded))
        self.statistics = {s: RunningStatistics(*norms_of(stages[s]), exact=plan.exact) for s in several}
        self.here = own.here
        self.mirrors = {s: stages[s].mirror for s in several}
        self.keeps = bool(several) and plan.exact
        for stage in several:
            stages[stage].sums_in_place = not plan.exact
        self.updates = dict.fromkeys(several, 0)
        self.number, self.last = 0, dict[int, int | None]()

    def begin(self, step: Step) -> None:
        """A step begins."""
        if not self.groups:
            return
        self.number = len(step.micro_batches)
        self.last = {i.stage: i.micro_batch for i in step.program if i.op in (Op.B, Op.W)}
        for statistics in self.statistics.values():
            statistics.begin()
        for stage, group in self.groups.items():
            named, mirror = self.here[stage], self.mirrors[stage]
            check_hooks(named, known=mirror.hooks if mirror else ())
            for one in self.exchanges[stage]:
                # A gradient that no optimizer took away counts once, with micro-batch 0.
                one.begin(forgets=self.plan.sharded or self.plan.place_of(stage, 0) != group.place)

    def holders(self, stage: int) -> list[int]:
        """The place of the replica of ``stage`` that has each micro-batch of the step."""
        return [self.plan.place_of(stage, micro_batch) for micro_batch in range(self.number)]

    def forward(self, stage: int, micro_batch: int) -> contextlib.AbstractContextManager[None]:
        """The block in which the layers of ``stage`` run forward."""
        found = self.statistics.get(stage)
        return _NOTHING if found is None else found.forward(micro_batch)

    def backward(
        self, stage: int, micro_batch: int, *, ends: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        """The block of a backward of ``micro_batch`` through ``stage``; not ``ends``: its first half."""
        if stage not in self.groups:
            return _NOTHING
        if self.keeps:
            return self._keeping(stage, micro_batch, ends=ends)
        if not ends or micro_batch != self.last[stage] or self.mirrors[stage]:
            return _NOTHING
        return self.exchanges[stage][0].slices.finals()

    @contextlib.contextmanager
    def _keeping(self, stage: int, micro_batch: int, *, ends: bool) -> Iterator[None]:
        """The block behind which the gradients of a micro-batch are taken: those of the next start anew."""
        marks = [() if ends else one.marks() for one in self.exchanges[stage]]
        yield
        for one, before in zip(self.exchanges[stage], marks, strict=True):
            one.keep(micro_batch, unless=before)

    def exchange(self, stage: int) -> None:
        """Make the gradients of ``stage`` those of the whole batch, where its parameters are updated."""
        if stage not in self.groups:
            return
        exchanges, holders = self.exchanges[stage], self.holders(stage) if self.keeps else None
        for one in exchanges if self.mirrors[stage] and not self.keeps else ():
            one.keep(OWN)
        sums = exchanges[0].sums(holders)
        self.statistics[stage].exchange(self.groups[stage], self.number)
        has = self._gradients_anywhere(stage)
        exchanges[0].take_over(sums, has[0])
        for one, there in zip(exchanges[1:], has[1:], strict=True):
            one.take_over(one.sums(holders), there)

    def _gradients_anywhere(self, stage: int) -> Sequence[torch.Tensor]:
        """For each parameter of each exchange 1 if a replica has a gradient of it, else 0."""
        exchanges = self.exchanges[stage]
        named = [pair for one in exchanges for pair in one.named]
        if not named:
            return [torch.zeros(0)]
        trained = torch.tensor([int(parameter.requires_grad) for _, parameter in named], dtype=torch.uint8)
        rows = torch.stack([torch.cat([one.has for one in exchanges]), trained, 1 - trained])
        self.groups[stage].largest(rows, at="which gradients there are")
        for (name, _), both in zip(named, (rows[1] & rows[2]).tolist(), strict=True):
            if both:  # the sum would lack a part
                raise Disagreement(
                    f"replicas of a stage train the same parameters: {name} of stage {stage} requires a "
                    "gradient on some of their ranks and on others none; set requires_grad alike on all"
                )
        return rows[0].split([len(one.named) for one in exchanges])

    def losses(self, mine: Mapping[int, torch.Tensor]) -> Mapping[int, torch.Tensor]:
        """The losses of all micro-batches, ascending, where the last stage is; of one replica, ``mine``."""
        group = self.groups.get(self.plan.num_stages - 1)
        if group is None:
            return mine
        told = torch.zeros(self.number, 2, dtype=torch.float64)
        for index, loss in mine.items():
            told[index] = torch.tensor([1 + DTYPES.index(loss.dtype), float(loss)], dtype=torch.float64)
        rows = torch.stack(group.all_gather(told, at="the losses"))
        holders = self.holders(self.plan.num_stages - 1)
        found = [rows[holder, index].tolist() for index, holder in enumerate(holders)]
        return {i: torch.tensor(loss, dtype=DTYPES[int(kind) - 1]) for i, (kind, loss) in enumerate(found)}

    def updated(self, stage: int) -> None:
        """Give each other what some updated for all; compare what replicas of ``stage`` hold, every hundredth
        time."""
        if stage not in self.groups:
            return
        if self.plan.sharded:
            for one in self.exchanges[stage]:
                one.share()
        self.updates[stage] += 1
        if (self.updates[stage] - 1) % self.every:
            return
        group, held = self.groups[stage], self.held[stage]
        rows = group.all_gather(self._digests(stage), at="the digest of what replicas hold")
        for rank, row in zip(group.ranks, rows, strict=True):
            for name, ours, theirs in zip(held, rows[0].tolist(), row.tolist(), strict=True):
                if ours != theirs:
                    raise Disagreement(
                        f"replicas of a stage hold the same bits after every update: {name} of stage {stage} "
                        f"differs on rank {group.ranks[0]} and rank {rank} behind update "
                        f"{self.updates[stage]}; see that nothing but the pipeline writes to the model"
                    )

    def exchanged_bytes(self) -> dict[int, int]:
        """Bytes that this replica of each stage has given the others since the last call."""
        found = {stage: group.num_bytes for stage, group in self.groups.items()}
        for group in self.groups.values():
            group.num_bytes = 0
        return found

    def _digests(self, stage: int) -> torch.Tensor:
        """One number for the bytes of each tensor of ``stage``; of offloaded parameters turn by turn."""
        held, found = self.held[stage], dict[str, int]()
        for one in self.exchanges[stage] if self.mirrors[stage] else ():
            names = [name for name, _ in one.named if name in held]
            with one.values():
                found |= zip(names, digests(held[name] for name in names).tolist(), strict=True)
        rest = [name for name in held if name not in found]
        found |= zip(rest, digests(held[name] for name in rest).tolist(), strict=True)
        return torch.tensor([found[name] for name in held], dtype=torch.int64)


def digests(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """One number for the bytes of each tensor."""
    found = [hashlib.blake2b(bytes_of(tensor), digest_size=8).digest() for tensor in tensors]
    return torch.tensor([int.from_bytes(one, "little", signed=True) for one in found], dtype=torch.int64)
