"""Which of a stage's values may ask for a gradient: those that did when they were traced.

No message brings a gradient back for another one."""

from __future__ import annotations

from typing import NoReturn

from torch import nn

from ...compression.errors import StageError
from ..tracing.layers import Parts
from ..tracing.probe import Value


class Frozen:
    """Remembers which parameters of ``parts`` were frozen, to name them if they are no longer."""

    def __init__(self, parts: Parts) -> None:
        named = [(name, t) for name, t in parts.tensors.items() if isinstance(t, nn.Parameter)]
        for path, module in parts.modules.items():
            named += module.named_parameters(prefix=path)
        self.frozen = {name: parameter for name, parameter in named if not parameter.requires_grad}

    def refuse(self, value: Value) -> NoReturn:
        """Refuse to send a value that asks for a gradient, and did not when traced."""
        unfrozen = [name for name, parameter in self.frozen.items() if parameter.requires_grad]
        why = "it must detach always, or never, or not be cut behind"
        if unfrozen:
            why = f"{', '.join(unfrozen)} unfrozen; make the Pipeline anew and load its state_dict()"
        raise StageError(
            f"layer {value.name} returned a tensor that requires a gradient, and when it was traced it "
            f"did not: {why}"
        )
