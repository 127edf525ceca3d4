"""Call of a model: its example as a flat list of tensors, and back to arguments.

Everything below ``trace`` passes tensors by position; people pass a tuple, or a dict by name, with flags and
None between them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ....compression.errors import PlanError
from ...split_inputs import Column, Split
from ...torch_private import TreeSpec, tree_flatten, tree_unflatten
from .signature import PLAIN

Example = tuple[Any, ...] | Mapping[str, Any]


Examples = Example | Sequence[Example]
"""One micro-batch as the model takes it, or several of other shapes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Constant:
    """A tensor among a model's inputs that has no sample in it (a mask of a fixed shape, a table of
    positions): every micro-batch gets all of it."""

    tensor: torch.Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, torch.Tensor):
            raise PlanError(
                f"penstock.Constant holds a tensor, found {self.tensor!r}; give numbers, flags and None as "
                "they are"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """``names`` of the tensors among the leaves of (args, kwargs), and whether each is a ``Constant``
    (``whole``); the other leaves stay as they are."""

    names: tuple[str, ...]
    whole: tuple[bool, ...]
    leaves: tuple[Any, ...]
    places: tuple[int, ...]
    spec: TreeSpec

    @classmethod
    def of(cls, model: nn.Module, example: Example) -> tuple[Call, tuple[torch.Tensor, ...]]:
        """The call that ``example`` is one of, and its tensors; PlanError if it is none."""
        if not isinstance(example, tuple | Mapping):
            raise PlanError(
                "example_inputs is a tuple (by position) or a dict (by name) of what the model takes, or a "
                f"list of several, found a {type(example).__name__}; wrap it: (x,)"
            )
        args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})
        leaves, spec = tree_flatten((args, kwargs))
        names = _names(model, args, kwargs)
        places = tuple(i for i, leaf in enumerate(leaves) if _is_tensor(leaf))
        for i, leaf in enumerate(leaves):
            if i not in places and not isinstance(leaf, PLAIN):
                raise PlanError(
                    f"a model is called with tensors, numbers, strings, None, and tuples, lists and dicts "
                    f"of them, found a {type(leaf).__name__} for {names[i]}; make it inside the model"
                )
        call = cls(
            names=tuple(names[i] for i in places),
            whole=tuple(isinstance(leaves[i], Constant) for i in places),
            leaves=tuple(None if i in places else leaf for i, leaf in enumerate(leaves)),
            places=places,
            spec=spec,
        )
        if all(call.whole):
            raise PlanError(
                "example_inputs holds at least one tensor of samples, found none; give one micro-batch"
            )
        return call, tuple(map(_tensor, (leaves[i] for i in places)))

    @classmethod
    def of_several(
        cls, model: nn.Module, examples: Examples
    ) -> tuple[Call, tuple[torch.Tensor, ...], list[tuple[torch.Tensor, ...]]]:
        """The call that all ``examples`` are of, the tensors of the largest, and of the others."""
        several: Any = examples if isinstance(examples, list) else [examples]
        found = [cls.of(model, one) for one in several]
        if not found:
            raise PlanError("example_inputs holds one micro-batch at least, found []; give one")
        found.sort(key=lambda one: -sum(x.numel() for x in one[1]))
        (call, given), *others = found
        if any(other != call for other, _ in others):
            raise PlanError(
                "examples of several shapes are one call, found other names or other numbers beside their "
                "tensors; give them alike"
            )
        return call, given, [tensors for _, tensors in others]

    def tensors(self, given: Any) -> tuple[torch.Tensor, ...]:
        """The tensors of a batch: one alone, a tuple by position, a dict by name, or nested as the example.

        Raises: PlanError: they, or what stands beside them, are not as in the example."""
        if not isinstance(given, Mapping):
            found = tuple(given) if isinstance(given, tuple | list) else (given,)
            if len(found) == len(self.names) and all(map(_is_tensor, found)):
                return tuple(map(_tensor, found))
            return self._by_structure((found, {}), found)
        if given.keys() == {*self.names} and all(map(_is_tensor, given.values())):
            return tuple(_tensor(given[name]) for name in self.names)
        known = list(self.arguments([torch.empty(0)] * len(self.names))[1]) or list(self.names)
        if set(known) != given.keys():
            raise PlanError(
                f"the model takes the inputs {', '.join(known)}, as in its example, found "
                f"{', '.join(map(str, given))}; trace it with an example of what it will get"
            )
        return self._by_structure(((), {name: given[name] for name in known}), given.values())

    def columns(self, given: Any) -> tuple[Column, ...]:
        """``tensors`` of a batch; of a ``Split`` those of every micro-batch."""
        if not isinstance(given, Split):
            return self.tensors(given)
        rows = [self.tensors(one) for one in given.micro_batches]
        if not rows:
            raise PlanError("penstock.Split has the inputs of every micro-batch, found none; give them")
        columns = zip(zip(*rows, strict=True), self.whole, strict=True)
        return tuple(column[0] if whole else column for column, whole in columns)

    def samples_of(self, tensors: Sequence[torch.Tensor]) -> int:
        """The samples of a micro-batch: the length of its first input that is no constant."""
        pairs = zip(tensors, self.whole, strict=True)
        return next((len(x) for x, whole in pairs if not whole and x.dim()), 0)

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

    def _by_structure(self, arguments: Any, found: Any) -> tuple[torch.Tensor, ...]:
        """The tensors of a batch that has what stands between them in the example, too."""
        leaves, spec = tree_flatten(arguments)
        places = [i for i, leaf in enumerate(leaves) if _is_tensor(leaf)]
        if spec != self.spec or tuple(places) != self.places:
            kinds, number = [type(x).__name__ for x in found], len(self.names)
            shown = ", ".join([*kinds[: number + 1], *["..."] * (len(kinds) > number + 1)])
            raise PlanError(
                f"the model takes {number} tensors ({', '.join(self.names)}), found {len(kinds)} "
                f"({shown}); give a tensor for each: torch.as_tensor makes one of an array, torch.stack of "
                "samples"
            )
        for name, seen, now in zip(range(len(leaves)), self.leaves, leaves, strict=True):
            if name not in places and (type(seen), seen) != (type(now), now):
                raise PlanError(
                    f"what stands beside the tensors is as in the example that was traced: {seen!r} there, "
                    f"found {now!r}; trace with an example that has it"
                )
        return tuple(_tensor(leaves[i]) for i in places)


