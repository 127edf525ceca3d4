"""One module of a traced model, seen again at every step: is it set as it was when it was traced?

The fast answer compares identities and costs about a microsecond; a module that the user dropped is gone and
has nothing to say."""

from __future__ import annotations

import operator
import weakref
from typing import Any

from torch import nn

from .proof import HOOKS, POOL_MODULES, RELU_MODULES, is_itself

PLAIN = (bool, int, float, str, type(None))
_hooks = operator.itemgetter(*HOOKS)
GONE = type("Gone", (), {"__repr__": lambda self: "absent"})()


class Watched:
    """``traced``: its plain attributes as they were then, ``seen``: as they were last.

    ``leaf``: a layer calls it, so that its own code runs and whatever is set counts. ``proves``: a plain
    ReLU or max-pool, whose zeros may stop a gradient."""

    def __init__(self, path: str, module: nn.Module, *, leaf: bool) -> None:
        """As it is now, in tracing."""
        self.path, self.leaf, self.key = path, leaf, id(module)
        self.module = weakref.ref(module)
        self.names = tuple(sorted(name for name, item in vars(module).items() if _is_plain(item)))
        self.attributes = frozenset(vars(module))
        self._get = operator.itemgetter("training", *self.names)  # of one name it would give no tuple
        self.proves = isinstance(module, (*RELU_MODULES, *POOL_MODULES)) and is_itself(module)
        self.traced = self.seen = self._plain(module)
        self.built = self.built_seen = self._built(module)

    def changed(self, module: nn.Module) -> bool:
        """Whether anything is another object than when it was ``seen`` last."""
        try:
            now = self._get(module.__dict__)
        except KeyError:
            return True
        return not all(map(operator.is_, now, self.seen)) or self._built(module) != self.built_seen

    def see(self, module: nn.Module) -> None:
        """It is fine as it is."""
        self.seen, self.built_seen = self._plain(module), self._built(module)

    def differences(self, module: nn.Module) -> dict[str, tuple[Any, Any]]:
        """The plain attributes that differ from those in tracing: (then, now) by name; new ones too."""
        held = vars(module)
        then = dict(zip(("training", *self.names), self.traced, strict=True))
        then |= {name: GONE for name in held.keys() - self.attributes}
        pairs = {name: (old, held.get(name, GONE)) for name, old in then.items()}
        return {name: pair for name, pair in pairs.items() if not _equal(*pair)}

    def rebuilt(self, module: nn.Module) -> bool:
        """Whether its class, hooks, children or own tensors differ from those in tracing."""
        return self._built(module)[1:] != self.built[1:] or "forward" in vars(module).keys() - self.attributes

    def _plain(self, module: nn.Module) -> tuple[Any, ...]:
        held = module.__dict__
        return tuple(held.get(name, GONE) for name in ("training", *self.names))

    def _built(self, module: nn.Module) -> tuple[Any, ...]:
        held = module.__dict__
        found: tuple[Any, ...] = (len(held), *map(tuple, _hooks(held)))
        if self.leaf:
            return found
        tensors = (*held["_parameters"].values(), *held["_buffers"].values())
        return (*found, type(module), tuple(map(id, held["_modules"].values())), tuple(map(id, tensors)))


def _is_plain(item: Any) -> bool:
    return isinstance(item, PLAIN) or (isinstance(item, tuple) and all(map(_is_plain, item)))


def _equal(old: Any, new: Any) -> bool:
    """Whether both are the same to any reader: 1, 1.0 and True are not, nor are 0.0 and -0.0."""
    return old is new or (type(old) is type(new) and _is_plain(old) and repr(old) == repr(new))
