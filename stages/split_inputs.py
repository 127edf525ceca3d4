"""A batch that comes in its micro-batches, of which a process may have some alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

Column = torch.Tensor | tuple[torch.Tensor, ...]
"""An input of a batch: whole, or of each micro-batch."""


class Split(NamedTuple):
    """The inputs of a batch, cut into its micro-batches as ``torch.tensor_split`` cuts; each is as a whole
    batch would be, on the meta device where this process does not read it (``Pipeline.reads``)."""

    micro_batches: tuple[Any, ...]
