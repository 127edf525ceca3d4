"""Chance and writes of runs on the meta device: nothing is drawn or written there, but torch's
dispatch says which calls would.

A generator's state and the bytes of a buffer tell it of a real run; without data neither moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .device import CPU
from .torch_private import TorchDispatchMode, dispatch_mode, memory_id, schema_of, tree_leaves, tree_map_only

META = torch.device("meta")
_STATISTICS = slice(3, 5)  # running mean and variance among the arguments of a batch norm
_TRAINING = 5
_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")  # whose schemas name no write


class MetaWatch(TorchDispatchMode):
    """Looks on in a block; asked like a ``torch.Generator``, its state is how often something was drawn.

    Attributes: writes: the storages that were written to, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = 0
        self.writes: list[int] = []
        self._kept: list[torch.UntypedStorage] = []  # else a storage that is gone gives its number to another

    def get_state(self) -> torch.Tensor:
        """Number of draws."""
        return torch.tensor([self.draws], device=CPU)

    def set_state(self, state: torch.Tensor) -> None:
        """Do nothing: what was drawn stays drawn."""

    def manual_seed(self, seed: int) -> None:
        """Nothing follows from a seed here."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """One call of a kernel."""
        kwargs = kwargs or {}
        self.draws += torch.Tag.nondeterministic_seeded in func.tags
        self._writes(written_by(func, args, kwargs))
        if schema_of(func).name.partition("::")[2] in _NORMS and args[_TRAINING]:
            self._writes(args[_STATISTICS])
        if {tensor.is_meta for tensor in tensors_in((args, kwargs))} == {True, False}:
            to_meta = lambda tensor: tensor.to(META)  # noqa: E731 (a tensor of a file has values)
            args = tree_map_only(torch.Tensor, to_meta, args)
            kwargs = {name: tree_map_only(torch.Tensor, to_meta, given) for name, given in kwargs.items()}
        return func(*args, **kwargs)

    def _writes(self, given: Any) -> None:
        for tensor in tensors_in(given):
            if tensor.is_meta:
                self._kept.append(tensor.untyped_storage())
                self.writes.append(memory_id(tensor))


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation writes to, as its schema says."""
    taken = schema_of(func).arguments
    pairs = [*zip(taken, args, strict=False), *((a, kwargs[a.name]) for a in taken if a.name in kwargs)]
    return [t for a, value in pairs if a.alias_info and a.alias_info.is_write for t in tensors_in(value)]


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors among what a call is given."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def watching() -> MetaWatch | None:
    """The one that looks on now, if any."""
    mode = dispatch_mode()
    return mode if isinstance(mode, MetaWatch) else None
