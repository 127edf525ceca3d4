"""Gradients of DistributedDataParallel, and shards of FSDP2, as frames; sums in the order of ranks.

    ddp.register_comm_hook(ddp.process_group, penstock.ddp_hook())

Each rank adds the gradients of its part of a bucket, those of rank 0 first, and sends the sum to all. An
element is added in the same order whatever the buckets are, so that its bits do not depend on their size.
"""

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin

from ...compression.errors import PlanError, StageError
from .exchange import Packing, Transfers, expect, send, slices_of


class _Packed:
    """A packing for each group, which all of its ranks join at the first exchange; ``transfers`` counts."""

    def __init__(self, codec: str = "auto", *, deadline: float = 60.0) -> None:
        self._codec, self._deadline, self.transfers = codec, deadline, Transfers()
        self._packings: dict[dist.ProcessGroup | None, Packing] = {}

    def _packing_of(self, group: dist.ProcessGroup | None) -> Packing:
        if group not in self._packings:
            self._packings[group] = Packing(self._codec, group, deadline=self._deadline)
            self._packings[group].transfers = self.transfers
        return self._packings[group]


class DdpHook(_Packed):
    """A hook for ``ddp.register_comm_hook(ddp.process_group, hook)`` that sends gradients as frames.

    The group is one of gloo; None instead of it is the default group.

    Args:
        codec: a lossless codec, or ``auto``: for each bucket the fastest over the measured link.
        deadline: seconds to wait for the other ranks at the first bucket.

    ``hook.transfers`` counts bytes.
    """

    def __init__(self, codec: str = "auto", *, deadline: float = 60.0) -> None:
        super().__init__(codec, deadline=deadline)
        self.__name__ = self.__qualname__ = "ddp_hook"  # DistributedDataParallel reads both
        self._thread = ThreadPoolExecutor(1, "penstock-ddp")  # buckets in their order, beside the backward

    def __call__(self, state: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Return the mean of a bucket over the ranks of the group ``state``, as a future."""
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        buffer, index = bucket.buffer(), bucket.index()

        def run() -> None:
            try:
                done.set_result(self._mean(buffer, index, state))
            except Exception as error:  # the backward raises it
                done.set_exception(error)  # pyright: ignore[reportArgumentType]

        self._thread.submit(run)
        return done.then(torch.futures.Future.value)  # torch shows the error of a callback as it is

    @torch.no_grad()
    def _mean(self, buffer: Tensor, index: int, group: dist.ProcessGroup | None) -> Tensor:
        if buffer.layout is not torch.strided:
            raise StageError(
                "ddp_hook packs dense gradients, found sparse ones, as of nn.Embedding(sparse=True); take "
                "sparse=False, or leave out the hook"
            )
        packing, rank, size = self._packing_of(group), dist.get_rank(group), dist.get_world_size(group)
        slices = slices_of(buffer.div_(size).tensor_split(size))  # each has a part of every rank's piece
        sums = [expect(packing, [pieces[rank]] * size, group) for pieces in slices]
        means = [expect(packing, pieces, group) for pieces in slices]
        sent = [send(packing, pieces, group, flow=("gradients", index)) for pieces in slices]
        for pieces, came in zip(slices, sums, strict=True):
            pieces[rank].copy_(functools.reduce(torch.add, came(pieces[rank])))
            sent.append(send(packing, [pieces[rank]] * size, group, flow=("means", index)))
        for pieces, came in zip(slices, means, strict=True):
            for piece, mean in zip(pieces, came(pieces[rank]), strict=True):
                piece.copy_(mean)
        for wait in sent:
            wait()
        return buffer


ddp_hook = DdpHook


class FsdpAllGather(_Packed, DefaultAllocMixin, AllGather):
    """An all-gather of frames for ``FSDPModule.set_custom_all_gather``; ``transfers`` counts."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill ``output_tensor`` with the ``input_tensor`` of every rank."""
        size, packing = group.size(), self._packing_of(group)
        slices = [one * size for one in slices_of([input_tensor.view(-1)])]
        shards = [expect(packing, parts, group) for parts in slices]
        sent = [send(packing, parts, group, flow="shard") for parts in slices]
        rows_of = slices_of(output_tensor.view(size, -1).unbind())
        for rows, parts, came in zip(rows_of, slices, shards, strict=True):
            for row, part in zip(rows, came(parts[0]), strict=True):
                row.copy_(part)
        for wait in sent:
            wait()


class FsdpReduceScatter(_Packed, DefaultAllocMixin, ReduceScatter):
    """A reduce-scatter of frames in the order of ranks, for ``FSDPModule.set_custom_reduce_scatter``."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Fill ``output_tensor`` with the sum, or mean, of this rank's part over the ranks.

        Raises:  PlanError: another operation than sum and mean.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise PlanError(f"gradients are summed or averaged, found {op}; leave the divide factor as it is")
        size, packing = group.size(), self._packing_of(group)
        slices = slices_of(input_tensor.view(size, -1).unbind())
        own = group.rank()
        sums = [expect(packing, [parts[own]] * size, group) for parts in slices]
        sent = [send(packing, parts, group, flow="gradients") for parts in slices]
        for (out,), parts, came in zip(slices_of([output_tensor.view(-1)]), slices, sums, strict=True):
            total = functools.reduce(torch.add, came(parts[own]))
            out.copy_(total.div_(size) if op == dist.ReduceOp.AVG else total)
        for wait in sent:
            wait()
