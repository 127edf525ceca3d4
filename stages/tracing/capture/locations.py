"""Where in a model something happened: for the choice of what becomes one layer, and for sentences."""

from __future__ import annotations

from torch import fx, nn

from ....compression.errors import PlanError
from .dynamic_shapes import Different
from .nodes import Unrecordable


def around(model: nn.Module, failure: Different | Unrecordable) -> str:
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


def unrepeatable(model: nn.Module, failure: Different | Unrecordable) -> PlanError:
    """What a model is refused with that no layer can be made of."""
    if isinstance(failure, Unrecordable):
        found, where = failure.what, f" ({failure.where})" if failure.where else ""
    else:
        found, where = f"it goes another way with other data: {failure.what}", where_of(failure.node)
    return PlanError(
        f"forward of {type(model).__name__} itself must be the same calls every time, found that "
        f"{found}{where}; put that part into a module of its own, which then is one layer; where the code "
        "is not yours, in a subclass that overrides the method"
    )
