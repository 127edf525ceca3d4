"""What a model returns, as a flat list of tensors and numbers, and back: dicts, dataclasses and all.

What holds tensors and is no such structure (a cache of keys and values) cannot be put together again from
stages, so it is left out, and said."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...meta_watch import tensors_in

_NUMBERS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def flattened(result: Any) -> tuple[list[Any], pytree.TreeSpec, tuple[str, ...]]:
    """Leaves and structure of ``result``, and what was left out of it, by name."""
    _register(result)
    paths, spec = pytree.tree_flatten_with_path(result)
    leaves, dropped = [], []
    for path, leaf in paths:
        if isinstance(leaf, (torch.Tensor, *_NUMBERS)):
            leaves.append(leaf)
        else:
            leaves.append(None)
            name = re.sub(r"\['(\w+)'\]", r".\1", pytree.keystr(path)).lstrip(".")
            dropped.append(f"{name or 'its result'} ({type(leaf).__name__})")
    return leaves, spec, tuple(dropped)


def _register(result: Any) -> None:
    """Tell torch how to take plain dataclasses apart."""
    for item in pytree.tree_leaves(result):
        kind = type(item)
        made = getattr(kind, "__dataclass_params__", None)
        own = made is not None and made.init and "__init__" in vars(kind)  # else a class like any other
        if own and _holds_tensors(item):
            pytree.register_dataclass(kind)
            return _register(result)


def _holds_tensors(item: Any) -> bool:
    values = [getattr(item, field.name) for field in dataclasses.fields(item)]
    return bool(tensors_in(values))
