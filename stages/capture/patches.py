"""What torch's dispatch does not show, exchanged while a run is recorded, and put back while a layer runs.

A layer runs as it will run later: with torch's own functions and with no mode around it, so that compiled pieces
compile what they would, and modules that ask whether anybody watches take the path that they always take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily


class Patches:
    """``wanted``: (class, module or dict of globals, name, what stands there while recording)."""

    def __init__(self, wanted: Iterable[tuple[Any, str, Any]]) -> None:
        self.wanted = list(wanted)
        self.kept = [_look(owner, name) for owner, name, _ in self.wanted]

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """The block that is recorded."""
        self._put([new for _, _, new in self.wanted])
        try:
            yield
        finally:
            self._put(self.kept)

    @contextlib.contextmanager
    def off(self, mode: TorchFunctionMode) -> Iterator[None]:
        """A block inside it in which everything, the ``mode`` that records too, is as ever."""
        self._put(self.kept)
        try:
            with (
                _pop_mode_temporarily() if _get_current_function_mode() is mode else contextlib.nullcontext()
            ):
                yield
        finally:
            self._put([new for _, _, new in self.wanted])

    def _put(self, values: Iterable[Any]) -> None:
        for (owner, name, _), value in zip(self.wanted, values, strict=True):
            if isinstance(owner, dict):
                owner[name] = value
            else:
                setattr(owner, name, value)


def _look(owner: Any, name: str) -> Any:
    return owner[name] if isinstance(owner, dict) else vars(owner)[name]


def overridden(tensors: Iterable[Any]) -> bool:
    """What torch.overrides.has_torch_function says where nobody records: is one of them of a kind of its own?"""
    plain = (torch.Tensor, torch.nn.Parameter)
    return any(type(t) not in plain and hasattr(type(t), "__torch_function__") for t in tensors)
