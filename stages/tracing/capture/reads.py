"""Reads of a run outside of its layers: attributes of modules, whether tensors are trained, and what the
code of a model reads from outside of it (globals of its files and what they lead to, variables of
functions around, methods of its classes).

What a run read is part of its record, and is held against its value at every step; what nobody read may
change. Layers run their own code again each time, so theirs does not count."""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import enum
import functools
import gc
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ....compression.errors import PlanError
from ..object_snapshot import Facts, Same, contents, describe, is_plain, walk, written_kinds
from .nodes import OURS, asking, is_code_of_model

ALL = "__dict__"
"""The attribute that stands for all of a module's own: somebody took the dict that holds them."""
ASKS = "requires_grad()"
"""With the name of a parameter in the place of a path: whether it is trained; with "" whether any is."""
_ASKING = frozenset({"requires_grad", "grad_fn", "is_leaf"})


class Reads:
    """Gathers ``found``: (path of a module, attribute), and (name of a parameter, ``ASKS``).

    Args:    paths: of the modules, by identity.
             quiet: whether a layer runs now, whose code reads anew each time."""

    def __init__(self, paths: Mapping[nn.Module, str], quiet: Callable[[], object]) -> None:
        self.paths = {id(module): path for module, path in paths.items()}
        self.quiet, self.found = quiet, set[tuple[str, str]]()

    def reader(self) -> Callable[[nn.Module, str], Any]:
        """Return a ``nn.Module.__getattribute__`` that notes reads."""
        paths, quiet, note, plain = self.paths, self.quiet, self.found.add, nn.Module.__getattribute__

        def read(module: nn.Module, name: str) -> Any:
            if not quiet() and (path := paths.get(id(module))) is not None:
                # torch looks there for parameters and children
                if name != ALL or is_code_of_model(sys._getframe(1).f_code.co_filename):
                    note((path, name))
            return plain(module, name)

        return read

    def of_tensor(self, getter: Any, name: str | None) -> None:
        """Note that the property behind ``getter`` was read of the tensor ``name`` (None: a computed one).

        Called by whom torch calls; PlanError for a gradient."""
        file = sys._getframe(3).f_code.co_filename
        wanted = getattr(getattr(getter, "__self__", None), "__name__", "")
        if wanted in _ASKING and not file.startswith(OURS):
            self.found.add((name or "", ASKS))
        if wanted == "grad" and name and is_code_of_model(file):
            raise PlanError(
                f"forward reads the gradient of {name}, which depends on how many micro-batches have come "
                f"back by then ({file}:{sys._getframe(3).f_lineno}); read it between steps"
            )


MOST_COMPARED = 1024  # values in a container or object that are compared; larger ones are data, not settings
_CODE = (types.FunctionType, types.ModuleType, nn.Module)  # each is itself alone
_OF_ENVIRONMENT = type(os.environ).__getitem__.__code__
ABSENT = enum.Enum("Absence", ["ABSENT"]).ABSENT
DROPPED = object()
"""Read of a module that no longer exists: such a guard holds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Guard:
    """A place that can be read again, and what it was: ``facts`` where it can change inside, else ``value``.

    ``look`` tells the facts of an object, None where it is itself alone. ``name`` and ``where`` (file and
    line of the code that read it) are for a sentence."""

    name: str
    where: str
    read: Callable[[], Any]
    look: Callable[[Any], Facts | None]
    value: Any
    facts: Facts | None

    @classmethod
    def of(
        cls,
        name: str,
        read: Callable[[], Any],
        look: Callable[[Any], Facts | None] = lambda _: None,
        *,
        where: str = "",
        known: dict[int, Facts | None] | None = None,
    ) -> Guard:
        """Return a guard on what is there now; equal objects share the facts in ``known``, by their id."""
        value, facts = read(), None
        if not is_plain(value):
            facts = look(value) if known is None or id(value) not in known else known[id(value)]
            if known is not None:
                known[id(value)] = facts
        return cls(name, where, read, look, value if facts is None else None, facts)

    def difference(self, known: dict[int, Facts] | None = None) -> tuple[str, str, str] | None:
        """Return the name of what has changed, what it was and what it is, as text; None where nothing has.

        ``known``: objects (by their id) whose facts were found to hold in this check."""
        now = self.read()
        if now is DROPPED or (self.facts is None and now is self.value):
            return None
        known = {} if known is None else known
        if self.facts is None:
            if same_to_readers(self.value, now):
                return None
            was, found = shown(self.value), shown(now)
            return self.name, was, f"another {type(now).__name__}" if was == found else found
        if known.get(id(now)) is self.facts:
            return None
        facts = {} if now is ABSENT else self.look(now) or {"": (type(now),)}
        change = changed_fact(self.facts, facts, self.name)
        if change is None:
            known[id(now)] = self.facts
        return change


def same_to_readers(old: object, new: object) -> bool:
    """Return whether any reader takes both for the same: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    are_plain = type(old) is type(new) and is_plain(old) and is_plain(new)
    return old is new or (are_plain and repr(old) == repr(new))


def changed_fact(before: Facts, after: Facts, name: str = "") -> tuple[str, str, str] | None:
    """Return path, old and new text of the first fact below ``name`` that has changed."""
    path = next((path for path in before | after if before.get(path) != after.get(path)), None)
    if path is None:
        return None
    was, now = describe(before.get(path)), describe(after.get(path))
    step = "." if name and path and path[0] not in "[." else ""
    return f"{name}{step}{path}", was, f"another {now.removeprefix('a ')}" if was == now else now


