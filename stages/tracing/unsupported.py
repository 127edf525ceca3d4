"""Refusals of a model before it is traced: each by the path of the module, with what to do instead.

A copy of such a model, or its trace, would fail with words that do not say what is meant."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils.spectral_norm import SpectralNorm

from ...compression.errors import PlanError
from ..device import KINDS
from ..torch_private import BUFFERS, FORWARD_PRE_HOOKS, PARAMETERS, tree_leaves

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


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
        for reason in (reason for rule in RULES for reason in rule(module)):
            raise PlanError(f"{path or 'the model'} {reason}")


def _of_another_kind(module: nn.Module) -> Iterator[str]:
    if isinstance(module, torch.jit.ScriptModule):
        yield "is a TorchScript module, which nobody can look into; give the module it was made of"
    if ".quantized" in type(module).__module__ and type(module).__module__.startswith("torch."):
        yield "is quantised and does not train; train the model in floating point and quantise it afterwards"


def _not_trainable(module: nn.Module) -> Iterator[str]:
    held = [item for kind in (PARAMETERS, BUFFERS) for item in vars(module)[kind].items()]
    for name, tensor in held:
        if isinstance(tensor, torch.Tensor) and tensor.layout is not torch.strided:
            yield f"has a tensor without strides, {name} ({tensor.layout}); hold it dense"
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            yield f"is lazy, its {name} has no shape yet; run the model once on a batch: model(x)"
        if tensor is not None and tensor.is_inference():
            yield (
                f"has a tensor made in inference mode, {name}, which cannot be trained; make the model "
                "outside torch.inference_mode()"
            )


def _computed(module: nn.Module) -> Iterator[str]:
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


def _writes_weights(module: nn.Module) -> Iterator[str]:
    if isinstance(module, EMBEDDINGS) and module.max_norm is not None:
        yield (
            "has max_norm, with which its forward writes to its weight; leave it out, and give "
            "F.embedding(x, torch.renorm(weight, 2, 0, max_norm)) in a forward of your own"
        )
    if any(isinstance(hook, SpectralNorm) for hook in vars(module)[FORWARD_PRE_HOOKS].values()):
        yield (
            "has the old torch.nn.utils.spectral_norm, whose hook writes to its weight; use "
            "torch.nn.utils.parametrizations.spectral_norm"
        )


RULES = (_of_another_kind, _not_trainable, _computed, _writes_weights)


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


def refuse_resized(name: str, now: torch.Tensor, before: torch.Tensor) -> None:
    """Raise PlanError for a buffer or parameter that forward gave another shape."""
    if now.shape != before.shape:
        raise PlanError(
            f"forward gives {name} another shape, {tuple(now.shape)} instead of {tuple(before.shape)}; keep "
            "its shape, or run the model once on a batch before"
        )
