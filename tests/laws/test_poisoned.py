"""Law L1 where freed memory is overwritten at once, and everything that is saved leaves.

What is looked up behind its end, or under an address that was given out again, gives other bits then."""

import os
import subprocess
import sys

import pytest
import torch
from cases import Case
from law import differences
from traps import TRAPS

# glibc's allocator fills what is freed with a byte, and what is given out with its complement; the cache of a
# thread does not, so it is off, and large blocks come from the same heap.
POISON = {
    "MALLOC_PERTURB_": "165",
    "GLIBC_TUNABLES": "glibc.malloc.perturb=165:glibc.malloc.tcache_count=0:"
    "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=4294967296",
}

CASES = [
    Case(model="SmallMasks", cuts=["a"], tier="packed", codec="raw"),
    Case(model="Freed", cuts=["sub"], tier="packed", codec="raw"),
    Case(model="Sizes", cuts="every", tier="packed", steps=2),
    Case(model="gated", cuts="every", schedule="zb_h1", tier="packed", steps=1),
    Case(model="residual", cuts=3, tier="host", steps=1),
    *(
        Case(model=name, cuts=cuts, schedule=schedule, tier="packed", codec=codec, steps=2, micro_batches=2)
        for name in TRAPS
        for cuts, schedule, codec in (("every", "1f1b", "zero_value"), (2, "zb_h1", "raw"))
    ),
    *(Case(model=f"dag{i}", cuts=("random", 3, i), tier="packed", codec="raw", steps=2) for i in range(6)),
    *(
        Case(model=name, cuts=3, schedule="zb_h1", tier="packed", codec="raw", steps=1)
        for name in ("tied", "gated", "residual", "residual_channels_last", "gpt_gelu_dropout", "gpt_tied")
    ),
    Case(model="resnet18", cuts=3, tier="packed", steps=1),
    Case(model="squeezenet", cuts=3, schedule="gpipe", tier="packed", steps=1),
]


@pytest.mark.slow
def test_the_bits_are_the_same_where_freed_memory_is_poisoned():
    command = [sys.executable, __file__]
    done = subprocess.run(
        command,
        env=os.environ | POISON | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stdout, done.stderr[-2000:]) == (0, "", "")


def is_poisoned():
    """Whether the memory of a tensor that was freed has other bits, where an allocator can do that."""
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
    for case in CASES:
        if found := differences(case):
            print(case, found[:3])


if __name__ == "__main__":
    main()
