"""One recorded run of a traced model: which values there are, who reads them, and where it must not be cut.

Names in a graph hide what decides the bits: one object under two names, two tensors in one storage, a layer
that writes in place or draws random numbers. A run on a copy of the model shows all of it, and the stages
hold every micro-batch against it. On the meta device it gives other micro-batch sizes for free.

Behind a ReLU no gradient passes where the output is zero, so it needs to travel only where the output is not
(mask reuse): the upstream ReLU makes zeros of the rest, whatever stands there, NaN included. Only a ReLU, a
ReLU6 or a max-pool over one proves that, and no dropout (a kept element may be zero with a live gradient, a
dropped one gets -0.0). A gradient surely comes back through torch's own layers only: a person's function may
take another way in every run, and his backward may return None."""

import dataclasses
import itertools
import operator
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

from ...compression.errors import PlanError
from ...compression.geometry import geometry
from ..meta_watch import Contents
from ..seeds import drew, generators_of, states_of
from ..torch_private import (
    HOOKS,
    BatchOrInstanceNorm,
    TensorBase,
    TreeSpec,
    has_gradient_hooks,
    hooks_on_all_modules,
    memory_id,
    saved_tensors_hooks,
    tree_flatten,
    version_of,
)
from .layers import Layer, Parts, Traced, is_local, run_layer, tensors_read
from .object_snapshot import is_foreign


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Result of a layer: the values of its leaves, the structure around them, and the value that it is by
    itself (``alone``), None where there is a structure."""

    values: tuple[int, ...]
    spec: TreeSpec
    alone: int | None


GradientPaths = Mapping[int, Collection[int]]  # from values that a layer made to those that it read


class ProbeRecorder:
    """Gathers values by object identity; keeps every object, so that no identity is used twice."""

    def __init__(self, generators: Sequence[torch.Generator] = ()) -> None:
        self.generators = generators
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.names: list[str] = []
        self.producers: list[int] = []
        self.users: list[set[int]] = []
        self.outputs: dict[fx.Node, Outputs] = {}
        self.random: set[str] = set()
        self.own: set[str] = set()  # layers that run code of a person's
        self.keeping: set[str] = set()  # those whose backward runs such code
        self.accesses: dict[int, tuple[str, set[int]]] = {}
        self.written: set[int] = set()
        self.writes: dict[int, list[int]] = {}
        self.freed: set[int] = set()  # memory
        self.gradient_paths: dict[int, GradientPaths] = {}
        self.untracked_memory: dict[int, str] = {}  # by memory, a layer that wrote to it so
        self.keepers: dict[int, str] = {}  # by memory, a layer that keeps it for its backward
        self.untracked_values: dict[int, int] = {}  # by value, the last layer that wrote to it uncounted
        self.turned: dict[int, int] = {}  # by value, the last layer that made it ask for a gradient, or not
        self.on: dict[int, list[torch.Tensor]] = {}
        self.kept: list[torch.UntypedStorage] = []  # else one that is exchanged gives its number to another

    def add(self, node: fx.Node, index: int, result: Any) -> None:
        """Note what the layer ``index``, which is ``node``, returned: a known object is a known value."""
        leaves, spec = tree_flatten(result)
        values = []
        for k, leaf in enumerate(leaves):
            number = self.numbers.get(id(leaf), len(self.objects))
            if number == len(self.objects):
                self.objects.append(leaf)
                self.names.append(node.name if len(leaves) == 1 else f"{node.name}.{k}")
                self.producers.append(index)
                self.users.append(set())
                if isinstance(leaf, torch.Tensor):
                    self.numbers[id(leaf)] = number
                    if leaf.layout is torch.strided:
                        self.on.setdefault(memory_id(leaf), []).append(leaf)
            values.append(number)
        alone = values[0] if spec.is_leaf() else None
        self.outputs[node] = Outputs(values=tuple(values), spec=spec, alone=alone)

    def reads(self, node: fx.Node, extra: Sequence[fx.Node] = ()) -> Iterator[int]:
        """The values that ``node`` reads: of a tuple that is indexed, only what is picked."""
        for source in itertools.filterfalse(is_local, (*node.all_input_nodes, *extra)):
            outputs = self.outputs[source]
            picks = node.args[1] if node.target is operator.getitem and source is node.args[0] else None
            flat = outputs.spec.num_children == outputs.spec.num_leaves > 0
            if isinstance(picks, int) and flat:
                yield outputs.values[picks]
            else:
                yield from outputs.values

    def writers(self, number: int) -> list[int]:
        """The layers that wrote to the memory of a value, ascending, its producer first."""
        item = self.objects[number]
        writes = self.writes.get(memory_id(item), []) if isinstance(item, torch.Tensor) else []
        return sorted({self.producers[number], *writes})


RELU_MODULES = (nn.ReLU, nn.ReLU6)
RELU_CALLS = {F.relu, F.relu_, F.relu6, torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_}
POOL_MODULES = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
POOL_CALLS = {F.max_pool1d, F.max_pool2d, F.max_pool3d, torch.max_pool1d, torch.max_pool2d, torch.max_pool3d}


def _zeros_that_stop(traced: Traced, parts: Parts, recorder: ProbeRecorder) -> set[tuple[int, int]]:
    """(layer, value) for every layer that left zeros in its only output that stop every gradient there."""
    found: set[tuple[int, int]] = set()
    for index, layer in enumerate(traced.layers):
        values = recorder.outputs[layer.node].values
        value = recorder.objects[values[0]] if len(values) == 1 else None
        # A hook of a value's own sees the whole gradient.
        if not isinstance(value, torch.Tensor) or has_gradient_hooks(value) or value.retains_grad:
            continue
        if _is(layer, parts, RELU_MODULES, RELU_CALLS):
            found.add((index, values[0]))
        elif len(layer.node.all_input_nodes) == 1 and _is(layer, parts, POOL_MODULES, POOL_CALLS):
            (pooled,) = recorder.outputs[layer.node.all_input_nodes[0]].values
            if (max(w for w in recorder.writers(pooled) if w < index), pooled) in found:
                found.add((index, values[0]))
    return found


def _is(layer: Layer, parts: Parts, modules: tuple[type[nn.Module], ...], calls: set[object]) -> bool:
    """Return whether a layer is one of these and no other, which nobody watches through hooks."""
    if layer.node.op != "call_module":  # a parameter may be called "relu"
        return layer.node.op != "get_attr" and layer.node.target in calls
    module = parts.modules[str(layer.node.target)]
    return type(module) in modules and is_unmodified(module) and not getattr(module, "min_val", 0)


RELU_FUNCTIONS = ("relu", "relu6", "hardtanh", "max_pool1d", "max_pool2d", "max_pool3d")
"""Functions of torch.nn.functional that such modules call."""


def is_unmodified(module: nn.Module) -> bool:
    """Return whether nothing but its class says what a module does: no hooks, no forward of its own."""
    hooks = [*hooks_on_all_modules(), *(getattr(module, name) for name in HOOKS)]
    return not any(hooks) and "forward" not in vars(module)


def _is_of_torch(module: nn.Module) -> bool:
    """Return whether torch alone says what a module and all in it do: no code of a person's is held there."""
    return all(
        type(m).__module__.startswith("torch.nn.")
        and is_unmodified(m)
        and not any(map(_is_persons_code, vars(m).values()))
        for m in module.modules()
    )


