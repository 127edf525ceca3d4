"""Groups of ranks, made, parted, asked and left: gloo's between processes, and those of threads."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroup, Store

from ...compression.errors import PlanError
from .signals import heard
from .thread_group import ThreadGroup


def beside(process_group: ProcessGroup, *, deadline: float) -> ProcessGroup:
    """A gloo group of the same ranks; one of threads is somebody's own, and stays what it is."""
    if isinstance(process_group, ThreadGroup):
        return process_group
    return _gloo(dist.get_process_group_ranks(process_group), deadline=deadline)


def part(group: ProcessGroup, ranks: Sequence[int], *, deadline: float) -> ProcessGroup:
    """A group of some of the ranks of ``group``, this one among them; collective among those alone."""
    if isinstance(group, ThreadGroup):
        return group.part(ranks)
    known = dist.get_process_group_ranks(group)
    return _gloo([known[rank] for rank in ranks], deadline=deadline)


def store_of(group: ProcessGroup) -> Store:
    """Where its ranks leave notices."""
    if isinstance(group, ThreadGroup):
        return group.store
    return distributed_c10d._get_process_group_store(group)


def leave(group: ProcessGroup) -> None:
    """Close this rank's connections, if it has any."""
    if not isinstance(group, ThreadGroup):
        dist.destroy_process_group(group)


def thread_of(group: ProcessGroup | None) -> int | None:
    """The number of this rank where ranks are threads; None where they are processes."""
    return group.place if isinstance(group, ThreadGroup) else None


def hearing(
    group: ProcessGroup | None, tell: Callable[[int], None]
) -> contextlib.AbstractContextManager[None]:
    """The block in which a signal that asks a run to stop calls ``tell``; of a process only the main thread
    hears, which tells the ranks."""
    return group.post.hearing(tell) if isinstance(group, ThreadGroup) else heard(tell)


def check_own(group: ProcessGroup | None, model: nn.Module) -> None:
    """Refuse a model that another rank of this process trains, too; raises PlanError."""
    if isinstance(group, ThreadGroup) and (name := group.post.claim(model, group.place)):
        raise PlanError(
            f"every rank has its own copy of the model, and {name} is a parameter of another thread's, too; "
            "give each thread one: copy.deepcopy(model), before the threads begin"
        )


def founded() -> int:
    """How many groups this process has founded, as torch counts them."""
    return distributed_c10d._world.group_count


def set_founded(number: int) -> None:
    """Count the next group from ``number`` on."""
    distributed_c10d._world.group_count = number


def _gloo(ranks: Sequence[int], *, deadline: float) -> ProcessGroup:
    group = dist.new_group(
        list(ranks),
        backend="gloo",
        timeout=datetime.timedelta(seconds=deadline),
        use_local_synchronization=True,  # no other rank need come
    )
    assert isinstance(group, ProcessGroup), "a rank is a member of its own group"
    return group
