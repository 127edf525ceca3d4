"""The memory thread: what was saved leaves by layer, and comes back by layer; a limit of the device holds."""

import functools
import threading

import pytest
import torch
from disks import Fails, Slow
from far import AwayStore
from reference import same_bits
from saving import Net, Square, busy, ends, forward, settle, wait
from torch import nn

from penstock.compression.errors import ConfigError, StageError
from penstock.stages.memory.byte_budget import MemoryOptions, Tiers
from penstock.stages.memory.disk import SwapFile
from penstock.stages.memory.prefetch import NEVER, MemoryThread, Pass, Timeline

DEPTH, SIZE = 12, 1 << 18
PROGRAM = [Pass(0, 0), Pass(0, 0, reads=True)]


def deep(depth=DEPTH):
    return Net(nn.Sequential(*[Square() for _ in range(depth)]))


@pytest.fixture
def made(saver):
    """Makes what keeps the saved tensors of a net, at the beginning of a step of one micro-batch."""

    def make(net, *, store=None, **options):
        thread = MemoryThread(MemoryOptions(**options), num_layers={0: len(net.layers)})
        thread.begin(PROGRAM)
        thread.at(0)
        return saver(net, store=store or AwayStore(), codec="raw", thread=thread), thread

    return make


def input_of():
    return torch.rand(SIZE).requires_grad_().clone()


def states(saved):
    """The state of every storage by the layer that reads it first."""
    run = saved._micro_batches[0]
    return dict(sorted((run.first_read(storage), storage.state) for storage in run.alive()))


def states_at(saved, net, layer):
    """The states of the storages when ``layer`` begins, what was to move having moved; the output."""
    seen, tell = {}, saved.layer_done

    def layer_done(done, following):
        tell(done, following)
        if following is net.layers[layer]:
            wait(saved)
            seen.update(states(saved))

    saved.layer_done = layer_done
    with saved.forward(0):
        out = net.run(input_of(), saved)
    return seen, out


def at_each_read(saved, thread, look):
    """Results of ``look`` at each layer of the backward, everything that was to move having moved."""
    seen, read = [], thread.reads

    def reads(run, layer):
        read(run, layer)
        wait(saved)
        seen.append((layer, look()))

    thread.reads = reads
    thread.at(1)
    return seen


@pytest.mark.parametrize("near", [0, 4, 9])
def test_what_is_far_from_being_read_leaves_while_the_forward_runs(near, made):
    net = deep()
    saved, _ = made(net, prefetch_layers=0, writeout_layers=near)
    now, last = DEPTH - 2, 2 * DEPTH - 1
    seen, _ = states_at(saved, net, now)
    assert all(
        state == "offloaded" for layer, state in seen.items() if last - layer - now > near and layer < now - 1
    )
    # What was never farther from its backward than that has not left.
    assert all(state == "resident" for layer, state in seen.items() if last - layer - (layer + 1) <= near)
    assert "offloaded" in seen.values()


@pytest.mark.parametrize("near", [1, 3])
def test_a_backward_brings_back_so_many_layers_ahead(near, made):
    net = deep()
    saved, thread = made(net, prefetch_layers=near)
    out = forward(net, saved, input_of())
    wait(saved)
    assert "offloaded" in states(saved).values()
    seen = at_each_read(
        saved, thread, lambda: min(layer for layer, state in states(saved).items() if state == "resident")
    )
    out.sum().backward()
    assert len(seen) > DEPTH // 2
    assert all(layer - least <= near + 1 for layer, least in seen)
    assert any(layer > least for layer, least in seen)
    assert saved.counts.exposed_seconds == 0  # all of it was there in time


def test_each_layer_is_queued_and_taken_in_turn_and_a_burst_is_decided_once(made):
    net = deep()
    saved, thread = made(net)
    worker, queued, taken, decided = thread._worker, [], [], []
    queue, take, decide = thread._queue, thread._take, thread._decide

    def queues(position, **how):
        assert not worker._changed._is_owned()  # the lock is given back between two layers
        queued.append(position)
        queue(position, **how)

    vars(thread)["_queue"] = queues
    vars(thread)["_take"] = lambda layer, *how: (taken.append(layer), take(layer, *how))
    vars(thread)["_decide"] = lambda: (decided.append(len(taken)), decide())
    gate = busy(worker)
    out = forward(net, saved, input_of())
    layers = [position for position in queued if position is not None]
    assert layers == [*range(DEPTH)]
    assert worker.num_urgent == len(queued)
    assert taken == decided == []  # the thread is at something else
    gate.set()
    wait(saved)
    assert taken == queued
    assert decided[0] >= len(layers)  # the burst, and only then
    thread.at(1)
    out.sum().backward()
    wait(saved)
    assert taken == queued
    assert {*taken} >= {2 * DEPTH - 1 - layer for layer in range(1, DEPTH)}
    settle()  # nothing is queued, so the thread waits, and ends


