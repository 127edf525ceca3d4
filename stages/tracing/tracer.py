"""trace(model, example) -> LayerGraph: the network as layers and values, once as it trains and once as it
evaluates.

What a model does is recorded from real eager runs (``capture``). Before anybody relies on the record it
is run beside the model on other data, another size and moved weights: same outputs, gradients and
buffers, bit for bit, or a refusal."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import textwrap
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from ...compression.errors import PlanError
from ..device import CPU, device_of
from ..meta_watch import META
from ..seeds import seeded
from .aliases import Groups, shared, shared_memory_reason, unregistered_views
from .capture.call_spec import Call, Examples, fresh, other_data, resized
from .capture.capture import Captured, Recording, capture, default_leaf
from .capture.nodes import path_of
from .dataflow import Probe, probe
from .guards import traced_state
from .layers import Layer, Parts, Traced, casting, is_local, parts_of, run_all, tensor_at
from .meta_model import meta_model, on_meta, recorded_on, recording_meta, refuse_valueless
from .model_checks import Leaf, chosen_leaves, is_compiled, refuse_autocast, refuse_model, refuse_objects
from .verify import TraceCopy, observe, refuse_difference, run_eager, undrawn

SHOWN = 12  # names of a list that has more are its first and last ones


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerGraph:
    """A recorded model: its two runs, the probe of each at the example's shape, the copy they ran on.

    ``shared``: in the train and in the eval run the tensors that share memory, with the layers that need
    them: all on one stage. ``written``: the buffers that a forward in train mode writes to, and
    ``written_in_eval`` those in eval mode. ``model``: the one that was traced; ``state``: all that the trace
    could read of it; ``others``: smaller examples.

    A plan carries it to the ``Pipeline`` of its process, without memory; the plan's JSON does not have it."""

    train: Traced
    eval: Traced
    train_probe: Probe
    eval_probe: Probe
    model_copy: nn.Module
    example_inputs: tuple[torch.Tensor, ...]
    fingerprint: str
    shared: tuple[Groups, ...]
    autocast: torch.dtype | None
    written: frozenset[str]
    model: weakref.ref[nn.Module]
    state: tuple[Any, ...]
    others: tuple[tuple[torch.Tensor, ...], ...] = ()
    written_in_eval: frozenset[str] = frozenset()

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, in the order in which they run."""
        return tuple(layer.name for layer in self.train.layers)

    def without_memory(self) -> LayerGraph:
        """Return the same graph around a copy of the model on the meta device."""
        return dataclasses.replace(self, model_copy=on_meta(self.model_copy))

    def fits(self, model: nn.Module) -> bool:
        """Return whether ``model`` is the one that was traced, and nothing that a trace reads has changed."""
        if self.model() is not model or traced_state(model) != self.state:
            return False
        return not any(guard.difference() for guard in (*self.train.guards, *self.eval.guards))

    def __str__(self) -> str:
        """A summary: its call, what may be cut, what is one layer and why, what was left out, the layers."""
        call, refused = self.train.call, self.train_probe.refused
        inputs = [
            f"{name} {'x'.join(map(str, x.shape))} {str(x.dtype).removeprefix('torch.')}{' whole' * whole}"
            for name, x, whole in zip(call.names, self.example_inputs, call.whole, strict=True)
        ]
        reasons = {reason: self.layers[cut] for cut, reason in reversed(refused.items())}
        places = len(self.layers) - 1
        sections = {
            "called with": inputs,
            "cuts": [f"allowed behind {places - len(refused)} of {places} layers"],
            "no cut": [f"behind {name}: {reason}" for reason, name in list(reversed(reasons.items()))[:3]],
            "one layer": _some([f"{name} ({why})" for name, why in self.train.leaves.items()]),
            "left out": [f"{name}, which no stage could put together again" for name in self.train.dropped],
            "other sizes": [f"are recorded when they come: {self.train.fixed}"] if self.train.fixed else [],
            "layers": [", ".join(_some(list(self.layers)))],
        }
        name = type(self.model_copy).__name__
        title = f"{name}: {len(self.layers)} layers, {len(self.eval.layers)} in eval mode"
        fill = functools.partial(textwrap.fill, width=110, subsequent_indent=" " * 14)
        texts = ((f"  {heading:<12}", text) for heading, texts in sections.items() for text in texts)
        return "\n".join([title, *(fill(text, initial_indent=start) for start, text in texts)])


def _some(items: list[str]) -> list[str]:
    half = SHOWN // 2
    if len(items) <= SHOWN:
        return items
    return [*items[:half], f"... {len(items) - SHOWN} more ...", *items[-half:]]


def trace(
    model: nn.Module,
    example_inputs: Examples,
    *,
    autocast: torch.dtype | None = None,
    leaves: Iterable[Leaf] = (),
) -> LayerGraph:
    """Record what ``model`` does, in train and in eval mode, and prove both records on copies of it.

    Modules keep their own training flags, unless the whole model stands in eval mode: then it is recorded in
    train mode.

    Args:
        model: Any module; left bit for bit as it was (weights, gradients, mode, random state).
        example_inputs: One micro-batch as the model takes it: a tuple by position, or a dict by name. Of a
            list of several the largest is recorded, for which a plan is made then, and a Pipeline records the
            model at the others as it begins.
        autocast: The dtype that training will cast to, None for none.
        leaves: What is one layer each: classes of modules, paths of modules, functions. Modules of torch.nn
            are by themselves, and so is the smallest module around a place that other data make run
            otherwise.

    Returns:
        The LayerGraph; a layer is one torch call or one module of torch.nn, with the name that torch.fx would
        give it.

    Raises:
        PlanError: What the model does cannot be repeated layer by layer.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"a model is a torch.nn.Module, found {type(model).__name__}")
    call, given, others = Call.of_several(model, example_inputs)
    if any(x.layout != torch.strided for batch in (given, *others) for x in batch):
        raise PlanError("inputs are dense tensors, found a sparse one in example_inputs; convert it")
    if any(x.dim() and not len(x) for x, whole in zip(given, call.whole, strict=True) if not whole):
        shapes = ", ".join(str(tuple(x.shape)) for x in given)
        raise PlanError(f"an example has one sample at least, found inputs of shape {shapes}; give it some")
    if autocast is not None and not isinstance(autocast, torch.dtype):
        raise PlanError(
            f"autocast is a dtype such as torch.bfloat16, found {autocast!r}; give None for no cast"
        )
    if is_compiled(model):
        raise PlanError(
            "a compiled module is one layer, which no cut divides, and the whole model is compiled; compile "
            "its parts instead: model.layer1 = torch.compile(model.layer1)"
        )
    refuse_autocast()
    refuse_model(model)
    modules, functions = chosen_leaves(model, leaves)
    modules |= {path: "it is compiled" for path, module in model.named_modules() if is_compiled(module)}
    home, known = recorded_on(model), model
    place, valueless = device_of(CPU if home == META else home), contextlib.nullcontext()
    if home == META:
        model = meta_model(model, autocast)
        valueless = recording_meta(model)
    example, drawn = tuple(x.to(home) for x in given), seeded(None, place.generators)
    with place.current(), drawn, torch.enable_grad(), casting(autocast, home), valueless:
        unregistered = unregistered_views(model)
        copies = functools.partial(TraceCopy, model, unregistered)
        prove = functools.partial(_proven, copies, call, example, functions)
        train, train_probe, written, root = prove(modules)
        evaluation, eval_probe, tested, _ = prove(train.leaves, beside=train)
        if evaluation.leaves != train.leaves:  # one layer here is one layer there
            train, train_probe, written, root = prove(evaluation.leaves)
            evaluation, eval_probe, tested, _ = prove(evaluation.leaves, beside=train)
    pairs = (train, (0,)), (evaluation, ())
    groups = tuple(shared(model, traced, written=written, unread=unread) for traced, unread in pairs)
    for group, layers in groups[0].items():
        for cut in range(min(layers, default=0), max(layers, default=0)):
            train_probe.refused.setdefault(cut, shared_memory_reason(group))
    for name in train.dropped:
        warnings.warn(
            f"the model returns {name}, which cannot be put together again from stages: it is left out; "
            "switch it off (use_cache=False) where nothing needs it",
            stacklevel=2,
        )
    return LayerGraph(
        train=train,
        eval=evaluation,
        train_probe=train_probe,
        eval_probe=eval_probe,
        model_copy=root,
        example_inputs=fresh(example),
        fingerprint=fingerprint(model),
        shared=groups,
        autocast=autocast,
        written=frozenset(written),
        written_in_eval=frozenset(tested),
        model=weakref.ref(known),
        state=traced_state(known),
        others=tuple(map(fresh, others)),
    )


