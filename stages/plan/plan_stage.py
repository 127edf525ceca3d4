"""Stages of a plan, and how micro-batches are dealt to their replicas: by weight and smoothly.

Every replica has credit: each micro-batch adds its share to it, and who has most takes the micro-batch
and pays for all. Any run of micro-batches is spread as the shares say, and equal shares are plain turns.

Source: smooth weighted round robin as nginx deals requests (ngx_http_upstream_round_robin.c, since
1.3.1)."""

import dataclasses
import functools
from collections.abc import Sequence

from ...compression.errors import CodecError, PlanError
from ...compression.names import GPU, HOST, check_name, is_device
from ..record import shortened
from ..units import show_bytes


def place_of(shares: tuple[int, ...], micro_batch: int) -> int:
    """The place of the replica that takes ``micro_batch``; of equals the first."""
    return _places(shares, 1 << micro_batch.bit_length())[micro_batch]


def counts_of(shares: tuple[int, ...], number: int) -> list[int]:
    """Return how many of the first ``number`` micro-batches each replica takes."""
    places = _places(shares, 1 << number.bit_length())[:number]
    return [places.count(place) for place in range(len(shares))]


@functools.lru_cache(maxsize=1024)
def _places(shares: tuple[int, ...], number: int) -> tuple[int, ...]:
    credit, total, found = [0] * len(shares), sum(shares), list[int]()
    for _ in range(number):
        credit = [one + share for one, share in zip(credit, shares, strict=True)]
        place = credit.index(max(credit))
        credit[place] -= total
        found.append(place)
    return tuple(found)


def check_shares(shares: Sequence[object], *, replicas: int, of: str) -> None:
    """Raise PlanError for shares by which nothing can be dealt to so many replicas; ``of``: of what."""
    shown = shortened(list(shares))
    if len(shares) != replicas:
        raise PlanError(
            f"each replica of a stage has a share, found shares {shown} for {replicas} {of}; give as many"
        )
    if wrong := [one for one in shares if type(one) is not int or one < 0]:
        raise PlanError(
            f"the share of a replica is a whole number from 0, found {wrong[0]!r} in shares {shown} {of}; "
            "give 0 to one that shall get nothing"
        )
    if not any(shares):
        raise PlanError(f"some replica of a stage has a share, found shares {shown} {of}; raise one above 0")


def split_shares(shares: Sequence[int], ranks: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The shares of each stage on its ``ranks``, from those of all ranks in their order; () where they are
    alike, or a stage has one rank.

    Raises:  PlanError: there are others than ranks, or a stage cannot be dealt by them."""
    number = len({rank for own in ranks for rank in own})
    if len(shares) != number:
        raise PlanError(
            f"there is a share for each rank, found {len(shares)} shares for {number} ranks; give as many"
        )
    found = ([shares[rank] for rank in own] for own in ranks)
    return tuple(shares_of_stage(some, stage, len(some)) for stage, some in enumerate(found))


def shares_of_stage(shares: Sequence[int], stage: int, replicas: int) -> tuple[int, ...]:
    """The shares of a stage with so many replicas, () where they are alike; PlanError for wrong ones."""
    if shares:
        check_shares(shares, replicas=replicas, of=f"of stage {stage}")
    return tuple(shares) if len(set(shares)) > 1 else ()


def show_sent(raw: int, packed: int | None, *, arrow: str = " -> ") -> str:
    """Write the bytes that pass a cut, and as frames where they are known."""
    if not raw:
        return "-"
    return show_bytes(raw) + ("" if packed is None else f"{arrow}{show_bytes(packed)}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanStage:
    """One stage: its layers and parameters (names), its decisions, and its predictions per micro-batch.

    ``num_parameters`` counts elements, ``memory_bytes`` is for all micro-batches in flight, beside
    ``weight_bytes`` (parameters, gradients, optimizer state, versions; None: nobody counted), of which each
    leaves ``saved_bytes`` for its backward, of which ``near_bytes`` are the most that layers near each other
    save (None: all), ``frame_bytes`` are the most of frames beside that, ``bytes_forward`` and
    ``bytes_backward`` pass the cut behind the stage, unpacked; ``packed_forward`` and ``packed_backward`` as
    frames (None: nobody tried), which take ``packing_forward`` and ``packing_backward`` seconds to pack and
    to unpack.

    ``ranks``: one, or replicas that take its micro-batches in turn; ``shares``: by what weight (0: none),
    empty where all take as many; ``device``: cpu, cuda (the GPU of its rank) or cuda:1, None for that of its
    rank; ``tier``: where saved tensors wait for their backward (``TIERS``); ``weights_tier``: where a version
    of its weights waits that no instruction reads right now; ``parameters_tier``: where its parameters, their
    gradients and optimizer state are while no layer reads them, but for ``staying_bytes`` of them;
    ``prefetches``: parameters come ahead of their layer; else one layer's are there at a time; ``recompute``:
    a backward runs its forward again, or the layers of these parts of the model, one part at a time; of
    ``saved_bytes`` then ``kept_bytes`` stay, and ``near_bytes`` are the most of a part. ``codecs``: by name
    of a value that the stage sends, its codec, or that under "auto" it begins with; ``gradient_codecs``:
    those of gradients that it sends up, by name of their values. What has no codec here has that of the plan.
    ``update_seconds``: of one update of its parameters.
    Raises:  PlanError: a decision that nothing can run."""

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
    frame_bytes: int = 0
    device: str | None = None
    tier: str = "device"
    weights_tier: str = "device"
    parameters_tier: str = "device"
    staying_bytes: int = 0
    prefetches: bool = True
    recompute: tuple[str, ...] | bool = False
    kept_bytes: int = 0
    shares: tuple[int, ...] = ()
    codecs: dict[str, str] = dataclasses.field(default_factory=dict, hash=False)
    gradient_codecs: dict[str, str] = dataclasses.field(default_factory=dict, hash=False)
    update_seconds: float = 0.0
    packed_forward: int | None = None
    packed_backward: int | None = None
    packing_forward: float = 0.0
    packing_backward: float = 0.0
    weight_bytes: int | None = None

    def transfer_seconds(self, way: str, rate: float | None) -> float:
        """Seconds of a micro-batch on the link after the stage.

        Args:   way: "forward" or "backward"; rate: bits per second, None: free."""
        if not rate:
            return 0.0
        packed = getattr(self, f"packed_{way}")
        num_bytes = getattr(self, f"bytes_{way}") if packed is None else packed
        return 8 * num_bytes / rate

    @property
    def held_bytes(self) -> int:
        """Bytes in all, with frames."""
        return self.memory_bytes + self.frame_bytes

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
        if self.recompute and self.recompute is not True and self.parameters_tier != "device":
            raise PlanError(
                f"parameters in a tier come for a whole stage that runs again, found "
                f"recompute={list(self.recompute)} and the tier {self.parameters_tier} {here}; take "
                "recompute=true, or leave parameters on the device"
            )
        for name, codec in (*self.codecs.items(), *self.gradient_codecs.items()):
            try:
                check_name(codec, auto=False)
            except CodecError as error:
                raise PlanError(f"{here}, {name}: {error}") from error