def test_frames_are_forgotten_while_the_backward_runs(made):
    net, store = deep(), AwayStore()
    saved, thread = made(net, store=store)
    out = forward(net, saved, input_of())
    wait(saved)
    all_of_it = store.num_bytes
    seen = at_each_read(saved, thread, lambda: store.num_bytes)
    out.sum().backward()
    left = [num_bytes for _, num_bytes in seen]
    assert all_of_it == max(left) > 4 * min(left)


@pytest.mark.parametrize("holder", ["a list", "an array"])
def test_what_somebody_still_holds_may_be_written_to_and_stays_until_the_forward_is_over(holder, made):
    """Whoever made a NumPy array may write to it: no count of torch's says so."""
    net, held, memory = deep(), [], torch.rand(SIZE).numpy()
    saved, _ = made(net, prefetch_layers=0)

    def keeps(x, _):
        held.append(x)
        return x * x

    net.layers[0].node.target = keeps if holder == "a list" else lambda x, _: torch.from_numpy(memory) * x
    seen, _graph = states_at(saved, net, DEPTH - 2)
    assert seen[0] == "resident"
    held.clear()
    saved.offload(0, {})
    wait(saved)
    assert states(saved)[0] == "offloaded"


def test_a_slow_store_makes_the_next_forward_wait_and_nothing_is_lost(saver):
    net, store = deep(90), AwayStore()
    saved = saver(net, store=store, codec="raw", thread=MemoryThread(num_layers={0: len(net.layers)}))
    gate = busy(saved._packer.io)
    with saved.forward(0):
        out = net.run(input_of(), saved)
    waits = threading.Thread(target=saved.offload, args=(0, {}))
    waits.start()
    waits.join(0.3)
    assert waits.is_alive()
    gate.set()
    waits.join(10)
    assert not waits.is_alive()
    wait(saved)
    assert len(store._frames) == 90
    out.sum().backward()


def test_what_the_thread_raises_ends_the_step(made):
    net = deep()
    saved, thread = made(net)

    def fail(*_):
        raise RuntimeError("the thread died")

    with saved.forward(0):
        _graph = net.run(input_of(), saved)
    vars(thread)["_leave"] = fail
    saved.offload(0, {})
    with pytest.raises(RuntimeError, match="the thread died"):
        wait(saved)


@pytest.mark.parametrize("found", [-1, True, 1.5, "4"])
def test_counts_of_layers_are_checked(found):
    with pytest.raises(ConfigError, match="writeout_layers counts layers"):
        MemoryOptions(writeout_layers=found)


def test_room_that_comes_while_the_thread_looks_is_not_missed(made):
    """The packing ends between the look that found no room and the word that somebody is behind."""
    net = deep(30)
    saved, thread = made(net, prefetch_layers=0)
    leave, gate = thread._leave, busy(saved._packer.packing)

    def slowly(timeline, now):
        if not all(run.closed for run in thread._runs.values()):
            return 0
        behind = leave(timeline, now)
        gate.set()
        saved._packer.packing.drain()  # all that was queued is packed before anybody knows
        return behind

    vars(thread)["_leave"] = slowly
    out = forward(net, saved, input_of())
    ends(lambda: wait(saved))
    out.sum().backward()


# Two stages of 3 and 2 layers: F of stage 0, F of stage 1, B of stage 1, B of stage 0.
TWO_STAGES = [Pass(0, 0), Pass(1, 0), Pass(1, 0, reads=True), Pass(0, 0, reads=True), Pass(1, None)]


