"""Exchange of gradients among the replicas of a stage, and of the parameters that one of them updates.

    exact       keep    after each backward the gradients of its micro-batch
                sums    in the order of micro-batches, as the plain loop adds; slice by slice: each replica
                        sums a part of the buffer, or the owner of a parameter what is pushed to it
    otherwise   sums    begun in the last backward (``Slices``)
    then        take_over   the sums become the gradients, where the parameters are updated
    updated     share   the others pull the values that the owner of a parameter wrote

Offloaded parameters are exchanged turn by turn, with no other turn of them in memory.

In the last backward of a step the gradient of a parameter is final as soon as autograd has added to it. When
all of a slice of the flat buffer are, the slice goes out, in an order that is the same on all replicas; what
no backward ended goes out at the update. The sums run in threads of gloo, the backward in this one.
Source: Li et al., PyTorch Distributed, VLDB 2020, section 3.2 (buckets of gradients)."""

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from ...compression.errors import StageError, TransportError
from ...stages.memory.evictable_tensor import EvictableTensor
from ...stages.memory.parameter_offload import OffloadedParameters
from ...stages.torch_private import version_of
from ..distributed.process_group import ReplicaGroup
from ..optimizer.flat import FlatGradients, Gradients, Slice
from ..optimizer.optimizers import Named

Waiting = EvictableTensor | torch.Tensor | None  # a gradient, which may be in a store
Mark = tuple[Waiting, int]  # a gradient, and how often it was written to

OWN = -1  # in place of a micro-batch: all of this replica
_SUM = "the sum of the gradients"
_UPDATED = "the updated parameters"


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
        parameters = ((place, self.flat.named[place][1]) for place in self.slice_of)
        handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._final, place))
            for place, parameter in parameters
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
        """The sums of all gradients; ``gathered``: buffers of them, else as far as they have not gone out."""
        if gathered is not None:
            self.buffers = gathered
        for place in self.slice_of if gathered is None else ():
            if place not in self.taken:
                self._take(place)
            (name, parameter), (gradient, version) = self.flat.named[place], self.taken.get(place, (None, 0))
            if gradient is not None and (parameter.grad is not gradient or version_of(gradient) != version):
                raise StageError(
                    f"the gradient of {name} was summed up over replicas when its last backward had ended "
                    "it, and something wrote to it since; write to it in a hook of the optimizer's step"
                )
        for missing in self.missing:
            missing.clear()
        self._go_on()
        if self.lost:
            raise self.lost
        for one, work in zip(self.flat.slices, self.works, strict=True):
            self.group.finish(work, self._numbers(one), at=_SUM)
        found, self.buffers = self.buffers, {}
        self.works, self.taken = [], {}  # they hold memory
        return found

    def share_parameters(self) -> None:
        """Have every replica take each parameter from the one that updates it."""
        buffers, works, group = self.flat.buffers(), [], self.group
        for one in self.flat.slices:
            assert one.owner is not None, "somebody updated it"
            if one.owner == group.place:
                for parameter, flat in self.flat.parameters(buffers, one):
                    flat.copy_(parameter)
            part = buffers[one.dtype][one.start : one.stop]
            works.append(group.begin_to_broadcast(part, one.owner, at=_UPDATED))
        for one, work in zip(self.flat.slices, works, strict=True):
            group.finish(work, buffers[one.dtype][one.start : one.stop], at=_UPDATED)
            if one.owner != group.place:
                for parameter, flat in self.flat.parameters(buffers, one):
                    parameter.copy_(flat)
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
            self.taken[place] = parameter.grad, version_of(parameter.grad)

    def _go_on(self) -> None:
        """Send the next slices, as far as they are whole; an error is raised by the wait."""
        while self.lost is None and len(self.works) < len(self.missing) and not self.missing[len(self.works)]:
            one = self.flat.slices[len(self.works)]
            try:
                work = self.group.begin_to_add_up(self._numbers(one), owner=one.owner, at=_SUM)
                self.works.append(work)
            except TransportError as error:
                self.lost = error

    def _numbers(self, one: Slice) -> torch.Tensor:
        flat = self.buffers[one.dtype][one.start : one.stop]
        return torch.view_as_real(flat) if flat.is_complex() else flat


