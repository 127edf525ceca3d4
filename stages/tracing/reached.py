"""Through which layers a gradient surely comes back to a value: what the graph of a recorded run leads to.

A receiver that knows this takes no None for such a gradient. Only torch's own layers are believed: a function
of a person may take another way in every run, and a backward of his own may return None."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from .layers import Layer, Parts
from .probe_record import Leads, local_at
from .proof import is_of_torch

Edges = dict[tuple[Node, int], int]  # of a graph, and the number of the value that it belongs to
_HANGS = ("register_hook", "register_post_accumulate_grad_hook")
_OWN = ("torch", "torch.functional", "torch.nn.functional", "_operator", "math", "builtins")


def edges_of(items: Iterable[tuple[int, object]]) -> Edges:
    """Where the gradients of values (number, object) enter the graph; of those that have one."""
    if not torch.is_grad_enabled():  # there is no graph
        return {}
    asked = [(number, t) for number, t in items if isinstance(t, torch.Tensor) and t.requires_grad]
    edges = [(number, get_gradient_edge(tensor)) for number, tensor in asked]
    return {(edge.node, edge.output_nr): number for number, edge in edges}


def leads(layer: Layer, parts: Parts, *, made: Edges, read: Edges) -> Leads:
    """For each value that ``layer`` made, those it read that the gradient of that value surely comes to."""
    if not read or not _is_own(layer, parts):
        return {}
    return {number: _led_to(edge, read) for edge, number in made.items()}


def _led_to(edge: tuple[Node, int], read: Edges) -> set[int]:
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


class Hung(TorchFunctionMode):
    """The block in which a layer runs; ``any``: it hung functions on gradients, which read what they like."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call of torch."""
        self.any |= getattr(func, "__name__", "") in _HANGS
        return func(*args, **kwargs or {})


def keeps_itself(layer: Layer, parts: Parts, *, made: Edges, read: Edges) -> bool:
    """Whether a backward of a person's is among those of ``layer``: it reads what it likes, saved or not."""
    ahead = [] if _is_own(layer, parts) else [node for node, _ in made]
    before, seen = {node for node, _ in read}, set[Node]()
    while ahead:
        node = ahead.pop()
        if isinstance(node, BackwardCFunction) and node not in before:
            return True
        if node not in seen and node not in before:
            seen.add(node)
            ahead += [following for following, _ in node.next_functions if following is not None]
    return False


def _is_own(layer: Layer, parts: Parts) -> bool:
    """Whether torch alone says what a layer does."""
    node = layer.node
    if node.op == "call_module":
        return is_of_torch(parts.modules[str(node.target)])
    home = getattr(node.target, "__module__", None) or ""
    owner = getattr(node.target, "__objclass__", None)  # of a method of torch.Tensor
    return owner in (torch.Tensor, torch._C.TensorBase) or home in _OWN or home.startswith("torch._C")


@contextlib.contextmanager
def keeping() -> Iterator[set[int]]:
    """The block in which a layer runs; the memory that it keeps for its backward."""
    found = set[int]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided:
            found.add(tensor.untyped_storage()._cdata)
        return tensor.detach()  # a node that kept its own result would never be freed

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found


def statistics_of(layer: Layer, parts: Parts) -> set[int]:
    """The memory of running statistics that a layer keeps, and that no backward in train mode reads."""
    if layer.node.op == "call_module":
        modules = parts.modules[str(layer.node.target)].modules()
        norms = (part for part in modules if isinstance(part, nn.modules.batchnorm._NormBase))
        found = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
    else:
        norm = getattr(layer.node.target, "__name__", "") in ("batch_norm", "instance_norm")
        found = [*local_at(layer.node, parts).values()] if norm else []
    return {tensor.untyped_storage()._cdata for tensor in found}


def runs_own_code(layer: Layer, parts: Parts) -> bool:
    """Whether a layer is more than one call of torch, and torch alone does not say what it does."""
    node = layer.node
    return "opaque" in node.meta and not (
        node.op == "call_module" and is_of_torch(parts.modules[str(node.target)])
    )


def reached(steps: Mapping[int, Leads], outputs: Collection[int], num_layers: int) -> dict[int, int]:
    """The last layer through which a gradient surely comes to a value, by number; not those without one.

    Args:    steps: what ``leads`` found, by layer.
             outputs: the values that the model returns and that have gradients; of several the loss may leave
             out any."""
    last = dict.fromkeys(outputs, num_layers) if len(outputs) == 1 else {}
    for index in sorted(steps, reverse=True):
        for end, starts in steps[index].items():
            for start in starts if end in last else ():
                last.setdefault(start, index)
    return last
