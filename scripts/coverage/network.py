"""A public network to try: how to make it small, and a batch for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

Batch = Mapping[str, torch.Tensor]
Inputs = tuple[torch.Tensor, ...] | dict[str, torch.Tensor]
SECOND = 32  # more pixels a side of the pictures of a second size
MASKS = {
    "input_ids": "attention_mask",
    "input_values": "attention_mask",
    "decoder_input_ids": "decoder_attention_mask",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """``make()`` builds it, with random weights; ``batch(n)`` is n samples by name, one that is called x by
    position, ``batch(n, second=True)`` those of another length or size; ``skip`` says why it is not tried
    here."""

    name: str
    library: str
    make: Callable[[], nn.Module]
    batch: Callable[..., Batch]
    skip: str = ""

    @property
    def full_name(self) -> str:
        """Library and name: what rows are known by."""
        return f"{self.library}/{self.name}"


def given(batch: Batch) -> Inputs:
    """Arguments of a model: copies, by name, or by position where the one input is called x."""
    copies = {name: x.clone() for name, x in batch.items()}
    return tuple(copies.values()) if tuple(batch) == ("x",) else copies


def normal(seed: int, *shape: int) -> torch.Tensor:
    """Normal numbers, the same for one seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int, *shape: int, most: int = 97) -> torch.Tensor:
    """Tokens from 3 up to ``most``, so that none is a padding."""
    return torch.randint(3, most, shape, generator=torch.Generator().manual_seed(seed))


def masked(batch: Batch, *, padded: bool) -> Batch:
    """A batch with the masks of its sequences; ``padded``: all but every fourth end early, by more and more,
    and no label counts behind the end."""
    result = dict(batch)
    for name, x in batch.items():
        if x.dim() == 2:
            length = x.shape[1]
            ends = length - padded * (torch.arange(len(x)) % 4) * (length // 5)
            inside = torch.arange(length) < ends[:, None]
            result[name] = x.where(inside, -100 if name == "labels" else 0)
            result |= {MASKS[name]: inside.long()} if name in MASKS else {}
    return result


def table() -> dict[str, Any]:
    """Networks that ``networks.yaml`` lists."""
    return yaml.safe_load(Path(__file__).with_name("networks.yaml").read_text())