def test_positions_count_the_layers_of_every_pass():
    line = Timeline(TWO_STAGES, {0: 3, 1: 2})
    assert line.starts[:5] == [0, 3, 5, 7, 10]
    assert [line.position(0, 0, layer, reads=False) for layer in range(3)] == [0, 1, 2]
    assert [line.position(7, 0, layer, reads=True) for layer in range(3)] == [9, 8, 7]


def test_a_pass_that_runs_still_reads_and_what_none_reads_is_never_read():
    line = Timeline(TWO_STAGES, {0: 3, 1: 2})
    for now, found in (0, [5, 7]), (6, [5, 7]), (7, [7]), (9, [7]), (10, []):
        assert [start for start, _ in line.readings(now)] == found
    assert line.next_reading(0, 0, 0) == 7
    assert line.next_reading(0, 0, 10) == NEVER
    assert line.next_reading(0, 1, 0) == NEVER
    assert Timeline().next_reading(0, 0, 0) == NEVER


DEEP, MIB = 30, 1 << 20


class Held:
    """A deep net whose saved tensors go to a disk, within ``limit`` bytes."""

    def __init__(self, opened, saver, limit, swap_file=SwapFile):
        self.tiers, self.net = Tiers(device=limit), deep(DEEP)
        self.disk, store = opened(swap_file, most_waiting=MIB, tiers=self.tiers)
        self.thread = MemoryThread(num_layers={0: len(self.net.layers)}, tiers=self.tiers)
        self.saved = saver(self.net, store=store, codec="raw", thread=self.thread)

    def forward(self, *, waits=False):
        """The input and the output; ``waits``: until what may leave has left."""
        x = torch.linspace(-1, 1, MIB // 4).requires_grad_()
        self.thread.begin(PROGRAM)
        self.thread.at(0)
        out = forward(self.net, self.saved, x.clone())
        if waits:
            wait(self.saved)
        return x, out

    def gradient(self, *, waits=False):
        """Forward and backward."""
        x, out = self.forward(waits=waits)
        self.thread.at(1)
        out.sum().backward()
        self.saved.drop(0)
        self.disk.drain()  # of what was fetched and not needed
        return x.grad


@pytest.fixture
def held(opened, saver):
    """Makes nets within a limit, and closes them."""
    return functools.partial(Held, opened, saver)


def test_the_most_bytes_are_within_the_limit_and_a_frame_on_its_way(held):
    expected = held(None).gradient()
    for limit in (20, 12, 8):
        one = held(limit * MIB)
        assert same_bits(one.gradient(), expected)
        assert one.tiers.device.peak <= (limit + 2) * MIB, limit
        assert one.tiers.disk.peak >= (DEEP - limit - 2) * MIB
        assert one.tiers.device.now == one.tiers.leaving.now == one.tiers.disk.now == 0


def test_nothing_leaves_that_need_not(held):
    one = held(100 * MIB)
    one.gradient(waits=True)
    assert one.tiers.disk.peak == 0
    assert one.tiers.device.peak >= DEEP * MIB
    some = held(40 * MIB)  # half of it is kept free
    some.gradient(waits=True)
    assert 5 * MIB <= some.tiers.disk.peak <= 15 * MIB


def test_what_is_read_last_leaves_first(held):
    one = held(40 * MIB)
    _, _graph = one.forward(waits=True)
    run = one.saved._micro_batches[0]
    away = sorted(run.first_read(s) for s in run.alive() if s.state == "offloaded")
    assert away == list(range(away[0], away[0] + len(away)))
    assert away[0] <= 1  # what came in is held until the forward is over
    assert len(away) >= 8


def test_the_forward_waits_for_a_slow_disk_and_that_is_counted(held):
    one = held(8 * MIB, Slow)
    one.gradient()
    assert one.tiers.device.peak <= 10 * MIB
    assert one.tiers.seconds_waited > 0


def test_a_limit_that_nothing_can_keep_to_holds_nobody_up(held):
    assert same_bits(ends(held(MIB // 2).gradient), held(None).gradient())


def test_who_waits_hears_of_a_disk_that_refuses(held):
    one = held(8 * MIB, Fails)
    one.disk._file.writing = OSError(5, "Input/output error")
    error = ends(one.gradient)
    assert isinstance(error, StageError)
    assert "Input/output error" in str(error)
    one.saved.drop(0)
    for worker in (one.saved._packer.io, one.saved._packer.packing):
        worker._error = None
    one.disk._error = None
