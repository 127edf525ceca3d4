"""capture(model, call, example) -> Captured: the graph of what a model does, from a few real eager runs.

The first run gives the nodes. A second one with other data shows what depends on it: the smallest module around
such a place is taken as one layer, whatever it does inside. A third one with one more sample shows which numbers
follow the size of the micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import TreeSpec

from ...compression.errors import PlanError
from .call import Call
from .outputs import flattened
from .recorder import Recorder, Unrecordable
from .sizes import Different, moving, refuse_data

_MOST_LEAVES = 64
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_OF_BLOCKS = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A recorded graph: placeholders, nodes in running order, an output node with the flat list of results.

    ``spec`` puts the model's outputs together from that list; ``constants`` are the tensors that came from
    outside; ``moving`` has for nodes whose numbers follow the size of the micro-batch what they become;
    ``sizes`` are the other sizes it was recorded at; ``fixed`` says why the graph holds for one size only, "" where it holds for all; ``leaves`` names the
    modules that were taken as one layer because of what they do, and why; ``dropped`` the outputs left out;
    ``again`` records a copy of the model on other inputs, with the same leaves; ``reads`` are the attributes of
    modules that the run read outside of its layers: what nobody read may change."""

    graph: fx.Graph
    spec: TreeSpec
    constants: Mapping[str, torch.Tensor]
    moving: Mapping[fx.Node, Any]
    sizes: tuple[int, ...]
    fixed: str
    leaves: Mapping[str, str]
    dropped: tuple[str, ...]
    again: Callable[[nn.Module, Sequence[torch.Tensor]], fx.Graph]
    reads: frozenset[tuple[str, str]]


def capture(
    model: nn.Module,
    call: Call,
    example: Sequence[torch.Tensor],
    *,
    copies: Callable[[], nn.Module],
    leaf: Callable[[str, nn.Module], bool],
    known: Mapping[str, str],
) -> Captured:
    """Record ``model`` on ``example``.

    Args:    copies: gives a fresh copy of the model for each run, in the mode to record.
             leaf: whether a module is one layer by somebody's choice.
             known: modules that another mode showed to be one layer, and why.
    Raises:  PlanError: a run cannot be repeated node by node, and no module around the place can be one layer.
    """
    chosen: dict[str, str] = {}
    kinds: set[type] = set()

    def is_leaf(path: str, module: nn.Module) -> bool:
        return path in chosen or type(module) in kinds or leaf(path, module)

    def again(twin: nn.Module, inputs: Sequence[torch.Tensor]) -> fx.Graph:
        return _recorded(twin, call, inputs, is_leaf)[0].graph

    def choose(path: str, why: str) -> None:
        chosen[path] = why
        if not isinstance(model.get_submodule(path), _CONTAINERS):
            kinds.add(type(model.get_submodule(path)))

    for path, why in known.items():
        choose(path, why)
    while True:
        try:
            recorder, spec, dropped = _recorded(copies(), call, [x.clone() for x in example], is_leaf)
            refuse_data(recorder.graph, again(copies(), other_data(example)), samples_of(example))
            break
        except (Different, Unrecordable) as failure:
            path = _around(model, failure)
            if not path or len(chosen) == _MOST_LEAVES or path in chosen:
                raise _unrepeatable(model, failure) from None
            choose(path, failure.what)
    sizes = (samples_of(example) + 1, 2 * samples_of(example) + 1)
    moves, fixed = _sizes(recorder.graph, lambda inputs: again(copies(), inputs), example, sizes)
    return Captured(
        graph=recorder.graph,
        spec=spec,
        constants=recorder.constants,
        moving=moves,
        sizes=sizes,
        fixed=fixed,
        leaves=chosen,
        dropped=dropped,
        again=again,
        reads=frozenset(recorder.reads),
    )


def _recorded(
    twin: nn.Module, call: Call, inputs: Sequence[torch.Tensor], leaf: Callable[[str, nn.Module], bool]
) -> tuple[Recorder, TreeSpec, tuple[str, ...]]:
    """One run: its nodes, the structure of what the model returned, and what was left out of that."""
    recorder = Recorder(twin, leaf)
    recorder.note_reads()
    for name, tensor in zip(call.names, inputs, strict=True):
        recorder.input(name, tensor)
    with recorder.recording():
        result = call.run(twin, inputs)
    leaves, spec, dropped = flattened(result)
    recorder.graph.output(tuple(recorder.named(leaves)))
    return recorder, spec, dropped


def _sizes(
    graph: fx.Graph,
    again: Callable[[Sequence[torch.Tensor]], fx.Graph],
    example: Sequence[torch.Tensor],
    sizes: tuple[int, ...],
) -> tuple[dict[fx.Node, Any], str]:
    """What moves with the number of samples, and why the graph is bound to the example's, if it is."""
    samples = samples_of(example)
    others: dict[int, fx.Graph] = {}
    for size in sizes:
        try:
            others[size] = again(resized(example, size))
        except Exception as error:
            return {}, f"the model does not run on {size} samples: {type(error).__name__}: {error}"
    try:
        return moving(graph, others, samples), ""
    except Different as difference:
        return {}, f"with another number of samples than {samples}, {difference.what}"


def resized(example: Sequence[torch.Tensor], size: int) -> list[torch.Tensor]:
    """The example with ``size`` samples: its own, and then again; what has another length stays."""
    samples = samples_of(example)
    again = torch.arange(size) % max(1, samples)
    return [x[again] if x.dim() and len(x) == samples else x.clone() for x in example]


def samples_of(inputs: Sequence[torch.Tensor]) -> int:
    """The samples of a micro-batch: the length of its first input."""
    return next((len(x) for x in inputs if x.dim()), 0)


def other_data(example: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Inputs of the same shapes, dtypes, strides and range: elements drawn from the example's, with repeats."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for tensor in example:
        drawn = torch.randint(max(1, tensor.numel()), tensor.shape, generator=generator)
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        found.append(made.copy_(tensor.flatten()[drawn]) if tensor.numel() else made)
    return found


def _around(model: nn.Module, failure: Different | Unrecordable) -> str:
    """The path of the smallest module around what failed, "" for the model itself."""
    if isinstance(failure, Unrecordable):
        return failure.path
    paths = [path_of(node).split(".") for node in (failure.node, failure.other or failure.node)]
    common = []
    for ours, theirs in zip(*paths, strict=False):
        if ours != theirs:
            break
        common.append(ours)
    while common and isinstance(model.get_submodule(".".join(common)), nn.ModuleList | nn.ModuleDict):
        common.pop()  # nobody calls these
    return ".".join(common)


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
        f"forward of {type(model).__name__} itself must be the same calls every time, found that {found}{where}; put "
        "that part into a module of its own, which then is one layer; where the code is not yours, in a subclass "
        "that overrides the method"
    )


def default_leaf(path: str, module: nn.Module) -> bool:
    """Modules of torch.nn are one layer each; containers, and what is a list of blocks, are not."""
    return type(module).__module__.startswith("torch.nn") and not isinstance(
        module, (*_CONTAINERS, *_OF_BLOCKS)
    )