def _proven(
    copies: Callable[..., TraceCopy],
    call: Call,
    example: tuple[torch.Tensor, ...],
    functions: Mapping[str, Callable[..., Any]],
    modules: Mapping[str, str],
    *,
    beside: Traced | None = None,
) -> tuple[Traced, Probe, set[str], nn.Module]:
    """The record of a model in train mode, its probe, the buffers that it writes to, and the copy it ran on.

    Args:   copies: makes a copy of the model.
            beside: the record in train mode, to make the one in eval mode: its tied parameters are tied
                here, too."""
    copied, eager = (copies(evaluates=beside is not None) for _ in range(2))
    tied = {str(node.target) for layer in beside.layers for _, node in layer.tied} if beside else ()
    root, mode = copied.root, "train" if copied.root.training else "eval"
    with torch.set_grad_enabled(root.training):
        written, clean = run_eager(eager.root, root, call, example)
        if not clean:
            eager = copies(evaluates=beside is not None)
        eager.clean, copied.written = clean, written
        eager.written = written if clean else ()
        with undrawn():
            captured = capture(
                eager.root,
                call,
                example,
                copies=eager.fresh_copy,
                leaf=lambda path, module: path in modules or default_leaf(module),
                functions=functions.values(),
                written=written,
                known=beside,
                nodes=beside.nodes if beside else (),
            )
        refuse_valueless(captured.graph, captured.constants)
        leaves = {**modules, **captured.leaves, **dict.fromkeys(functions, "by request")}
        traced = _traced(root, dataclasses.replace(captured, leaves=leaves), call, tied=tied)
        parts = parts_of(root, traced)
        if captured.seed:
            other = other_data(call, example, seed=captured.seed)
            if not captured.fixed:
                other = resized(call, other, call.samples_of(example) + 1)
            copied.shift()
            model_copy = eager.fresh_copy(shifted=True)
            expected = observe(lambda *x: call.run(model_copy, x), model_copy, other)
            found = observe(lambda *x: _repeated(traced, parts, x), root, other)
            refuse_difference(expected, found, mode=mode)
            copied.restore()
        record = probe(traced, parts, fresh(example))
        copied.restore()
    return traced, record, written, root


