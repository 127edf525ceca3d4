"""The compiled kernels against their slow twins, on memory that ends at unreadable pages."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import llvmlite.binding as llvm
import numpy as np
import pytest
from guarded import guarded
from kernels import Kernels
from words import BITS, at, checksum_of, ends_of, memory, random_words, twin

from penstock.compression.frame import BLOCK
from penstock.compression.kernels import jit, zero_value_ir
from penstock.compression.kernels.jit import host_isas


@pytest.fixture(params=host_isas(), scope="module")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Of every instruction set that this machine has: "portable" everywhere."""
    return jit._build("zero_value", request.param)


@pytest.mark.parametrize("verb", ["unpack", "stream"])
@pytest.mark.parametrize("density", [0.02, 0.5, 1])
def test_damage_is_found_and_never_followed(kernels: Kernels, density: float, verb: str) -> None:
    num_words, rng = 3 * BLOCK if verb == "stream" else 2 * BLOCK + 1001, np.random.default_rng(1)
    for bits in BITS:
        words = random_words(num_words, bits, density)
        bitmap, ends, values = map(memory, twin(words))
        out, kernel, found = guarded(words.nbytes).numpy(), kernels[f"{verb}{bits}"], 0
        for trial in range(120):
            area = (bitmap[: -(-num_words // 8)], ends.view(np.uint8), ends)[trial % 3]
            kept, place = area.copy(), rng.integers(len(area))
            if area is ends:  # likely numbers: they descend, or end too early
                area[place] = rng.integers(len(values) + 2)
            else:
                area[place : place + rng.integers(1, 40)] ^= rng.integers(0, 256, dtype=np.uint8)
            is_set = np.unpackbits(bitmap, bitorder="little").astype(bool)
            sound = not is_set[num_words:].any() and (ends_of(is_set[:num_words]) == ends).all()
            sound = sound and all(a <= b for a, b in pairwise([0, *ends.tolist(), len(values)]))
            end = kernel(at(bitmap), at(ends), at(values), 0, len(values), num_words, at(out))
            assert (end >= 0) == sound
            found += not sound
            area[:] = kept
        assert found > 60


def test_checksum_is_what_its_twin_says(kernels: Kernels) -> None:
    for num_words in (0, 1, 63, 64, 65, 4 * BLOCK + 129):
        bitmap = np.packbits(random_words(num_words, 8, 0.5) != 0, bitorder="little")
        whole = memory(np.pad(bitmap, (0, -len(bitmap) % 8)))
        assert kernels["checksum"](at(whole), num_words) % (1 << 64) == checksum_of(bitmap, num_words)
    assert kernels["checksum"](0, 0) == 1
    known = np.array([5, 6], np.uint64)
    assert kernels["checksum"](at(known), 128) % (1 << 64) == 0xDB61C7E391FF4982  # in every release


def test_kernels_are_built_once_for_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    build, asked = jit._build.__wrapped__, list[str]()
    monkeypatch.setattr(jit, "_build", cache(lambda source, isa: asked.append(isa) or build(source, isa)))
    with ThreadPoolExecutor(8) as threads:
        built = list(threads.map(lambda _: jit.kernels("zero_value"), range(8)))
    assert all(kernels is built[0] for kernels in built)
    assert asked == host_isas()[:1]


def test_portable_kernels_compile_for_other_processors() -> None:
    assert host_isas()[-1] == "portable"
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    text = zero_value_ir.module("portable")
    names = [one.name for one in jit.exported(llvm.parse_assembly(text))]
    for system in ("aarch64-unknown-linux-gnu", "arm64-apple-darwin", "riscv64-linux-gnu"):
        machine = llvm.Target.from_triple(system).create_target_machine()
        assembly = machine.emit_assembly(llvm.parse_assembly(text))
        assert len(names) > 10
        assert all(f"{name}:" in assembly for name in names), system
