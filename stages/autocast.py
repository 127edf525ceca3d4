"""Torch's mixed precision by device: autocast, its state, and the scale of a loss."""

from __future__ import annotations

import torch
from torch.amp import GradScaler

from .device import CPU


def autocast(
    dtype: torch.dtype, *, enabled: bool = True, cache: bool = False, device: torch.device = CPU
) -> torch.autocast:
    """Casts to ``dtype`` as torch.autocast does on ``device``; ``cache``: of cast weights, which depends on
    what shares a stage."""
    return torch.autocast(device.type, dtype, enabled=enabled, cache_enabled=cache)


def autocast_state(device: torch.device = CPU) -> tuple[bool, torch.dtype]:
    """Return whether autocast is on now, and to which dtype it casts."""
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)


def grad_scaler(device: torch.device = CPU) -> GradScaler:
    """A dynamic loss scale for gradients on ``device``."""
    return GradScaler(device.type)
