"""One recorded run of a traced model: which values there are, who reads them, and where it must not be cut.

Names in a graph hide what decides the bits: one object under two names, two tensors in one storage, a layer
that writes in place or draws random numbers. A run on a copy of the model shows all of it, and the stages
hold every micro-batch against this record. A run on the meta device gives shapes and identities of another
micro-batch size for free."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from ...compression.errors import PlanError
from ...compression.geometry import geometry
from ..seeds import drew, generators_of, states_of
from .layers import Layer, Parts, Traced, run_layer
from .probe_record import Outputs, ProbeRecorder, buffers_at, local_at
from .proof import zeros_that_stop
from .reached import Hung, edges_of, keeping, keeps_itself, leads, reached, runs_own_code, statistics_of
from .unseen import Contents

NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One tensor or Python number of a run: made by layer ``producer`` (-1: an input), read by the layers
    ``users`` (the model's output reads last: it counts as one more layer).

    ``strides`` are those of a real run, None where they are not known: the meta device lays some results out
    otherwise, and a copy of a parameter drops its gaps. ``refused`` says why it must not cross a cut, "" if
    it may. ``number``: the type that a number had, which may be another later; ``dtype`` has room for any.
    ``parameter``: a (tied) parameter, sent once a step. ``writers``: the layers that wrote to its memory,
    ascending, each with whether it left zeros that stop every gradient (``proof.py``). ``reached``: the last
    layer through which a gradient surely comes back to it (``reached.py``), -1 if none does."""

    name: str
    producer: int
    users: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: torch.dtype
    number: type | None
    requires_grad: bool
    parameter: bool
    refused: str
    writers: tuple[tuple[int, bool], ...]
    reached: int

    def stops(self, layer: int) -> bool:
        """Whether a zero of this value, as it is after ``layer``, makes its gradient irrelevant."""
        return next((stops for writer, stops in reversed(self.writers) if writer <= layer), False)

    @property
    def num_bytes(self) -> int:
        """Size of the elements in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The record: values by number, outputs of every node, random layers, refused cuts with reasons.

    ``seeded``: the random layers, and those that run code of a person's, which may begin to draw.
    ``keeping``: those whose backward runs such code, which may read a parameter that nobody saved."""

    values: tuple[Value, ...]
    outputs: dict[fx.Node, Outputs]
    random: frozenset[str]
    seeded: frozenset[str]
    keeping: frozenset[str]
    refused: dict[int, str]
    samples: int

    def crossing(self, cut: int) -> list[int]:
        """Numbers of the values that are alive between layer ``cut`` and the next."""
        return [i for i, v in enumerate(self.values) if v.producer <= cut < max(v.users, default=-1)]


def probe(traced: Traced, parts: Parts, inputs: Sequence[torch.Tensor]) -> Probe:
    """Run ``traced`` once on ``inputs`` (both are written to: pass copies) and record what happens."""
    recorder, samples = ProbeRecorder(generators_of(inputs)), traced.call.samples_of(inputs)
    env: dict[fx.Node, Any] = dict(zip(traced.inputs, inputs, strict=True))
    for node, tensor in env.items():
        recorder.add(node, -1, tensor)
    for index, layer in enumerate(traced.layers):
        _record_layer(recorder, layer, index, env, parts, samples)
        _refuse_written_constants(recorder, layer, traced, parts)
    end = len(traced.layers)
    for number in recorder.reads(traced.output):
        recorder.users[number].add(end)
    for name, buffer in local_at(traced.output, parts).items():
        recorder.accesses.setdefault(buffer.untyped_storage()._cdata, (name, set()))[1].add(end)
    _refuse_uncounted(recorder)
    stops = zeros_that_stop(traced, parts, recorder.outputs, recorder.last_writer, recorder.watched())
    asked = {i for i in recorder.reads(traced.output) if getattr(recorder.objects[i], "requires_grad", False)}
    last = reached(recorder.leads, asked, len(traced.layers))
    values = tuple(_value(recorder, i, stops, last.get(i, -1)) for i in range(len(recorder.objects)))
    record = Probe(
        values=values,
        outputs=recorder.outputs,
        random=frozenset(recorder.random),
        seeded=frozenset(recorder.random | recorder.own),
        keeping=frozenset(recorder.keeping),
        refused={},
        samples=samples,
    )
    for cut, alive in enumerate(_alive(values, len(traced.layers) - 1)):
        if reason := _refusal(recorder, record, cut, alive):
            record.refused[cut] = reason
    return record


