"""Process groups of ranks, and the notices that ranks leave in their store: failures, signs of life.

Torch's look-ups in a store that has gone with its rank never return. So each runs in a thread with a short
deadline, and after one that got stuck no other is tried."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, Store

from ...compression.errors import PlanError, TransportError
from ...stages.device import Device
from .processes import heard
from .thread_group import ThreadGroup

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


MOMENT = 1.5  # seconds that a look-up in the store may take, of which ranks have one to give a sign of life
_SIGN_SECONDS = 1.0
_POLL_SECONDS = 0.1
_ASKING = "penstock-store"
_DONE = "done"

T = TypeVar("T")


def bounded(call: Callable[[], T], *, seconds: float) -> T:
    """Return the result of ``call``, or raise its error.

    Raises: TimeoutError: it takes longer, and so does its thread; or an earlier call still has not ended."""
    # A thread that is stuck is the memory of it: the store did not answer this thread once.
    name = f"{_ASKING}-{threading.get_ident()}"
    if any(thread.name == name for thread in threading.enumerate()):
        raise TimeoutError("the store of the ranks did not answer before")
    answers, errors = list[T](), list[BaseException]()

    def ask() -> None:
        try:
            answers.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=ask, name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"the store of the ranks did not answer within {seconds:g} s")
    return answers[0]


class Notices:
    """Notices of this rank and its peers in the store of their group; without a store there are no peers."""

    def __init__(self, store: Store | None, rank: int, size: int) -> None:
        self.store, self.rank = store, rank
        self.others = [other for other in range(size) if other != rank]

    def post_failure(self, sentence: str) -> None:
        """Tell the other ranks why this one stops."""
        self._ask(lambda store: store.set(f"failed/{self.rank}", sentence), otherwise=None)

    def peer_failures(self) -> str:
        """Return the words of other ranks that stopped, "" if none did."""

        def look(store: Store) -> str:
            keys = [f"failed/{other}" for other in self.others]
            return "; ".join(store.get(key).decode(errors="replace") for key in keys if store.check([key]))

        return self._ask(look, otherwise="")

    def why(self, error: RuntimeError) -> str:
        """Tell why a wait for all failed: by a rank that failed, else by who gives no sign of life."""
        if reason := self.peer_failures():
            return reason
        quiet = self._ask(lambda store: silent(store, "lost", self.rank, self.others), otherwise=self.others)
        who = f"{ranks_named(quiet)} did not answer: " if quiet else ""
        return f"{who}{of_gloo(error)}"

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Leave a sign of life every second while the block lasts; the others are in ``wait_for``."""
        store, done = self.store, threading.Event()
        assert store is not None, "there is somebody who waits"
        store.set(f"busy/{self.rank}", "0")  # not the end of another block

        def beat() -> None:
            count = 0
            with contextlib.suppress(RuntimeError):  # the store has gone: the next exchange tells
                while not done.wait(_SIGN_SECONDS):
                    store.set(f"busy/{self.rank}", str(count := count + 1))

        thread = threading.Thread(target=beat, name="penstock-busy", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(MOMENT)
            with contextlib.suppress(RuntimeError):
                store.set(f"busy/{self.rank}", _DONE)

    def wait_for(self, rank: int, *, deadline: float) -> None:
        """Wait until ``rank`` has left its ``busy`` block; TransportError without signs of life."""
        store, key = self.store, f"busy/{rank}"
        assert store is not None, "there is somebody to wait for"
        seen, until = "", time.monotonic() + deadline
        try:
            while seen != _DONE:
                before = seen
                seen = bounded(
                    lambda: store.get(key).decode(errors="replace") if store.check([key]) else "",
                    seconds=deadline,
                )
                if seen != before:
                    until = time.monotonic() + deadline
                elif time.monotonic() > until:
                    raise TimeoutError(f"it gave no sign of life for {deadline:g} s")
                time.sleep(_POLL_SECONDS)
        except (RuntimeError, TimeoutError) as error:
            raise TransportError(f"rank {self.rank} waited for rank {rank}: {of_gloo(error)}") from error

    def part(self, seconds: float) -> None:
        """Say that nothing is left to do, and wait until all have said so."""
        if self.store is not None:
            self.store.set(f"left/{self.rank}", "")
            self.store.wait([f"left/{other}" for other in self.others], datetime.timedelta(seconds=seconds))

    def _ask(self, look: Callable[[Store], T], *, otherwise: T) -> T:
        store = self.store
        if store is None:
            return otherwise
        try:
            return bounded(lambda: look(store), seconds=MOMENT)
        except Exception:  # the store has gone with the rank that held it; the error itself travels on
            return otherwise


def silent(store: Store, kind: str, rank: int, others: Collection[int]) -> list[int]:
    """Leave a sign of this ``kind``; return which of ``others`` leave neither one nor word of a failure."""
    store.set(f"{kind}/{rank}", "")
    until = time.monotonic() + _SIGN_SECONDS
    while True:
        left = [o for o in others if not (store.check([f"{kind}/{o}"]) or store.check([f"failed/{o}"]))]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.02)


