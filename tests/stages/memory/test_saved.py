"""Saved: what a stage saved leaves after a forward, is back before its backward; packed once, same bits."""

import threading

import numpy as np
import pytest
import torch
from reference import same_bits
from saving import Net, behind, busy, fetch, forward, gradients, wait
from torch import nn

from penstock.compression.buffers import Frame, Pool
from penstock.compression.codec import buffer_bytes, pack_into
from penstock.compression.errors import CodecError, StageError
from penstock.compression.frame import MASKED, read_header, write_header
from penstock.stages.memory.saved_storage import Bytes, SavedStorage
from penstock.stages.memory.stores import Store
from penstock.stages.worker import Stream


def net():
    torch.manual_seed(1)
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten()
    return Net(nn.Sequential(*layers, nn.Linear(200, 9)))


def batches(count):
    return [torch.randn(4, 3, 16, 16).relu() for _ in range(count)]


def test_what_left_is_gone_until_it_is_fetched_and_has_one_backward(saver):
    model, store = net(), Store()
    saved = saver(model, store=store)
    out = forward(model, saved, batches(1)[0])
    wait(saved)
    assert saved.counts.bytes_raw > 3 * saved.counts.bytes_kept > 0
    assert store.num_bytes <= saved.counts.bytes_kept
    assert saved.counts.num_unpacks == 0
    fetch(saved)
    wait(saved)
    fetched = saved.counts.num_unpacks
    assert fetched == saved.counts.num_packs > 3
    out.sum().backward(retain_graph=True)
    assert saved.counts.num_unpacks == fetched  # each of them once
    saved.drop(0)
    assert store.num_bytes == 0
    with pytest.raises(StageError, match="has one backward"):
        out.sum().backward()


def frame_of(tensor, pool, codec="zero_value"):
    buffer = pool.take(buffer_bytes(tensor.shape, tensor.dtype, codec))
    return Frame(buffer, pack_into(tensor, buffer, codec=codec), pool)


def test_a_frame_that_was_sent_is_kept_as_it_was_sent(saver):
    """The last layer's output goes packed, and is not packed again."""
    model, store, pool = Net(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sigmoid())), Store(), Pool()
    memory = np.maximum(np.random.default_rng(0).normal(size=4 * 3 * 16 * 16 + 3), 0).astype(np.float32)
    x = torch.from_numpy(memory[3:]).view(4, 3, 16, 16)
    assert x.data_ptr() % 64  # so that a tensor does not begin where its storage does
    expected, _ = gradients(model, x, None)
    model.model.zero_grad()
    saved = saver(model, store=store)
    with saved.forward(0):
        out = model.run(x, saved)
    sent = frame_of(out, pool)
    result, edge = out.detach().clone(), torch.autograd.graph.get_gradient_edge(out)
    went = {9: (out.detach(), sent)}
    del out
    saved.offload(0, went)
    went.clear()
    wait(saved)
    assert saved.counts.num_packs == 1  # of what came in
    assert any(kept is sent for kept in store._frames.values())
    sent.release()
    saved.ready(0)
    weight = torch.linspace(-1, 1, result.numel()).view(result.shape)
    torch.autograd.backward([edge], [weight])
    saved.drop(0)
    assert not pool._lent
    found = [result, *(p.grad for p in model.model.parameters())]
    assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    "what", ["what was saved", "of another tensor", "it has gaps", "it is lossy", "it has values alone"]
)
def test_only_a_frame_of_what_was_saved_is_taken(what, saver):
    model, store, pool = Net(nn.Conv2d(3, 8, 3)), Store(), Pool()
    wide = nn.functional.hardshrink(torch.randn(4, 3, 16, 16)).repeat(1, 1, 1, 2)
    x = wide[..., :16] if what == "it has gaps" else wide[..., :16].contiguous()
    frame = frame_of(x, pool)
    header = read_header(frame.buffer)
    if what == "it is lossy":
        write_header(frame.buffer, header._replace(codec="bf16"))
    if what == "it has values alone":
        write_header(frame.buffer, header._replace(flags=MASKED, checksum=1))
    saved = saver(model, store=store)
    with saved.forward(0):
        _graph = model.run(x, saved)
    saved.offload(0, {0: (x.clone() if what == "of another tensor" else x, frame)})
    wait(saved)
    assert any(kept is frame for kept in store._frames.values()) == (what == "what was saved")
    frame.release()
    assert bool(pool._lent) == (what == "what was saved")
    saved.drop(0)
    assert not pool._lent


def test_what_is_fetched_before_it_left_stays(saver):
    model = net()
    saved = saver(model)
    gate = busy(saved._packer.packing)
    out = forward(model, saved, batches(1)[0])
    fetch(saved)
    gate.set()
    saved.ready(0)
    wait(saved)
    assert saved.counts.num_packs == saved.counts.num_unpacks == 0
    assert saved.counts.bytes_kept == saved.counts.bytes_raw
    out.sum().backward()


def test_what_was_used_meanwhile_is_not_brought_back_again(saver):
    model = net()
    saved = saver(model)
    out = forward(model, saved, batches(1)[0])
    wait(saved)
    gate = busy(saved._packer.reading)
    fetch(saved)
    out.sum().backward(retain_graph=True)
    gate.set()
    wait(saved)
    assert saved.counts.num_unpacks == saved.counts.num_packs > 0


