"""trace(model, example) -> LayerGraph: the network as layers and values, once as it trains and once as it
evaluates.

torch.fx loses things silently (no_grad and autocast blocks, buffer updates, branches), so the traced network
is run beside the eager one before anybody relies on it: same outputs, gradients and buffers, bit for bit, or
a refusal.
Source: claims B1.1-1.4 of CN110032450B (layer vertices, data vertices, dependencies)."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from ..compression.errors import PlanError
from .layers import Layer, Traced, is_local, parts_of, run_all
from .probe import Probe, probe


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerGraph:
    """A traced model: its train and eval traces, the record of each at the example's shape, and the copy they
    ran on."""

    train: Traced
    eval: Traced
    train_probe: Probe
    eval_probe: Probe
    twin: nn.Module
    example_inputs: tuple[torch.Tensor, ...]
    fingerprint: str

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, in the order in which they run."""
        return tuple(layer.name for layer in self.train.layers)


def trace(model: nn.Module, example_inputs: tuple[torch.Tensor, ...]) -> LayerGraph:
    """Trace ``model`` with torch.fx, in train and in eval mode, and prove both traces on copies of it.

    Modules keep their own training flags, unless the whole model stands in eval mode: then it is traced in
    train mode.

    Args:    model: any module that torch.fx can trace; left bit for bit as it was (weights, gradients, mode,
             random state).
             example_inputs: the positional inputs of one micro-batch, as tensors.
    Returns: the LayerGraph; a layer is one node of the default torch.fx trace and has that node's name.
    Raises:  PlanError: torch.fx cannot trace the model, or the trace does not compute what the model
             computes.
    """
    if not isinstance(example_inputs, tuple) or not all(isinstance(x, torch.Tensor) for x in example_inputs):
        raise PlanError(
            "example_inputs is a tuple of tensors, one for each input of the model; wrap them: (x,)"
        )
    with torch.random.fork_rng(devices=[]):
        eager, twin = _training_copy(model), _training_copy(model)
        train = _traced(model, twin, len(example_inputs))
        parts = parts_of(twin, train)
        try:
            expected = _observe(eager, eager, example_inputs)
        except Exception as error:
            shapes = ", ".join(str(tuple(x.shape)) for x in example_inputs)
            raise PlanError(
                f"the model does not run on inputs of shape {shapes}: {error}; give another example"
            ) from error
        _refuse_difference(
            expected, _observe(lambda *x: run_all(train, parts, x), twin, example_inputs), mode="train"
        )
        _restore(twin, model)
        train_probe = probe(train, parts, _fresh(example_inputs))
        _restore(twin, model)
        _restore(eager.eval(), model)
        evaluation = _traced(model, eager, len(example_inputs))
        parts = parts_of(eager, evaluation)
        with torch.no_grad():
            expected = _observe(eager, eager, example_inputs)
            found = _observe(lambda *x: run_all(evaluation, parts, x), eager, example_inputs)
            _refuse_difference(expected, found, mode="eval")
            eval_probe = probe(evaluation, parts, _fresh(example_inputs))
    return LayerGraph(
        train=train,
        eval=evaluation,
        train_probe=train_probe,
        eval_probe=eval_probe,
        twin=twin,
        example_inputs=_fresh(example_inputs),
        fingerprint=fingerprint(model),
    )


