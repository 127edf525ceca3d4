"""One stage of a plan: its layers, what was decided for it, and what it is predicted to take."""

from __future__ import annotations

import dataclasses

from ...compression.errors import CodecError, PlanError
from ...compression.names import GPU, HOST, check_name, is_device
from .dealing import check_shares


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanStage:
    """One stage: its layers and parameters (names), its decisions, and its predictions per micro-batch.

    ``num_parameters`` counts elements, ``memory_bytes`` is for all micro-batches in flight, of which each
    leaves ``saved_bytes`` for its backward, of which ``near_bytes`` are the most that layers near each other
    save (None: all of them), ``bytes_forward`` and ``bytes_backward`` are those of the tensors
    that pass the cut behind the stage, unpacked.

    ``ranks``: who runs it: one rank, or replicas that take its micro-batches in turn; ``shares``: by what
    weight each of these takes some (0: none), empty where all take as many; ``device``: what computes, cpu,
    cuda (the GPU of its rank) or cuda:1, None for what its rank computes on; ``tier``: where saved tensors
    wait for their backward (``TIERS``); ``weights_tier``: where a version of its weights waits that no
    instruction reads right now; ``parameters_tier``: where its parameters are, with their gradients and what
    the optimizer keeps, while no layer reads them, but for ``staying_bytes`` of them, which stay with the
    device; ``recompute``: whether a backward runs its forward again.
    ``codecs``: by name of a value that the stage makes and sends, the codec that it travels in, or under
    "auto" begins with; ``gradient_codecs``: the same for the gradients that it sends up, by name of their
    values. What has no codec here has that of the plan.
    Raises:  PlanError: a decision that nothing can run.
    """

    layers: tuple[str, ...]
    parameters: tuple[str, ...]
    num_parameters: int
    forward_seconds: float
    backward_seconds: float
    memory_bytes: int
    bytes_forward: int
    bytes_backward: int
    ranks: tuple[int, ...]
    saved_bytes: int = 0
    near_bytes: int | None = None
    device: str | None = None
    tier: str = "device"
    weights_tier: str = "device"
    parameters_tier: str = "device"
    staying_bytes: int = 0
    recompute: bool = False
    shares: tuple[int, ...] = ()
    codecs: dict[str, str] = dataclasses.field(default_factory=dict, hash=False)
    gradient_codecs: dict[str, str] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        here = f"for the stage of {', '.join(self.layers[:1])}"
        if not self.ranks or len(set(self.ranks)) != len(self.ranks):
            found = f"found ranks {list(self.ranks)} {here}"
            raise PlanError(f"a stage runs on one rank, or on replicas that are each another, {found}")
        if self.shares:
            check_shares(self.shares, replicas=len(self.ranks), of=here)
        if self.device is not None and not is_device(self.device):
            raise PlanError(
                f"a stage computes on device {HOST}, {GPU} or {GPU}:N, found {self.device!r} {here}; "
                "write one of these, or leave it out"
            )
        if self.recompute and self.tier != "device":
            raise PlanError(
                f"a stage whose forward runs again has nothing for a tier to keep, found recompute=true and "
                f"tier {self.tier} {here}; take one of them"
            )
        for name, codec in (*self.codecs.items(), *self.gradient_codecs.items()):
            try:
                check_name(codec, auto=False)
            except CodecError as error:
                raise PlanError(f"{here}, {name}: {error}") from error
