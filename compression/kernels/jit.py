"""LLVM IR to machine code, for the instruction set that is asked for.

Calls go through ctypes, which gives up the interpreter lock, so a packing thread does not stop the others.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any, NamedTuple

import llvmlite.binding as llvm

from ..errors import CodecError

# What LLVM calls the features that the kernels of an instruction set use, fastest set first.
ISAS: dict[str, tuple[str, ...]] = {
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512vbmi", "avx512vbmi2", "popcnt"),
    "avx2": ("avx2", "bmi", "bmi2", "popcnt"),
    "portable": (),
}


class Code(NamedTuple):
    """Compiled functions: their addresses by name, and what owns the machine code (keep it: they dangle)."""

    addresses: dict[str, int]
    engine: Any


def host_isas() -> list[str]:
    """The instruction sets of this machine, fastest first; the last is always "portable"."""
    try:
        features = llvm.get_host_cpu_features()
    except RuntimeError:  # LLVM cannot tell on this system
        return ["portable"]
    return [isa for isa, needed in ISAS.items() if all(features.get(name) for name in needed)]


def compiled(text: str, names: Sequence[str], *, isa: str, label: str) -> Code:
    """Compile the functions ``names`` of the module ``text`` in about 0.1 s.

    Raises: CodecError: this machine has no such instruction set.
    """
    if isa not in host_isas():
        known = ", ".join(host_isas())
        raise CodecError(f"kernels for this machine are {known}, found {isa!r}; leave the choice to build()")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu = "x86-64" if platform.machine().lower() in ("x86_64", "amd64") else "generic"
    features = ",".join(f"+{name}" for name in ISAS[isa])
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
    tracker = library.add_current_process().link(jit, f"{label}_{isa}")
    return Code({name: tracker[name] for name in names}, (jit, tracker))
