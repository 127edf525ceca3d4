"""Packed exchanges for all integrations: counters, and the codec of a tensor by measurement."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ...compression.buffers import Pool
from ...compression.codec import decode_received, encode
from ...compression.codec_cost import candidates, sample, trial
from ...compression.errors import CodecError, TransportError
from ...compression.frame import FrameSpec, frame_bytes, written_by
from ...compression.names import AUTO, check_name, lossless

PROBE_BYTES = 1 << 18  # of the message that measures a link


@dataclass(slots=True)
class Transfers:
    """Bytes of the tensors that this rank has sent, and of the frames that they travelled in."""

    bytes_raw: int = 0
    bytes_sent: int = 0

    def __str__(self) -> str:
        ratio = self.bytes_raw / max(1, self.bytes_sent)
        return f"{self.bytes_raw / 2**20:.1f} MiB -> {self.bytes_sent / 2**20:.1f} MiB ({ratio:.2f}x)"


class Packing:
    """The codec of each flow, chosen by its first tensor where it is ``auto``; counts what it packs.

    A flow is what one place sends again and again, such as the output of a stage.
    """

    def __init__(self, codec: str, group: dist.ProcessGroup | None, *, deadline: float) -> None:
        """Join the other ranks of ``group``, and measure the link to the next one if the codec is ``auto``.

        Raises:
            CodecError: no lossless codec has this name.
            TransportError: the group is not of gloo, or a rank does not come in ``deadline`` seconds.
        """
        check_name(codec)
        if codec not in (AUTO, *lossless()):
            raise CodecError(f"codec is one that loses nothing, found {codec}; choose auto or zero_value")
        if (backend := dist.get_backend(group)) != "gloo":
            raise TransportError(
                f"frames travel over gloo here, found a group of {backend}; make one of gloo"
            )
        _join(group, deadline)
        self.codec, self.transfers = codec, Transfers()
        self._chosen: dict[Hashable, str] = {}
        self._pool = Pool()
        self._bytes_per_second = _measure_link(group) if codec == AUTO else 0.0

    def pack(self, tensor: Tensor, flow: Hashable, *, mask: Tensor | None = None) -> Tensor:
        """Return the frame of ``tensor``; ``mask`` as for ``encode``."""
        return encode(tensor, self._codec_of(tensor, flow), mask=mask)

    def count(self, tensor: Tensor, frame: Tensor) -> None:
        """Count a tensor that is sent, and its frame."""
        self.transfers.bytes_raw += tensor.nbytes
        self.transfers.bytes_sent += frame.nbytes

    def room(self, like: Tensor) -> Tensor:
        """Return memory for the longest frame of a tensor of this shape and dtype."""
        return torch.empty(frame_bytes(like.shape, like.dtype), dtype=torch.uint8)

    def unpack(
        self, room: Tensor, like: Tensor, *, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, bool]:
        """Return the tensor in ``room``, its frame, and whether the sender marked it.

        Raises:  CodecError: it is damaged, or has not the shape and dtype of ``like``.
        """
        expected = FrameSpec(
            tuple(like.shape), like.dtype, None, written_by(AUTO), True, masked=mask is not None, frozen=True
        )
        tensor, length, marked = decode_received(room, expected, mask=mask)
        assert tensor is not None, "the promise has no None"
        return tensor, room[:length], marked

    def _codec_of(self, tensor: Tensor, flow: Hashable) -> str:
        if self.codec != AUTO:
            return self.codec
        if flow not in self._chosen:
            part, seconds = sample(tensor.detach()), {}
            for codec in candidates(tensor.dtype):
                cost = trial(part, codec, self._pool, num_bytes=tensor.nbytes)
                seconds[codec] = (
                    cost.num_bytes / self._bytes_per_second + cost.pack_seconds + cost.unpack_seconds
                )
            self._chosen[flow] = min(seconds, key=seconds.__getitem__)
        return self._chosen[flow]


def exchange(
    packing: Packing,
    parts: Sequence[Tensor],
    likes: Sequence[Tensor],
    group: dist.ProcessGroup | None,
    *,
    flow: Hashable,
) -> list[Tensor]:
    """Send ``parts[k]`` to rank k of ``group`` as a frame; return what every rank sent.

    Args:
        parts: one tensor for each rank; one that stands several times is packed once.
        likes: tensors of the shape and dtype that each rank sends. This rank's part is returned as it is.
    """
    rank, frames, rooms, operations = dist.get_rank(group), dict[int, Tensor](), dict[int, Tensor](), []
    for peer, part in enumerate(parts):
        if peer == rank:
            continue
        if id(part) not in frames:
            frames[id(part)] = packing.pack(part, flow)
        packing.count(part, frames[id(part)])
        rooms[peer] = packing.room(likes[peer])
        operations.append(dist.P2POp(dist.isend, frames[id(part)], group=group, group_peer=peer))
        operations.append(dist.P2POp(dist.irecv, rooms[peer], group=group, group_peer=peer))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return [part if k == rank else packing.unpack(rooms[k], likes[k])[0] for k, part in enumerate(parts)]


def _join(group: dist.ProcessGroup | None, deadline: float) -> None:
    """Wait for all ranks of a group, by ``deadline`` seconds."""
    try:
        dist.monitored_barrier(group, timeout=timedelta(seconds=deadline), wait_all_ranks=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise TransportError(
            f"all ranks of a group make this call at the same place, found some missing after {deadline:g} s "
            f"({reason}); call it on each"
        ) from error


def _measure_link(group: dist.ProcessGroup | None) -> float:
    """Return the bytes per second to the next rank while the one before sends, the fastest of three."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return float("inf")
    sent, came = torch.zeros(PROBE_BYTES, dtype=torch.uint8), torch.empty(PROBE_BYTES, dtype=torch.uint8)
    fastest = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        operations = [
            dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, came, group=group, group_peer=(rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        fastest = min(fastest, time.perf_counter() - began)
    return PROBE_BYTES / fastest
