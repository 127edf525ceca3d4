"""Profile: what was measured of a network, as data: a plan is made from it, without the model.

Intermediate data of a step is part of it: every storage that autograd keeps for a backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...compression.errors import PlanError
from ...compression.names import HOST
from ..files import save_json
from ..memory.byte_budget import PREFETCH_LAYERS
from ..plan.memory_model import NEIGHBOURS
from ..record import IN_PROCESS, json_fields, load_json, read, reduced, shortened
from ..tracing.capture.signature import Signature
from .pipedream import read_graph

KINDS = ("feature map", "index", "mask", "statistic", "cast", "other")
FEATURES, INDEX, MASK, STATISTIC, CAST, OTHER = KINDS
"""Kinds of intermediates: a feature map; integers, such as where a pooling found its maximum; a mask, of
bits or of a dropout; numbers of a normalization, fewer than the layer's values; a parameter's copy in the
dtype of autocast; none of these."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Intermediate:
    """One storage that layers save for their backward: ``num_bytes`` of it, and its first tensor's shape.

    ``maker``: the layer that made it, -1 for an input; ``savers``: the layers that saved it, ascending, by
    which it is saved first at the forward of the first, and read last at the backward of the same. ``order``:
    its place among what that layer saved first. ``value``: the value that lies in it, "" for none.
    ``readers``: nodes of the backward that read it. ``zeros``: the share of its elements that are zero."""

    maker: int
    savers: tuple[int, ...]
    order: int
    value: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    readers: int
    zeros: float

    @property
    def layer(self) -> int:
        """The layer that saved it first: its bytes count there."""
        return self.savers[0]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """One layer: seconds per micro-batch, parameters it is the first to use, bytes kept for its backward, and
    what is left of these without their zeros; None where nobody looked. ``trained_bytes``: of the parameters
    that are not frozen, None: all."""

    name: str
    module: str
    forward_seconds: float
    backward_seconds: float
    parameters: tuple[str, ...]
    num_parameters: int
    parameter_bytes: int
    saved_bytes: int
    packed_bytes: int | None = None
    trained_bytes: int | None = None


def sizes_of(layers: Sequence[LayerProfile]) -> dict[str, int]:
    """Bytes of these layers: their parameters, what a micro-batch saves, what of that is left packed, the
    parameters of the layer that has most and of neighbours that do, and the most that near layers save."""
    parameters, saved = [x.parameter_bytes for x in layers], [x.saved_bytes for x in layers]
    packed = [x.saved_bytes if x.packed_bytes is None else x.packed_bytes for x in layers]
    return {
        "parameters": sum(parameters),
        "saved": sum(saved),
        "packed": sum(packed),
        "near": _most(saved, PREFETCH_LAYERS + 1),
        "neighbours": _most([size for size in parameters if size], NEIGHBOURS),
        "largest": max(parameters),
    }


