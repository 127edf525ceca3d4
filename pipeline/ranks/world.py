"""World: the ranks that train one pipeline, as a value: which of them this process is, and how they talk.

One process alone is a world of one, so callers never ask which case it is. Somebody else's process group is
left as it is: a world of the same ranks makes a gloo group of its own, so neither tags nor deadlines meet.
Nothing is pickled. Every wait ends: by the deadline, or a moment later where the store itself has gone."""

from __future__ import annotations

import contextlib
import datetime
import json
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, Store

from ...compression.errors import TransportError
from ...stages.device import Device
from . import groups, notices
from .notices import Notices

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_LEAVING_SECONDS = 2.0
"""How long a rank that has done its work waits for the others before it closes its connections."""

_FOUNDED: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
"""The default groups that ``found`` started: nobody else's, so a world needs no group beside them."""


class World:
    """The ranks of one pipeline.

    Args:   process_group: the ranks, by a group of any backend; collective among them. None: this process
            alone.
            device: where this rank computes; None: where its Pipeline does, and on the CPU until then.
            deadline: seconds that a wait for all of them may take.
    """

    def __init__(
        self,
        process_group: ProcessGroup | None = None,
        *,
        device: Device | None = None,
        deadline: float = 60.0,
    ) -> None:
        self.device, self.has_device, self.deadline = device or Device(), device is not None, deadline
        self.group: ProcessGroup | None = None
        self.rank, self.size, self.notices = 0, 1, Notices(None, 0, 1)
        if process_group is None:
            return
        own = process_group in _FOUNDED
        self.group = process_group if own else groups.beside(process_group, deadline=deadline)
        self.rank, self.size = self.group.rank(), self.group.size()
        self.notices = Notices(groups.store_of(self.group), self.rank, self.size)

    @staticmethod
    def alone(device: Device | None = None) -> World:
        """This process and no other."""
        return World(device=device)

    @staticmethod
    def default(*, device: Device | None = None, deadline: float = 60.0) -> World:
        """The ranks of the default process group, where one is initialised; else this process alone."""
        started = dist.is_available() and dist.is_initialized()
        return World(dist.group.WORLD if started else None, device=device, deadline=deadline)

    @staticmethod
    def from_mesh(mesh: DeviceMesh, *, deadline: float = 60.0) -> World:
        """The ranks along a mesh of one dimension, such as ``device_mesh["pp"]``."""
        if mesh.ndim != 1:
            raise TransportError(
                f"a pipeline runs along one dimension of a mesh, found {mesh.ndim}; give mesh['pp']"
            )
        return World(mesh.get_group(), deadline=deadline)

    @property
    def is_alone(self) -> bool:
        """Whether all stages run in this process."""
        return self.group is None

    def all_gather(self, numbers: Sequence[float], *, at: str = "") -> list[list[float]]:
        """Everybody's ``numbers`` (equally many on every rank, kept as float64), by rank.

        ``at``, here and below: what the ranks do together, for the sentence of a rank that loses them."""
        group = self.group
        if group is None:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        self.collective(lambda: group.allgather([rows], [mine]).wait(), at, mine)
        return [row.tolist() for row in rows]

    def all_reduce(self, numbers: Sequence[float], *, at: str = "") -> list[float]:
        """The sums over all ranks of numbers, place by place, in the order of ranks."""
        return [sum(column) for column in zip(*self.all_gather(numbers, at=at), strict=True)]

    def broadcast(self, number: float, source: int, *, at: str = "") -> float:
        """The number that rank ``source`` gives, on every rank."""
        return self.all_gather([number], at=at)[source][0]

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self.all_gather([0.0])

    def all_gather_json(self, item: Any, *, at: str = "") -> list[Any]:
        """Everybody's ``item`` (anything JSON can say), by rank, on every rank."""
        group = self.group
        if group is None:
            return [item]
        data = torch.frombuffer(bytearray(json.dumps(item).encode()), dtype=torch.uint8)
        sizes = [int(row[0]) for row in self.all_gather([data.numel()], at=at)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: data.numel()] = data
        rows = [torch.empty_like(padded) for _ in sizes]
        self.collective(lambda: group.allgather([rows], [padded]).wait(), at, padded)
        return [json.loads(bytes(row[:size].numpy())) for row, size in zip(rows, sizes, strict=True)]

    def gather(self, frames: Sequence[torch.Tensor], *, at: str = "") -> list[list[torch.Tensor]] | None:
        """Everybody's ``frames`` (1-D uint8 tensors), by rank, on rank 0; None elsewhere."""
        group = self.group
        if group is None:
            return [list(frames)]
        sizes = self.all_gather_json([frame.numel() for frame in frames], at=at)
        if self.rank:
            for frame in frames:
                self.collective(lambda x=frame: group.send([x], 0, 0).wait(), at, frame)
            return None
        gathered = [list(frames)]
        for source, lengths in enumerate(sizes[1:], start=1):
            rows = [torch.empty(length, dtype=torch.uint8) for length in lengths]
            for row in rows:
                self.collective(lambda x=row, source=source: group.recv([x], source, 0).wait(), at, row)
            gathered.append(rows)
        return gathered

    def level(self) -> None:
        """Have some ranks of this world found groups of their own next; collective among all of it.

        Torch names such a group by how many groups a rank has founded before, and ranks that have been in
        different ones would wait for each other under different names."""
        if groups.thread_of(self.group) is None:
            groups.set_founded(int(max(row[0] for row in self.all_gather([groups.founded()]))))

    def isend(self, tensor: torch.Tensor, target: int, *, tag: int) -> dist.Work:
        """Begin to send real numbers to rank ``target``; raises RuntimeError where the connection is gone."""
        assert self.group is not None, "there is somebody to send to"
        return self.group.send([tensor], target, tag)  # as dist.isend, whose checks cost more than it does

    def irecv(self, tensor: torch.Tensor, source: int, *, tag: int) -> dist.Work:
        """Begin to receive from rank ``source``; raises RuntimeError where the connection is gone."""
        assert self.group is not None, "there is somebody to receive from"
        return self.group.recv([tensor], source, tag)

    def close(self) -> None:
        """Leave the group together, after success only: else an error hides behind those of the peers.

        First everybody has what it waits for, then everybody says so, and only then does anybody close its
        connections: none ever breaks under a transfer of a peer that is a little behind.
        """
        if self.group is None:
            return
        self.all_gather([0.0], at="leaving the group")
        with contextlib.suppress(Exception):  # a peer that has left already misses nothing
            notices.bounded(
                lambda: self.notices.part(_LEAVING_SECONDS), seconds=_LEAVING_SECONDS + notices.MOMENT
            )
        groups.leave(self.group)
        self.group = None

    def collective(self, call: Callable[[], Any], at: str, item: torch.Tensor) -> None:
        """Do what several ranks do together with ``item``; raises TransportError where one is lost."""
        try:
            call()
        except (RuntimeError, ValueError) as error:
            # torch's report of a failure knows no group of threads, and fails where there is a default group.
            cause = error if isinstance(error, RuntimeError) else error.__context__
            if not isinstance(cause, RuntimeError):
                raise
            where = f" in {at} ({item.nbytes:,} bytes of each) within {self.deadline:g} s" if at else ""
            raise TransportError(
                f"rank {self.rank} lost the group of ranks{where}: {self.notices.why(cause)}"
            ) from error


