"""What the code of a model reads from outside of it: globals of its files, and variables of functions around.

A record is one run's way through that code; what the code read there is part of the record, and is held
against its value at every step."""

from __future__ import annotations

import contextlib
import dis
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn

from .values import is_code_of_model

_CONTAINERS = (list, dict, set)
_MOST = 64  # items of a container that are compared; larger ones are data, not settings
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
GONE = object()


class Read(NamedTuple):
    """A name that code read: where it stands, how it is read again, and what it was."""

    name: str
    where: str
    read: Callable[[], Any]
    value: Any
    shown: str

    def changed(self) -> bool:
        """Whether another reader would find something else there now."""
        now = self.read()
        if now is self.value:
            return _shown(now) != self.shown
        return not (type(now) is type(self.value) and self.shown and _shown(now) == self.shown)


class Outside:
    """Watches which code runs while a model is called."""

    def __init__(self, model: nn.Module) -> None:
        self.ran: dict[types.CodeType, dict[str, Any]] = {}
        self.within: Callable[[], object] = lambda: 0  # a layer, whose code runs again each time
        kinds = {kind for module in model.modules() for kind in type(module).__mro__}
        methods = [part for kind in kinds for part in vars(kind).values()]
        functions = [part for part in methods if isinstance(part, types.FunctionType)]
        self.closures = {function.__code__: function for function in functions if function.__closure__}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """The block in which the model is called."""
        before, ran = sys.getprofile(), self.ran

        def note(frame: types.FrameType, event: str, argument: Any) -> None:
            if event == "call" and frame.f_code not in ran and not self.within():
                ran[frame.f_code] = frame.f_globals

        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(before)

    def reads(self) -> tuple[Read, ...]:
        """What that code reads, as it is now: after the run, which may have made some of it."""
        found: dict[tuple[int, str], Read] = {}
        for code, held in self.ran.items():
            if not is_code_of_model(code.co_filename):
                continue
            for name in _globals_of(code):
                if name in held:
                    found[id(held), name] = _read(name, code, lambda h=held, n=name: h.get(n, GONE))
            function = self.closures.get(code)
            for name, cell in zip(code.co_freevars, (function and function.__closure__) or (), strict=False):
                if name != "__class__":
                    found[id(cell), name] = _read(name, code, lambda c=cell: _content(c))
        return tuple(found.values())


def _read(name: str, code: types.CodeType, read: Callable[[], Any]) -> Read:
    value = read()
    return Read(name, f"{code.co_filename}:{code.co_firstlineno}", read, value, _shown(value))


def _globals_of(code: types.CodeType) -> set[str]:
    return {
        str(one.argval) for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned
        return GONE


def _shown(value: Any) -> str:
    """A text that tells plain values and small containers of them apart; "" for all else, which is itself."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if type(value) in (*_CONTAINERS, tuple) and len(value) <= _MOST:
        items = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
        if all(isinstance(item, _PLAIN) for item in items):
            return repr(sorted(map(repr, value)) if isinstance(value, set) else value)
    return ""