def _is_tensor(item: object) -> bool:
    return isinstance(item, torch.Tensor | Constant)


def _tensor(item: torch.Tensor | Constant) -> torch.Tensor:
    return item.tensor if isinstance(item, Constant) else item


def _names(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """A name for every leaf: that of its parameter, with a number behind it where one has several."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names: list[str] = []
    for i, item in [*enumerate(args), *kwargs.items()]:
        name = i if isinstance(i, str) else positional[i] if i < len(positional) else f"input_{i}"
        leaves, spec = tree_flatten(item)
        names += [name] if spec.is_leaf() else [f"{name}_{k}" for k in range(len(leaves))]
    return names


def fresh(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Copies in memory of their own: views may be misaligned, and a layer may write to its input."""
    return tuple(x.detach().clone() for x in inputs)


def resized(call: Call, example: Sequence[torch.Tensor], size: int) -> list[torch.Tensor]:
    """The example with ``size`` samples: its own, and then again; constants stay."""
    samples = call.samples_of(example)
    again = torch.arange(size) % max(1, samples)
    pairs = zip(example, call.whole, strict=True)
    kept = [(x, whole or not x.dim() or len(x) != samples) for x, whole in pairs]
    return [x.clone() if whole else x[again.to(x.device)] for x, whole in kept]


def other_data(call: Call, example: Sequence[torch.Tensor], *, seed: int = 1) -> list[torch.Tensor]:
    """Inputs like the example: every element is one from the same place of some sample, so that what holds
    for a place in all samples (positions, padding) goes on to hold; a single sample lends from all of its
    places. Constants stay."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for tensor, whole in zip(example, call.whole, strict=True):
        if not whole and tensor.numel() and tensor.dim():
            several = len(tensor) > 1
            most = len(tensor) if several else tensor.numel()
            drawn = torch.randint(most, tensor.shape, generator=generator, device=generator.device)
            drawn = drawn.to(tensor.device)
            lent = tensor.gather(0, drawn) if several else tensor.flatten()[drawn]
        else:
            lent = tensor
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        found.append(like.copy_(lent))
    return found
