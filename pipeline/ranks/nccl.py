"""What carries frames between which ranks: NCCL from GPU to GPU, where two ranks have one each.

Two groups, one for each direction of the ranks, so that what goes down cannot wait for what comes up. NCCL
takes payloads in the order in which both ends ask for them, that of the program; headers go over gloo.
Two ranks on one GPU, and a GPU and a CPU, go through pinned memory instead, as where there is no NCCL."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ...compression.buffers import Pool
from ...stages.device import Device
from .groups import thread_of
from .staged import Direct, StagedTransport
from .transport import GlooTransport, LocalTransport, Transport
from .world import World


def transport_of(
    world: World, *, device: Device, gpus: Sequence[str | None], deadline: float, pool: Pool | None = None
) -> Transport:
    """What carries the frames of a pipeline in ``world``, whose ranks compute on whatever they have.

    Args:    gpus: by rank, which GPU of all it computes on (``identity_of``); collective among those.
             pool: of the buffers of frames that are packed on the host."""
    if world.is_alone:
        return LocalTransport(pool)
    direct = direct_routes(world, gpus, deadline=deadline)
    if device.is_gpu:
        return StagedTransport(world, device=device, deadline=deadline, direct=direct)
    return GlooTransport(world, deadline=deadline, pool=pool)


def identity_of(device: Device) -> str | None:
    """What others must know of ``device``: which GPU it is; None where it is none, or there is no NCCL."""
    return device.identity if dist.is_nccl_available() else None


def direct_routes(world: World, gpus: Sequence[str | None], *, deadline: float) -> dict[int, Direct]:
    """How payloads of this rank go to others from GPU to GPU, by rank; collective among those with one."""
    mine, ranks = gpus[world.rank], [rank for rank, identity in enumerate(gpus) if identity]
    if mine is None or len({gpus[rank] for rank in ranks}) < 2 or thread_of(world.group) is not None:
        return {}  # to NCCL a process is a rank
    assert world.group is not None, "a world of several ranks has a group"
    members = [dist.get_process_group_ranks(world.group)[rank] for rank in ranks]
    down, up = _group(members, deadline), _group(members, deadline)
    return {
        rank: Direct(ranks.index(rank), *((down, up) if rank > world.rank else (up, down)))
        for rank in ranks
        if gpus[rank] != mine
    }


def _group(members: list[int], deadline: float) -> ProcessGroup:
    limit = datetime.timedelta(seconds=deadline)
    group = dist.new_group(members, limit, "nccl", use_local_synchronization=True)
    assert isinstance(group, ProcessGroup), "a rank is a member of its own group"
    return group
