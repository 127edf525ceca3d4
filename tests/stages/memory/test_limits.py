"""A limit of the device: what leaves, what comes back, and who waits, so that it holds."""

import pytest
import torch
from disks import Slow
from reference import same_bits
from saving import Net, Square, ends, forward, memory_threads, saved_for, settle
from torch import nn

from penstock.compression.errors import StageError
from penstock.stages.memory.byte_budget import Tiers
from penstock.stages.memory.disk import Disk, DiskOptions, SwapFile
from penstock.stages.memory.prefetch import MemoryThread, Pass
from penstock.stages.memory.stores import DiskStore, StoreOptions

DEPTH, MIB = 30, 1 << 20
PROGRAM = [Pass(0, 0), Pass(0, 0, reads=True)]


class Held:
    """A deep net whose saved tensors go to a disk, within ``limit`` bytes."""

    def __init__(self, folder, limit, swap_file=SwapFile):
        self.tiers = Tiers(device=limit)
        self.disk = Disk(DiskOptions(path=folder), swap_file=swap_file, most_waiting=MIB, tiers=self.tiers)
        self.net = Net(nn.Sequential(*[Square() for _ in range(DEPTH)]))
        self.thread = MemoryThread(num_layers={0: len(self.net.layers)}, tiers=self.tiers)
        store = DiskStore(StoreOptions(disk=self.disk, tiers=self.tiers))
        self.saved = saved_for(self.net, store=store, codec="raw", thread=self.thread)

    def forward(self, *, waits=False):
        """The input and the output; ``waits``: until what may leave has left."""
        x = torch.linspace(-1, 1, MIB // 4).requires_grad_()
        self.thread.begin(PROGRAM)
        self.thread.at(0)
        out = forward(self.net, self.saved, x.clone())
        if waits:
            self.saved.wait()
        return x, out

    def gradient(self, *, waits=False):
        """Forward and backward."""
        x, out = self.forward(waits=waits)
        self.thread.at(1)
        out.sum().backward()
        self.saved.drop(0)
        self.disk.drain()  # of what was fetched and not needed
        return x.grad

    def close(self):
        self.saved.close()
        self.disk.close()


@pytest.fixture
def held(tmp_path):
    """Makes nets within a limit, and closes them."""
    settle()
    made = []

    def make(limit, swap_file=SwapFile):
        made.append(Held(tmp_path, limit, swap_file))
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert memory_threads() == []


def test_the_most_bytes_are_within_the_limit_and_a_frame_on_its_way(held):
    expected = held(None).gradient()
    for limit in (20, 12, 8):
        one = held(limit * MIB)
        assert same_bits(one.gradient(), expected)
        assert one.tiers.device.peak <= (limit + 2) * MIB, limit
        assert one.tiers.disk.peak >= (DEPTH - limit - 2) * MIB
        assert one.tiers.device.now == one.tiers.leaving.now == one.tiers.disk.now == 0


def test_nothing_leaves_that_need_not(held):
    one = held(100 * MIB)
    one.gradient(waits=True)
    assert one.tiers.disk.peak == 0
    assert one.tiers.device.peak >= DEPTH * MIB
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


class Refusing(SwapFile):
    def write(self, data, at):
        raise OSError(5, "Input/output error")


def test_who_waits_hears_of_a_disk_that_refuses(held):
    one = held(8 * MIB, Refusing)
    error = ends(one.gradient)
    assert isinstance(error, StageError)
    assert "Input/output error" in str(error)
    one.saved.drop(0)
    for worker in (one.saved._packer.io, one.saved._packer.packing):
        worker._error = None
    one.disk._error = None
