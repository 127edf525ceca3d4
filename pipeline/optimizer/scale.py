"""Loss scales: small gradients of float16 survive when the loss is large, and an overflow skips the update.

The plain loop's GradScaler knows one optimizer; here every stage has one, and ranks that found nothing must
skip with those that did. So its kernels and its numbers are used, and the verdict is everybody's.
Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.amp import GradScaler

Scaler = GradScaler | float | None


def scale_of(scaler: Scaler) -> Scale:
    """The scale that a person asked for; a GradScaler that is switched off stands for none."""
    if isinstance(scaler, GradScaler):
        return Dynamic(scaler) if scaler.is_enabled() else Scale()
    return Scale() if scaler is None else Static(scaler)


class Scale:
    """Factor of the loss and divisor of its gradients; this one is 1, and infinite gradients are taken.

    Attributes:
        checks: True if an overflow skips the update."""

    checks = False

    def begin(self) -> None:
        """Nothing is in flight: count batches and updates from 0."""

    def apply(self, weighted_loss: torch.Tensor, batch: int = 0) -> torch.Tensor:
        """Return the first gradient of the backward of a micro-batch of ``batch``, in float32 at least."""
        return weighted_loss

    def unscale(self, gradients: Iterable[torch.Tensor]) -> bool:
        """Divide the gradients of the next update in place; whether one of them is infinite or no number."""
        return False

    def update(self, *, overflow: bool) -> None:
        """After an update (with ``overflow``: in its place), on every rank alike."""

    def state(self) -> dict[str, Any] | None:
        """Return the trained state of the scale; None: it has none."""
        return None

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Take over what ``state`` returned."""


class Static(Scale):
    """One number for the whole training."""

    checks = True

    def __init__(self, scale: float) -> None:
        self.scale = torch.tensor(float(scale))

    def apply(self, weighted_loss: torch.Tensor, batch: int = 0) -> torch.Tensor:
        """Multiply by the scale."""
        return weighted_loss * self.scale

    def unscale(self, gradients: Iterable[torch.Tensor]) -> bool:
        """Divide by the scale."""
        return _unscale(gradients, self.scale)


class Dynamic(Scale):
    """The scale of ``scaler``, which stays the one that knows it: read before a batch, moved after an update.

    With double-buffered weights a batch begins before the one ahead of it updates: its scale, like its
    weights, is that after ``batch - 1`` updates, from its first micro-batch to its own update."""

    checks = True

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        self.begin()

    def begin(self) -> None:
        """Count updates from 0."""
        self.num_updates = 0
        self.after = {0: torch.tensor(self.scaler.get_scale())}

    def apply(self, weighted_loss: torch.Tensor, batch: int = 0) -> torch.Tensor:
        """Multiply by the scale."""
        return weighted_loss * self.after[max(0, batch - 1)]

    def unscale(self, gradients: Iterable[torch.Tensor]) -> bool:
        """Divide by the scale of the oldest batch that has not updated."""
        return _unscale(gradients, self.after[max(0, self.num_updates - 1)])

    def update(self, *, overflow: bool) -> None:
        """Smaller after an overflow, larger after a long time without one."""
        state = self.scaler.state_dict()
        scale = torch.tensor(state["scale"])
        tracker = torch.tensor(state["_growth_tracker"], dtype=torch.int32)
        torch._amp_update_scale_(  # pyright: ignore[reportPrivateImportUsage]
            scale,
            tracker,
            torch.tensor(float(overflow)),
            state["growth_factor"],
            state["backoff_factor"],
            state["growth_interval"],
        )
        self.scaler.load_state_dict(state | {"scale": float(scale), "_growth_tracker": int(tracker)})
        self.num_updates += 1
        self.after[self.num_updates] = scale
        self.after.pop(self.num_updates - 2, None)

    def state(self) -> dict[str, Any]:
        """Return the numbers of the GradScaler under its own names."""
        return self.scaler.state_dict()

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Load it into the GradScaler that was given."""
        self.scaler.load_state_dict(dict(state or {}))
        self.begin()


def _unscale(gradients: Iterable[torch.Tensor], scale: torch.Tensor) -> bool:
    """GradScaler's own kernel, for gradients of one device and dtype at a time, and its reciprocal."""
    inverse = float(scale.double().reciprocal().float())
    found: dict[torch.device, torch.Tensor] = {}
    same: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        same.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, _), alike in same.items():
        torch._amp_foreach_non_finite_check_and_unscale_(  # pyright: ignore[reportPrivateImportUsage]
            alike,
            found.setdefault(device, torch.zeros((), dtype=torch.float32, device=device)),
            torch.full((), inverse, dtype=torch.float32, device=device),
        )
    return any([bool(each) for each in found.values()])
