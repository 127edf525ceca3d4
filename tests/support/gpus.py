"""Laws of kernels for a GPU, held on one, or in Triton's interpreter on CPU tensors where there is none."""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from checkout import run
from tensors import assert_same, decoded
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.compression.codec import encode
from penstock.compression.gpu import frames, payloads

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this process runs kernels in the interpreter, which is chosen before Triton is imported."""

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = "cpu" if INTERPRETED else pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])
_WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "bincount",
    "equal",
    "is_nonzero",
    "lift_fresh",
)


def compile_all(module: str, names: Sequence[str], types: dict[str, str], constants: dict[str, Any]) -> None:
    """Compile kernels for an H100 or H200, as the interpreter takes more than the compiler does.

    Args:    types: of arguments by name, Triton's; those not named are integers, of 32 and of 64 bits.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    loops = payloads.kernels(module)
    for name, size in product(names, ("i32", "i64")):
        kernel = getattr(loops, name)
        kinds = {arg: "constexpr" if arg in constants else types.get(arg, size) for arg in kernel.arg_names}
        given = {(kernel.arg_names.index(arg),): constants[arg] for arg in kinds if arg in constants}
        source = ASTSource(kernel, kinds, given)
        assert triton.compile(source, GPUTarget("cuda", 90, 32), payloads.options(4)).asm["cubin"]


def run_interpreted(*files_and_options: str) -> None:
    """Run tests of files again, in a process where kernels are interpreted."""
    words = "-m", "pytest", "-q", "-p", "no:cacheprovider", *files_and_options
    assert "passed" in run(*words, seconds=600, TRITON_INTERPRET="1")


def moved(tensor: Tensor, device: str) -> Tensor:
    """``tensor`` on ``device``, in a storage where it lies as in its own."""
    source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    storage, first = source.to(device).untyped_storage(), int(tensor.storage_offset())
    empty = torch.empty(0, dtype=torch.uint8, device=device).view(tensor.dtype)
    return empty.set_(storage, first, tensor.size(), tensor.stride())


def assert_law(tensor: Tensor, device: str, codec: str = "zero_value", *, mask=None) -> Tensor:
    """The CPU's bytes, which are returned, and the same tensor back from them."""
    expected, there = encode(tensor, codec, mask=mask), moved(tensor, device)
    mask_there = None if mask is None else mask.to(device)
    frame = frames.encode(there, codec, mask=mask_there)
    assert frame.device == there.device
    assert torch.equal(frame.cpu(), expected)
    back = frames.decode(expected.to(device), mask=mask_there)
    assert back is not None
    assert_same(moved(back, "cpu"), decoded(expected, mask=mask))
    return expected


class _RefusingOperations(TorchDispatchMode):
    """Refuses operations whose result the host has to wait for, or that copy from its memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in _WAITING, f"the host waits for {name}"
        return func(*args, **(kwargs or {}))


class _RefusingCalls(TorchFunctionMode):
    """Refuses what reads a tensor on the CPU without an operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        assert name not in ("tolist", "numpy"), f"the host waits for {name}"
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """Raise where the host waits for the device: torch says so on a GPU, else what would wait is refused."""
    if device == "cpu":
        with _RefusingCalls(), _RefusingOperations():
            yield
        return
    with told_of_waits("error"):
        yield


@contextmanager
def told_of_waits(how: str) -> Iterator[None]:
    """Torch says where the host waits for the device: ``how`` is "warn" or "error"."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(how)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