def _is_persons_code(item: object) -> bool:
    if isinstance(item, types.FunctionType):  # as an activation may be
        return not is_foreign(item)
    return callable(item) and not isinstance(item, type | types.BuiltinFunctionType)


Edges = dict[tuple[Node, int], int]  # of a graph, and the number of the value that it belongs to
_HANGS = ("register_hook", "register_post_accumulate_grad_hook")
_TORCH_MODULES = ("torch", "torch.functional", "torch.nn.functional", "_operator", "math", "builtins")


def _edges_of(items: Iterable[tuple[int, object]]) -> Edges:
    """Edges at which the gradients of values (number, object) enter the graph; of those that have one."""
    if not torch.is_grad_enabled():  # there is no graph
        return {}
    asked = [(number, t) for number, t in items if isinstance(t, torch.Tensor) and t.requires_grad]
    edges = [(number, get_gradient_edge(tensor)) for number, tensor in asked]
    return {(edge.node, edge.output_nr): number for number, edge in edges}


def _reachable(edge: tuple[Node, int], read: Edges) -> set[int]:
    """The values among those ``read`` that the gradient at ``edge`` surely comes to."""
    ahead, seen, found = [edge], set(), set()
    while ahead:
        place = ahead.pop()
        if place in seen:
            continue
        seen.add(place)
        if place in read:
            found.add(read[place])
        elif not isinstance(place[0], BackwardCFunction) and "CppNode" not in place[0].name():
            ahead += [(node, number) for node, number in place[0].next_functions if node is not None]
    return found


