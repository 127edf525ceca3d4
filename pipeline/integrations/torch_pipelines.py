"""Schedules of ``torch.distributed.pipelining`` whose stages send frames: the same bits, fewer bytes.

    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss)
    transfers = penstock.pack_transfers(schedule)        # on every rank, before the first step
    saved = penstock.offload_stage(stage)                # saved tensors, too, are packed until they are read
    schedule.step(x); print(transfers, saved)

A stage's methods that list its sends and receives are replaced, so that sends carry frames and receives have
room for the longest one. Where a stage's output is that of a ReLU, its gradient travels only where the output
was not zero: the frame of the output, which both sides keep until then, has the places.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...compression.errors import CodecError, ScheduleError
from ...compression.names import HOST
from ...stages.memory.offload import Offload, offload
from .exchange import Packing, Transfers

REPLACED = (
    "get_fwd_send_ops",
    "get_bwd_send_ops",
    "_get_recv_ops",
    "_retrieve_recv_activations",
    "_retrieve_recv_grads",
)
GATES = ("ReluBackward0",)
"""Nodes of autograd that read no gradient where their result is zero."""


def pack_transfers(schedule: Any, codec: str = "auto", *, deadline: float = 60.0) -> Transfers:
    """Have the stages of a schedule send and receive frames; every rank of the schedule calls it.

    Args:
        schedule: a schedule of ``torch.distributed.pipelining``, of one or several stages a rank, on CPUs.
        codec: a lossless codec, or ``auto``: each value and gradient takes the one that is fastest over the
            link to the next rank, both as measured.
        deadline: seconds to wait for the other ranks to make this call.

    Returns:
        What is counted from now on.

    Raises:
        ScheduleError: this is no such schedule, it packs already, or a stage is not on a CPU.
        CodecError: no lossless codec has this name. TransportError: a rank did not make this call in time.
    """
    stages: list[Any] = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    if not all(hasattr(stage, name) for stage in stages for name in REPLACED):
        rule = "pack_transfers takes a schedule of torch.distributed.pipelining"
        raise ScheduleError(f"{rule}, found {type(schedule).__name__}; make one, such as Schedule1F1B")
    for stage in stages:
        if "packed_transfers" in vars(stage):
            raise ScheduleError(f"stage {stage.stage_index} packs its transfers already; call it once")
        if stage.device.type != HOST:
            raise ScheduleError(f"stages are on CPUs here, found {stage.device}; leave pack_transfers out")
    packing = Packing(codec, stages[0].group, deadline=deadline)
    for stage in stages:
        stage.packed_transfers = _PackedStage(stage, packing)
    return packing.transfers


def offload_stage(stage: Any, tier: str = "packed", **options: Any) -> Offload:
    """Keep what the forwards of a stage save packed, or elsewhere, until their backwards; the same bits.

    Args:
        stage: a stage of ``torch.distributed.pipelining``, before its first step.
        tier: ``packed``, ``host`` or ``disk``.
        options: as for ``penstock.offload``.

    Returns:
        What is counted from now on.

    Raises:
        ScheduleError: this is no such stage, or it is called a second time.
        ConfigError: no such tier or option value.
    """
    module = getattr(stage, "submod", None)
    if not isinstance(module, torch.nn.Module):
        rule = "offload_stage takes a stage of torch.distributed.pipelining"
        raise ScheduleError(
            f"{rule}, found {type(stage).__name__}; give the stage, not its schedule or module"
        )
    if "offload_stage" in vars(stage):
        raise ScheduleError(f"stage {stage.stage_index} keeps what it saves elsewhere already; call it once")
    saved, forward = offload(tier, keep=module, **options), module.forward

    def kept(*args: Any, **kwargs: Any) -> Any:
        with saved:
            return forward(*args, **kwargs)

    module.forward = kept
    stage.offload_stage = saved
    return saved


class _PackedStage:
    """Methods in the place of a stage's own, which list its sends and receives."""

    def __init__(self, stage: Any, packing: Packing) -> None:
        self.stage, self.packing = stage, packing
        self._plain: dict[str, Callable[..., Any]] = {name: getattr(stage, name) for name in REPLACED}
        self._rooms: dict[int, Tensor] = {}  # by id of torch's receive
        self._masks: dict[Hashable, Tensor] = {}  # frames of ReLUs by (sent or came, micro-batch, place)
        for name in REPLACED:
            setattr(stage, name, getattr(self, name.lstrip("_")))

    def get_fwd_send_ops(self, chunk: int) -> list[dist.P2POp]:
        outputs, goals = self.stage.fwd_cache[chunk][0], self.stage.act_send_info
        places = [(i, len(goals[i])) for i in range(len(outputs)) for goal in goals[i] if goal is not None]
        operations = self._plain["get_fwd_send_ops"](chunk)
        for (place, num_goals), operation in zip(places, operations, strict=True):
            gated = self.stage.has_backward and num_goals == 1 and _is_gated(outputs[place])
            tensor = operation.tensor.detach().requires_grad_(gated)
            frame = self._pack(operation, tensor, (self.stage.stage_index, "value", place))
            self._keep(frame if gated else None, "sent", chunk, place)
        return operations

    def get_bwd_send_ops(self, chunk: int) -> list[dist.P2POp]:
        operations = self._plain["get_bwd_send_ops"](chunk)
        places = [i for i, goal in enumerate(self.stage.grad_send_info or ()) if goal is not None]
        masks = {place: self._masks.pop(("came", chunk, place), None) for place in places}
        for place, operation in zip(places, operations, strict=False):
            mask = masks[place] if len(places) == len(operations) else None
            flow = (self.stage.stage_index, "gradient", place)
            self._pack(operation, operation.tensor.detach(), flow, mask)
        return operations

    def get_recv_ops(self, infos: Sequence[Any], *group: Any) -> list[dist.P2POp]:
        operations = self._plain["_get_recv_ops"](infos, *group)
        real = [info for info in infos if not info.is_root_arg and info.buffer is not None]
        for info, operation in zip(real, operations, strict=True):
            operation.tensor = self._rooms[id(info)] = self.packing.room(info.buffer)
        return operations

    def retrieve_recv_activations(self, chunk: int) -> Any:
        for place, info in enumerate(self.stage.args_recv_info[chunk]):
            if (room := self._rooms.pop(id(info), None)) is not None:
                frame, gated = self._unpack(room, info.buffer, f"input {place} of micro-batch {chunk}")
                self._keep(frame if gated else None, "came", chunk, place)
        return self._plain["_retrieve_recv_activations"](chunk)

    def retrieve_recv_grads(self, chunk: int) -> Any:
        for place, info in zip(self.stage.act_send_info, self.stage.grad_recv_info[chunk], strict=False):
            mask = self._masks.pop(("sent", chunk, place), None)
            if (room := self._rooms.pop(id(info), None)) is not None:
                self._unpack(room, info.buffer, f"gradient {place} of micro-batch {chunk}", mask)
        return self._plain["_retrieve_recv_grads"](chunk)

    def _keep(self, frame: Tensor | None, *key: Hashable) -> None:
        """Keep the frame of a ReLU until its gradient is there; None: forget that of an earlier step."""
        self._masks.pop(key, None)
        if frame is not None:
            self._masks[key] = frame

    def _pack(self, operation: Any, tensor: Tensor, flow: Hashable, mask: Tensor | None = None) -> Tensor:
        frame = self.packing.pack(tensor, flow, mask=mask)
        self.packing.count(tensor, frame)
        operation.tensor = frame
        return frame

    def _unpack(
        self, room: Tensor, buffer: Tensor, what: str, mask: Tensor | None = None
    ) -> tuple[Tensor, bool]:
        """Unpack a frame into torch's buffer; return the frame, and whether it is that of a ReLU."""
        try:
            tensor, frame, gated = self.packing.unpack(room, buffer, mask)
        except CodecError as error:
            raise CodecError(f"stage {self.stage.stage_index}, {what}: {error}") from error
        with torch.no_grad():
            buffer.detach().copy_(tensor)
        return frame, gated


def _is_gated(output: Any) -> bool:
    """True if nobody reads the gradient of ``output`` where it is zero."""
    return (
        isinstance(output, Tensor)
        and output.grad_fn is not None
        and output.grad_fn.name() in GATES
        and not output.retains_grad
        and not output._backward_hooks
    )