def _record_layer(
    recorder: ProbeRecorder, layer: Layer, index: int, env: dict[fx.Node, Any], parts: Parts, samples: int
) -> None:
    read = list(recorder.reads(layer.node, [source for _, source in layer.lifted]))
    tensors = [t for i in read if isinstance(t := recorder.objects[i], torch.Tensor)]
    buffers = buffers_at(layer, parts)
    recorder.hold(buffers.values())
    at_hand = recorder.beside([*tensors, *buffers.values()])
    versions, contents = [t._version for t in at_hand], Contents(at_hand)
    asked = [(t.requires_grad, t._version) for t in tensors]
    recorder.kept += contents.storages
    states, before = states_of(recorder.generators), edges_of((i, recorder.objects[i]) for i in read)
    try:
        with Hung() as hung, keeping() as kept:
            env[layer.node] = run_layer(layer, env, parts, samples=samples)
    except Exception as error:
        size = next((tuple(t.shape) for t in tensors), ())
        raise PlanError(f"layer {layer.name} does not take an input of shape {size}: {error}") from error
    if drew(recorder.generators, states):
        recorder.random.add(layer.name)
    if runs_own_code(layer, parts):
        recorder.own.add(layer.name)
    changed = [t for t, before in zip(at_hand, versions, strict=True) if t._version != before]
    # batch_norm writes its statistics without giving them a new version, others through .data or NumPy
    other, counted = contents.changed(), {id(t) for t in changed}
    unseen = [t for t in at_hand if id(t) not in counted and t.untyped_storage()._cdata in other]
    recorder.uncounted |= {t.untyped_storage()._cdata: layer.name for t in unseen}
    recorder.keepers |= dict.fromkeys(kept - statistics_of(layer, parts), layer.name)
    recorder.unseen |= {recorder.numbers[id(t)]: index for t in unseen if id(t) in recorder.numbers}
    changed += unseen
    recorder.turned |= {
        recorder.numbers[id(t)]: index
        for t, (did, version) in zip(tensors, asked, strict=True)
        if t.requires_grad != did and t._version == version
    }
    for storage in {t.untyped_storage()._cdata for t in changed}:
        recorder.writes.setdefault(storage, []).append(index)
    recorder.written |= {id(t) for t in changed}
    for name, buffer in buffers.items():
        recorder.accesses.setdefault(buffer.untyped_storage()._cdata, (name, set()))[1].add(index)
    for tensor in (t for t in tensors if t.layout == torch.strided):  # a layer may have returned a buffer
        if (known := recorder.accesses.get(tensor.untyped_storage()._cdata)) is not None:
            known[1].add(index)
    for number in read:
        recorder.users[number].add(index)
    recorder.add(layer.node, index, env[layer.node])
    after = edges_of((i, recorder.objects[i]) for i in recorder.outputs[layer.node].values)
    recorder.leads[index] = leads(layer, parts, made=after, read=before)
    if hung.any or keeps_itself(layer, parts, made=after, read=before):
        recorder.keeping.add(layer.name)


def _refuse_uncounted(recorder: ProbeRecorder) -> None:
    """Refuse a buffer that a backward would read as forwards of later micro-batches have written it; where
    torch counts the writes, it does so by itself."""
    for memory, (name, _) in recorder.accesses.items():
        if memory in recorder.uncounted and memory in recorder.keepers:
            raise PlanError(
                f"layer {recorder.uncounted[memory]} writes to {name} past what torch counts (.data, NumPy), "
                f"and {recorder.keepers[memory]} keeps it for its backward; read a clone of it, or read it "
                "under torch.no_grad()"
            )


