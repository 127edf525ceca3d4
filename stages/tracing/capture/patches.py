"""Patches for what torch's dispatch does not show: on while a run is recorded, off while a layer runs.

A layer runs as it will run later: with torch's own functions and with no mode around it, so that compiled
pieces compile what they would, and modules that ask whether anybody watches take the path that they always
take."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from ...torch_private import FORWARD_HOOKS, is_compiled_in_place, optimized_module, wrapped_functions

_NOTHING = object()  # stood there: the name is taken away again


class Patches:
    """``wanted``: (class, module or dict of globals, name, what stands there while recording)."""

    def __init__(self, wanted: Iterable[tuple[Any, str, Any]]) -> None:
        self.wanted = list(wanted)
        held = [(o if isinstance(o, dict) else vars(o), name) for o, name, _ in self.wanted]
        self.kept = [names.get(name, _NOTHING) for names, name in held]

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """The block that is recorded."""
        self._put([new for _, _, new in self.wanted])
        try:
            yield
        finally:
            self._put(self.kept)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """A block inside it in which everything is as ever."""
        self._put(self.kept)
        try:
            yield
        finally:
            self._put([new for _, _, new in self.wanted])

    def _put(self, values: Iterable[Any]) -> None:
        for (owner, name, _), value in zip(self.wanted, values, strict=True):
            if isinstance(owner, dict):
                owner[name] = value
            elif value is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def is_single(module: nn.Module) -> bool:
    """Return whether a module of torch.nn runs no code but torch's, so that what it runs asks for no patch:
    putting them aside for each takes longer than most take to run."""
    return (
        type(module).__module__.startswith("torch.nn.modules.")
        and not any(True for _ in module.children())
        and not (any(vars(module)[name] for name in FORWARD_HOOKS) or is_compiled_in_place(module))
    )


def overridden(tensors: Iterable[Any]) -> bool:
    """Return what torch.overrides.has_torch_function says where nobody records: is one of a kind of its
    own?"""
    plain = (torch.Tensor, torch.nn.Parameter)
    return any(type(t) not in plain and hasattr(type(t), "__torch_function__") for t in tensors)


def at_once(run: Callable[..., Any], keep_random: bool, *args: Any) -> Any:
    """Run what a reentrant checkpoint computes, without dropping and computing it again."""
    graded = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    with torch.set_grad_enabled(torch.is_grad_enabled() and graded):  # else it gives nobody a gradient
        return run(*args)


def kinds_that_are_called() -> Iterator[type[nn.Module]]:
    """The classes whose ``__call__`` runs a module."""
    yield nn.Module
    compiled = optimized_module()
    if compiled is not None and "__call__" in vars(compiled):
        yield compiled


Place = tuple[dict[str, Any], str, Callable[..., Any]]
"""Globals of a file, a name in them, and the function that it stands for."""


def wrapped() -> list[Place]:
    """Return the places of functions that are marked with ``torch.fx.wrap``."""
    return [(frame, name, frame[name]) for frame, name in wrapped_functions() if callable(frame.get(name))]


def bound(functions: Collection[Callable[..., Any]]) -> list[Place]:
    """Every name of every imported file that stands for one of ``functions``."""
    return _places(lambda held: any(held is function for function in functions)) if functions else []


def applying() -> list[tuple[dict[str, Any], str, type]]:
    """Every name of every imported file that stands for ``apply`` of an autograd Function, which comes
    last."""
    builtin = types.BuiltinMethodType  # compared and not asked: some lazy objects warn when they are
    places = _places(lambda held: type(held) is builtin and held.__name__ == "apply")
    owners = [(file, name, getattr(held, "__self__", None)) for file, name, held in places]
    return [
        (file, name, own) for file, name, own in owners if isinstance(own, type) and issubclass(own, Function)
    ]


def _places(suits: Callable[[Any], bool]) -> list[Place]:
    files = [vars(file) for file in list(sys.modules.values()) if isinstance(file, types.ModuleType)]
    return [(file, name, held) for file in files for name, held in list(file.items()) if suits(held)]
