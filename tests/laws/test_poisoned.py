"""Law L1 where freed memory is overwritten at once, and everything that is saved leaves.

What is looked up behind its end, or under an address that was given out again, gives other bits then."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from cases import Case
from product import FACTORS, case_of, differences, draws, unsuited
from sampling import number_of, seed_of
from traps import TRAPS

# glibc's allocator fills what is freed with a byte, and what is given out with its complement; the cache of a
# thread does not, so it is off, and large blocks come from the same heap.
POISON = {
    "MALLOC_PERTURB_": "165",
    "GLIBC_TUNABLES": "glibc.malloc.perturb=165:glibc.malloc.tcache_count=0:"
    "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=4294967296",
}

ALONE = FACTORS | {
    "world": ("alone",), "replicas": (1,), "tier": ("packed",), "budget": (None,), "dtype": (None,),
    "autocast": (None,), "bare": (False,),
}  # fmt: skip


def cases(seed: int) -> Iterator[Case]:
    """One case of every small model and trap, the rest of it drawn."""
    yield Case(model="SmallMasks", cuts=["a"], tier="packed", codec="raw")
    yield Case(model="Freed", cuts=["sub"], tier="packed", codec="raw")
    for name in (*TRAPS, *FACTORS["model"]):
        yield case_of(next(draws(ALONE | {"model": (name,)}, seed, unsuited)), seed)


@pytest.mark.slow
def test_the_bits_are_the_same_where_freed_memory_is_poisoned(pytestconfig):
    command = [sys.executable, __file__, str(number_of(seed_of(pytestconfig)))]
    done = subprocess.run(
        command,
        env=os.environ | POISON | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stdout, done.stderr[-2000:]) == (0, "", "")


def is_poisoned():
    """True if the memory of a freed tensor has other bits, where an allocator can do that."""
    kept = torch.UntypedStorage(4096)
    address = kept.data_ptr()
    row = torch.empty(0, dtype=torch.uint8).set_(kept, 0, (4096,), (1,)).fill_(7)
    del kept, row
    import ctypes

    return ctypes.string_at(address, 4096)[1024] != 7


def main():
    """Run the cases in this process; a line for each that differs."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    if not is_poisoned():
        print("freed memory keeps its bytes here")
    for case in cases(int(sys.argv[1])):
        if found := differences(case):
            print(*found[:3], found[-1])


if __name__ == "__main__":
    main()
