"""Models that a trace takes: refusals by the path of a module, and the modules that are one layer each.

A copy of a refused model, or its trace, would fail with words that do not say what is meant. One layer is
what was named (``leaves=``) or compiled: it runs as it is, and cuts are between layers."""

import contextlib
import difflib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils.spectral_norm import SpectralNorm

from ...compression.errors import PlanError
from ..device import KINDS
from ..seeds import TURN
from ..torch_private import FORWARD_PRE_HOOKS, is_compiled_in_place, optimized_module, tree_leaves


def refuse_model(model: nn.Module) -> None:
    """Raise PlanError for what cannot be copied, traced or trained, whichever module of ``model`` it is."""
    if torch.is_inference_mode_enabled():
        raise PlanError(
            "a model is traced as it trains, and inside torch.inference_mode() nothing does; leave it"
        )
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise PlanError(
            f"a pipeline takes the plain model, found it in a {type(model).__name__}; give model.module"
        )
    for path, module in model.named_modules():
        for reason in _refusals(module):
            raise PlanError(f"{path or 'the model'} {reason}")


def _refusals(module: nn.Module) -> Iterator[str]:
    if isinstance(module, torch.jit.ScriptModule):
        yield "is a TorchScript module, which nobody can look into; give the module it was made of"
    if ".quantized" in type(module).__module__ and type(module).__module__.startswith("torch."):
        yield "is quantised and does not train; train the model in floating point and quantise it afterwards"
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        if tensor.layout is not torch.strided:
            yield f"has a tensor without strides, {name} ({tensor.layout}); hold it dense"
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            yield f"is lazy, its {name} has no shape yet; run the model once on a batch: model(x)"
        if tensor.is_inference():
            yield (
                f"has a tensor made in inference mode, {name}, which cannot be trained; make the model "
                "outside torch.inference_mode()"
            )
    for name, item in vars(module).items():
        if isinstance(item, torch.Tensor) and item.grad_fn is not None:
            yield (
                f"holds {name}, a tensor that was computed from its parameters, as pruning and the old "
                "torch.nn.utils.weight_norm do; use torch.nn.utils.parametrizations, or prune.remove it"
            )
        if isinstance(item, torch.Generator):
            yield (
                f"holds {name}, a torch.Generator, and what is drawn from one depends on the cuts; "
                "draw from the default generator, which is seeded for every layer"
            )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        yield (
            "has max_norm, with which its forward writes to its weight; leave it out, and give "
            "F.embedding(x, torch.renorm(weight, 2, 0, max_norm)) in a forward of your own"
        )
    if any(isinstance(hook, SpectralNorm) for hook in vars(module)[FORWARD_PRE_HOOKS].values()):
        yield (
            "has the old torch.nn.utils.spectral_norm, whose hook writes to its weight; use "
            "torch.nn.utils.parametrizations.spectral_norm"
        )


def refuse_objects(graph: fx.Graph) -> None:
    """Raise PlanError for a layer that is given a generator of its own: what it draws depends on the cuts."""
    for node in graph.nodes:
        given = [*tree_leaves(node.args), *tree_leaves(node.kwargs)]
        if any(isinstance(item, torch.Generator) for item in given):
            raise PlanError(
                f"{node.name} is given a Generator by forward; leave it out: the default generator is "
                "seeded for every layer"
            )


def refuse_autocast() -> None:
    """Raise PlanError where autocast is on around us: which weights it casts once depends on the cuts."""
    if any(map(torch.is_autocast_enabled, KINDS)):
        raise PlanError(
            "a pipeline casts by itself, without a cache of cast weights, and torch.autocast is on around "
            "it; leave that block, and give its dtype as autocast= to trace and Pipeline"
        )


Leaf = str | type[nn.Module] | Callable[..., Any]


def is_compiled(module: nn.Module) -> bool:
    """Return whether it came from ``torch.compile(module)`` or was compiled in place."""
    kind = optimized_module()
    return (kind is not None and isinstance(module, kind)) or is_compiled_in_place(module)


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """The block in which compiled pieces run as they were written: none of the few versions that torch keeps
    of a compiled function is spent on tensors without memory.

    One thread at a time: torch has one stance for all, and of two that overlap the last would keep it."""
    if optimized_module() is None:
        yield
        return
    with TURN, torch.compiler.set_stance("force_eager"):
        yield


def chosen_leaves(
    model: nn.Module, leaves: Iterable[Leaf]
) -> tuple[dict[str, str], dict[str, Callable[..., Any]]]:
    """The modules of ``model`` by path, and functions by dotted name, that ``leaves`` names; each with why.

    Args:    leaves: classes of modules (or their names), paths of modules, functions (or their dotted names:
             only among what is imported already, since a plan may name them).
    Raises:  PlanError: one names nothing of the model."""
    if isinstance(leaves, str) or not isinstance(leaves, Iterable):
        raise PlanError(
            f"leaves is a list of classes, module paths and functions, found {leaves!r}; wrap it: [...]"
        )
    modules: dict[str, str] = {}
    functions: dict[str, Callable[..., Any]] = {}
    paths = dict(model.named_modules())
    for leaf in leaves:
        found = [path for path, module in paths.items() if _is_meant(leaf, path, module)]
        if found == [""]:
            raise PlanError(
                f"the whole model as one leaf is one layer, which no cut divides, found {leaf!r} in leaves"
            )
        if found:
            modules |= {path: "by request" for path in found if path}
        elif function := _function(leaf):
            functions[f"{function.__module__}.{function.__qualname__}"] = function
        else:
            known = [*dict.fromkeys(type(module).__name__ for module in paths.values()), *filter(None, paths)]
            name = leaf if isinstance(leaf, str) else getattr(leaf, "__name__", repr(leaf))
            close = difflib.get_close_matches(str(name), known, n=3) or known[1:6]
            raise PlanError(
                f"leaves names classes and paths of the model's modules, or functions that are imported, "
                f"found {name!r}; it has {', '.join(close)}"
            )
    for path in modules:
        if isinstance(paths[path], nn.ModuleList | nn.ModuleDict):
            raise PlanError(
                f"{path} is a {type(paths[path]).__name__}, which nobody calls; name the modules in it"
            )
    return modules, functions


def _is_meant(leaf: Leaf, path: str, module: nn.Module) -> bool:
    kind = type(module)
    if isinstance(leaf, str):
        return leaf in (path, kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    return isinstance(leaf, type) and isinstance(module, leaf)


def _function(leaf: Leaf) -> Callable[..., Any] | None:
    if isinstance(leaf, str):
        home, _, name = leaf.rpartition(".")
        leaf = getattr(sys.modules.get(home), name, None)  # type: ignore[assignment]
    ours = callable(leaf) and not isinstance(leaf, type | nn.Module)
    return leaf if ours and hasattr(leaf, "__qualname__") else None  # type: ignore[return-value]
