"""The policies of the weights that ``penstock bench convergence`` compares, by name."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Which weights a micro-batch sees; ``label`` says it in the picture."""

    label: str
    schedule: str = "async_1f1b"
    weights: str = "latest"
    prediction: bool = False

    @property
    def each(self) -> bool:
        """Whether every micro-batch is an update of its own."""
        return self.schedule == "async_1f1b"


POLICIES = {
    "synchronous": Policy(label="synchronous 1f1b", schedule="1f1b"),
    "double_buffered": Policy(label="double buffered", schedule="1f1b", weights="double_buffered"),
    "stashed": Policy(label="async, stashed", weights="stashed"),
    "latest": Policy(label="async, no stashing"),
    "prediction": Policy(label="async, no stashing, prediction", prediction=True),
}