class _HookWatch(TorchFunctionMode):
    """The block in which a layer runs; ``any``: it hung functions on gradients, which read what they like."""

    any = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.any |= getattr(func, "__name__", "") in _HANGS
        return func(*args, **kwargs or {})


def _has_custom_backward(made: Edges, read: Edges) -> bool:
    """Return whether a layer has a backward of a person's, which reads what it likes, saved or not."""
    ahead, seen = [node for node, _ in made], {node for node, _ in read}
    while ahead:
        node = ahead.pop()
        if node not in seen:
            if isinstance(node, BackwardCFunction):
                return True
            seen.add(node)
            ahead += [following for following, _ in node.next_functions if following is not None]
    return False


def _is_torch_only(layer: Layer, parts: Parts) -> bool:
    node = layer.node
    if node.op == "call_module":
        return _is_of_torch(parts.modules[str(node.target)])
    home = getattr(node.target, "__module__", None) or ""
    owner = getattr(node.target, "__objclass__", None)  # of a method of torch.Tensor
    return owner in (torch.Tensor, TensorBase) or home in _TORCH_MODULES or home.startswith("torch._C")


def _statistics_of(layer: Layer, parts: Parts) -> set[int]:
    """The memory of running statistics that a layer keeps, and that no backward in train mode reads."""
    if layer.node.op == "call_module":
        modules = parts.modules[str(layer.node.target)].modules()
        norms = (part for part in modules if isinstance(part, BatchOrInstanceNorm))
        found = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
    else:
        norm = getattr(layer.node.target, "__name__", "") in ("batch_norm", "instance_norm")
        found = [tensor for _, tensor in tensors_read(layer.node, parts)] if norm else []
    return {memory_id(tensor) for tensor in found}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One tensor or other leaf of a run: made by layer ``producer`` (-1: an input), read by the layers
    ``users`` (the model's output reads last: it counts as one more layer).

    ``strides`` are those of a real run, None where they are not known: the meta device lays some results out
    otherwise, and a copy of a parameter drops its gaps. ``refused`` says why it must not cross a cut, "" if
    it may; whatever is no tensor must not.
    ``parameter``: a (tied) parameter, sent once a step. ``writers``: the layers that wrote to its memory,
    ascending, each with whether it left zeros that stop every gradient; ``freed``: one of its readers gave
    its memory back. ``last_gradient_layer``: the last layer through which a gradient surely comes back to it,
    -1 if none does."""

    name: str
    producer: int
    users: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: torch.dtype
    requires_grad: bool
    parameter: bool
    refused: str
    writers: tuple[tuple[int, bool], ...]
    freed: bool
    last_gradient_layer: int

    def stops(self, layer: int) -> bool:
        """Return whether a zero of this value, as it is after ``layer``, makes its gradient irrelevant."""
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


def probe(traced: Traced, parts: Parts, inputs: Sequence[torch.Tensor]) -> Probe:
    """Run ``traced`` once on ``inputs`` (both are written to: pass copies) and record what happens."""
    recorder, samples = ProbeRecorder(generators_of(inputs)), traced.call.samples_of(inputs)
    env: dict[fx.Node, Any] = dict(zip(traced.inputs, inputs, strict=True))
    for node, tensor in env.items():
        recorder.add(node, -1, tensor)
    for index, layer in enumerate(traced.layers):
        _record_layer(recorder, layer, index, env, parts, samples)
        for name, tensor in tensors_read(layer.node, parts):
            if id(tensor) in recorder.written and name in traced.constants:
                raise PlanError(
                    f"layer {layer.name} writes to {name}, a tensor that was made once, while tracing; make "
                    "it in a module or function that is named in leaves=, or register it as a buffer"
                )
    end = len(traced.layers)
    for number in recorder.reads(traced.output):
        recorder.users[number].add(end)
    for name, buffer in tensors_read(traced.output, parts):
        recorder.accesses.setdefault(memory_id(buffer), (name, set()))[1].add(end)
    # A backward would read a buffer as forwards of later micro-batches have written it, and torch, which
    # counts writes, would not see it.
    for memory, (name, _) in recorder.accesses.items():
        if (writer := recorder.untracked_memory.get(memory)) and memory in recorder.keepers:
            raise PlanError(
                f"layer {writer} writes to {name} past what torch counts (.data, NumPy), "
                f"and {recorder.keepers[memory]} keeps it for its backward; read a clone of it, or read it "
                "under torch.no_grad()"
            )
    # The last layer through which a gradient surely comes to a value: of several outputs the loss may leave
    # out any.
    asked = {i for i in recorder.reads(traced.output) if getattr(recorder.objects[i], "requires_grad", False)}
    last = dict.fromkeys(asked, end) if len(asked) == 1 else {}
    for index, paths in reversed(recorder.gradient_paths.items()):
        for start in (start for value, starts in paths.items() if value in last for start in starts):
            last.setdefault(start, index)
    stops = _zeros_that_stop(traced, parts, recorder)
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
    # 1. what the layer may read and write, as it is before
    read = list(recorder.reads(layer.node, [source for _, source in layer.tied]))
    tensors = [t for i in read if isinstance(t := recorder.objects[i], torch.Tensor)]
    held = tensors_read(layer.node, parts)
    buffers = {name: t for name, t in held if not (isinstance(t, nn.Parameter) and t.requires_grad)}
    for tensor in buffers.values():  # who writes to a view of one writes to it
        others = recorder.on.setdefault(memory_id(tensor), [])
        if all(tensor is not other for other in others):
            others.append(tensor)
    known = {id(t): t for t in (*tensors, *buffers.values())}
    memories = {memory_id(t) for t in known.values() if t.layout is torch.strided}
    known |= {id(t): t for memory in memories for t in recorder.on.get(memory, ())}
    at_hand = list(known.values())
    versions, contents = [version_of(t) for t in at_hand], Contents(at_hand)
    asked = [(t.requires_grad, version_of(t)) for t in tensors]
    recorder.kept += contents.storages
    states, before = states_of(recorder.generators), _edges_of((i, recorder.objects[i]) for i in read)
    kept = set[int]()  # for its backward

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided:
            kept.add(memory_id(tensor))
        return tensor.detach()  # a node that kept its own result would never be freed

    # 2. the run
    try:
        with _HookWatch() as watch, saved_tensors_hooks(keep, lambda tensor: tensor):
            env[layer.node] = run_layer(layer, env, parts, samples=samples)
    except Exception as error:
        if "saved tensor hooks" in str(error):
            raise PlanError(
                f"layer {layer.name} takes a gradient by torch.func (grad, vjp, jacrev), which allows no "
                "hooks on saved tensors, and layers run under some; take it by torch.autograd.grad(..., "
                "create_graph=True), under torch.enable_grad()"
            ) from error
        size = next((tuple(t.shape) for t in tensors), ())
        raise PlanError(f"layer {layer.name} does not take an input of shape {size}: {error}") from error
    # 3. chance, and writes: counted by autograd, or seen by the bytes alone
    if drew(recorder.generators, states):
        recorder.random.add(layer.name)
    is_torchs = _is_torch_only(layer, parts)
    if "opaque" in layer.node.meta and not (is_torchs and layer.node.op == "call_module"):
        recorder.own.add(layer.name)
    changed = [t for t, before in zip(at_hand, versions, strict=True) if version_of(t) != before]
    # batch_norm writes its statistics without giving them a new version, others through .data or NumPy
    other, counted = contents.changed(), {id(t) for t in changed}
    untracked = [t for t in at_hand if id(t) not in counted and memory_id(t) in other]
    recorder.untracked_memory |= {memory_id(t): layer.name for t in untracked}
    recorder.keepers |= dict.fromkeys(kept - _statistics_of(layer, parts), layer.name)
    numbers = (recorder.numbers.get(id(t)) for t in untracked)
    recorder.untracked_values |= {number: index for number in numbers if number is not None}
    changed += untracked
    recorder.turned |= {
        recorder.numbers[id(t)]: index
        for t, (did, version) in zip(tensors, asked, strict=True)
        if t.requires_grad != did and version_of(t) == version
    }
    recorder.freed |= contents.resized()
    for storage in {memory_id(t) for t in changed}:
        recorder.writes.setdefault(storage, []).append(index)
    recorder.written |= {id(t) for t in changed}
    # 4. who reads which buffer and value
    for name, buffer in buffers.items():
        recorder.accesses.setdefault(memory_id(buffer), (name, set()))[1].add(index)
    for tensor in (t for t in tensors if t.layout == torch.strided):  # a layer may have returned a buffer
        if (known := recorder.accesses.get(memory_id(tensor))) is not None:
            known[1].add(index)
    for number in read:
        recorder.users[number].add(index)
    # 5. what it made, and which gradients surely come back through it
    recorder.add(layer.node, index, env[layer.node])
    after = _edges_of((i, recorder.objects[i]) for i in recorder.outputs[layer.node].values)
    paths = {number: _reachable(edge, before) for edge, number in after.items()} if is_torchs else {}
    recorder.gradient_paths[index] = paths
    if watch.any or (not is_torchs and _has_custom_backward(after, before)):
        recorder.keeping.add(layer.name)


def _value(recorder: ProbeRecorder, number: int, stops: Collection[tuple[int, int]], last: int) -> Value:
    leaf = recorder.objects[number]
    tensor = leaf if isinstance(leaf, torch.Tensor) else None
    refused, strides = "", ()
    if tensor is not None and (tensor.is_meta or isinstance(tensor, nn.Parameter)):
        strides = None
    elif tensor is not None and tensor.layout == torch.strided:
        strides = tuple(tensor.stride())
    if tensor is None:
        refused = f"a Python value of type {type(leaf).__name__} ({recorder.names[number]}) would cross it"
    elif not travels(tensor):
        name = recorder.names[number]
        refused = f"the tensor {name}, whose elements overlap or lie far apart, would cross it"
    return Value(
        name=recorder.names[number],
        producer=recorder.producers[number],
        users=tuple(sorted(recorder.users[number])),
        shape=() if tensor is None else tuple(tensor.shape),
        strides=strides,
        dtype=torch.float64 if tensor is None else tensor.dtype,
        requires_grad=tensor is not None and tensor.requires_grad,
        parameter=isinstance(tensor, nn.Parameter),
        refused=refused,
        writers=tuple((writer, (writer, number) in stops) for writer in recorder.writers(number)),
        freed=tensor is not None and tensor.layout is torch.strided and memory_id(tensor) in recorder.freed,
        last_gradient_layer=last,
    )


def travels(tensor: torch.Tensor) -> bool:
    """Return whether a frame keeps the tensor's geometry: another one picks other kernels and other bits."""
    dense = tensor.layout == torch.strided
    return dense and geometry(tuple(tensor.shape), tensor.stride(), tensor.itemsize).travels


def _alive(values: Sequence[Value], cuts: int) -> Iterator[list[int]]:
    """Yield the values that cross each cut, in one pass."""
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
    for number, writer in recorder.untracked_values.items():
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
    tensors = ((i, t) for i in alive if isinstance(t := recorder.objects[i], torch.Tensor))
    for number, tensor in tensors:
        storage = memory_id(tensor)  # on the meta device all addresses are zero
        first = seen.setdefault(storage, number)
        if first != number and storage in recorder.writes:
            names = f"{record.values[first].name} and {record.values[number].name}"
            return f"{names} share one memory that a layer writes to, and both would cross it"
    for key, (name, layers) in recorder.accesses.items():
        if key in recorder.writes and min(layers) <= cut < max(layers):
            return f"the layers that use the buffer {name}, and write to it, would stand on both sides"
    return ""
