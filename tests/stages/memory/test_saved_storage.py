"""SavedStorage: every transition that is allowed, and that no other one is made; memory in every state."""

import itertools
import weakref

import pytest
import torch
from reference import same_bits

from penstock.compression.errors import StageError
from penstock.stages.memory.copy_stream import CopyStream
from penstock.stages.memory.saved_storage import SavedStorage
from penstock.stages.memory.tensor_view import Bytes

# How a storage comes into each state, in the steps of a life.
WAYS = {
    "resident": [],
    "leaving": ["leaving"],
    "away": ["leaving", "stored"],
    "coming": ["leaving", "stored", "coming"],
    "dropped": ["dropped"],
}
ALLOWED = {
    ("resident", "leaving"), ("resident", "away"), ("resident", "dropped"),
    ("leaving", "resident"), ("leaving", "away"), ("leaving", "dropped"),
    ("away", "coming"), ("away", "dropped"),
    ("coming", "resident"), ("coming", "dropped"),
}  # fmt: skip


def storage_of(tensor):
    return SavedStorage(tensor, stream=CopyStream(), previous=lambda: None)


def brought_back(content):
    return lambda: Bytes(content.clone().untyped_storage(), 0)


def in_state(state, tensor):
    """A storage that saved ``tensor`` once, and came into ``state``; its store has the same bytes."""
    storage = storage_of(tensor)
    storage.add(tensor, None)
    content = tensor.detach().clone()
    for step in WAYS[state]:
        if step == "stored":
            assert storage.stored(brought_back(content))
        else:
            assert storage.transition(step)
    assert storage.state == state
    return storage


@pytest.mark.parametrize(("before", "after"), list(itertools.product(WAYS, WAYS)))
def test_the_transitions_of_the_drawing_are_made_and_all_others_refused(before, after):
    storage = in_state(before, torch.arange(8.0))
    if (before, after) in ALLOWED:
        assert storage.transition(after)
        assert storage.state == after
    else:
        with pytest.raises(StageError, match=f"that is {before} goes to .*, found {after}"):
            storage.transition(after)
        assert storage.state == before


@pytest.mark.parametrize("state", WAYS)
def test_memory_is_there_until_it_is_stored_or_dropped_and_a_read_gives_its_bytes(state):
    tensor = torch.arange(8.0)
    storage, there = in_state(state, tensor), weakref.ref(tensor.untyped_storage())
    expected = tensor.clone()
    del tensor
    assert (there() is not None) == (state in ("resident", "leaving"))
    assert (storage.flat() is not None) == (state == "leaving")
    if state == "dropped":
        with pytest.raises(StageError, match="has one backward"):
            storage.read(0)
        return
    assert same_bits(storage.read(0), expected)
    assert storage.state == {"coming": "away"}.get(state, state)
    assert same_bits(storage.read(0), expected)  # for one more pass over the graph


def test_it_goes_when_every_view_was_read():
    tensor = torch.arange(8.0)
    storage = in_state("away", tensor)
    storage.add(tensor[2:], None)
    storage.read(0)
    assert storage.state == "resident"
    storage.read(1)
    assert storage.state == "away"


def test_bring_is_for_what_is_away_and_for_what_is_awaited():
    for state, fetched_only, after in (
        ("away", False, "resident"), ("away", True, "away"),
        ("coming", False, "resident"), ("coming", True, "resident"),
        ("resident", False, "resident"), ("leaving", False, "leaving"), ("dropped", True, "dropped"),
    ):  # fmt: skip
        storage = in_state(state, torch.arange(8.0))
        storage.bring(fetched_only=fetched_only)
        assert storage.state == after


def test_only_from_leaves_other_states_alone():
    storage = in_state("away", torch.arange(8.0))
    assert not storage.transition("resident", only_from="leaving")
    assert storage.state == "away"
    assert storage.transition("coming", only_from="away")
    assert storage.state == "coming"


def test_what_left_while_it_was_kept_can_go_later_and_while_it_was_dropped_needs_no_frame():
    tensor = torch.arange(8.0)
    storage = in_state("leaving", tensor)
    storage.transition("resident", only_from="leaving")
    assert storage.stored(brought_back(tensor))
    assert storage.state == "resident"
    storage.read(0)
    assert storage.state == "away"
    storage = in_state("leaving", tensor)
    storage.transition("dropped")
    assert not storage.stored(brought_back(tensor))
    assert storage.state == "dropped"
