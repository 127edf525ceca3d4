"""Packed exchanges for all integrations: counters, and the codec of a tensor by measurement."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...compression.buffers import Pool
from ...compression.codec import decode_received, encode
from ...compression.codec_cost import candidates, sample, trial
from ...compression.errors import CodecError, TransportError
from ...compression.frame import FrameSpec, frame_bytes, written_by
from ...compression.names import AUTO, check_name, lossless
from ...stages.units import show_bytes
from ..distributed.process_group import World
from ..distributed.transport import measured_rates

SLICE_BYTES = 2 << 20  # before they are packed: 0.17 s at 100 Mbit/s


@dataclass(slots=True)
class Transfers:
    """Bytes of the tensors that this rank has sent, and of the frames that they travelled in."""

    bytes_raw: int = 0
    bytes_sent: int = 0

    def __str__(self) -> str:
        ratio = self.bytes_raw / max(1, self.bytes_sent)
        return f"{show_bytes(self.bytes_raw)} -> {show_bytes(self.bytes_sent)} ({ratio:.2f}x)"


class Packing:
    """The codec of each flow, chosen by its first tensor where it is ``auto``; counts what it packs.

    A flow is what one place sends again and again, such as the output of a stage.
    """

    def __init__(self, codec: str, group: dist.ProcessGroup | None, *, deadline: float) -> None:
        """Join the other ranks of ``group``, and measure the links to the next ones if the codec is ``auto``.

        Raises:
            CodecError: no lossless codec has this name.
            TransportError: the group is not of gloo, or a rank does not come in ``deadline`` seconds.
        """
        check_name(codec)
        if codec not in (AUTO, *lossless()):
            raise CodecError(f"codec is one that loses nothing, found {codec}; choose auto or zero_value")
        if (backend := dist.get_backend(group)) != "gloo":
            raise TransportError(f"frames travel over gloo, found a group of {backend}; make one of gloo")
        world = _joined(group, deadline)
        self.codec, self.transfers = codec, Transfers()
        self._chosen: dict[Hashable, str] = {}
        self._pool = Pool()
        self._bytes_per_second = _slowest_link(world) if codec == AUTO else 0.0

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

    def unpack(self, room: Tensor, like: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, bool]:
        """Return the tensor in ``room``, its frame, and whether the sender marked it.

        Raises:  CodecError: it is damaged, or has not the shape and dtype of ``like``.
        """
        sizes, masked = tuple(like.shape), mask is not None
        expected = FrameSpec(sizes, like.dtype, None, written_by(AUTO), True, masked=masked, frozen=True)
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
                seconds[codec] = cost.num_bytes / self._bytes_per_second + sum(cost[1:])
            self._chosen[flow] = min(seconds, key=seconds.__getitem__)
        return self._chosen[flow]


def expect(
    packing: Packing, likes: Sequence[Tensor], group: dist.ProcessGroup | None
) -> Callable[[Tensor], list[Tensor]]:
    """Begin to receive a frame from every other rank of ``group``.

    A sender waits until it is expected, and is told so on the way that frames take. So expect all that will
    come before any is sent. After an error frames may still be on their way: the group is of no more use.

    Args:
        likes: tensors of the shape and dtype that each rank sends.

    Returns:
        A function that waits for all of them. It takes this rank's own tensor, and returns all by rank.
    """
    rank, rooms = dist.get_rank(group), {}
    for peer, like in enumerate(likes):
        if peer != rank:
            room = packing.room(like)
            rooms[peer] = room, dist.irecv(room, group=group, group_src=peer)

    def arrived(own: Tensor) -> list[Tensor]:
        for _, work in rooms.values():
            work.wait()
        return [own if k == rank else packing.unpack(rooms[k][0], like)[0] for k, like in enumerate(likes)]

    return arrived


def send(
    packing: Packing, parts: Sequence[Tensor], group: dist.ProcessGroup | None, *, flow: Hashable
) -> Callable[[], None]:
    """Begin to send ``parts[k]`` to rank k of ``group`` as a frame; return a function that waits for the end.

    Args:
        parts: one tensor for each rank; one that stands several times is packed once.
    """
    rank, frames, works = dist.get_rank(group), dict[int, Tensor](), []
    for peer, part in enumerate(parts):
        if peer == rank:
            continue
        if id(part) not in frames:
            frames[id(part)] = packing.pack(part, flow)
        packing.count(part, frames[id(part)])
        works.append(dist.isend(frames[id(part)], group=group, group_dst=peer))

    def sent() -> None:
        for work in works:
            work.wait()
        frames.clear()  # which live until then

    return sent


def slices_of(parts: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Return flat parts in slices of about ``SLICE_BYTES``: one tuple a slice, with that slice of each part.

    One slice is packed while another travels."""
    number = max(1, -(-max(part.nbytes for part in parts) // SLICE_BYTES))
    return list(zip(*(part.tensor_split(number) for part in parts), strict=True))


def _joined(group: dist.ProcessGroup | None, deadline: float) -> World:
    """Wait for all ranks of a group, by ``deadline`` seconds where it is somebody's own; return them."""
    try:
        world = World(group or dist.group.WORLD, deadline=deadline)
        world.all_gather([0.0], at="packing transfers")
    except RuntimeError as error:  # of a group that torch cannot make
        reason = str(error).splitlines()[0]
        raise TransportError(
            f"all ranks of a group make this call at the same place, found some missing after {deadline:g} s "
            f"({reason}); call it on each"
        ) from error
    return world


def _slowest_link(world: World) -> float:
    """Return the bytes per second of this rank's slower link to its neighbours; collective."""
    size = world.size
    ring = sorted({(rank, (rank + step) % size) for rank in range(size) for step in (1, -1)} - {(0, 0)})
    rates = measured_rates(world, ring, deadline=world.deadline)
    return min((rate for (source, _), rate in rates.items() if source == world.rank), default=math.inf)
