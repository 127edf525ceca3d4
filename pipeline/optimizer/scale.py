"""Loss scales: small gradients of float16 survive when the loss is large, and an overflow skips the update.

The plain loop's GradScaler knows one optimizer; here every stage has one, and ranks that found nothing must
skip with those that did. So its kernels and its numbers are used, and the verdict is everybody's.
Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.amp import GradScaler

from ...stages.torch_private import unscale, update_scale

Scaler = GradScaler | float | None


class Scale:
    """Factor of the loss and divisor of its gradients: a number that stays, or the scale of a GradScaler,
    which is read before a batch and moved after an update. With ``checks`` an overflow skips the update.

    With double-buffered weights a batch begins before the one ahead of it updates: its scale, like its
    weights, is that after ``batch - 1`` updates, from its first micro-batch to its own update."""

    def __init__(self, scaler: Scaler) -> None:
        self.scaler = scaler if isinstance(scaler, GradScaler) and scaler.is_enabled() else None
        self.number = None if isinstance(scaler, GradScaler) else scaler
        self.checks = self.scaler is not None or self.number is not None
        self.begin()

    def begin(self) -> None:
        """Nothing is in flight: count batches and updates from 0."""
        self.num_updates = 0
        scale = self.scaler.get_scale() if self.scaler is not None else self.number or 1.0
        self.after = {0: torch.tensor(float(scale))}

    def apply(self, weighted_loss: torch.Tensor, batch: int = 0) -> torch.Tensor:
        """Return the first gradient of the backward of a micro-batch of ``batch``, in float32 at least."""
        return weighted_loss * self._of_batch(batch) if self.checks else weighted_loss

    def unscale(self, gradients: Iterable[torch.Tensor]) -> bool:
        """Divide the gradients of the next update in place; whether one of them is infinite or no number."""
        return self.checks and _unscale(gradients, self._of_batch(self.num_updates))

    def _of_batch(self, batch: int) -> torch.Tensor:
        return self.after[max(0, batch - 1) if self.scaler is not None else 0]

    def update(self, *, overflow: bool) -> None:
        """Move the scale after an update (with ``overflow``: in its place), on every rank alike."""
        if self.scaler is None:
            return
        state = self.scaler.state_dict()
        scale = torch.tensor(state["scale"])
        tracker = torch.tensor(state["_growth_tracker"], dtype=torch.int32)
        update_scale(
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

    def state(self) -> dict[str, Any] | None:
        """Return the numbers of the GradScaler under its own names; None: there is none."""
        return None if self.scaler is None else self.scaler.state_dict()

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Load what ``state`` returned into the GradScaler that was given."""
        if self.scaler is not None:
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
        unscale(
            alike,
            found.setdefault(device, torch.zeros((), dtype=torch.float32, device=device)),
            torch.full((), inverse, dtype=torch.float32, device=device),
        )
    return any([bool(each) for each in found.values()])
