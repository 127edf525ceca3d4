"""The ranks that run replicas of one stage, and what they do together: sums and copies of plain buffers.

What travels are bytes or sums of numbers on the host, over a gloo group of their own; every wait ends by the
deadline of the world, and names what was lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from . import process_group
from .process_group import World


class ReplicaGroup:
    """Those of the ``ranks`` of ``world`` that run ``stage``, this one among them; collective among them."""

    def __init__(self, world: World, ranks: Sequence[int], *, stage: int) -> None:
        assert world.group is not None, "replicas are ranks of their own"
        self.world, self.ranks, self.stage = world, tuple(ranks), stage
        self.place = self.ranks.index(world.rank)
        self.group = process_group.part(world.group, self.ranks, deadline=world.deadline)

    @property
    def size(self) -> int:
        """Number of replicas."""
        return len(self.ranks)

    def begin_to_add_up(self, numbers: torch.Tensor, *, at: str) -> dist.Work:
        """Begin to sum up real ``numbers`` over the replicas, in place; all of them get the same bits."""
        begun: list[dist.Work] = []
        self._do(lambda: begun.append(self.group.allreduce([numbers])), at, numbers)
        return begun[0]

    def begin_to_add_up_at(self, owner: int, numbers: torch.Tensor, *, at: str) -> dist.Work:
        """The same for the ``owner``-th replica alone; what the others then have there is nothing."""
        options = dist.ReduceOptions()
        options.rootRank = owner
        begun: list[dist.Work] = []
        self._do(lambda: begun.append(self.group.reduce([numbers], options)), at, numbers)
        return begun[0]

    def begin_to_broadcast(self, item: torch.Tensor, source: int, *, at: str) -> dist.Work:
        """Begin to fill ``item`` on all replicas with that of the ``source``-th."""
        begun: list[dist.Work] = []
        self._do(lambda: begun.append(self.group.broadcast([_raw(item)], _from(source))), at, item)
        return begun[0]

    def finish(self, work: dist.Work, item: torch.Tensor, *, at: str) -> None:
        """Wait until what was begun with ``item`` has been done."""
        self._do(work.wait, at, item)

    def largest(self, numbers: torch.Tensor, *, at: str) -> None:
        """The largest over the replicas, place by place, in place."""
        self._do(lambda: dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group), at, numbers)

    def scatter(self, piece: torch.Tensor, pieces: Sequence[torch.Tensor], source: int, *, at: str) -> None:
        """Fill ``piece`` with the one for this replica of the ``pieces`` that the ``source``-th has."""
        mine = [_raw(one) for one in pieces] if source == self.place else None
        self._do(lambda: dist.scatter(_raw(piece), mine, group=self.group, group_src=source), at, piece)

    def all_gather(
        self, mine: torch.Tensor, *, at: str, into: Sequence[torch.Tensor] = ()
    ) -> list[torch.Tensor]:
        """Gather the tensors of every replica, of this shape and dtype, in their order, ``into`` these or
        new ones.
        """
        rows = [*into] or [torch.empty_like(mine) for _ in self.ranks]
        self._do(lambda: dist.all_gather([_raw(row) for row in rows], _raw(mine), group=self.group), at, mine)
        return rows

    def _do(self, call: Callable[[], object], at: str, item: torch.Tensor) -> None:
        self.world.collective(call, f"{at} of stage {self.stage}", item)


def _from(source: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = source
    return options


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
