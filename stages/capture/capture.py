"""capture(model, call, example) -> Captured: the graph of what a model does, from a few real eager runs.

The first run gives the nodes. A second one with other data shows what depends on it: the smallest module
around such a place is taken as one layer, whatever it does inside. A third one with one more sample shows
which numbers follow the size of the micro-batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import TreeSpec

from ...compression.errors import PlanError
from .call import Call
from .data import fresh, other_data, resized
from .nodes import Unrecordable
from .outputs import flattened
from .outside import Outside, Read
from .recorder import Recorder
from .sizes import Different, moving, refuse_data, same_way
from .told import carry, hold

_MOST_LEAVES = 64
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_OF_BLOCKS = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A recorded graph: placeholders, nodes in running order, an output node with the flat list of results.

    ``spec`` puts the model's outputs together from that list; ``constants`` are the tensors that came from
    outside; ``moving`` has for nodes whose numbers follow the size of the micro-batch what they become;
    ``sizes`` are the other sizes it was recorded at; ``fixed`` says why the graph holds for one size only,
    "" where it holds for all; ``leaves`` names the modules that were taken as one layer because of what they
    do, and why; ``dropped`` the outputs left out; ``again`` records a copy of the model on other inputs, with
    the same leaves; ``reads`` are the attributes of modules that the run read outside of its layers: what
    nobody read may change; ``outside`` what its code read of files and functions around it."""

    graph: fx.Graph
    spec: TreeSpec
    constants: Mapping[str, torch.Tensor]
    moving: Mapping[fx.Node, Any]
    sizes: tuple[int, ...]
    fixed: str
    leaves: Mapping[str, str]
    dropped: tuple[str, ...]
    again: Callable[..., fx.Graph]
    reads: frozenset[tuple[str, str]]
    outside: tuple[Read, ...]


def capture(
    model: nn.Module,
    call: Call,
    example: Sequence[torch.Tensor],
    *,
    copies: Callable[[], nn.Module],
    leaf: Callable[[str, nn.Module], bool],
    functions: Collection[Callable[..., Any]] = (),
    written: Collection[str] = (),
) -> Captured:
    """Record ``model`` on ``example``.

    Args:    copies: gives a fresh copy of the model for each run, in the mode to record.
             leaf: whether a module is one layer by somebody's choice; ``functions``: those that are.
             written: the buffers that a forward changes.
    Raises:  PlanError: a run cannot be repeated node by node, and no module around the place can be one
    layer.
    """
    samples = call.samples_of(example)
    chosen: dict[str, str] = {}
    kinds: dict[type, str] = {}

    def is_leaf(path: str, module: nn.Module) -> bool:
        return path in chosen or type(module) in kinds or leaf(path, module)

    outside = Outside(model)
    held = False  # to the numbers that its layers told

    def again(twin: nn.Module, inputs: Sequence[torch.Tensor], expects: Sequence[Any] = ()) -> fx.Graph:
        graph = record(twin, inputs, expects=expects)[0].graph
        if held:
            hold(graph)
        return graph

    def record(
        twin: nn.Module,
        inputs: Sequence[torch.Tensor],
        way: int | None = None,
        expects: Sequence[Any] = (),
    ) -> tuple[Recorder, TreeSpec, tuple[str, ...]]:
        recorder = Recorder(twin, is_leaf, functions, written=written, way=way, expects=expects)
        outside.within = lambda: recorder.quiet
        return _recorded(recorder, twin, call, inputs)

    while True:
        outside.ran.clear()
        try:
            with outside.watching():
                recorder, spec, dropped = record(copies(), fresh(example))
            held = recorder.altering.count > 0 and not _carries(
                recorder, lambda way: record(copies(), fresh(example), way)[0].graph
            )
            refuse_data(recorder.graph, again(copies(), other_data(call, example)), samples)
            break
        except (Different, Unrecordable) as failure:
            path = _around(model, failure)
            if not path or len(chosen) == _MOST_LEAVES or path in chosen:
                raise _unrepeatable(model, failure) from None
            chosen[path] = failure.what
            if not isinstance(model.get_submodule(path), _CONTAINERS):
                kinds[type(model.get_submodule(path))] = path
    sizes = (samples + 1, 2 * samples + 1)
    moves, fixed = _sizes(recorder.graph, lambda inputs: again(copies(), inputs), call, example, sizes)
    for size in {1, samples - 1} - {0, samples, samples + 1} if not fixed else ():
        with contextlib.suppress(Exception):  # that size then is looked at if it ever comes
            same_way(
                [node for node in recorder.graph.nodes if node.op != "output"],
                again(copies(), resized(call, example, size)),
                size,
                moves,
            )
            sizes = (*sizes, size)
    return Captured(
        graph=recorder.graph,
        spec=spec,
        constants=recorder.constants,
        moving=moves,
        sizes=(samples,) if fixed else (samples, *sizes),
        fixed=fixed,
        leaves=chosen
        | {
            p: f"like {kinds[type(m)]}"
            for p, m in model.named_modules()
            if type(m) in kinds and p not in chosen
        },
        dropped=dropped,
        again=again,
        reads=frozenset(recorder.reads),
        outside=outside.reads(),
    )


