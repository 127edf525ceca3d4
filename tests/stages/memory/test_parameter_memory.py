"""A mirror by itself: what it brings and takes between layers, what stays resident, and that writes stay."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from far import FarStore
from saving import busy
from torch import nn
from torch.nn import Parameter

from penstock.compression.errors import StageError
from penstock.stages.memory.parameter_offload import OffloadedParameters, without_resident
from penstock.stages.memory.stores import Store

LAYERS: list[Any] = [SimpleNamespace(name=name) for name in "abc"]


def mirror_of(store, **options):
    """A mirror of three parameters, each read by a layer, all of them away."""
    parameters = [nn.Parameter(torch.full((32,), float(i))) for i in range(3)]
    readers = {layer.name: [p] for layer, p in zip(LAYERS, parameters, strict=True)}
    mirror = OffloadedParameters(store, readers=readers, packs=False, min_bytes=1, **options)
    mirror.begin()
    mirror.push_all()
    return mirror, parameters


def sizes(parameters):
    return [parameter.numel() for parameter in parameters]


@pytest.mark.parametrize("kind", [Store, FarStore])
def test_between_layers_one_leaves_and_the_next_one_comes_and_what_is_written_there_stays(kind):
    mirror, parameters = mirror_of(kind())
    seen = []
    for done, following in zip([None, *LAYERS], [*LAYERS, None], strict=True):
        mirror.layer_done(done, following)
        seen.append(sizes(parameters))
        if following is LAYERS[1]:
            with torch.no_grad():
                parameters[1].add_(1)
    assert seen == [[32, 0, 0], [0, 32, 0], [0, 0, 32], [0, 0, 0]]
    mirror.layer_done(None, LAYERS[1])
    assert float(parameters[1].detach().sum()) == 64
    mirror.pull_all()
    mirror.close()
    assert [float(parameter.detach().sum()) for parameter in parameters] == [0, 64, 64]


def test_what_autograd_saved_is_brought_and_must_not_be_written_to():
    mirror, parameters = mirror_of(FarStore())
    mirror.layer_done(None, LAYERS[1])
    whole, part = mirror.saved(parameters[1]), mirror.saved(parameters[1].view(4, 8)[1:, 2:])
    mirror.layer_done(LAYERS[1], None)
    assert sizes(parameters) == [0, 0, 0]
    assert part().shape == (3, 6)
    assert torch.equal(whole(), torch.ones(32))
    mirror.settle()
    mirror.layer_done(None, LAYERS[1])
    with torch.no_grad():
        parameters[1].mul_(2)
    for read in (whole, part):
        with pytest.raises(StageError, match="must not be written to before its backward"):
            read()
    mirror.close()


def test_what_is_brought_ahead_is_let_go_where_it_is_not_wanted():
    mirror, _ = mirror_of(FarStore())
    for turn in (0, 1, 2, 1):
        mirror.prefetch(turn)
        mirror.frames.ahead.drain()
        assert mirror.resident_bytes == 128
        assert sum(one.prefetched_bytes for one in mirror._all.values()) == 128
    mirror.settle()
    assert sum(one.prefetched_bytes for one in mirror._all.values()) == 0
    mirror.close()


def test_so_many_layers_are_brought_ahead_in_the_direction_of_the_walk():
    mirror, _ = mirror_of(FarStore(), ahead=2)

    def ahead():
        mirror.frames.ahead.drain()
        return [one.prefetched_bytes for one in mirror._all.values()]

    mirror.layer_done(None, LAYERS[0])
    assert ahead() == [0, 128, 128]
    mirror.settle()
    mirror.prefetch(2, step=-1)
    assert ahead() == [0, 128, 128]
    mirror.prefetch(1, step=-1)
    assert ahead() == [128, 128, 0]
    mirror.close()


def test_the_last_layers_of_a_forward_stay_for_the_backward_but_not_for_another_forward():
    mirror, parameters = mirror_of(FarStore(), stays=2)
    notes = []
    for done, following in zip([None, *LAYERS], [*LAYERS, None], strict=True):
        mirror.layer_done(done, following)
        if following is not None:
            notes.append(mirror.saved(parameters[LAYERS.index(following)]))
    assert sizes(parameters) == [0, 32, 32]
    mirror.frames.ahead.drain()
    before = mirror.frames.bytes_in
    for number in (2, 1, 0):
        assert torch.equal(notes[number](), torch.full((32,), float(number)))
        mirror.frames.ahead.drain()
    assert mirror.frames.bytes_in - before == 128
    mirror.layer_done(None, LAYERS[0])
    assert sizes(parameters) == [32, 0, 0]
    mirror.close()


def test_what_a_thread_raised_is_raised_by_who_waits_for_it():
    class Broken(FarStore):
        def get(self, key):
            raise OSError("the disk is gone")

    mirror, _ = mirror_of(Broken())
    mirror.prefetch(0)
    with pytest.raises(OSError, match="the disk is gone"):
        mirror.layer_done(None, LAYERS[0])


@pytest.mark.parametrize("comes", [False, True])
def test_a_thread_that_is_late_brings_nothing(comes):
    mirror, _ = mirror_of(FarStore())
    gate = busy(mirror.frames.ahead)
    mirror.prefetch(0)
    if comes:
        mirror.layer_done(None, LAYERS[0])
    else:
        mirror.prefetch(-1)
    gate.set()
    mirror.frames.ahead.drain()
    assert [one.prefetched_bytes for one in mirror._all.values()] == [0, 128 * comes, 0]
    mirror.close()


@pytest.mark.parametrize(
    ("num_bytes", "moves"),
    [(0, "abc"), (3, "abc"), (4, "ac"), (19, "ac"), (20, "c"), (43, "c"), (44, ""), (1 << 40, "")],
)
def test_whole_layers_stay_the_smallest_first(num_bytes, moves):
    sizes = {"a": [2, 2], "b": [1], "c": [6]}
    readers = {name: [Parameter(torch.zeros(n)) for n in ns] for name, ns in sizes.items()}
    left = without_resident(readers, num_bytes)
    assert list(left) == [*sizes]
    assert {name for name, found in left.items() if found} == set(moves)
    assert all(found in ([], readers[name]) for name, found in left.items())


def test_a_parameter_of_two_layers_stays_with_its_first():
    shared, own = Parameter(torch.zeros(4)), Parameter(torch.zeros(1))
    left = without_resident({"first": [shared], "second": [shared, own]}, 16)
    assert [*map(len, left.values())] == [1, 1]
    left = without_resident({"first": [shared], "second": [shared, own]}, 20)
    assert [*map(len, left.values())] == [0, 0]