def test_a_failed_step_leaves_nothing(saver):
    model, store = net(), Store()
    saved = saver(model, store=store)
    _graph = forward(model, saved, batches(1)[0])

    def fail():
        with saved.forward(1):
            model.run(batches(1)[0], saved)
            raise ValueError("in a layer")

    with pytest.raises(ValueError, match="in a layer"):
        fail()
    assert saved._hooks is None
    saved.close()
    assert store.num_bytes == 0


def test_a_frame_that_was_damaged_in_the_store_is_told(saver):
    model, store = net(), Store()
    saved = saver(model, store=store)
    _graph = forward(model, saved, batches(1)[0])
    wait(saved)
    for frame in store._frames.values():
        frame.buffer[0] = 0
    fetch(saved)
    with pytest.raises(CodecError, match="it is damaged"):
        wait(saved)


def storage_of(tensor):
    return SavedStorage(tensor, stream=Stream(), previous=lambda: None)


def test_a_way_that_no_saved_storage_goes_is_refused():
    storage = storage_of(torch.ones(8))
    assert storage.transition("dropped")
    with pytest.raises(StageError, match=r"that is dropped goes to .*, found offloaded"):
        storage.transition("offloaded")


def test_a_view_that_was_given_up_is_not_waited_for():
    kept = torch.arange(8.0)
    storage = storage_of(kept)
    first, second = storage.add(kept, None), storage.add(kept, None)
    storage.transition("evicting")
    storage.stored(lambda _: Bytes(kept.untyped_storage(), 0))
    storage.give_up(first)
    for _ in range(2):  # a graph that is kept is gone through again
        assert same_bits(storage.read(second), kept)
        assert storage.state == "offloaded"


def test_memory_that_was_given_back_and_taken_anew_is_another():
    x = torch.ones(1 << 16)
    storage, memory = storage_of(x), x.untyped_storage()
    assert storage.same_memory(memory)
    memory.resize_(0)
    others = [torch.ones(len(x)) for _ in range(4)]  # one of them may lie there now
    memory.resize_(storage.num_bytes)
    assert not storage.same_memory(memory), len(others)


@pytest.mark.parametrize("filled", [False, True])
def test_what_was_freed_stays_so_until_it_is_filled_again(filled, saver):
    """As sharded training does between a forward and a backward; torch itself would read at address 0."""
    model, x = Net(nn.Sequential(nn.Linear(64, 64), nn.Sigmoid())), torch.randn(8, 64)
    expected, _ = gradients(model, x, None)
    model.model.zero_grad()
    saved = saver(model)
    with saved.forward(0):
        out = model.run(x, saved)
    content, storage = out.detach().clone(), out.untyped_storage()
    storage.resize_(0)
    saved.offload(0, {})
    wait(saved)
    assert storage.nbytes() == 0
    fetch(saved)
    saved.ready(0)
    edge = torch.autograd.graph.get_gradient_edge(out)
    weight = torch.linspace(-1, 1, content.numel()).view(content.shape)
    if filled:
        storage.resize_(content.nbytes)
        out.detach().numpy()[:] = content.numpy()
        torch.autograd.backward([edge], [weight])
        found = [content, *(p.grad for p in model.model.parameters())]
        assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))
    else:
        with pytest.raises(StageError, match=r"must keep its memory until its backward.*resized to 0"):
            torch.autograd.backward([edge], [weight])


class Slow(Store):
    """Lets a frame in when ``gate`` is set."""

    def __init__(self):
        super().__init__()
        self.gate, self.asked = threading.Event(), threading.Event()

    def put(self, key, frame):
        self.asked.set()
        assert self.gate.wait(10)
        super().put(key, frame)


@pytest.mark.parametrize("what", ["left", "fetched", "dropped"])
def test_a_slow_store_stops_no_packing_and_gets_nothing_that_is_wanted_or_dropped_meanwhile(what, saver):
    model, store = net(), Slow()
    saved = saver(model, store=store)
    out = forward(model, saved, batches(1)[0])
    behind(saved._thread)
    saved._packer.packing.drain()
    assert store.asked.wait(30)  # the first is on its way, the others wait
    assert (saved.counts.num_packs, store._frames) == (4, {})
    waiting = store.num_bytes
    assert waiting > 0  # what waits counts
    if what == "fetched":
        fetch(saved)
        assert saved.counts.num_unpacks == 0
        out.sum().backward(retain_graph=True)
    elif what == "dropped":
        saved.drop(0)
    store.gate.set()
    wait(saved)
    # The first was wanted too late to be kept out, and may be let go of without packing.
    assert len(store._frames) == {"left": saved.counts.num_packs, "fetched": 1, "dropped": 0}[what]
    assert store.num_bytes == sum(frame.num_bytes for frame in store._frames.values())
    assert store.num_bytes == waiting or what != "left"
    if what != "dropped":
        out.sum().backward()
        assert saved.counts.num_unpacks <= 1 or what == "left"
    saved.drop(0)
    assert (store.num_bytes, store._frames) == (0, {})
