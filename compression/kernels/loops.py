"""Kernels that take addresses and counts alone, as callables: compiled once per process, at their first use.

One text serves every machine: where its vectors are wider than the machine's, LLVM cuts them up.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from . import jit, narrow_ir, planes_ir

_TEXTS = {"narrow": narrow_ir.module, "planes": planes_ir.module}
_lock = threading.Lock()
_built: dict[tuple[str, str | None], Loops] = {}  # None: the host's best


class Loops(NamedTuple):
    """Kernels by name, for one instruction set; their text says what the arguments are."""

    isa: str
    call: Mapping[str, Callable[..., None]]
    engine: Any  # owns the machine code: without it the callables dangle


def build(label: str, isa: str | None = None) -> Loops:
    """The kernels "narrow" or "planes" for ``isa`` (default: the host's best), compiled in about 0.2 s.

    Raises: CodecError: this machine has no such instruction set.
    """
    with _lock:
        if (label, isa) not in _built:
            chosen = isa or jit.host_isas()[0]
            if (label, chosen) not in _built:
                _built[label, chosen] = _compiled(label, chosen)
            _built[label, isa] = _built[label, chosen]
        return _built[label, isa]


def _compiled(label: str, isa: str) -> Loops:
    text, num_arguments = _TEXTS[label]()
    code = jit.compiled(text, list(num_arguments), isa=isa, label=label)
    call = {
        name: ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * num_arguments[name])(address)
        for name, address in code.addresses.items()
    }
    return Loops(isa, call, code.engine)