def _carries(recorder: Recorder, other: Callable[[int], fx.Graph]) -> bool:
    """Whether the numbers that layers told travel from node to node; else they are held to what they were."""
    with contextlib.suppress(Exception):  # whatever a run with other numbers fails with, it went on from them
        if not recorder.altering.used:
            carry(recorder.graph, [other(way) for way in (0, 1)])
            return True
    hold(recorder.graph)
    return False


def _recorded(
    recorder: Recorder, twin: nn.Module, call: Call, inputs: Sequence[torch.Tensor]
) -> tuple[Recorder, TreeSpec, tuple[str, ...]]:
    """One run: its nodes, the structure of what the model returned, and what was left out of that."""
    for name, tensor in zip(call.names, inputs, strict=True):
        recorder.input(name, tensor)
    with recorder.noting(), recorder.recording():
        result = call.run(twin, inputs)
    recorder.write_back(twin)
    leaves, spec, dropped = flattened(result)
    recorder.graph.output(tuple(recorder.named(leaves)))
    return recorder, spec, dropped


def _sizes(
    graph: fx.Graph,
    again: Callable[[Sequence[torch.Tensor]], fx.Graph],
    call: Call,
    example: Sequence[torch.Tensor],
    sizes: tuple[int, ...],
) -> tuple[dict[fx.Node, Any], str]:
    """What moves with the number of samples, and why the graph is bound to the example's, if it is."""
    samples = call.samples_of(example)
    others: dict[int, fx.Graph] = {}
    for size in sizes:
        try:
            others[size] = again(resized(call, example, size))
        except Exception as error:
            return {}, f"the model does not run on {size} samples: {type(error).__name__}: {error}"
    try:
        return moving(graph, others, samples), ""
    except Different as difference:
        return {}, f"with another number of samples than {samples}, {difference.what}"


def _around(model: nn.Module, failure: Different | Unrecordable) -> str:
    """The path of the smallest module around what failed, "" for the model itself."""
    if isinstance(failure, Unrecordable):
        return failure.path
    paths = [_around_node(node) for node in (failure.node, failure.other or failure.node)]
    common = []
    for ours, theirs in zip(*paths, strict=False):
        if ours != theirs:
            break
        common.append(ours)
    while common and isinstance(model.get_submodule(".".join(common)), nn.ModuleList | nn.ModuleDict):
        common.pop()  # nobody calls these
    return ".".join(common)


def _around_node(node: fx.Node) -> list[str]:
    path = path_of(node).split(".")
    return path[:-1] if node.op == "call_module" else path  # a layer as a whole is not smaller for being one


def path_of(node: fx.Node) -> str:
    """Dotted path of the module in which a node ran."""
    stack = node.meta.get("nn_module_stack")
    return str(next(reversed(stack.values()))[0]) if stack else ""


def where_of(node: fx.Node) -> str:
    """Module path, file and line of a node, as far as they are known, for a sentence."""
    path, where = path_of(node), node.meta.get("where")
    return (f" in module {path}" if path else "") + (f" ({where})" if where else "")


def _unrepeatable(model: nn.Module, failure: Different | Unrecordable) -> PlanError:
    if isinstance(failure, Unrecordable):
        found, where = failure.what, f" ({failure.where})" if failure.where else ""
    else:
        found, where = f"it goes another way with other data: {failure.what}", where_of(failure.node)
    return PlanError(
        f"forward of {type(model).__name__} itself must be the same calls every time, found that "
        f"{found}{where}; put that part into a module of its own, which then is one layer; where the code "
        "is not yours, in a subclass that overrides the method"
    )


def default_leaf(path: str, module: nn.Module) -> bool:
    """Modules of torch.nn are one layer each; containers, and what is a list of blocks, are not."""
    return type(module).__module__.startswith("torch.nn") and not isinstance(
        module, (*_CONTAINERS, *_OF_BLOCKS)
    )
