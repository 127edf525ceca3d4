"""trace(model, example) -> LayerGraph: the network as layers and values, once as it trains and once as it
evaluates.

torch.fx loses things silently (no_grad and autocast blocks, buffer updates, branches), so the traced network
is run beside the eager one before anybody relies on it: same outputs, gradients and buffers, bit for bit, or
a refusal.
Source: claims B1.1-1.4 of CN110032450B (layer vertices, data vertices, dependencies)."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import operator
from collections.abc import Collection, Iterable

import torch
from torch import fx, nn

from ..compression.errors import PlanError
from .aliases import Groups, refuse_cuts, shared
from .compare import (
    fresh,
    observe,
    refuse_changes,
    refuse_difference,
    refuse_lost_writes,
    same_bits,
    undrawn,
)
from .contents import contents
from .copied import Copied
from .layers import Layer, Traced, casting, is_local, parts_of, run_all
from .leaves import Tracer, defaults_of, is_compiled
from .lift import lift_shared
from .probe import Probe, probe
from .unsupported import refuse_model, refuse_objects


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerGraph:
    """A traced model: its two traces, the record of each at the example's shape, the copy they ran on.

    ``shared``: in the train and in the eval trace the tensors that share memory, with the layers that need
    them: all on one stage."""

    train: Traced
    eval: Traced
    train_probe: Probe
    eval_probe: Probe
    twin: nn.Module
    example_inputs: tuple[torch.Tensor, ...]
    fingerprint: str
    shared: tuple[Groups, Groups]

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, in the order in which they run."""
        return tuple(layer.name for layer in self.train.layers)


