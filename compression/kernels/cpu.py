"""The zero-value kernels as callables, built once per process by LLVM's JIT.

Calls go through ctypes, which gives up the interpreter lock, so a packing thread does not stop the others.
"""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm

from ..errors import CodecError
from . import ir
from .isa import Avx512, InstructionSet, Portable

_ISAS: dict[str, type[InstructionSet]] = {"avx512": Avx512, "portable": Portable}
_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_PACK = ctypes.CFUNCTYPE(_COUNT, _POINTER, _COUNT, _POINTER, _POINTER, _POINTER, _COUNT)
_UNPACK = ctypes.CFUNCTYPE(_COUNT, _POINTER, _POINTER, _POINTER, _COUNT, _COUNT, _COUNT, _POINTER)
_lock = threading.Lock()
_built: dict[str, Kernels] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The kernels of one instruction set by the bits of a word; ``ir`` says what the arguments are."""

    isa: str
    pack: Mapping[int, Callable[..., int]]
    unpack: Mapping[int, Callable[..., int]]
    stream: Mapping[int, Callable[..., int]]  # unpack past the cache; unpack itself where nothing does that
    engine: Any  # owns the machine code: without it the callables dangle


def host_isa() -> str:
    """The fastest instruction set of this machine; avx512 needs VBMI2 for words of 8 and 16 bits."""
    try:
        features = llvm.get_host_cpu_features()
    except RuntimeError:  # LLVM cannot tell on this system
        return "portable"
    needed = ("avx512f", "avx512bw", "avx512vl", "avx512vbmi2", "popcnt")
    return "avx512" if all(features.get(name) for name in needed) else "portable"


def build(isa: str | None = None) -> Kernels:
    """The kernels of ``isa`` (default: the host's best), compiled at the first call in about 0.2 s and kept.

    Raises: CodecError: no such instruction set, or not on this machine.
    """
    host = host_isa()
    isa = isa or host
    if isa not in _ISAS or (isa != host and isa != "portable"):
        known = ", ".join(sorted({host, "portable"}))
        raise CodecError(f"kernels for this machine are {known}, found {isa!r}; leave it to build()")
    with _lock:
        if isa not in _built:
            _built[isa] = _compile(isa)
        return _built[isa]


def _compile(isa: str) -> Kernels:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    text, names = ir.module(_ISAS[isa])
    cpu, features = "x86-64" if platform.machine().lower() in ("x86_64", "amd64") else "generic", ""
    if isa == "avx512":
        cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(cpu=cpu, features=features, opt=3, jit=True)
    jit = llvm.create_lljit_compiler(machine)
    module = llvm.parse_assembly(text)
    module.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(module, passes)
    library = llvm.JITLibraryBuilder().add_ir(module)
    for name in names:
        library = library.export_symbol(name)
    tracker = library.add_current_process().link(jit, f"zero_value_{isa}")

    def kernels(verb: str, kind: Callable[[int], Callable[..., int]]) -> dict[int, Callable[..., int]]:
        return {bits: kind(tracker[f"{verb}{bits}"]) for bits in (8, 16, 32, 64) if f"{verb}{bits}" in names}

    unpack = kernels("unpack", _UNPACK)
    return Kernels(
        isa=isa,
        pack=kernels("pack", _PACK),
        unpack=unpack,
        stream=kernels("stream", _UNPACK) or unpack,
        engine=(jit, tracker),
    )