def _fresh(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Copies in memory of their own: a view of a batch may be misaligned, and a layer may write to its
    input."""
    return tuple(x.detach().clone() for x in inputs)


def _training_copy(model: nn.Module) -> nn.Module:
    """A copy as it will train: modules keep their own flags, unless the whole model stands in eval mode."""
    try:
        twin = copy.deepcopy(model)
    except Exception as error:
        raise PlanError(f"a model is traced on a copy, and this one cannot be copied: {error}") from error
    return twin if twin.training else twin.train()


def _restore(twin: nn.Module, model: nn.Module) -> None:
    """Give a copy the model's tensors back after a run, and no gradients."""
    pairs = zip((*twin.parameters(), *twin.buffers()), (*model.parameters(), *model.buffers()), strict=True)
    with torch.no_grad():
        for ours, original in pairs:
            ours.copy_(original)
    twin.zero_grad()


def _traced(model: nn.Module, root: nn.Module, num_inputs: int) -> Traced:
    """The trace of ``root``, a copy of ``model``: shared parameters lifted, further inputs at their
    defaults."""
    parameters = list(inspect.signature(root.forward).parameters.values())
    defaults = {p.name: p.default for p in parameters[num_inputs:] if p.default is not p.empty}
    try:
        graph = fx.Tracer().trace(root, defaults or None)
    except Exception as error:
        raise PlanError(
            f"torch.fx cannot trace {type(root).__name__}: {error}; keep branches and loops over tensor "
            "values out of "
            "forward, or put them into a function under torch.fx.wrap"
        ) from error
    _refuse_lost_buffers(model, root)
    _drop_default_inputs(graph, num_inputs)
    lifted = _lift_shared(root, graph)
    layers = tuple(
        Layer(node=node, module=_module_path(node), lifted=tuple(lifted.get(node, ())))
        for node in graph.nodes
        if node.op not in ("placeholder", "output") and not is_local(node)
    )
    inputs = tuple(node for node in graph.nodes if node.op == "placeholder")
    if not layers:
        raise PlanError(f"a pipeline needs at least one layer; {type(root).__name__}.forward calls none")
    if len(inputs) != num_inputs:
        names = ", ".join(node.name for node in inputs)
        raise PlanError(
            f"example_inputs has one tensor for each input; the model takes {names}, {num_inputs} were given"
        )
    constants = {n.target: operator.attrgetter(n.target)(root) for n in graph.nodes if n.op == "get_attr"}
    constants = {name: tensor for name, tensor in constants.items() if not _has(model, name)}
    return Traced(inputs=inputs, layers=layers, output=next(iter(reversed(graph.nodes))), constants=constants)


def _drop_default_inputs(graph: fx.Graph, num_inputs: int) -> None:
    """Remove the placeholders (and torch.fx's assertions on them) of arguments that stay at their
    defaults."""
    for node in [n for n in graph.nodes if n.op == "placeholder"][num_inputs:]:
        dead = [node]
        for user in dead:
            dead.extend(u for u in user.users if u not in dead)
        if all("_assert" in str(n.target) or n is node or n.target is operator.eq for n in dead):
            for user in reversed(dead):
                graph.erase_node(user)


def _module_path(node: fx.Node) -> str:
    """Dotted path of the module that the node was traced in, "" for the model itself."""
    stack = node.meta.get("nn_module_stack")
    return str(next(reversed(stack.values()))[0]) if stack else ""


def _parameter_uses(root: nn.Module, graph: fx.Graph) -> dict[int, list[tuple[fx.Node, str | None]]]:
    """For every trained parameter the nodes that use it: (node, name inside its module; None for a get_attr
    node)."""
    uses: dict[int, list[tuple[fx.Node, str | None]]] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            uses.setdefault(id(operator.attrgetter(node.target)(root)), []).append((node, None))
        elif node.op == "call_module":
            for name, parameter in root.get_submodule(node.target).named_parameters(remove_duplicate=False):
                if parameter.requires_grad:
                    uses.setdefault(id(parameter), []).append((node, name))
    return uses


def _lift_shared(root: nn.Module, graph: fx.Graph) -> dict[fx.Node, list[tuple[str, fx.Node]]]:
    """Make one layer of every trained parameter that several nodes use, right before its first user.

    A tied parameter then is a value like any other. Buffers, constants and frozen parameters are read where
    they are used and never travel: their get_attr nodes become local to each user."""
    for node in list(graph.nodes):
        if node.op == "get_attr" and not operator.attrgetter(node.target)(root).requires_grad:
            for user in list(node.users):
                with graph.inserting_before(user):
                    local = graph.get_attr(node.target)
                local.meta["local"] = True
                user.replace_input_with(node, local)
            graph.erase_node(node)
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    lifted: dict[fx.Node, list[tuple[str, fx.Node]]] = {}
    for key, uses in _parameter_uses(root, graph).items():
        if key not in names or len({node for node, _ in uses}) < 2:
            continue
        with graph.inserting_before(uses[0][0]):
            shared = graph.get_attr(names[key])
        for node, name in uses:
            if name is None:
                node.replace_all_uses_with(shared)
                graph.erase_node(node)
            else:
                lifted.setdefault(node, []).append((name, shared))
    return lifted


def _has(model: nn.Module, name: str) -> bool:
    try:
        operator.attrgetter(name)(model)
    except AttributeError:
        return False
    return True


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors agree in shape, dtype and every bit (torch.equal takes -0.0 for 0.0 and no NaN for
    itself)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1) for t in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _refuse_lost_buffers(model: nn.Module, traced: nn.Module) -> None:
    """Refuse a model whose forward writes buffers outside its layers: torch.fx runs that at trace time and
    loses it."""
    after = dict(traced.named_buffers())
    for name, buffer in model.named_buffers():
        if name not in after or not same_bits(buffer, after[name]):
            raise PlanError(
                f"torch.fx loses what forward writes to the buffer {name}; move that update into a module of "
                "its own "
                "that torch.fx takes as a leaf"
            )


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor))


def _observe(
    run: Callable[..., Any], model: nn.Module, inputs: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor | None]:
    """Outputs, gradients and buffers of one forward and backward from a fixed random state."""
    torch.manual_seed(0)
    model.zero_grad()
    outputs = list(_tensors(run(*_fresh(inputs))))
    seen: dict[str, torch.Tensor | None] = {f"output {i}": t.detach().clone() for i, t in enumerate(outputs)}
    roots = [t for t in outputs if t.requires_grad]
    weights = [torch.linspace(-1, 1, t.numel(), dtype=torch.float64).reshape(t.shape).to(t) for t in roots]
    if roots:
        torch.autograd.backward(roots, weights)
    seen |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    seen |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
    return seen


def _refuse_difference(
    expected: Mapping[str, torch.Tensor | None], found: Mapping[str, torch.Tensor | None], *, mode: str
) -> None:
    """Raise PlanError unless the trace's outputs, gradients and buffers are the eager model's, bit for
    bit."""
    for name, tensor in expected.items():
        other = found.get(name)
        if (tensor is None) != (other is None) or (
            tensor is not None and other is not None and not same_bits(tensor, other)
        ):
            raise PlanError(
                f"the torch.fx trace does not compute what the model computes in {mode} mode ({name} "
                "differs): no_grad and "
                "autocast blocks, tensors made in forward and branches on values are lost; "
                "move them into a module of their own or wrap the function with torch.fx.wrap"
            )


def fingerprint(model: nn.Module) -> str:
    """A hash of what a plan relies on beside the layers' names: names, shapes and dtypes of parameters and
    buffers."""
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    return digest.hexdigest()
