"""Tied parameters as values: one layer reads them, and from there they travel like anything else.

Two modules that share a parameter may end on two stages; then it needs an owner, a chain and a gradient that
comes back, which a value has already. Buffers, constants and frozen parameters are read where they are used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import fx, nn

from ...compression.errors import PlanError
from .layers import is_local, tensor_at


def _parameter_uses(
    root: nn.Module, graph: fx.Graph, constants: Mapping[str, torch.Tensor]
) -> dict[int, list[tuple[fx.Node, str | None]]]:
    """For every trained parameter the nodes that use it, and its name in their module (None: get_attr)."""
    uses: dict[int, list[tuple[fx.Node, str | None]]] = {}
    for node in graph.nodes:
        if node.op == "get_attr" and not is_local(node):
            uses.setdefault(id(tensor_at(root, str(node.target), constants)), []).append((node, None))
        elif node.op == "call_module":
            for name, parameter in root.get_submodule(node.target).named_parameters(remove_duplicate=False):
                if parameter.requires_grad:
                    uses.setdefault(id(parameter), []).append((node, name))
    return uses


def _refuse_segments(name: str, uses: Iterable[tuple[fx.Node, str | None]]) -> None:
    """Refuse a parameter whose gradients the plain loop adds one after another: a reentrant checkpoint has a
    backward of its own."""
    users = [user for node, inside in uses for user in ((node,) if inside else node.users)]
    if len({user.meta.get("segment", 0) for user in users}) > 1:
        raise PlanError(
            f"{name} is used in a torch.utils.checkpoint with use_reentrant=True and outside of it, so its "
            "gradient is not added up at once; take use_reentrant=False"
        )


def lift_shared(
    root: nn.Module, graph: fx.Graph, tied: Collection[str], constants: Mapping[str, torch.Tensor]
) -> dict[fx.Node, list[tuple[str, fx.Node]]]:
    """Make one layer of every trained parameter that several nodes use (or ``tied`` names), before its first
    user.

    A tied parameter then is a value like any other. Buffers, constants and frozen parameters are read where
    they are used and never travel: their get_attr nodes become local to each user."""
    for node in list(graph.nodes):
        if node.op == "get_attr" and not tensor_at(root, str(node.target), constants).requires_grad:
            for user in list(node.users):
                with graph.inserting_before(user):
                    local = graph.get_attr(node.target)
                local.meta["local"] = True
                user.replace_input_with(node, local)
            graph.erase_node(node)
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    lifted: dict[fx.Node, list[tuple[str, fx.Node]]] = {}
    for key, uses in _parameter_uses(root, graph, constants).items():
        if key in names:
            _refuse_segments(names[key], uses)
        shared = key in names and (names[key] in tied or len({node for node, _ in uses}) > 1)
        if not shared:
            continue
        with graph.inserting_before(uses[0][0]):
            layer = graph.get_attr(names[key])
        for node, name in uses:
            if name is None:
                node.replace_all_uses_with(layer)
                graph.erase_node(node)
            else:
                lifted.setdefault(node, []).append((name, layer))
    return lifted
