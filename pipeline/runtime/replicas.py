"""Replicas of stages: one exact sum of the gradients, so that all of them update alike.

Every micro-batch counts with its share of the whole batch, which its loss was multiplied by, so the gradient
of the batch is a plain sum over the replicas: nothing is averaged, and a replica may have had nothing to do.
Where the sum is exact, each replica keeps its gradients micro-batch by micro-batch, and the owner of each
slice of the buffer adds them in ascending order, as the plain loop does: the same bits."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import nn

from ...compression.errors import Disagreement, PlanError, StageError
from ...stages.plan.plan import Plan
from ...stages.stage.stage import Stage
from ...stages.tracing.layers import is_local
from ...stages.tracing.tracer import LayerGraph
from ..distributed.process_group import ReplicaGroup, World
from ..optimizer.clip import DTYPES
from ..optimizer.flat import FlatGradients
from ..schedules.instruction import Op
from .gradient_buckets import Slices
from .ownership import Ownership
from .running_statistics import BUFFERS, RunningStatistics, batch_norms, norms_of
from .step_planner import Step

Named = Iterable[tuple[str, torch.Tensor]]


def check_hooks(named: Named) -> None:
    """Refuse hooks that see a gradient behind each backward: of one rank the sum until then, here a part.

    Raises:  PlanError: a parameter has one."""
    if name := next((name for name, p in named if getattr(p, "_post_accumulate_grad_hooks", None)), ""):
        raise PlanError(
            f"replicas add up what each has of a gradient, and {name} has a hook that sees it behind each "
            "backward (register_post_accumulate_grad_hook); take a hook of the optimizer's step, or one rank "
            "a stage"
        )


def check_separate_gradients(named: Named) -> None:
    """Refuse gradients in one memory, as autograd gives them to two views of one shape that are added up:
    a backward behind it adds to both what is meant for each.

    Raises:  StageError: two are."""
    seen = dict[int, str]()
    for name, parameter in named:
        gradient = parameter.grad
        if gradient is None or gradient.layout != torch.strided or not gradient.numel():
            continue
        if (first := seen.setdefault(gradient.data_ptr(), name)) != name:
            raise StageError(
                f"replicas add up the gradient of each parameter, and autograd gave {first} and {name} one "
                "tensor for both, to which every backward adds twice; read a copy of one in forward: "
                f"{name}.clone()"
            )


def trained(named: Named) -> tuple[torch.Tensor, torch.Tensor]:
    """For each parameter 1 if it requires a gradient, else 0; and the other way round."""
    asks = torch.tensor([int(parameter.requires_grad) for _, parameter in named], dtype=torch.uint8)
    return asks, 1 - asks


def check_trained(named: Named, found: torch.Tensor, *, stage: int) -> None:
    """Refuse a parameter that replicas of ``stage`` do not all train: the sum would lack a part.

    Args:    found: the largest of what they have ``trained``.
    Raises:  Disagreement: there is one."""
    for (name, _), both in zip(named, (found[0] & found[1]).tolist(), strict=True):
        if both:
            raise Disagreement(
                f"replicas of a stage train the same parameters: {name} of stage {stage} requires a gradient "
                "on some of their ranks and on others none; set requires_grad alike on all of them"
            )


def check_replicated(plan: Plan, model: nn.Module, graph: LayerGraph) -> None:
    """Refuse what replicas would train otherwise than one.

    Raises:  PlanError: the model has something of the kind."""
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
    if graph.written and any(stage.recompute for stage in plan.stages):
        raise PlanError(
            f"replicas set the running statistics of batch norms aside, found {min(graph.written)} and "
            "recompute=true; take recompute=false, or one rank a stage"
        )


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
    """Work of the stages of this process together with their replicas on other ranks, if there are any.

    Args:
        own: The parameters of each stage of this process, and their updaters.
        stages: The stages of this process.
        held: All tensors of each of these stages by name, which are the same on every replica."""

    def __init__(
        self,
        plan: Plan,
        world: World,
        *,
        own: Ownership,
        stages: Mapping[int, Stage],
        held: Callable[[int], Mapping[str, torch.Tensor]],
        every: int = EVERY,
    ) -> None:
        self.plan, self.held, self.every = plan, held, every
        several = [] if world.is_alone else [stage for stage in own.here if plan.replicas[stage] > 1]
        if max(plan.replicas) > 1 and not world.is_alone:
            world.level()
        self.groups = {s: ReplicaGroup(world, plan.stages[s].ranks, stage=s) for s in several}
        self.flats = {
            s: FlatGradients(
                own.here[s], pieces=plan.replicas[s], owners=_owners(plan.stages[s].ranks, s, own)
            )
            for s in several
        }
        self.slices = {s: Slices(flat, self.groups[s]) for s, flat in self.flats.items()}
        self.statistics = {s: RunningStatistics(*norms_of(stages[s]), exact=plan.exact) for s in several}
        self.keeps = bool(several) and plan.exact
        self.updates = dict.fromkeys(several, 0)
        self.number, self.last = 0, dict[int, int | None]()

    def begin(self, step: Step) -> None:
        """A step begins."""
        if not self.groups:
            return
        self.number = len(step.micro_batches)
        self.last = {i.stage: i.micro_batch for i in step.program if i.op is Op.B}
        self.kept: dict[int, dict[int, dict[torch.dtype, torch.Tensor]]] = {s: {} for s in self.groups}
        for each in (*self.statistics.values(), *self.slices.values()):
            each.begin()
        self.has = {s: flat.has() * 0 for s, flat in self.flats.items()}
        self.like: dict[int, list[torch.Tensor | None]] = {
            s: [None] * len(flat.named) for s, flat in self.flats.items()
        }
        for stage, group in self.groups.items():
            check_hooks(self.flats[stage].named)
            if self.plan.sharded or self.plan.place_of(stage, 0) != group.place:
                for _, parameter in self.flats[stage].named:
                    parameter.grad = None  # one that no optimizer took away counts once, with micro-batch 0

    def holders(self, stage: int) -> list[int]:
        """The place of the replica of ``stage`` that has each micro-batch of the step."""
        return [self.plan.place_of(stage, micro_batch) for micro_batch in range(self.number)]

    def forward(self, stage: int, micro_batch: int) -> contextlib.AbstractContextManager[None]:
        """The block in which the layers of ``stage`` run forward."""
        found = self.statistics.get(stage)
        return _NOTHING if found is None else found.forward(micro_batch)

    def backward(self, stage: int, micro_batch: int) -> contextlib.AbstractContextManager[None]:
        """The block in which ``micro_batch`` goes backward through ``stage``."""
        if stage not in self.slices or self.keeps or micro_batch != self.last[stage]:
            return _NOTHING
        return self.slices[stage].finals()

    def keep(self, stage: int, micro_batch: int) -> None:
        """Take the gradients of a micro-batch, which has just gone backward, so that the next starts anew."""
        if stage not in self.groups:
            return
        flat, like = self.flats[stage], self.like[stage]
        check_separate_gradients(flat.named)
        self.kept[stage][micro_batch] = flat.gather()
        self.has[stage] |= flat.has()
        for place, (_, parameter) in enumerate(flat.named):
            like[place] = parameter.grad if like[place] is None else like[place]
            parameter.grad = None

    def exchange(self, stage: int) -> None:
        """Make the gradients of ``stage`` those of the whole batch, the same on all its replicas."""
        if stage not in self.groups:
            return
        flat, group = self.flats[stage], self.groups[stage]
        if not self.keeps:
            check_separate_gradients(flat.named)
            self.has[stage] = flat.has()
            self.like[stage] = [parameter.grad for _, parameter in flat.named]
        sums = self._in_order(stage) if self.keeps else self.slices[stage].sums()
        self.statistics[stage].exchange(group, self.number)
        if flat.named:
            told = torch.stack([self.has[stage], *trained(flat.named)])
            group.largest(told, at="which gradients there are")
            check_trained(flat.named, told[1:], stage=stage)
            has = told[0]
            if self.plan.sharded:  # only the sums of what this replica updates are surely here
                has = has * torch.tensor([owner == group.place for owner in flat.owners])
            flat.spread(sums, has, like=self.like[stage])
            flat.give_back(sums, *self.kept[stage].values())

    def _in_order(self, stage: int) -> dict[torch.dtype, torch.Tensor]:
        """Sum over micro-batches in ascending order: each replica adds up its slice for all."""
        group, kept, holders = self.groups[stage], self.kept[stage], self.holders(stage)
        found = self.flats[stage].buffers()
        for dtype, sums in found.items():
            parts = sums.chunk(group.size)
            total, piece = parts[group.place], parts[group.place - 1]  # another's until its owner tells it
            for micro_batch, holder in enumerate(holders):
                pieces = kept[micro_batch][dtype].chunk(group.size) if holder == group.place else ()
                into = piece if micro_batch else total
                group.scatter(into, pieces, holder, at=f"the gradients of micro-batch {micro_batch}")
                if micro_batch:
                    total += piece
            group.all_gather(total, into=parts, at="the sum of the gradients")
        return found

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
        """Give each other what some updated for all; compare what the replicas of ``stage`` hold, at the
        first update and every hundredth.

        Raises: Disagreement: it is not the same; the sentence names the first tensor."""
        if stage not in self.groups:
            return
        if self.plan.sharded:
            self.slices[stage].share_parameters()
        self.updates[stage] += 1
        if (self.updates[stage] - 1) % self.every:
            return
        group, held = self.groups[stage], self.held(stage)
        rows = group.all_gather(digests(held.values()), at="the digest of what replicas hold")
        for rank, row in zip(group.ranks, rows, strict=True):
            for name, ours, theirs in zip(held, rows[0].tolist(), row.tolist(), strict=True):
                if ours != theirs:
                    raise Disagreement(
                        f"replicas of a stage hold the same bits after every update: {name} of stage {stage} "
                        f"differs on rank {group.ranks[0]} and rank {rank} behind update "
                        f"{self.updates[stage]}; see that nothing but the pipeline writes to the model"
                    )


def _owners(ranks: Sequence[int], stage: int, own: Ownership) -> list[int]:
    """The place among ``ranks`` of the updater of each parameter of ``stage``; none: all of them update."""
    return [ranks.index(own.updaters[name]) for name, _ in own.here[stage] if own.updaters]


def digests(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """One number for the bytes of each tensor."""
    found = []
    for tensor in tensors:
        seen = tensor.detach().cpu().resolve_conj().resolve_neg()
        plain = seen.clone(memory_format=torch.contiguous_format)
        data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        found.append(int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True))
    return torch.tensor(found, dtype=torch.int64)
