"""LLVM IR to machine code, for the instruction set that is asked for.

Kernels are compiled once per process, in about 0.2 s, at the first call that asks for them. Calls go through
ctypes, which gives up the interpreter lock, so a packing thread does not stop the others.
"""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import llvmlite.binding as llvm

from ..errors import CodecError
from . import exponent_ir, exponent_x86, narrow_ir, planes_ir, zero_value_ir

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


_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_Function = Callable[..., int]
_lock = threading.Lock()
_built: dict[tuple[str, str], Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroValueKernels:
    """The kernels by the bits of a word; ``zero_value_ir`` says what the arguments are."""

    isa: str
    pack: Mapping[int, _Function]
    pack_masked: Mapping[int, _Function]
    unpack: Mapping[int, _Function]
    stream: Mapping[int, _Function]  # unpack past the cache; unpack itself where nothing does that
    checksum: _Function
    engine: Any  # owns the machine code: without it the callables dangle


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentKernels:
    """The kernels by (bits of a word, plan, whether to store past the cache), ``count`` by bits of a word.

    ``exponent_ir`` says what the arguments are.
    """

    isa: str
    pack: Mapping[tuple[int, tuple[int, ...], bool], _Function]
    unpack: Mapping[tuple[int, tuple[int, ...], bool], _Function]
    count: Mapping[int, _Function]
    engine: Any  # as above


class Loops(NamedTuple):
    """Kernels by name that take addresses and counts alone; their text says what the arguments are."""

    isa: str
    call: Mapping[str, Callable[..., None]]
    engine: Any  # as above


def zero_value_kernels(isa: str | None = None) -> ZeroValueKernels:
    """Return the kernels for ``isa`` (default: the host's best).

    Raises: CodecError: this machine has no such instruction set.
    """
    return _once("zero_value", isa, _zero_value)


def exponent_kernels(isa: str | None = None) -> ExponentKernels:
    """As ``zero_value_kernels``."""
    return _once("exponent", isa, _exponent)


def narrow_kernels(isa: str | None = None) -> Loops:
    """As ``zero_value_kernels``."""
    return _once("narrow", isa, lambda isa: _loops("narrow", isa, *narrow_ir.module()))


def planes_kernels(isa: str | None = None) -> Loops:
    """As ``zero_value_kernels``."""
    return _once("planes", isa, lambda isa: _loops("planes", isa, *planes_ir.module()))


def _once(label: str, isa: str | None, build: Callable[[str], Any]) -> Any:
    with _lock:
        isa = isa or host_isas()[0]
        if (label, isa) not in _built:
            _built[label, isa] = build(isa)
        return _built[label, isa]


def _zero_value(isa: str) -> ZeroValueKernels:
    text, names = zero_value_ir.module(zero_value_ir.STEPS.get(isa, zero_value_ir.Portable))
    code = compiled(text, names, isa=isa, label="zero_value")

    def kernels(verb: str, *arguments: Any) -> dict[int, _Function]:
        found = {bits: code.addresses.get(f"{verb}{bits}") for bits in (8, 16, 32, 64)}
        kind = ctypes.CFUNCTYPE(_COUNT, *arguments)
        return {bits: kind(address) for bits, address in found.items() if address is not None}

    unpacking = (_POINTER, _POINTER, _POINTER, _COUNT, _COUNT, _COUNT, _POINTER)
    unpack = kernels("unpack", *unpacking)
    return ZeroValueKernels(
        isa=isa,
        pack=kernels("pack", _POINTER, _COUNT, _POINTER, _POINTER, _POINTER, _COUNT),
        pack_masked=kernels("packm", _POINTER, _COUNT, _POINTER, _POINTER, _COUNT),
        unpack=unpack,
        stream=kernels("stream", *unpacking) or unpack,
        checksum=ctypes.CFUNCTYPE(ctypes.c_uint64, _POINTER, _COUNT)(code.addresses["checksum"]),
        engine=code.engine,
    )


def _exponent(isa: str) -> ExponentKernels:
    steps = exponent_x86.STEPS.get(isa, exponent_ir.PortableExponents)()
    text, names = exponent_ir.module(steps)
    code = compiled(text, names, isa=isa, label="exponent")
    packing = (_POINTER, _COUNT, *[_POINTER] * 5, _COUNT, _COUNT)
    unpacking = (*[_POINTER] * 4, *[_COUNT] * 3, _POINTER, _POINTER)

    def kernels(verb: str, arguments: tuple[Any, ...]) -> dict[tuple[int, tuple[int, ...], bool], _Function]:
        found = {}
        kind = ctypes.CFUNCTYPE(_COUNT, *arguments)
        for bits, plan, stream in product(exponent_ir.WORD_BITS, exponent_ir.PLANS, (False, True)):
            name = f"{verb}{'s' if stream and steps.streams else ''}{bits}_{exponent_ir.plan_name(plan)}"
            found[bits, plan, stream] = kind(code.addresses[name])
        return found

    count = ctypes.CFUNCTYPE(_COUNT, _POINTER, _COUNT, _COUNT, _POINTER)
    return ExponentKernels(
        isa=isa,
        pack=kernels("pack", packing),
        unpack=kernels("unpack", unpacking),
        count={bits: count(code.addresses[f"count{bits}"]) for bits in exponent_ir.WORD_BITS},
        engine=code.engine,
    )


def _loops(label: str, isa: str, text: str, num_arguments: Mapping[str, int]) -> Loops:
    code = compiled(text, list(num_arguments), isa=isa, label=label)
    call = {
        name: ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * num_arguments[name])(address)
        for name, address in code.addresses.items()
    }
    return Loops(isa, call, code.engine)
