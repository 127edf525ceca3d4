"""The zero-value kernels as callables, built once per process by LLVM's JIT."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CodecError
from . import ir, jit
from .avx2 import Avx2
from .isa import Avx512, InstructionSet, Portable

_ISAS: dict[str, type[InstructionSet]] = {kind.name: kind for kind in (Avx512, Avx2, Portable)}
_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_PACK = ctypes.CFUNCTYPE(_COUNT, _POINTER, _COUNT, _POINTER, _POINTER, _POINTER, _COUNT)
_PACK_MASKED = ctypes.CFUNCTYPE(_COUNT, _POINTER, _COUNT, _POINTER, _POINTER, _COUNT)
_UNPACK = ctypes.CFUNCTYPE(_COUNT, _POINTER, _POINTER, _POINTER, _COUNT, _COUNT, _COUNT, _POINTER)
_CHECKSUM = ctypes.CFUNCTYPE(ctypes.c_uint64, _POINTER, _COUNT)
_lock = threading.Lock()
_built: dict[str, Kernels] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The kernels of one instruction set by the bits of a word; ``ir`` says what the arguments are."""

    isa: str
    pack: Mapping[int, Callable[..., int]]
    pack_masked: Mapping[int, Callable[..., int]]
    unpack: Mapping[int, Callable[..., int]]
    stream: Mapping[int, Callable[..., int]]  # unpack past the cache; unpack itself where nothing does that
    checksum: Callable[..., int]
    engine: Any  # owns the machine code: without it the callables dangle


def host_isa() -> str:
    """The fastest instruction set of this machine that there are kernels for."""
    return next(isa for isa in jit.host_isas() if isa in _ISAS)


def build(isa: str | None = None) -> Kernels:
    """The kernels of ``isa`` (default: the host's best), compiled at the first call in about 0.2 s and kept.

    Raises: CodecError: no such instruction set, or not on this machine.
    """
    isa = isa or host_isa()
    if isa not in _ISAS:
        raise CodecError(f"instruction sets are {', '.join(_ISAS)}, found {isa!r}; leave it to build()")
    with _lock:
        if isa not in _built:
            _built[isa] = _compile(isa)
        return _built[isa]


def _compile(isa: str) -> Kernels:
    text, names = ir.module(_ISAS[isa])
    code = jit.compiled(text, names, isa=isa, label="zero_value")

    def kernels(verb: str, kind: Callable[[int], Callable[..., int]]) -> dict[int, Callable[..., int]]:
        found = {bits: code.addresses.get(f"{verb}{bits}") for bits in (8, 16, 32, 64)}
        return {bits: kind(address) for bits, address in found.items() if address is not None}

    unpack = kernels("unpack", _UNPACK)
    return Kernels(
        isa=isa,
        pack=kernels("pack", _PACK),
        pack_masked=kernels("packm", _PACK_MASKED),
        unpack=unpack,
        stream=kernels("stream", _UNPACK) or unpack,
        checksum=_CHECKSUM(code.addresses["checksum"]),
        engine=code.engine,
    )
