"""One step as a value: what all parts of the runtime are told, so that none of them keeps it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ..schedules.instruction import Instruction
from ..schedules.messages import StepMessages
from .batches import MicroBatch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """This process's ``program`` with the messages of all ranks, and the micro-batches by number.

    ``number``: which step of the training it is. ``training``: else it is an evaluation. ``keeps_outputs``:
    whether what the model returns is asked for. ``observed``: the micro-batch whose tensors the policy of
    codecs looks at, or None."""

    number: int
    messages: StepMessages
    program: Sequence[Instruction]
    micro_batches: Mapping[int, MicroBatch]
    training: bool = True
    keeps_outputs: bool = False
    observed: int | None = None
