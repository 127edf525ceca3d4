"""Values that a call of torch takes and gives, as a recording writes them: names, parts, what was read."""

from __future__ import annotations

import dataclasses
import operator
import os
import pathlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ...torch_private import pytree

FACTS = frozenset(
    "size dim stride numel nelement ndimension element_size storage_offset is_floating_point is_complex "
    "is_signed is_contiguous is_same_size get_device __len__ __hash__ untyped_storage data_ptr "
    "__dlpack_device__".split()
)
"""Methods that tell the geometry of a tensor and nothing of its elements."""
SHAPE = frozenset({"size", "numel", "nelement", "__len__", "stride", "is_same_size"})
_ARITHMETIC = frozenset("add_ sub_ mul_ div_ pow_ remainder_ floor_divide_".split())
_REFLECTED = {
    f"r{name}": name for name in "add sub mul div truediv floordiv pow mod matmul and or xor".split()
}


_PYTHON = os.path.dirname(os.__file__) + os.sep
_OURS = str(pathlib.Path(__file__).parents[2]) + os.sep
_NOT_THE_MODEL = (os.path.dirname(torch.__file__) + os.sep, _OURS, "<")


def items_of(value: Any) -> tuple[Callable[..., Any], list[tuple[Any, Any]]]:
    """Return the function that picks the parts of a result, and the key of each."""
    if isinstance(value, Mapping):
        return operator.getitem, list(value.items())
    if isinstance(value, tuple | list):
        return operator.getitem, list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return getattr, [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return operator.getitem, []


def plain(result: Any) -> Any:
    """Return what was read of a tensor, as values that can be compared; None: nothing was."""
    value = result.tolist() if hasattr(result, "tolist") else result
    return value if isinstance(value, bool | int | float | complex | str | list | tuple) else None


def node_name(name: str) -> str:
    """The name that torch.fx gives to the node of such a call."""
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        return _REFLECTED.get(name, name)
    return name.removesuffix("_") if name in _ARITHMETIC else name  # `x += y` is an addition there


def rebuilt(spec: pytree.TreeSpec, *leaves: Any) -> Any:
    """A structure put together from its leaves: what a node can be given only as a value of its own."""
    return pytree.tree_unflatten(list(leaves), spec)


def is_code_of_model(file: str) -> bool:
    """Return whether code in ``file`` is neither torch's nor ours nor Python's own."""
    installed = f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file
    return not file.startswith(_NOT_THE_MODEL) and (installed or not file.startswith(_PYTHON))


def is_our_code(file: str) -> bool:
    """Return whether code in ``file`` records the model, or runs it."""
    return file.startswith(_OURS)


def asking(frame: types.FrameType | None) -> types.CodeType | None:
    """The code that had Python's own run ``frame``; None where it is not the model's."""
    while frame is not None and frame.f_code.co_filename.startswith((_PYTHON, "<frozen")):
        if is_code_of_model(frame.f_code.co_filename):  # installed there
            break
        frame = frame.f_back
    if frame is None or not is_code_of_model(frame.f_code.co_filename):
        return None
    return frame.f_code


def line_of_model() -> str:
    """``file:line`` of the code that runs now: the innermost that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_MODEL):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def numbers_in(item: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield keys and value of every number in nested tuples, lists and dicts."""
    if type(item) in (bool, int, float):
        yield path, item
    elif type(item) in (tuple, list):
        for i, one in enumerate(item):
            yield from numbers_in(one, (*path, i))
    elif type(item) is dict:
        for key, one in item.items():
            yield from numbers_in(one, (*path, key))