class GradientExchange:
    """Exchange of the gradients of some parameters of a stage: all of them, or one turn of a mirror. ``has``:
    for each parameter 1 if this replica has a gradient of it, else 0."""

    def __init__(
        self,
        named: Named,
        group: ReplicaGroup,
        *,
        owners: Mapping[str, int],
        mirror: OffloadedParameters | None,
    ) -> None:
        """Take the place of the owner of each parameter by name; without owners every replica updates all."""
        places = [owners[name] for name, _ in named] if owners else ()
        self.named, self.group, self.mirror, self.is_owned = named, group, mirror, bool(owners)
        self.turn = [parameter for _, parameter in named]
        self.flat = FlatGradients(named, pieces=group.size, owners=places, reuses=mirror is None)
        self.slices = Slices(self.flat, group)
        self.kept: dict[int, dict[torch.dtype, torch.Tensor] | list[Waiting]] = {}
        self.begin()

    def begin(self, *, forgets: bool = False) -> None:
        """A step begins; ``forgets``: without gradients of the step before, which no optimizer took away."""
        for kept in self.kept.values():  # of a step that failed
            _drop(kept)
        if forgets:
            _drop(self._take())
        self.slices.begin()
        self.kept = {}
        self.has = torch.zeros(len(self.named), dtype=torch.uint8)
        self.like: list[torch.Tensor | None] = [None] * len(self.named)

    def marks(self) -> list[Mark]:
        """Return what tells, behind the first half of a backward, whose gradients it left alone."""
        return [(one, version_of(one) if isinstance(one, torch.Tensor) else 0) for one in self._waiting()]

    def keep(self, micro_batch: int, *, unless: Sequence[Mark] = ()) -> None:
        """Take the gradients of a micro-batch, so that the next starts anew; ``OWN``: of all that went
        backward here.

        Half of a backward adds to what the other half left."""
        gradients, before = self._take(unless), self.kept.get(micro_batch)
        self._note(gradients)
        if self.mirror is None:
            buffers = before if isinstance(before, dict) else None
            self.kept[micro_batch] = self.flat.gather(_in_memory(gradients), buffers)
        elif isinstance(before, list):
            pairs = zip(before, gradients, strict=True)
            self.kept[micro_batch] = [old if new is None else new for old, new in pairs]
        else:
            self.kept[micro_batch] = gradients

    def sums(self, holders: Sequence[int] | None) -> dict[torch.dtype, torch.Tensor]:
        """Sum up the gradients over all replicas; ``holders``: the place of the replica that kept those of
        each micro-batch, None: every replica has the sum over its own."""
        if holders is not None:
            return self._sums_at_owners(holders) if self.is_owned else self._sums_in_parts(holders)
        if self.kept:
            return self.slices.sums(self._flat(OWN))
        check_separate_gradients(self.named)
        self._note([parameter.grad for parameter in self.turn])
        return self.slices.sums()

    def take_over(self, sums: dict[torch.dtype, torch.Tensor], has: torch.Tensor) -> None:
        """Make the ``sums`` the gradients, where a replica ``has`` one and this one updates the parameter."""
        owned = [owner in (None, self.group.place) for owner in self.flat.owners]
        told = [int(one) and mine for one, mine in zip(has.tolist(), owned, strict=True)]
        gradients = self.flat.spread(sums, told, like=self.like)
        if self.mirror is None:
            for place, gradient in gradients.items():
                self.turn[place].grad = gradient
        else:
            self.mirror.give_gradients(self.turn, [gradients.get(place) for place in range(len(self.turn))])
        self.flat.give_back(sums, *(one for one in self.kept.values() if isinstance(one, dict)))
        self.kept, self.like = {}, []

    def share(self) -> None:
        """Have every replica take each parameter from its owner."""
        pulled = [one for one in self.flat.slices if one.owner != self.group.place]
        with self.values(fresh={id(self.turn[place]) for one in pulled for place in one.places}):
            self.slices.share_parameters()

    def values(self, *, fresh: Collection[int] = ()) -> contextlib.AbstractContextManager[None]:
        """The block in which the values of the parameters are in memory; ``fresh``: identities of those
        that are written there before anybody reads them."""
        return contextlib.nullcontext() if self.mirror is None else self.mirror.values(self.turn, fresh=fresh)

    def _waiting(self) -> list[Waiting]:
        if self.mirror is not None:
            return self.mirror.waiting_gradients(self.turn)
        return [parameter.grad for parameter in self.turn]

    def _take(self, unless: Sequence[Mark] = ()) -> list[Waiting]:
        """Take the gradients away from the parameters, but for those that still have their mark."""
        found = self._waiting()
        if unless:
            marks = zip(self.marks(), unless, strict=True)
            found = [None if new[0] is old[0] and new[1] == old[1] else new[0] for new, old in marks]
        if self.mirror is None:
            check_separate_gradients(self.named)
        for parameter, gradient in zip(self.turn, found, strict=True):
            if gradient is not None and self.mirror is not None:
                self.mirror.take_gradients([parameter])
            elif gradient is not None:
                parameter.grad = None
        return found

    def _note(self, gradients: Sequence[Waiting]) -> None:
        """Note which gradients there are, and memory, or a layout, for their sums."""
        self.has |= torch.tensor([int(one is not None) for one in gradients], dtype=torch.uint8)
        for place, one in enumerate(gradients):
            if one is not None and self.like[place] is None:
                self.like[place] = one.like if isinstance(one, EvictableTensor) else one

    def _flat(self, micro_batch: int) -> dict[torch.dtype, torch.Tensor]:
        """Return the buffers with the gradients that were kept of a micro-batch."""
        kept = self.kept[micro_batch]
        return kept if isinstance(kept, dict) else self.flat.gather(_in_memory(kept))

    def _sums_in_parts(self, holders: Sequence[int]) -> dict[torch.dtype, torch.Tensor]:
        """Each replica sums its part of the buffers over micro-batches, ascending, and gives it to all."""
        group, found = self.group, self.flat.buffers()
        for micro_batch, holder in enumerate(holders):
            mine = self._flat(micro_batch) if holder == group.place else {}
            for dtype, sums in found.items():
                parts = sums.chunk(group.size)
                total, piece = parts[group.place], parts[group.place - 1]  # of another: not summed yet
                pieces = mine[dtype].chunk(group.size) if mine else ()
                into = piece if micro_batch else total
                group.scatter(into, pieces, holder, at=f"the gradients of micro-batch {micro_batch}")
                if micro_batch:
                    total += piece
        for sums in found.values():
            parts = sums.chunk(group.size)
            group.all_gather(parts[group.place], into=parts, at=_SUM)
        return found

    def _sums_at_owners(self, holders: Sequence[int]) -> dict[torch.dtype, torch.Tensor]:
        """Push the gradients of each micro-batch to the owners, which sum theirs up, ascending."""
        group, found = self.group, self.flat.buffers()
        for micro_batch, holder in enumerate(holders):
            mine = self._flat(micro_batch) if holder == group.place else {}
            for one in self.flat.slices:
                total = found[one.dtype][one.start : one.stop]
                part = mine[one.dtype][one.start : one.stop] if mine else total
                if group.place == one.owner != holder and micro_batch:
                    part = torch.empty_like(total)
                assert one.owner is not None, "somebody updates it"
                if holder != one.owner:
                    group.push(part, source=holder, target=one.owner, at=_SUM)
                if group.place == one.owner and part is not total:
                    total.copy_(part) if not micro_batch else total.add_(part)
        return found


def _drop(gradients: object) -> None:
    for one in gradients if isinstance(gradients, list) else ():
        if isinstance(one, EvictableTensor):
            one.drop()


def _in_memory(gradients: Sequence[Waiting]) -> Gradients:
    return [one.take() if isinstance(one, EvictableTensor) else one for one in gradients]


def check_separate_gradients(named: Named) -> None:
    """Refuse gradients in one memory, as autograd gives them to two views of one shape that are added up:
    a backward behind it adds to both what is meant for each."""
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