def _repeated(traced: Traced, parts: Parts, inputs: Sequence[torch.Tensor]) -> Any:
    try:
        return run_all(traced, parts, inputs)
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(
            f"the recorded run cannot be repeated on other data and sizes ({error}): forward depends on "
            "something that recording does not see (a global, a closure, a counter); name the module around "
            "it in leaves="
        ) from error


def _traced(root: nn.Module, captured: Captured, call: Call, *, tied: Collection[str]) -> Traced:
    """The recorded graph as layers: shared and ``tied`` parameters are layers, moving numbers are rules."""
    graph = captured.graph
    for node, (args, kwargs, expect, shape) in captured.moving.items():
        node.args, node.kwargs = args, kwargs
        node.meta |= {k: v for k, v in (("expect", expect), ("shape", shape)) if v is not None}
    refuse_objects(graph)
    tied_names = _add_tied_layers(root, graph, tied, captured.constants)
    layers = tuple(
        Layer(
            node=node,
            module=path_of(node),
            tied=tuple(tied_names.get(node, ())),
            holds=_holds(root, node, {name for name, _ in tied_names.get(node, ())}),
            moves=node in captured.moving,
        )
        for node in graph.nodes
        if node.op not in ("placeholder", "output") and not is_local(node)
    )
    if not layers:
        raise PlanError(f"a pipeline needs at least one layer; {type(root).__name__}.forward calls none")
    return Traced(
        inputs=tuple(node for node in graph.nodes if node.op == "placeholder"),
        layers=layers,
        output=next(iter(reversed(graph.nodes))),
        call=call,
        recorded=recorded_on(root),
        **{field.name: getattr(captured, field.name) for field in dataclasses.fields(Recording)},
    )


