"""A model made without memory for its parameters (``model.load_weights=``), so that no process ever has the
whole: whether the options ask for one, where its values come from, and how its modules are made."""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ...compression.errors import ConfigError
from ...stages.meta_watch import META

SOURCES = ("load_weights", "init_weights")


def is_bare(options: Mapping[str, Any]) -> bool:
    """Whether the options of a model say where its stages get their values from."""
    return any(options.get(name) for name in SOURCES)


def sources(options: Mapping[str, Any]) -> dict[str, Any]:
    """What ``Pipeline`` is given for it.

    Raises: ConfigError: a function cannot be imported."""
    init = options.get("init_weights")
    try:
        return {
            "load_weights": options.get("load_weights"),
            "init_weights": pkgutil.resolve_name(init) if init else None,
        }
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"model.init_weights={init} cannot be imported ({str(error).splitlines()[0]}); write the dotted "
            "name of a function of (name, tensor)"
        ) from error


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """The block in which modules are made whose parameters have no memory; buffers are what they are made."""
    plain, known = nn.Module.register_parameter, WeakIdKeyDictionary()

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if type(param) is nn.Parameter and not param.is_meta:
            if param not in known:  # one under two names stays one
                known[param] = nn.Parameter(param.detach().to(META), param.requires_grad)
            param = known[param]
        plain(module, name, param)

    nn.Module.register_parameter = register  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        nn.Module.register_parameter = plain