def ranks_named(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 3 and 4``."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def of_gloo(error: BaseException) -> str:
    """Text of gloo's error about a failed transfer, without its source line and its advice."""
    return re.sub(r"^\[[^]]*\] ", "", str(error)).split(". ")[0]


def thread_of(group: ProcessGroup | None) -> int | None:
    """Return the number of this rank where ranks are threads; None where they are processes."""
    return group.place if isinstance(group, ThreadGroup) else None


def hearing(
    group: ProcessGroup | None, tell: Callable[[int], None]
) -> contextlib.AbstractContextManager[None]:
    """Have a signal that asks a run to stop call ``tell`` in the block, on every rank of a process."""
    return group.post.hearing(tell) if isinstance(group, ThreadGroup) else heard(tell)


def check_own(group: ProcessGroup | None, model: nn.Module) -> None:
    """Refuse a model that another rank of this process trains, too; raises PlanError."""
    if isinstance(group, ThreadGroup) and (name := group.post.claim(model, group.place)):
        raise PlanError(
            f"every rank has its own copy of the model, and {name} is a parameter of another thread's, too; "
            "give each thread one: copy.deepcopy(model), before the threads begin"
        )


def group_of(ranks: list[int], backend: str, *, deadline: float) -> ProcessGroup:
    """Make a group of processes, this one among them; no other rank need come."""
    limit = datetime.timedelta(seconds=deadline)
    group = dist.new_group(ranks, limit, backend, use_local_synchronization=True)
    assert isinstance(group, ProcessGroup), "a rank is a member of its own group"
    return group


_LEAVING_SECONDS = 2.0  # that a rank which has done its work waits for the others

_FOUNDED: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
"""The default groups of ``init_group``: nobody else's, so a world needs no group next to them."""


class World:
    """The ranks of one pipeline.

    Args:   process_group: the ranks, of any backend; collective among them. None: this process alone.
            device: where this rank computes; None: where its Pipeline does, and on the CPU until then.
            deadline: seconds that a wait for all of them may take."""

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
        if isinstance(process_group, ThreadGroup):
            group, store = process_group, process_group.post.store
        else:
            group = process_group
            if group not in _FOUNDED:
                group = group_of(dist.get_process_group_ranks(group), "gloo", deadline=deadline)
            store = distributed_c10d._get_process_group_store(group)
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.notices = Notices(store, self.rank, self.size)

    @staticmethod
    def default(*, device: Device | None = None, deadline: float = 60.0) -> World:
        """Return the ranks of the default process group, where there is one; else this process alone."""
        started = dist.is_available() and dist.is_initialized()
        return World(dist.group.WORLD if started else None, device=device, deadline=deadline)

    @staticmethod
    def from_mesh(mesh: DeviceMesh, *, deadline: float = 60.0) -> World:
        """Return the ranks along a mesh of one dimension, such as ``device_mesh["pp"]``."""
        if mesh.ndim != 1:
            raise TransportError(
                f"a pipeline runs along one dimension of a mesh, found {mesh.ndim}; give mesh['pp']"
            )
        return World(mesh.get_group(), deadline=deadline)

    @property
    def is_alone(self) -> bool:
        """True if all stages run in this process."""
        return self.group is None

    def all_gather(self, numbers: Sequence[float], *, at: str = "") -> list[list[float]]:
        """Return everybody's ``numbers`` (equally many on every rank, kept as float64), by rank.

        ``at``, here and below: what the ranks do together, for the sentence of a rank that loses them."""
        group = self.group
        if group is None:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        self.collective(lambda: group.allgather([rows], [mine]).wait(), at, mine)
        return [row.tolist() for row in rows]

    def broadcast(self, number: float, source: int, *, at: str = "") -> float:
        """Return the number that rank ``source`` gives, on every rank."""
        return self.all_gather([number], at=at)[source][0]

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self.all_gather([0.0])

    def all_gather_json(self, item: Any, *, at: str = "") -> list[Any]:
        """Return everybody's ``item`` (anything JSON can say), by rank, on every rank."""
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
        """Return everybody's ``frames`` (1-D uint8 tensors), by rank, on rank 0; None elsewhere."""
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
        """Let some ranks of this world make groups of their own next; collective among all of it.

        Torch names such a group by how many groups a rank has made before, and ranks that have been in
        different ones would wait for each other under different names."""
        if thread_of(self.group) is None:
            counts = self.all_gather([distributed_c10d._world.group_count])
            distributed_c10d._world.group_count = int(max(row[0] for row in counts))

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

        Connections are closed when all have said that they wait for nothing: none breaks under a transfer."""
        if self.group is None:
            return
        self.all_gather([0.0], at="leaving the group")
        with contextlib.suppress(Exception):  # a peer that has left already misses nothing
            bounded(lambda: self.notices.part(_LEAVING_SECONDS), seconds=_LEAVING_SECONDS + MOMENT)
        if not isinstance(self.group, ThreadGroup):
            dist.destroy_process_group(self.group)
        self.group = None

    def collective(self, call: Callable[[], T], at: str, item: torch.Tensor) -> T:
        """Do what several ranks do together with ``item``; raises TransportError where one is lost."""
        try:
            return call()
        except (RuntimeError, ValueError) as error:
            # torch's report of a failure knows no group of threads, and fails where there is a default group.
            cause = error if isinstance(error, RuntimeError) else error.__context__
            if not isinstance(cause, RuntimeError):
                raise
            where = f" in {at} ({item.nbytes:,} bytes of each) within {self.deadline:g} s" if at else ""
            raise TransportError(
                f"rank {self.rank} lost the group of ranks{where}: {self.notices.why(cause)}"
            ) from error


def init_group(store: Store, *, rank: int, ranks: int, deadline: float) -> World:
    """Become ``rank`` of ``ranks`` in a new default group that meets at ``store``.

    Args:    deadline: seconds until every rank must be there; then, those that any wait for all may take.
    Raises:  TransportError: a rank is not; the sentence names it."""
    limit = datetime.timedelta(seconds=deadline)
    signs = {other: f"penstock/joined/{other}" for other in range(ranks)}

    def meet() -> None:
        store.set(signs[rank], "")
        store.wait(list(signs.values()), limit)

    try:
        bounded(meet, seconds=deadline + MOMENT)
    except Exception as error:
        limits = f"within {deadline:g} s; see why it"
        try:
            missing = bounded(
                lambda: [str(other) for other, sign in signs.items() if not store.check([sign])],
                seconds=MOMENT,
            )
        except Exception:
            gone = f"the store where {ranks} ranks meet did not answer {limits} ended"
            raise TransportError(gone) from error
        names = ", ".join(missing)
        raise TransportError(f"rank {names} of {ranks} did not join {limits} did not start") from error
    own = PrefixStore("penstock", store)
    try:
        bounded(
            lambda: dist.init_process_group("gloo", store=own, rank=rank, world_size=ranks, timeout=limit),
            seconds=deadline + MOMENT,
        )
    except (RuntimeError, TimeoutError) as error:
        others = [other for other in range(ranks) if other != rank]
        with contextlib.suppress(Exception):
            others = bounded(lambda: silent(own, "apart", rank, others) or others, seconds=MOMENT)
        raise TransportError(
            f"rank {rank} could not connect to {ranks_named(others)}: {of_gloo(error)}"
        ) from error
    assert dist.group.WORLD is not None
    _FOUNDED.add(dist.group.WORLD)
    return World(dist.group.WORLD, deadline=deadline)


class ReplicaGroup:
    """Those of the ``ranks`` of ``world`` that run ``stage``, this one among them; collective among them.

    ``num_bytes``: gradients and parameters that this one has given others, counted for each of them."""

    def __init__(self, world: World, ranks: Sequence[int], *, stage: int) -> None:
        assert world.group is not None, "replicas are ranks of their own"
        self.world, self.ranks, self.stage = world, tuple(ranks), stage
        self.place = self.ranks.index(world.rank)
        if isinstance(world.group, ThreadGroup):
            self.group: ProcessGroup = world.group.part(self.ranks)
        else:
            members = dist.get_process_group_ranks(world.group)
            self.group = group_of([members[rank] for rank in ranks], "gloo", deadline=world.deadline)
        self.num_bytes = 0

    @property
    def size(self) -> int:
        """Number of replicas."""
        return len(self.ranks)

    def begin_to_add_up(self, numbers: torch.Tensor, *, owner: int | None = None, at: str) -> dist.Work:
        """Begin to sum up real ``numbers`` over the replicas, in place; all of them get the same bits, or the
        ``owner``-th alone, and what the others then have there is nothing."""
        if owner is None:
            self.num_bytes += numbers.nbytes * (self.size - 1)
            return self._do(lambda: self.group.allreduce([numbers]), at, numbers)
        options = dist.ReduceOptions()
        options.rootRank = owner
        self.num_bytes += numbers.nbytes * (owner != self.place)
        return self._do(lambda: self.group.reduce([numbers], options), at, numbers)

    def begin_to_broadcast(self, item: torch.Tensor, source: int, *, at: str) -> dist.Work:
        """Begin to fill ``item`` on all replicas with that of the ``source``-th."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        self.num_bytes += item.nbytes * (self.size - 1) * (source == self.place)
        return self._do(lambda: self.group.broadcast([_raw(item)], options), at, item)

    def finish(self, work: dist.Work, item: torch.Tensor, *, at: str) -> None:
        """Wait until what was begun with ``item`` has been done."""
        self._do(work.wait, at, item)

    def largest(self, numbers: torch.Tensor, *, at: str) -> None:
        """Take the largest over the replicas, place by place, in place."""
        self._do(lambda: dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group), at, numbers)

    def push(self, item: torch.Tensor, *, source: int, target: int, at: str) -> None:
        """Fill ``item`` of the ``target``-th replica with that of the ``source``-th."""
        if self.place == source:
            self.num_bytes += item.nbytes
            self._do(lambda: self.group.send([_raw(item)], target, 0).wait(), at, item)
        elif self.place == target:
            self._do(lambda: self.group.recv([_raw(item)], source, 0).wait(), at, item)

    def scatter(self, piece: torch.Tensor, pieces: Sequence[torch.Tensor], source: int, *, at: str) -> None:
        """Fill ``piece`` with the one for this replica of the ``pieces`` that the ``source``-th has."""
        mine = [_raw(one) for one in pieces] if source == self.place else None
        self.num_bytes += piece.nbytes * (self.size - 1) * (source == self.place)
        self._do(lambda: dist.scatter(_raw(piece), mine, group=self.group, group_src=source), at, piece)

    def all_gather(
        self, mine: torch.Tensor, *, at: str, into: Sequence[torch.Tensor] = ()
    ) -> list[torch.Tensor]:
        """Gather the tensors of all replicas, all of one shape and dtype, ``into`` these or new ones."""
        rows = [*into] or [torch.empty_like(mine) for _ in self.ranks]
        self.num_bytes += mine.nbytes * (self.size - 1) * bool(into)  # else no gradients
        self._do(lambda: dist.all_gather([_raw(row) for row in rows], _raw(mine), group=self.group), at, mine)
        return rows

    def _do(self, call: Callable[[], T], at: str, item: torch.Tensor) -> T:
        return self.world.collective(call, f"{at} of stage {self.stage}", item)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
