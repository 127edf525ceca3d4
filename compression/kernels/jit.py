"""LLVM IR to machine code, for the best instruction set of the host.

Kernels are compiled once per process, in about 0.2 s, at the first call that asks for them. Calls go through
ctypes, which gives up the interpreter lock, so a packing thread does not stop the others.
"""

import ctypes
import platform
import threading
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any

import llvmlite.binding as llvm

from . import exponent_ir, exponent_x86, narrow_ir, planes_ir, zero_value_ir

# What LLVM calls the features that the kernels of an instruction set use, fastest set first.
ISAS: dict[str, tuple[str, ...]] = {
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512vbmi", "avx512vbmi2", "popcnt"),
    "avx2": ("avx2", "bmi", "bmi2", "popcnt"),
    "portable": (),
}

SOURCES: dict[str, Callable[[str], str]] = {
    "zero_value": zero_value_ir.module,
    "exponent": lambda isa: exponent_ir.module(exponent_x86.STEPS[isa]()),
    "narrow": lambda _: narrow_ir.module(),
    "byte_plane": lambda _: planes_ir.module(),
}
"""By codec, the text of a module for an instruction set; all that is not internal in it is a kernel."""

_lock = threading.Lock()
_engines: list[Any] = []  # own the machine code: without them the callables dangle


@lru_cache(maxsize=1)
def host_isas() -> list[str]:
    """Return the instruction sets of this machine, fastest first; the last is always "portable"."""
    try:
        features = llvm.get_host_cpu_features()
    except RuntimeError:  # LLVM cannot tell on this system
        return ["portable"]
    return [isa for isa, needed in ISAS.items() if all(features.get(name) for name in needed)]


def kernels(source: str) -> Mapping[str, Callable[..., int]]:
    """Return the kernels of a codec by name, for this host, built by the first who asks.

    All take addresses and counts, as its module says, and return an i64 that may mean nothing."""
    with _lock:
        return _build(source, host_isas()[0])


@cache
def _build(source: str, isa: str) -> Mapping[str, Callable[..., int]]:
    # 1. The machine: whole features of this CPU for AVX-512, else only those that the instruction set needs.
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu = "x86-64" if platform.machine().lower() in ("x86_64", "amd64") else "generic"
    features = ",".join(f"+{name}" for name in ISAS[isa])
    if isa == "avx512":
        cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(cpu=cpu, features=features, opt=3, jit=True)
    # 2. The text, verified and optimised.
    module = llvm.parse_assembly(SOURCES[source](isa))
    module.verify()
    num_arguments = {function.name: len([*function.arguments]) for function in exported(module)}
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(module, passes)
    # 3. The machine code, and its functions as callables.
    jit, library = llvm.create_lljit_compiler(machine), llvm.JITLibraryBuilder().add_ir(module)
    for name in num_arguments:
        library = library.export_symbol(name)
    tracker, word = library.add_current_process().link(jit, f"{source}_{isa}"), ctypes.c_int64
    _engines.append((jit, tracker))
    return {
        name: ctypes.CFUNCTYPE(word, *[word] * count)(tracker[name]) for name, count in num_arguments.items()
    }


def exported(module: llvm.ModuleRef) -> list[llvm.ValueRef]:
    """The functions of a module that others can call."""
    return [
        one for one in module.functions if not one.is_declaration and one.linkage is llvm.Linkage.external
    ]
