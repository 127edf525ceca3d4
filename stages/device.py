"""The device of a rank: the one place that names a kind of device and asks torch what goes with it.

Everything else takes a ``torch.device``, or asks here. A rank computes on the CPU."""

from __future__ import annotations

import torch
from torch.amp import GradScaler

from ..compression.names import HOST

CPU = torch.device(HOST)
KINDS = (HOST, "cuda")
"""The kinds of device whose tensors we pack."""


def is_gpu(device: torch.device) -> bool:
    """Whether work on ``device`` is queued, and its memory is not the host's."""
    return device.type == "cuda"


def autocast(
    dtype: torch.dtype, *, enabled: bool = True, cache: bool = False, device: torch.device = CPU
) -> torch.autocast:
    """Casts to ``dtype`` as torch.autocast does on ``device``; ``cache``: of cast weights, which depends on
    what shares a stage."""
    return torch.autocast(device.type, dtype, enabled=enabled, cache_enabled=cache)


def autocast_state(device: torch.device = CPU) -> tuple[bool, torch.dtype]:
    """Whether autocast is on here and now, and to which dtype it casts."""
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)


def grad_scaler(device: torch.device = CPU) -> GradScaler:
    """A dynamic loss scale for gradients on ``device``."""
    return GradScaler(device.type)