def _holds(root: nn.Module, node: fx.Node, tied: Collection[str]) -> bool:
    """Return whether a layer needs a part of the model that only its stage has: not what is tied to it."""
    if node.op != "call_module":
        return node.op == "get_attr"
    module = root.get_submodule(str(node.target))
    own = {name for name, _ in module.named_parameters(remove_duplicate=False)} - set(tied)
    return bool(own) or any(True for _ in module.buffers())


def fingerprint(model: nn.Module) -> str:
    """A hash of the names, shapes and dtypes of parameters and buffers, which a plan relies on."""
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    return digest.hexdigest()


def _add_tied_layers(
    root: nn.Module, graph: fx.Graph, tied: Collection[str], constants: Mapping[str, torch.Tensor]
) -> dict[fx.Node, list[tuple[str, fx.Node]]]:
    """Make one layer of every trained parameter that several nodes use (or ``tied`` names), before its first
    user.

    A tied parameter then is a value like any other. Buffers, constants and frozen parameters are read where
    they are used and never travel: their get_attr nodes become local to each user."""
    # 1. local reads
    for node in list(graph.nodes):
        if node.op == "get_attr" and not tensor_at(root, str(node.target), constants).requires_grad:
            for user in list(node.users):
                with graph.inserting_before(user):
                    local = graph.get_attr(node.target)
                local.meta["local"] = True
                user.replace_input_with(node, local)
            graph.erase_node(node)
    # 2. the nodes that use each trained parameter, and its name in their module (None: get_attr)
    uses_of: dict[int, list[tuple[fx.Node, str | None]]] = {}
    for node in graph.nodes:
        if node.op == "get_attr" and not is_local(node):
            uses_of.setdefault(id(tensor_at(root, str(node.target), constants)), []).append((node, None))
        elif node.op == "call_module":
            for name, parameter in root.get_submodule(node.target).named_parameters(remove_duplicate=False):
                if parameter.requires_grad:
                    uses_of.setdefault(id(parameter), []).append((node, name))
    # 3. a layer for each that is tied
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    tied_names: dict[fx.Node, list[tuple[str, fx.Node]]] = {}
    for key, uses in uses_of.items():
        if key not in names:
            continue
        # Of several reentrant checkpoints each has a backward, and the plain loop adds one after another.
        users = [user for node, inside in uses for user in ((node,) if inside else node.users)]
        if len({user.meta.get("segment", 0) for user in users}) > 1:
            raise PlanError(
                f"{names[key]} is used in a torch.utils.checkpoint with use_reentrant=True and outside of "
                "it, so its gradient is not added up at once; take use_reentrant=False"
            )
        if names[key] not in tied and len({node for node, _ in uses}) == 1:
            continue
        with graph.inserting_before(uses[0][0]):
            layer = graph.get_attr(names[key])
        for node, name in uses:
            if name is None:
                node.replace_all_uses_with(layer)
                graph.erase_node(node)
            else:
                tied_names.setdefault(node, []).append((name, layer))
    return tied_names