def _refuse_written_constants(recorder: ProbeRecorder, layer: Layer, traced: Traced, parts: Parts) -> None:
    """A tensor made in forward was made once, while tracing: what a layer writes to it would stay for
    ever."""
    for name, tensor in local_at(layer.node, parts).items():
        if id(tensor) in recorder.written and name in traced.constants:
            raise PlanError(
                f"layer {layer.name} writes to {name}, a tensor that was made once, while tracing; make "
                "it in a module or function that is named in leaves=, or register it as a buffer"
            )


def _value(recorder: ProbeRecorder, number: int, stops: Collection[tuple[int, int]], last: int) -> Value:
    leaf = recorder.objects[number]
    tensor = leaf if isinstance(leaf, torch.Tensor) else None
    refused, strides = "", ()
    if tensor is not None and (tensor.is_meta or isinstance(tensor, nn.Parameter)):
        strides = None
    elif tensor is not None and tensor.layout == torch.strided:
        strides = tuple(tensor.stride())
    if tensor is None and type(leaf) not in NUMBERS:
        refused = f"a Python value of type {type(leaf).__name__} ({recorder.names[number]}) would cross it"
    elif type(leaf) is int and leaf.bit_length() > 63:
        refused = f"an int of more than 64 bits ({recorder.names[number]}) would cross it"
    elif tensor is not None and not travels(tensor):
        refused = (
            f"the tensor {recorder.names[number]}, whose elements overlap or lie far apart, would cross it"
        )
    return Value(
        name=recorder.names[number],
        producer=recorder.producers[number],
        users=tuple(sorted(recorder.users[number])),
        shape=() if tensor is None else tuple(tensor.shape),
        strides=strides,
        dtype=torch.float64 if tensor is None else tensor.dtype,  # room for a number of any type
        number=type(leaf) if tensor is None else None,
        requires_grad=tensor is not None and tensor.requires_grad,
        parameter=isinstance(tensor, nn.Parameter),
        refused=refused,
        writers=tuple((writer, (writer, number) in stops) for writer in recorder.writers(number)),
        reached=last,
    )


def travels(tensor: torch.Tensor) -> bool:
    """Whether a frame keeps the tensor's geometry exactly: another one picks other kernels and other bits."""
    dense = tensor.layout == torch.strided
    return dense and geometry(tuple(tensor.shape), tensor.stride(), tensor.itemsize).travels


def _alive(values: Sequence[Value], cuts: int) -> Iterator[list[int]]:
    """What ``crossing`` gives for one cut after the other, in one pass."""
    begin: dict[int, list[int]] = {}
    for number, value in enumerate(values):
        begin.setdefault(max(value.producer, 0), []).append(number)
    alive: list[int] = []
    for cut in range(cuts):
        alive = sorted(i for i in (*alive, *begin.get(cut, ())) if cut < max(values[i].users, default=-1))
        yield alive


def _refusal(recorder: ProbeRecorder, record: Probe, cut: int, alive: Sequence[int]) -> str:
    """Why the model must not be cut behind layer ``cut``, where ``alive`` cross; "" if it may."""
    for number in alive:
        if record.values[number].refused:
            return record.values[number].refused
    for number, writer in recorder.unseen.items():
        name, producer = record.values[number].name, record.values[number].producer
        if producer <= cut < writer:
            return (
                f"a layer behind it writes to the memory of {name}, which one before it may have saved, "
                "where autograd counts no write (through .data or NumPy)"
            )
    for number in alive:
        if cut < recorder.turned.get(number, -1):
            name = record.values[number].name
            return f"a layer behind it lets {name} ask for a gradient, or no more (requires_grad_)"
    seen: dict[int, int] = {}
    for number, storage in recorder.storages(alive).items():
        first = seen.setdefault(storage, number)
        if first != number and storage in recorder.writes:
            names = f"{record.values[first].name} and {record.values[number].name}"
            return f"{names} share one memory that a layer writes to, and both would cross it"
    for key, (name, layers) in recorder.accesses.items():
        if key in recorder.writes and min(layers) <= cut < max(layers):
            return f"the layers that use the buffer {name}, and write to it, would stand on both sides"
    return ""
