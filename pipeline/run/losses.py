"""The losses that ``loss=`` names: functions of (outputs, targets) that return a 0-dim tensor."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ...compression.errors import ConfigError

OF_MODEL = f"{__name__}.of_model"
CROSS_ENTROPY = f"{__name__}.cross_entropy"


def cross_entropy(outputs: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross entropy of classes (batch, classes) or of characters (batch, length, classes)."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), label_smoothing=label_smoothing)


def of_model(outputs: Any, targets: Any) -> Tensor:
    """Return the loss that a model returned: ``loss`` of a dict or object, the first of a tuple, or all."""
    if isinstance(outputs, Mapping):
        found = outputs.get("loss")
    elif isinstance(outputs, tuple | list):
        found = next(iter(outputs), None)
    else:
        found = getattr(outputs, "loss", outputs)
    if isinstance(found, Tensor) and not found.dim():
        return found
    kind = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
    raise ConfigError(
        f"loss=model takes the mean loss, a number, from what the model returns, found {kind}; have the "
        "model return it alone, first of a tuple or as `loss`, or name another loss"
    )
