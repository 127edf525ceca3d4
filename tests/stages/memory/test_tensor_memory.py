"""The bytes of a tensor in a store: what comes back has the bits, strides and address mod 64 that it had."""

import pytest
import torch
from far import FarStore, small_pieces
from reference import same_bits

from penstock.stages.memory.byte_budget import piece_bytes
from penstock.stages.memory.evictable_tensor import EvictableTensor, TensorStore, hollow, may_leave
from penstock.stages.memory.stores import HostStore, Store, StoreOptions


def special(dtype=torch.float32):
    return torch.tensor([0.0, -0.0, float("nan"), float("inf"), -1.5, 2.0] * 100).to(dtype)


SHAPES = {
    "plain": lambda: special(),
    "zeros": lambda: torch.zeros(40, 50),
    "bfloat16": lambda: special(torch.bfloat16),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "gaps": lambda: torch.randn(30, 20)[:, 3:9],
    "transposed": lambda: torch.randn(7, 9).t(),
    "misaligned": lambda: torch.randn(500)[3:],
    "complex": lambda: torch.randn(30, dtype=torch.complex64),
    "whole numbers": lambda: torch.arange(300),
    "bool": lambda: torch.rand(300) > 0.5,
}


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("kind", [Store, HostStore, FarStore])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_comes_back_is_what_left(shape, kind, packs, monkeypatch):
    small_pieces(monkeypatch)
    tensor, frames = SHAPES[shape](), TensorStore(kind(), packs=packs)
    expected, looks = tensor.clone(), (tensor.stride(), tensor.data_ptr() % 64)
    memory = EvictableTensor(frames, tensor)
    assert memory.put(tensor)
    hollow(tensor)
    assert tensor.numel() == 0
    for found in (memory.get(), memory.get(), memory.take()):
        assert same_bits(found, expected)
        assert (found.stride(), found.data_ptr() % 64) == looks
    assert not memory.stored
    assert frames.store.num_bytes == 0
    assert (frames.bytes_out, frames.bytes_in) == (memory.num_bytes, 3 * memory.num_bytes)


@pytest.mark.parametrize("shape", ["plain", "bfloat16", "channels_last", "misaligned"])
def test_what_is_added_piece_by_piece_is_the_sum(shape, monkeypatch):
    small_pieces(monkeypatch)
    first, second = SHAPES[shape](), SHAPES[shape]()
    memory = EvictableTensor(TensorStore(FarStore(), packs=False), first)
    memory.put(first.clone(memory_format=torch.preserve_format))
    kept = second.clone()
    assert memory.add(second)
    assert len(memory.places) > 1
    assert same_bits(memory.take(), first + second)
    assert same_bits(second, kept)


def test_pieces_are_a_quarter_at_most_and_16_mib():
    mib = 1 << 20
    pieces = {1: 1, mib - 4: mib - 4, mib: mib // 4, mib + 4: mib // 4 + 4096, 50 * mib: 13107200}
    pieces[1 << 30] = 16 * mib
    assert {size: piece_bytes(size) for size in pieces} == pieces


@pytest.mark.parametrize("kind", [Store, FarStore])
def test_what_was_not_written_is_not_moved_again(kind):
    frames = TensorStore(kind(), packs=False)
    memory = EvictableTensor(frames, tensor := special())
    memory.put(tensor)
    read = memory.get()
    assert memory.put(read, written=False)
    assert frames.bytes_out == memory.num_bytes
    memory.put(torch.zeros_like(read), written=True)
    assert not memory.get().any()
    assert frames.bytes_out == 2 * memory.num_bytes


def test_a_frame_that_is_not_packed_is_the_tensors_own_memory_and_what_finds_no_room_stays():
    memory = EvictableTensor(TensorStore(Store(), packs=False), tensor := special())
    memory.put(tensor)
    assert memory.get().data_ptr() == tensor.data_ptr()
    memory = EvictableTensor(TensorStore(Store(StoreOptions(budget=100)), packs=False), tensor)
    assert not memory.put(tensor)
    assert not memory.stored


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0),
        torch.zeros(3),  # small
        torch.zeros(30).to_sparse(),
        torch.randn(30, dtype=torch.complex64).conj(),
        torch.zeros(30, device="meta"),
    ],
)
def test_what_may_not_leave(tensor):
    assert not may_leave(tensor, min_bytes=16)
    assert may_leave(torch.zeros(30), min_bytes=16)
