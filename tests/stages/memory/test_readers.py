"""Which parameters of a mirror stay near all the same."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from penstock.stages.memory.readers import but_staying


@pytest.mark.parametrize(
    ("num_bytes", "moves"),
    [(0, "abc"), (3, "abc"), (4, "ac"), (19, "ac"), (20, "c"), (43, "c"), (44, ""), (1 << 40, "")],
)
def test_whole_layers_stay_the_smallest_first(num_bytes, moves):
    sizes = {"a": [2, 2], "b": [1], "c": [6]}
    readers = {name: [Parameter(torch.zeros(n)) for n in ns] for name, ns in sizes.items()}
    left = but_staying(readers, num_bytes)
    assert list(left) == [*sizes]
    assert {name for name, found in left.items() if found} == set(moves)
    assert all(found in ([], readers[name]) for name, found in left.items())


def test_a_parameter_of_two_layers_stays_with_its_first():
    shared, own = Parameter(torch.zeros(4)), Parameter(torch.zeros(1))
    left = but_staying({"first": [shared], "second": [shared, own]}, 16)
    assert [*map(len, left.values())] == [1, 1]
    left = but_staying({"first": [shared], "second": [shared, own]}, 20)
    assert [*map(len, left.values())] == [0, 0]
