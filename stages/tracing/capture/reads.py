"""What a run reads by itself, outside of its layers: attributes of modules, and whether tensors are trained.

What nobody read may change later; what was read once is part of the record."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ....compression.errors import PlanError
from .values import is_code_of_model, is_our_code

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