def trace(
    model: nn.Module, example_inputs: tuple[torch.Tensor, ...], *, autocast: torch.dtype | None = None
) -> LayerGraph:
    """Trace ``model`` with torch.fx, in train and in eval mode, and prove both traces on copies of it.

    Modules keep their own training flags, unless the whole model stands in eval mode: then it is traced in
    train mode.

    Args:    model: any module that torch.fx can trace; left bit for bit as it was (weights, gradients, mode,
             random state).
             example_inputs: the positional inputs of one micro-batch, as tensors.
             autocast: the dtype that training will cast to, None for none.
    Returns: the LayerGraph; a layer is one node of the default torch.fx trace and has that node's name.
    Raises:  PlanError: torch.fx cannot trace the model, or the trace does not compute what the model
             computes.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"a model is a torch.nn.Module, found {type(model).__name__}")
    if not isinstance(example_inputs, tuple) or not all(isinstance(x, torch.Tensor) for x in example_inputs):
        raise PlanError(
            "example_inputs is a tuple of tensors, one for each input of the model; wrap them: (x,)"
        )
    if any(x.layout != torch.strided for x in example_inputs):
        raise PlanError("inputs are dense tensors, found a sparse one in example_inputs; convert it")
    if autocast is not None and not isinstance(autocast, torch.dtype):
        raise PlanError(
            f"autocast is a dtype such as torch.bfloat16, found {autocast!r}; give None for no cast"
        )
    _check_inputs(model, example_inputs)
    if is_compiled(model):
        raise PlanError(
            "a compiled module is one layer, which no cut divides, and the whole model is compiled; compile "
            "its parts instead: model.layer1 = torch.compile(model.layer1)"
        )
    refuse_model(model)
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), casting(autocast):
        copies = Copied(model), Copied(model)
        train, train_probe, written = _proven(model, copies[0], example_inputs)
        tied = {str(node.target) for layer in train.layers for _, node in layer.lifted}
        copies[1].root.eval()
        evaluation, eval_probe, _ = _proven(model, copies[1], example_inputs, tied=tied)
    groups = (
        shared(model, train, written=written, unread=(0,)),
        shared(model, evaluation, written=written, unread=()),
    )
    refuse_cuts(groups[0], train_probe.refused)
    return LayerGraph(
        train=train,
        eval=evaluation,
        train_probe=train_probe,
        eval_probe=eval_probe,
        twin=copies[0].root,
        example_inputs=fresh(example_inputs),
        fingerprint=fingerprint(model),
        shared=groups,
    )


def _check_inputs(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*inputs)
    except TypeError:
        raise _other_inputs(signature.parameters, len(inputs)) from None


def _other_inputs(names: Iterable[str], given: int) -> PlanError:
    return PlanError(
        "example_inputs has one tensor for each input; "
        f"the model takes {', '.join(names)}, {given} were given"
    )


def _proven(
    model: nn.Module, copied: Copied, inputs: tuple[torch.Tensor, ...], *, tied: Collection[str] = ()
) -> tuple[Traced, Probe, set[str]]:
    """The trace of a copy in the mode in which it stands, its record, and the buffers that it writes to."""
    root, mode = copied.root, "train" if copied.root.training else "eval"
    copied.shift()
    before = {name: buffer.clone() for name, buffer in root.named_buffers()}
    with torch.set_grad_enabled(root.training):
        expected = _run_eager(root, inputs)
    written = {name for name, buffer in root.named_buffers() if not same_bits(buffer, before[name])}
    copied.restore()
    traced = _traced(model, root, len(inputs), tied=tied)
    copied.refuse_constants(traced)
    parts = parts_of(root, traced)
    copied.shift()
    with torch.set_grad_enabled(root.training):
        found = observe(lambda *x: run_all(traced, parts, x), root, inputs)
        refuse_difference(expected, found, mode=mode)
        copied.restore()
        record = probe(traced, parts, fresh(inputs))
        copied.restore()
    return traced, record, written


def _run_eager(eager: nn.Module, inputs: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor | None]:
    """What the model itself computes; refused if it does not run, or changes itself beside its buffers."""
    before = contents(eager, running=True)
    try:
        seen = observe(eager, eager, inputs)
    except Exception as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in inputs)
        raise PlanError(
            f"the model does not run on inputs of shape {shapes}: {error}; give another example"
        ) from error
    refuse_changes(before, eager, again=lambda: observe(eager, eager, inputs))
    return seen


def _traced(model: nn.Module, root: nn.Module, num_inputs: int, *, tied: Collection[str] = ()) -> Traced:
    """The trace of ``root``, a copy of ``model``: shared and ``tied`` parameters lifted, other inputs at
    defaults."""
    before = contents(root)
    try:
        with undrawn():
            graph = Tracer(model).trace(root, defaults_of(root, num_inputs) or None)
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(
            f"torch.fx cannot trace {type(root).__name__}: {error}; keep branches and loops over tensor "
            "values out of forward, or put them into a function under torch.fx.wrap"
        ) from error
    refuse_lost_writes(before, root)
    _drop_default_inputs(graph, num_inputs)
    refuse_objects(root, graph)
    lifted = lift_shared(root, graph, tied)
    layers = tuple(
        Layer(
            node=node,
            module=_module_path(node),
            lifted=tuple(lifted.get(node, ())),
            holds=_holds(root, node, {name for name, _ in lifted.get(node, ())}),
        )
        for node in graph.nodes
        if node.op not in ("placeholder", "output") and not is_local(node)
    )
    inputs = tuple(node for node in graph.nodes if node.op == "placeholder")
    if not layers:
        raise PlanError(f"a pipeline needs at least one layer; {type(root).__name__}.forward calls none")
    if len(inputs) != num_inputs:  # *inputs are one
        raise _other_inputs([node.name for node in inputs], num_inputs)
    held = {str(n.target): operator.attrgetter(n.target)(root) for n in graph.nodes if n.op == "get_attr"}
    return Traced(
        inputs=inputs,
        layers=layers,
        output=next(iter(reversed(graph.nodes))),
        constants={name: tensor for name, tensor in held.items() if not _has(model, name)},
        buffers=frozenset(held) & {name for name, _ in root.named_buffers(remove_duplicate=False)},
    )


def _drop_default_inputs(graph: fx.Graph, num_inputs: int) -> None:
    """Remove the placeholders of arguments that stay at defaults, and torch.fx's assertions on them."""
    for node in [n for n in graph.nodes if n.op == "placeholder"][num_inputs:]:
        dead = [node]
        for user in dead:
            dead.extend(u for u in user.users if u not in dead)
        if all("_assert" in str(n.target) or n is node or n.target is operator.eq for n in dead):
            for user in reversed(dead):
                graph.erase_node(user)


def _holds(root: nn.Module, node: fx.Node, lifted: Collection[str]) -> bool:
    """Whether a layer needs a part of the model that only its stage has: not what is tied or carried to
    it."""
    if node.op != "call_module":
        return node.op == "get_attr"
    module = root.get_submodule(str(node.target))
    own = {name for name, _ in module.named_parameters(remove_duplicate=False)} - set(lifted)
    return bool(own) or any(True for _ in module.buffers())


def _module_path(node: fx.Node) -> str:
    """Dotted path of the module that the node was traced in, "" for the model itself."""
    stack = node.meta.get("nn_module_stack")
    return str(next(reversed(stack.values()))[0]) if stack else ""


def _has(model: nn.Module, name: str) -> bool:
    try:
        operator.attrgetter(name)(model)
    except AttributeError:
        return False
    return True


def fingerprint(model: nn.Module) -> str:
    """A hash of the names, shapes and dtypes of parameters and buffers, which a plan relies on."""
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    return digest.hexdigest()
