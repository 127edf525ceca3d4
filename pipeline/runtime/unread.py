"""Who uses the running statistics of a batch norm beside it, within a layer that is a whole module.

Replicas add them at the update, so what else reads them in a forward would read those of the last one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ...compression.errors import StageError

T = TypeVar("T")

_OF_SHAPE = ("__get__", "__len__", "size", "dim", "numel", "stride", "is_floating_point", "is_complex")


class Unread(TorchFunctionMode):
    """The block in which nobody may use ``buffers`` (name by identity); norms that run have others then.

    Raises: StageError: somebody does."""

    def __init__(self, buffers: Mapping[int, str]) -> None:
        super().__init__()
        self.buffers = buffers

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at what is given, and call."""
        found = func(*args, **(kwargs or {}))
        named = (self.buffers.get(id(item)) for item in tree_leaves((args, kwargs)))
        if (name := next(filter(None, named), "")) and not _only_shape(func, found):
            raise StageError(
                "replicas add running statistics at the update, and only a module of torch.nn that is called "
                f"may read or write them, found a layer that uses {name} by itself; leave it to the module, "
                "or take one rank for its stage"
            )
        return found


def unwatched(function: Callable[..., T]) -> Callable[..., T]:
    """A function during which no such block counts."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> T:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run


def _only_shape(func: Any, found: object) -> bool:
    """Whether an answer tells of a tensor no more than its shape, dtype and device."""
    return not isinstance(found, torch.Tensor) and getattr(func, "__name__", "") in _OF_SHAPE
