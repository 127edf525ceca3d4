"""A batch that comes in its micro-batches, of which a process may have some alone."""

from typing import Any, NamedTuple

import torch

Column = torch.Tensor | tuple[torch.Tensor, ...]
"""An input of a batch: whole, or of each micro-batch."""


class Split(NamedTuple):
    """The inputs of a batch by micro-batch, each as a whole batch would be; targets are cut alike.

    Those that this process does not read (``Pipeline.reads``) may be on the meta device."""

    micro_batches: tuple[Any, ...]
