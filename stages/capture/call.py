"""How a model is called: its example as a flat list of tensors, and back to arguments.

Everything below ``trace`` passes tensors by position; people pass a tuple, or a dict by name, with flags and
None between them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ...compression.errors import PlanError

Example = tuple[Any, ...] | Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """``names`` of the tensors among the leaves of (args, kwargs); the other leaves stay as they are."""

    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    places: tuple[int, ...]
    spec: TreeSpec

    @classmethod
    def of(cls, model: nn.Module, example: Example) -> tuple[Call, tuple[torch.Tensor, ...]]:
        """The call that ``example`` is one of, and its tensors.

        Raises: PlanError: it is neither a tuple nor a dict, or has no tensor."""
        if isinstance(example, Mapping):
            args, kwargs = (), dict(example)
        elif isinstance(example, tuple):
            args, kwargs = example, {}
        else:
            found = type(example).__name__
            raise PlanError(
                f"example_inputs is a tuple (by position) or a dict (by name) of what the model takes, found a {found}; "
                "wrap it: (x,)"
            )
        leaves, spec = tree_flatten((args, kwargs))
        places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        if not places:
            raise PlanError("example_inputs holds at least one tensor, found none; give one micro-batch")
        names = _names(model, args, kwargs)
        plain = tuple(None if i in places else leaf for i, leaf in enumerate(leaves))
        call = cls(names=tuple(names[i] for i in places), leaves=plain, places=places, spec=spec)
        return call, tuple(leaves[i] for i in places)

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with these tensors."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self.spec)

    def run(self, model: nn.Module, tensors: Sequence[torch.Tensor]) -> Any:
        """Call ``model`` with these tensors."""
        args, kwargs = self.arguments(tensors)
        return model(*args, **kwargs)


def _names(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """A name for every leaf: that of its parameter, with a number behind it where one has several."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names: list[str] = []
    for i, item in [*enumerate(args), *kwargs.items()]:
        name = i if isinstance(i, str) else positional[i] if i < len(positional) else f"input_{i}"
        count = len(tree_flatten(item)[0])
        names += [name] if count == 1 else [f"{name}_{k}" for k in range(count)]
    return names
