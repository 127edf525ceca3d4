"""Codecs on kernels of any instruction set that this machine has; the package takes the best one."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from penstock.compression.kernels import jit
from penstock.compression.raw import Codec

Kernels = Mapping[str, Callable[..., int]]
C = TypeVar("C", bound=Codec)


def on(isa: str, codec: C) -> C:
    """Let ``codec`` use the kernels of ``isa``."""
    vars(codec)["kernel"] = lambda name: jit._build(codec.name, isa)[name]
    return codec
