"""The group of ranks: joining it, and what ranks tell each other beside frames. Nothing is pickled.

Without a process group every function answers for a world of one, so callers never ask which case it is."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..compression.errors import TransportError


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

    Args:    deadline: seconds until every rank must be there.
    Raises:  TransportError: a rank is not; the sentence names it.
    """
    limit = datetime.timedelta(seconds=deadline)
    signs = {other: f"penstock/joined/{other}" for other in range(ranks)}
    store.set(signs[rank], "")
    try:
        store.wait(list(signs.values()), limit)
    except Exception as error:
        missing = ", ".join(str(other) for other, sign in signs.items() if not store.check([sign]))
        raise TransportError(
            f"rank {missing} of {ranks} did not join within {deadline:g} s; see why it did not start"
        ) from error
    dist.init_process_group(
        "gloo", store=PrefixStore("penstock", store), rank=rank, world_size=ranks, timeout=limit
    )


def close() -> None:
    """Leave the group together, after success only: else an error hides behind those of the peers."""
    if joined():
        exchange([0.0])  # nobody leaves while another still waits for it
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


def leave_word(sentence: str) -> None:
    """Tell the other ranks, through the group's store, why this one stops."""
    with contextlib.suppress(
        Exception
    ):  # the store may have gone with the rank that held it; the error itself travels on
        _store().set(f"failed/{rank()}", sentence)


def words_of_others() -> str:
    """What ranks that failed left word of; "" if none did."""
    with contextlib.suppress(Exception):
        store = _store()
        said = [f"failed/{other}" for other in range(num_ranks()) if other != rank()]
        return "; ".join(store.get(key).decode() for key in said if store.check([key]))
    return ""


def reason_of(error: RuntimeError) -> str:
    """What gloo says of a failed transfer, less its source line and its advice."""
    return re.sub(r"^\[[^]]*\] ", "", str(error)).split(". ")[0]


def _store() -> Store:
    return distributed_c10d._get_default_store()


def share(number: float, source: int) -> float:
    """The number that rank ``source`` gives, on every rank."""
    return exchange([number])[source][0]


def _collective(call: Any) -> None:
    try:
        call()
    except RuntimeError as error:
        reason = words_of_others() or reason_of(error)
        raise TransportError(f"rank {rank()} lost the group of ranks: {reason}") from error
