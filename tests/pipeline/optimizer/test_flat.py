"""Gradients in one buffer: offsets, what stands where there is none, and the way back."""

from typing import Any

import pytest
import torch

from penstock.compression.errors import StageError
from penstock.pipeline.optimizer.flat import FlatGradients


def gradients(pairs):
    return [parameter.grad for _, parameter in pairs]


def named() -> Any:
    a = torch.nn.Parameter(torch.zeros(2, 3))
    b = torch.nn.Parameter(torch.zeros(4, 2, 2, 2).to(memory_format=torch.channels_last))
    c = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    d = torch.nn.Parameter(torch.zeros(2))
    a.grad, b.grad, c.grad = torch.full((2, 3), -0.0), torch.randn_like(b), torch.full((3,), 1 + 2j)
    return [("a", a), ("b", b), ("c", c), ("d", d)]


def test_offsets_go_from_the_last_to_the_first_by_dtype_and_the_rest_is_minus_zero():
    pairs = named()
    flat = FlatGradients(pairs, pieces=3)
    assert flat.offsets == {torch.float32: [(3, 0), (1, 2), (0, 34)], torch.complex64: [(2, 0)]}
    assert flat.sizes == {torch.float32: 42, torch.complex64: 3}
    found = flat.gather(gradients(pairs))
    assert torch.equal(found[torch.float32][2:34], pairs[1][1].grad.reshape(-1))
    rest = torch.cat([found[torch.float32][:2], found[torch.float32][34:]])
    assert torch.equal(rest.view(torch.int32), torch.full((10,), -0.0).view(torch.int32))


def test_buffers_that_were_given_back_hold_nothing_of_what_was_in_them():
    pairs = named()
    flat = FlatGradients(pairs, pieces=3)
    first = flat.gather(gradients(pairs))
    rows = {dtype: one.data_ptr() for dtype, one in first.items()}
    for _, parameter in pairs:
        parameter.grad = None
    flat.give_back(first)
    again = flat.gather(gradients(pairs))
    assert {dtype: one.data_ptr() for dtype, one in again.items()} == rows
    for found in again.values():
        numbers = torch.view_as_real(found) if found.is_complex() else found
        assert torch.equal(numbers.view(torch.int32), torch.full_like(numbers, -0.0).view(torch.int32))
    assert flat.buffers()[torch.float32].data_ptr() != rows[torch.float32]


@pytest.mark.parametrize(
    ("slice_bytes", "expected"),
    [
        (1, "float32 0:2 (3,), complex64 0:3 (2,), float32 2:34 (1,), float32 34:40 (0,)"),
        (9, "complex64 0:3 (2,), float32 0:34 (3, 1), float32 34:40 (0,)"),
        (1000, "complex64 0:3 (2,), float32 0:40 (3, 1, 0)"),
    ],
)
def test_slices_are_whole_parameters_in_the_order_in_which_all_of_each_are_final(slice_bytes, expected):
    found = FlatGradients(named(), pieces=3, slice_bytes=slice_bytes).slices
    shown = [f"{str(one.dtype)[6:]} {one.start}:{one.stop} {one.places}" for one in found]
    assert ", ".join(shown) == expected


def test_a_sum_of_two_keeps_minus_zero_and_what_nobody_has_stays_none():
    ours, theirs = named(), named()
    theirs[0][1].grad = None
    flat, other = FlatGradients(ours, pieces=1), FlatGradients(theirs, pieces=1)
    mine, others = flat.gather(gradients(ours)), other.gather(gradients(theirs))
    sums = {dtype: mine[dtype] + others[dtype] for dtype in flat.sizes}
    before = [parameter.grad for _, parameter in ours]
    expected = [None if g is None else g.clone() for g in before]
    found: Any = flat.spread(sums, [1, 1, 1, 0], like=[before[0], before[1].to("meta"), None, None])
    a, b, c, d = (found[place] for place in range(4))
    assert a is before[0]
    assert torch.equal(a.view(torch.int32), torch.full((2, 3), -0.0).view(torch.int32))
    assert torch.equal(b, expected[1] + theirs[1][1].grad)
    assert b.stride() == ours[1][1].stride()
    assert c.tolist() == [2 + 4j] * 3
    assert d is None


def test_a_sparse_gradient_is_refused_by_name():
    pairs = named()
    layer: Any = torch.nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    pairs.append(("words", layer.weight))
    with pytest.raises(StageError, match="replicas add up dense gradients, and words has a sparse one"):
        FlatGradients(pairs, pieces=1).gather(gradients(pairs))