def found(store: Store, *, rank: int, ranks: int, deadline: float) -> World:
    """Become ``rank`` of ``ranks`` in a new default group that meets at ``store``.

    Args:    deadline: seconds until every rank must be there; then, those that any wait for all may take.
    Raises:  TransportError: a rank is not; the sentence names it.
    """
    limit = datetime.timedelta(seconds=deadline)
    signs = {other: f"penstock/joined/{other}" for other in range(ranks)}

    def meet() -> None:
        store.set(signs[rank], "")
        store.wait(list(signs.values()), limit)

    try:
        notices.bounded(meet, seconds=deadline + notices.MOMENT)
    except Exception as error:
        raise TransportError(_who_is_missing(store, signs, ranks=ranks, deadline=deadline)) from error
    own = PrefixStore("penstock", store)
    try:
        notices.bounded(
            lambda: dist.init_process_group("gloo", store=own, rank=rank, world_size=ranks, timeout=limit),
            seconds=deadline + notices.MOMENT,
        )
    except (RuntimeError, TimeoutError) as error:
        raise TransportError(_who_is_cut_off(own, rank, ranks=ranks, error=error)) from error
    assert dist.group.WORLD is not None
    _FOUNDED.add(dist.group.WORLD)
    return World(dist.group.WORLD, deadline=deadline)


def _who_is_missing(store: Store, signs: dict[int, str], *, ranks: int, deadline: float) -> str:
    """What to say when not all ranks came to the store in time, or it has gone."""
    try:
        missing = notices.bounded(
            lambda: [other for other, sign in signs.items() if not store.check([sign])],
            seconds=notices.MOMENT,
        )
    except Exception:
        return f"the store where {ranks} ranks meet did not answer within {deadline:g} s; see why it ended"
    names = ", ".join(map(str, missing))
    return f"rank {names} of {ranks} did not join within {deadline:g} s; see why it did not start"


def _who_is_cut_off(store: Store, rank: int, *, ranks: int, error: Exception) -> str:
    """What to say when ranks that met at the store found no connection to each other."""
    others = [other for other in range(ranks) if other != rank]
    with contextlib.suppress(Exception):
        others = notices.bounded(
            lambda: notices.silent(store, f"apart/{rank}", "apart", others) or others, seconds=notices.MOMENT
        )
    return f"rank {rank} could not connect to {notices.ranks_named(others)}: {notices.of_gloo(error)}"
