"""The exponent kernels as callables, built once per process by LLVM's JIT."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from . import exponent_ir, jit
from .exponent_ir import WORD_BITS
from .exponent_isa import PLANS, PortableExponents, plan_name
from .exponent_x86 import Avx2Exponents, Avx512Exponents

_ISAS: dict[str, type[PortableExponents]] = {
    isa.name: isa for isa in (Avx512Exponents, Avx2Exponents, PortableExponents)
}
_Which = tuple[int, tuple[int, ...], bool]
_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_KINDS = {
    "pack": ctypes.CFUNCTYPE(_COUNT, _POINTER, _COUNT, *[_POINTER] * 5, _COUNT, _COUNT),
    "unpack": ctypes.CFUNCTYPE(_COUNT, *[_POINTER] * 4, *[_COUNT] * 3, _POINTER, _POINTER),
    "count": ctypes.CFUNCTYPE(_COUNT, _POINTER, _COUNT, _COUNT, _POINTER),
}
_lock = threading.Lock()
_built: dict[str, ExponentKernels] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentKernels:
    """The kernels of one instruction set; ``exponent_ir`` says what the arguments are.

    By (bits of a word, plan, whether to store past the cache), and ``count`` by bits of a word.
    """

    isa: str
    pack: Mapping[_Which, Callable[..., int]]
    unpack: Mapping[_Which, Callable[..., int]]
    count: Mapping[int, Callable[..., int]]
    engine: Any  # owns the machine code: without it the callables dangle


def build(isa: str | None = None) -> ExponentKernels:
    """The kernels of ``isa`` (default: the host's best), compiled at the first call and kept.

    Raises: CodecError: no such instruction set, or not on this machine.
    """
    isa = isa or jit.host_isas()[0]
    with _lock:
        if isa not in _built:
            _built[isa] = _compile(isa)
        return _built[isa]


def _compile(isa: str) -> ExponentKernels:
    kind = _ISAS.get(isa, PortableExponents)()  # what is unknown is refused below
    text, names = exponent_ir.module(kind)
    code = jit.compiled(text, names, isa=isa, label="exponent")

    def kernels(verb: str) -> dict[_Which, Callable[..., int]]:
        found = {}
        for bits, plan, stream in product(WORD_BITS, PLANS, (False, True)):
            name = f"{verb}{'s' if stream and kind.streams else ''}{bits}_{plan_name(plan)}"
            found[bits, plan, stream] = _KINDS[verb](code.addresses[name])
        return found

    counts = {bits: _KINDS["count"](code.addresses[f"count{bits}"]) for bits in WORD_BITS}
    return ExponentKernels(
        isa=isa, pack=kernels("pack"), unpack=kernels("unpack"), count=counts, engine=code.engine
    )