def shown(value: object) -> str:
    """Return a value as a sentence names it."""
    text = "absent" if value is ABSENT else repr(value)
    return text if len(text) < 40 and is_plain(value) else f"a {type(value).__name__}"


class CodeReads:
    """Watches which code runs while a model is called."""

    def __init__(self, model: nn.Module) -> None:
        self.ran: dict[types.CodeType, dict[str, Any]] = {}
        self.keys: dict[str, types.CodeType] = {}  # of os.environ
        self.kinds = {type(module) for module in model.modules()}

    @contextlib.contextmanager
    def watching(self, within: Callable[[], object]) -> Iterator[None]:
        """The block in which the model is called; ``within``: whether a layer runs now."""
        before, ran, collects = sys.getprofile(), self.ran, gc.isenabled()

        def note(frame: types.FrameType, event: str, argument: Any) -> None:
            code = frame.f_code
            if event == "call" and (code not in ran or code is _OF_ENVIRONMENT) and not within():
                ran[code] = frame.f_globals
                if code is _OF_ENVIRONMENT and (asker := asking(frame)) is not None:
                    self.keys[frame.f_locals["key"]] = asker

        gc.disable()  # whoever is called back when it collects is no part of the model
        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(before if callable(before) else None)
            if enable := getattr(before, "enable", None):  # cProfile's, which is no function
                enable()
            if collects:
                gc.enable()

    def guards(self) -> tuple[Guard, ...]:
        """Guards on what that code reads, as it is now: after the run, which may have made some of it."""
        found: dict[Any, Guard] = {}
        own = {code: held for code, held in self.ran.items() if is_code_of_model(code.co_filename)}
        for code, held in own.items():
            for chain in _chains_of(code):
                guard = _guard(".".join(chain), code, functools.partial(_follow, held, chain))
                if guard.value is not ABSENT:
                    found[id(held), chain] = guard
        for kind, name in [(owner, name) for owner in self.kinds for name in dir(owner)]:
            code = getattr(getattr(kind, name, None), "__code__", None)
            if code in own and not name.startswith("__"):
                read = functools.partial(getattr, kind, name, ABSENT)
                found[kind, name] = _guard(f"{kind.__name__}.{name}", code, read)
        for key, code in self.keys.items():
            look = lambda k=key: os.environ.get(k, ABSENT)  # noqa: E731
            found["environment", key] = _guard(f"os.environ[{key!r}]", code, look)
        waiting, met = [guard.value for guard in found.values()], set[int]()
        while waiting:
            part = waiting.pop()
            if isinstance(part, types.FunctionType) and part.__code__ in own and id(part) not in met:
                met.add(id(part))
                around = dict(_around(part))
                found |= around
                waiting += [guard.value for guard in around.values()]
        return tuple(guard for guard in found.values() if not guard.difference())  # not made anew by reading


def _around(function: types.FunctionType) -> Iterator[tuple[Any, Guard]]:
    """The defaults of a function, and the variables of functions around it."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":
            yield (id(cell), name), _guard(name, code, functools.partial(_content, cell))
    for name in ("__defaults__", "__kwdefaults__"):
        if getattr(function, name):
            read = functools.partial(getattr, function, name)
            yield (id(function), name), _guard(f"{function.__name__}.{name}", code, read)


def _guard(name: str, code: types.CodeType, read: Callable[[], Any]) -> Guard:
    return Guard.of(name, read, _facts, where=f"{code.co_filename}:{code.co_firstlineno}")


@functools.lru_cache(maxsize=4096)  # in eval mode the same code runs again
def _chains_of(code: types.CodeType) -> frozenset[tuple[str, ...]]:
    """The globals that code loads, each with the attributes that it takes of them at once: ``F.gelu``."""
    found: set[tuple[str, ...]] = set()
    chain: tuple[str, ...] = ()
    for one in dis.get_instructions(code):
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            chain = (str(one.argval),)
        elif chain and one.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain = (*chain, str(one.argval))
        elif one.opname not in ("CACHE", "PRECALL", "EXTENDED_ARG", "PUSH_NULL"):
            chain = ()
        if chain:
            found.add(chain)
    return frozenset(found)


def _follow(held: Mapping[str, Any], chain: tuple[str, ...]) -> Any:
    """The value at the end of a chain, ABSENT where there is none that can be had without running code."""
    value = held.get(chain[0], ABSENT)
    for name in chain[1:]:
        if value is ABSENT or isinstance(value, torch.Tensor | nn.Module | property):
            return ABSENT
        if isinstance(getattr(type(value), name, None), property):
            return ABSENT
        try:
            value = getattr(value, name)
        except Exception:  # a lazy module, a slot without a value
            return ABSENT
    return getattr(value, "__func__", value) if isinstance(value, types.MethodType) else value


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned
        return ABSENT


def _facts(value: Any) -> Facts | None:
    if isinstance(value, (type, *_CODE)):  # what is read of these stands in chains of its own
        return None
    if sum(1 for _ in itertools.islice(walk(value, enters=_data()), MOST_COMPARED + 1)) > MOST_COMPARED:
        return None
    found = contents(value, enters=_data())
    return None if [*found.values()] == [(type(value), Same(value))] else found


def _data() -> Callable[[object], bool]:
    """Looks into all but code; of classes into those of the objects met, which hold what these do not."""
    kinds: set[int] = set()

    def enters(item: object) -> bool:
        if isinstance(item, type):
            return id(item) in kinds
        kinds.update(map(id, written_kinds(item)))
        return not isinstance(item, _CODE)

    return enters
