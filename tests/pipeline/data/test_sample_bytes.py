"""A sample as bytes: what comes back is what there was, or there are no bytes."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from reference import same_bits

from penstock import PenstockError
from penstock.pipeline.data.cache.sample_bytes import from_bytes, to_bytes

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.stride() == b.stride() and same_bits(a, b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, Image.Image):
        return (a.mode, a.size, a.tobytes()) == (b.mode, b.size, b.tobytes())
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[name], b[name]) for name in a)
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    return a == b


def tensor(dtype: torch.dtype, shape: tuple[int, ...], order: int) -> torch.Tensor:
    many = torch.arange(math.prod(shape)).view(shape).to(dtype)
    return [many, many.mT, many[::2], many.unsqueeze(0).expand(3, *many.shape)][order]


SHAPES = [(2, 3), (1, 1), (0, 2), (7, 5)]
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(),
    st.builds(tensor, st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.integers(0, 3)),
    st.builds(lambda n, kind: np.arange(n, dtype=kind), st.integers(0, 9), st.sampled_from("bBhiqfdFD")),
    st.builds(lambda n: np.float32(n), st.floats(width=32)),
    st.builds(lambda mode: Image.new(mode, (3, 2), 1), st.sampled_from(["L", "RGB", "RGBA", "1", "F", "I"])),
)  # fmt: skip
SAMPLES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(st.text(max_size=4), inner)
    ),
    max_leaves=8,
)


@given(SAMPLES)
@example([-0.0, math.nan, math.inf, -math.inf, 5e-324, 2**70, True])
def test_what_comes_back_is_what_there_was(sample):
    data = to_bytes(sample)
    assert data is not None
    assert same(from_bytes(data), sample)


class Mine(torch.Tensor):
    pass


class Odd(dict[str, int]):
    pass


@pytest.mark.parametrize(
    "sample",
    [
        object(), {1, 2}, Odd(a=1), {1: 2}, torch.nn.Parameter(torch.ones(1)),
        torch.ones(1).as_subclass(Mine), torch.ones(2).requires_grad_(), torch.ones(2, 2).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, device="meta"),
        torch.arange(4.0).as_strided((2, 2), (1, 1)), np.array(["a"]),
        np.array([None]), np.ones((3, 3)).T[::2], np.ones(2, ">f4"), Image.new("P", (2, 2)),
        [torch.ones(1), object()], lambda: 1,
    ],
)  # fmt: skip
def test_what_may_come_back_otherwise_has_no_bytes(sample):
    assert to_bytes(sample) is None


@given(SAMPLES, st.data())
def test_damage_is_an_error_of_ours_and_never_another(sample, chosen):
    data = bytearray(to_bytes(sample) or b"")
    at = chosen.draw(st.integers(0, len(data) - 1))
    data[at] ^= 1 << chosen.draw(st.integers(0, 7))
    for damaged in (bytes(data), bytes(data[:at])):
        try:
            from_bytes(damaged)
        except PenstockError:
            pass
