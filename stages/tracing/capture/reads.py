"""What a run reads outside of its layers: attributes of modules, whether tensors are trained, and what the
code of a model reads from outside of it (globals of its files and what hangs on them, variables of
functions around, methods of its classes).

A record is one run's way through that code; what it read there is part of the record, and is held against
its value at every step. What nobody read may change later. Layers run their own code again each time, so
theirs does not count.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ....compression.errors import PlanError
from ..object_snapshot import Facts, Same, contents, is_plain, walk, written_kinds
from .values import asking, is_code_of_model, is_our_code

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
        """What stands for ``nn.Module.__getattribute__`` while reads are noted."""
        paths, quiet, note, plain = self.paths, self.quiet, self.found.add, nn.Module.__getattribute__

        def read(module: nn.Module, name: str) -> Any:
            if not quiet() and (path := paths.get(id(module))) is not None:
                # torch looks there for parameters and children
                if name != ALL or is_code_of_model(sys._getframe(1).f_code.co_filename):
                    note((path, name))
            return plain(module, name)

        return read

    def of_tensor(self, getter: Any, name: str | None) -> None:
        """Note that the property behind ``getter`` was read of the model's tensor ``name``, None for one that
        was computed; called by whoever torch told of it.

        Raises:  PlanError: it is a gradient."""
        file = sys._getframe(3).f_code.co_filename
        wanted = getattr(getattr(getter, "__self__", None), "__name__", "")
        if wanted in _ASKING and not is_our_code(file):
            self.found.add((name or "", ASKS))
        if wanted == "grad" and name and is_code_of_model(file):
            raise PlanError(
                f"forward reads the gradient of {name}, which hangs on how many micro-batches have come back "
                f"by then ({file}:{sys._getframe(3).f_lineno}); read it between steps"
            )


_MOST = 1024  # values in a container or object that are compared; larger ones are data, not settings
_CODE = (types.FunctionType, types.ModuleType, nn.Module)  # each is itself alone
_OF_ENVIRONMENT = type(os.environ).__getitem__.__code__
GONE = object()


class Read(NamedTuple):
    """A name that code read: where it stands, how it is read again, and what it was; ``facts`` tell values,
    arrays, tensors, objects and containers of them apart, None for what is itself alone."""

    name: str
    where: str
    read: Callable[[], Any]
    value: Any
    facts: Facts | None

    def changed(self) -> bool:
        """Whether another reader would find something else there now."""
        now = self.read()
        if now is self.value and (self.facts is None or is_plain(now)):
            return False
        if type(now) is not type(self.value) or self.facts is None:
            return True
        return contents(now, enters=_data()) != self.facts


class Outside:
    """Watches which code runs while a model is called."""

    def __init__(self, model: nn.Module) -> None:
        self.ran: dict[types.CodeType, dict[str, Any]] = {}
        self.keys: dict[str, types.CodeType] = {}  # of os.environ
        self.kinds = {type(module) for module in model.modules()}

    @contextlib.contextmanager
    def watching(self, within: Callable[[], object]) -> Iterator[None]:
        """The block in which the model is called; ``within``: whether a layer runs now, whose code runs again
        each time."""
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

    def reads(self) -> tuple[Read, ...]:
        """What that code reads, as it is now: after the run, which may have made some of it."""
        found: dict[Any, Read] = {}
        own = {code: held for code, held in self.ran.items() if is_code_of_model(code.co_filename)}
        for code, held in own.items():
            for chain in _chains_of(code):
                read = _read(".".join(chain), code, lambda h=held, c=chain: _follow(h, c))
                if read.value is not GONE:
                    found[id(held), chain] = read
        for kind in self.kinds:
            for name in dir(kind):
                part = getattr(kind, name, None)
                code = getattr(part, "__code__", None)
                if code in own and not name.startswith("__"):
                    read = lambda k=kind, n=name: getattr(k, n, GONE)  # noqa: E731
                    found[kind, name] = _read(f"{kind.__name__}.{name}", code, read)
        for key, code in self.keys.items():
            look = lambda k=key: os.environ.get(k, GONE)  # noqa: E731
            found["environment", key] = _read(f"os.environ[{key!r}]", code, look)
        waiting, met = [read.value for read in found.values()], set[int]()
        while waiting:
            part = waiting.pop()
            if isinstance(part, types.FunctionType) and part.__code__ in own and id(part) not in met:
                met.add(id(part))
                around = dict(_around(part))
                found |= around
                waiting += [read.value for read in around.values()]
        return tuple(read for read in found.values() if not read.changed())  # what is made anew by reading


def _around(function: types.FunctionType) -> Iterator[tuple[Any, Read]]:
    """The defaults of a function, and the variables of functions around it."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":
            yield (id(cell), name), _read(name, code, lambda c=cell: _content(c))
    for name in ("__defaults__", "__kwdefaults__"):
        if getattr(function, name):
            read = lambda f=function, n=name: getattr(f, n)  # noqa: E731
            yield (id(function), name), _read(f"{function.__name__}.{name}", code, read)


def _read(name: str, code: types.CodeType, read: Callable[[], Any]) -> Read:
    value = read()
    return Read(name, f"{code.co_filename}:{code.co_firstlineno}", read, value, _facts(value))


def _chains_of(code: types.CodeType) -> set[tuple[str, ...]]:
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
    return found


def _follow(held: Mapping[str, Any], chain: tuple[str, ...]) -> Any:
    """The value at the end of a chain, GONE where there is none that can be had without running code."""
    value = held.get(chain[0], GONE)
    for name in chain[1:]:
        if value is GONE or isinstance(value, torch.Tensor | nn.Module | property):
            return GONE
        if isinstance(getattr(type(value), name, None), property):
            return GONE
        try:
            value = getattr(value, name)
        except Exception:  # a lazy module, a slot without a value
            return GONE
    return getattr(value, "__func__", value) if isinstance(value, types.MethodType) else value


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned
        return GONE


def _facts(value: Any) -> Facts | None:
    if isinstance(value, (type, *_CODE)):  # what is read of these stands in chains of its own
        return None
    if sum(1 for _ in itertools.islice(walk(value, enters=_data()), _MOST + 1)) > _MOST:
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