def _most(sizes: Sequence[int], length: int) -> int:
    """The most that so many have together which follow each other."""
    return max((sum(sizes[first : first + length]) for first in range(len(sizes))), default=0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ValueProfile:
    """One value: made by layer ``producer`` (-1: an input of the model), read by the layers ``users``.

    ``contributions``: how many gradients are added up for it, 0 where nobody looked; ``is_parameter``: of the
    model, which passes a cut once a step. ``costs``: by codec the bytes of its frame, the seconds to pack and
    to unpack; ``gradient_costs``: those of its gradient; empty where nobody tried."""

    name: str
    producer: int
    users: tuple[int, ...]
    num_bytes: int
    requires_grad: bool
    zero_fraction: float
    contributions: int = 0
    is_parameter: bool = False
    costs: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict, hash=False)
    gradient_costs: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict, hash=False)

    def times(self, factor: float) -> ValueProfile:
        """Return the same for so many times as many samples."""
        if self.is_parameter:
            return self
        known: Any = {
            name: {codec: tuple(factor * x for x in cost) for codec, cost in getattr(self, name).items()}
            for name in ("costs", "gradient_costs")
        }
        return dataclasses.replace(self, num_bytes=round(factor * self.num_bytes), **known)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measurements that a plan is made from: the layers and values of one micro-batch, and where not to cut.

    ``refused``: for a layer's number, why the model must not be cut behind it. ``signature``: how the model
    is called, None in a profile that does not know: by position. ``leaves``: what was taken as one layer, by
    request or need. ``intermediates``: every storage that layers save, in the order of saving;
    ``backward_reads``: for a layer's number, the parameters and buffers that its backward reads. A profile
    that does not know has neither. ``written``: the buffers that a forward in training writes to.
    ``graph``: the LayerGraph that was measured, in this process only."""

    layers: tuple[LayerProfile, ...]
    values: tuple[ValueProfile, ...]
    refused: dict[int, str]
    fingerprint: str
    input_shapes: tuple[tuple[int, ...], ...]
    input_dtypes: tuple[str, ...]
    num_samples: int
    threads: int
    device: str
    torch: str
    signature: Signature | None = None
    leaves: tuple[str, ...] = ()
    intermediates: tuple[Intermediate, ...] = ()
    backward_reads: dict[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    written: tuple[str, ...] = ()
    graph: Any = dataclasses.field(default=None, compare=False, repr=False, metadata=IN_PROCESS)

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)

    def of_samples(self, samples: int, *, smaller: Profile | None = None) -> Profile:
        """The same for micro-batches of so many samples: seconds and bytes in proportion, but for parameters;
        with a profile of ``smaller`` micro-batches, seconds on the line through both."""
        times = samples / self.num_samples
        others = {layer.name: layer for layer in smaller.layers} if smaller else {}

        def seconds(layer: LayerProfile, name: str) -> float:
            large, other = getattr(layer, name), others.get(layer.name)
            if smaller is None or other is None or smaller.num_samples >= self.num_samples:
                return times * large
            small = getattr(other, name)
            slope = max(0.0, (large - small) / (self.num_samples - smaller.num_samples))
            least = small * min(1.0, samples / smaller.num_samples)  # where a line would go below zero
            return max(least, large + slope * (samples - self.num_samples))

        layers = [
            dataclasses.replace(
                layer,
                forward_seconds=seconds(layer, "forward_seconds"),
                backward_seconds=seconds(layer, "backward_seconds"),
                saved_bytes=round(times * layer.saved_bytes),
                packed_bytes=None if layer.packed_bytes is None else round(times * layer.packed_bytes),
            )
            for layer in self.layers
        ]
        values = [value.times(times) for value in self.values]
        shapes = ((samples, *x[1:]) if x and x[0] == self.num_samples else x for x in self.input_shapes)
        known = {"layers": tuple(layers), "values": tuple(values), "input_shapes": tuple(shapes)}
        kept = (dataclasses.replace(x, num_bytes=round(times * x.num_bytes)) for x in self.intermediates)
        known["intermediates"] = tuple(kept)
        return dataclasses.replace(self, num_samples=samples, graph=None, **known)

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, whole or not at all, else ConfigError; ``Profile.load`` reads it."""
        save_json(path, {"penstock_profile": 1, **json_fields(self)}, indent=1)

    @classmethod
    def from_pipedream(cls, path: str | Path) -> Profile:
        """Read a ``graph.txt`` of PipeDream's profiler; its micro-batch is taken as one sample. PlanError for
        what is none."""
        graph = read_graph(path)
        place = {name: number for number, name in enumerate(graph)}
        layers, values = [], []
        for name, ((forward, backward, size, parameters), users) in graph.items():
            layers.append(
                LayerProfile(
                    name=name,
                    module="",
                    forward_seconds=forward / 1000,
                    backward_seconds=backward / 1000,
                    parameters=(f"{name}.weight",) if parameters else (),
                    num_parameters=round(parameters / 4),
                    parameter_bytes=round(parameters),
                    saved_bytes=round(size),
                )
            )
            values.append(
                ValueProfile(
                    name=name,
                    producer=place[name],
                    users=tuple(place[user] for user in users),
                    num_bytes=round(size),
                    requires_grad=True,
                    zero_fraction=0.0,
                )
            )
        return cls(
            layers=tuple(layers),
            values=tuple(values),
            refused={},
            fingerprint=Path(path).name,
            input_shapes=((1,),),
            input_dtypes=("float32",),
            num_samples=1,
            threads=1,
            device=HOST,
            torch="",
        )

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile; raises PlanError, and nothing else, for a missing, damaged or other file."""
        data = load_json(path, "profile")
        if not isinstance(data, dict) or data.pop("penstock_profile", None) != 1:
            raise PlanError(
                f"a profile is a JSON object with the key penstock_profile, {path} is not; measure again"
            )
        profile = read(cls, data, "profile")
        _check_numbers(profile, "profile")
        return profile


def _check_numbers(value: Any, where: str) -> None:
    """Refuse a number below zero or beyond all sizes, and costs of a codec that are not three."""
    if dataclasses.is_dataclass(value) and not isinstance(value, Signature):
        for field in dataclasses.fields(value):
            _check_numbers(getattr(value, field.name), f"{where}.{field.name}")
    elif isinstance(value, tuple | dict):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if where.endswith("costs") and len(item) != 3:
                raise PlanError(f"{where}[{key}] is bytes and two times, found {[*item]}; measure again")
            _check_numbers(item, f"{where}[{key}]")
    elif isinstance(value, int | float):
        least = -1 if where.endswith((".producer", ".maker")) else 0
        least = 1 if where.endswith((".num_samples", ".threads")) else least
        if not least <= value <= 2**63:
            raise PlanError(f"{where} is a number from {least} on, found {shortened(value)}; measure again")
