"""The group of ranks: joining it, and what ranks tell each other beside frames. Nothing is pickled.

Without a process group every function answers for a world of one, so callers never ask which case it is.
Every wait ends: by the deadline given at ``join``, or a moment later where the store itself has gone."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from ...compression.errors import TransportError
from . import words

_LEAVING_SECONDS = 2.0
"""How long a rank that has done its work waits for the others before it closes its connections."""


def joined() -> bool:
    """Whether this process belongs to a group of ranks."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's rank, 0 without a group."""
    return dist.get_rank() if joined() else 0


def num_ranks() -> int:
    """Ranks in the group, 1 without one."""
    return dist.get_world_size() if joined() else 1


def join(store: Store, *, rank: int, ranks: int, deadline: float) -> None:
    """Become ``rank`` of ``ranks`` in the group that meets at ``store``.

    Args:    deadline: seconds until every rank must be there; then, those that any wait for all may take.
    Raises:  TransportError: a rank is not; the sentence names it.
    """
    limit = datetime.timedelta(seconds=deadline)
    signs = {other: f"penstock/joined/{other}" for other in range(ranks)}

    def meet() -> None:
        store.set(signs[rank], "")
        store.wait(list(signs.values()), limit)

    try:
        words.bounded(meet, seconds=deadline + words.MOMENT)
    except Exception as error:
        raise TransportError(_who_is_missing(store, signs, ranks=ranks, deadline=deadline)) from error
    own = PrefixStore("penstock", store)
    try:
        words.bounded(
            lambda: dist.init_process_group("gloo", store=own, rank=rank, world_size=ranks, timeout=limit),
            seconds=deadline + words.MOMENT,
        )
    except (RuntimeError, TimeoutError) as error:
        raise TransportError(_who_is_cut_off(own, rank, ranks=ranks, error=error)) from error


def close() -> None:
    """Leave the group together, after success only: else an error hides behind those of the peers.

    First everybody has what it waits for, then everybody says so, and only then does anybody close its
    connections: none ever breaks under a transfer of a peer that is a little behind.
    """
    if joined():
        exchange([0.0])
        with contextlib.suppress(Exception):  # a peer that has left already misses nothing
            words.bounded(_part, seconds=_LEAVING_SECONDS + words.MOMENT)
        dist.destroy_process_group()


def exchange(numbers: Sequence[float]) -> list[list[float]]:
    """Everybody's ``numbers`` (equally many on every rank, kept as float64), by rank."""
    if not joined():
        return [list(numbers)]
    mine = torch.tensor(numbers, dtype=torch.float64)
    all_of_them = [torch.empty_like(mine) for _ in range(num_ranks())]
    _collective(lambda: dist.all_gather(all_of_them, mine))
    return [row.tolist() for row in all_of_them]


def gather_json(item: Any) -> list[Any]:
    """Everybody's ``item`` (anything JSON can say), by rank, on every rank."""
    if not joined():
        return [item]
    data = torch.frombuffer(bytearray(json.dumps(item).encode()), dtype=torch.uint8)
    sizes = [int(row[0]) for row in exchange([data.numel()])]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: data.numel()] = data
    rows = [torch.empty_like(padded) for _ in sizes]
    _collective(lambda: dist.all_gather(rows, padded))
    return [json.loads(bytes(row[:size].numpy())) for row, size in zip(rows, sizes, strict=True)]


def gather_tensors(frames: Sequence[torch.Tensor]) -> list[list[torch.Tensor]] | None:
    """Everybody's ``frames`` (1-D uint8 tensors), by rank, on rank 0; None elsewhere."""
    if not joined():
        return [list(frames)]
    sizes = gather_json([frame.numel() for frame in frames])
    if rank():
        for frame in frames:
            _collective(lambda frame=frame: dist.send(frame, 0))
        return None
    gathered = [list(frames)]
    for source, lengths in enumerate(sizes[1:], start=1):
        rows = [torch.empty(length, dtype=torch.uint8) for length in lengths]
        for row in rows:
            _collective(lambda row=row, source=source: dist.recv(row, source))
        gathered.append(rows)
    return gathered


def share(number: float, source: int) -> float:
    """The number that rank ``source`` gives, on every rank."""
    return exchange([number])[source][0]


def _collective(call: Callable[[], Any]) -> None:
    try:
        call()
    except RuntimeError as error:
        raise TransportError(f"rank {rank()} lost the group of ranks: {words.why(error)}") from error


def _part() -> None:
    """Say that nothing is left to do, and wait until all have said so."""
    store = distributed_c10d._get_default_store()
    store.set(f"left/{rank()}", "")
    everybody = [f"left/{other}" for other in range(num_ranks())]
    store.wait(everybody, datetime.timedelta(seconds=_LEAVING_SECONDS))


def _who_is_missing(store: Store, signs: dict[int, str], *, ranks: int, deadline: float) -> str:
    """What to say when not all ranks came to the store in time, or it has gone."""
    try:
        missing = words.bounded(
            lambda: [other for other, sign in signs.items() if not store.check([sign])], seconds=words.MOMENT
        )
    except Exception:
        return f"the store where {ranks} ranks meet did not answer within {deadline:g} s; see why it ended"
    names = ", ".join(map(str, missing))
    return f"rank {names} of {ranks} did not join within {deadline:g} s; see why it did not start"


def _who_is_cut_off(store: Store, rank: int, *, ranks: int, error: Exception) -> str:
    """What to say when ranks that met at the store found no connection to each other."""
    others = [other for other in range(ranks) if other != rank]
    with contextlib.suppress(Exception):
        others = words.bounded(
            lambda: words.silent(store, f"apart/{rank}", "apart", others) or others, seconds=words.MOMENT
        )
    return f"rank {rank} could not connect to {words.ranks_named(others)}: {words.of_gloo(error)}"
