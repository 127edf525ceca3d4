"""What carries frames between which ranks: NCCL from GPU to GPU, where two ranks have one each.

Two groups, one for each direction of the ranks, so that what goes down cannot wait for what comes up. NCCL
takes payloads in the order in which both ends ask for them, that of the program; headers go over gloo.
Two ranks on one GPU, and a GPU and a CPU, go through pinned memory instead, as where there is no NCCL."""

from __future__ import annotations

import datetime

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ...stages.device import Device
from .staged import Direct, StagedTransport
from .transport import GlooTransport, LocalTransport, Transport
from .world import World


def transport_of(world: World, *, device: Device, deadline: float) -> Transport:
    """What carries the frames of a pipeline in ``world``, whose ranks compute on whatever they have.

    Collective: everybody must know what the others compute on."""
    if world.is_alone:
        return LocalTransport()
    direct = direct_routes(world, device, deadline=deadline)
    if device.is_gpu:
        return StagedTransport(world, device=device, deadline=deadline, direct=direct)
    return GlooTransport(world, deadline=deadline)


def direct_routes(world: World, device: Device, *, deadline: float) -> dict[int, Direct]:
    """How payloads of this rank go to others from GPU to GPU, by rank; collective among all ranks."""
    mine = device.identity if dist.is_nccl_available() else None
    everybody = world.all_gather_json(mine)
    ranks = [rank for rank, identity in enumerate(everybody) if identity]
    if mine is None or len({everybody[rank] for rank in ranks}) < 2:
        return {}
    assert world.group is not None, "a world of several ranks has a group"
    members = [dist.get_process_group_ranks(world.group)[rank] for rank in ranks]
    down, up = _group(members, deadline), _group(members, deadline)
    others = [rank for rank in ranks if everybody[rank] != mine]
    return {
        rank: Direct(ranks.index(rank), *((down, up) if rank > world.rank else (up, down))) for rank in others
    }


def _group(members: list[int], deadline: float) -> ProcessGroup:
    limit = datetime.timedelta(seconds=deadline)
    group = dist.new_group(members, limit, "nccl", use_local_synchronization=True)
    assert isinstance(group, ProcessGroup), "a rank is a member of its own group"
    return group
