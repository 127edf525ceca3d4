"""Fixtures that leave nothing behind: disks, and savers of a net's saved tensors."""

import threading

import pytest
from saving import memory_threads, saved_for, settle

from penstock.stages.memory.disk import Disk, DiskOptions, SwapFile
from penstock.stages.memory.stores import DiskStore, StoreOptions


@pytest.fixture
def opened(tmp_path):
    """Makes disks with their stores, and closes them."""
    disks, before = [], threading.enumerate()

    def make(swap_file=SwapFile, *, path=tmp_path, budget=None, tiers=None, **how):
        disk = Disk(DiskOptions(path=path, budget=budget), swap_file=swap_file, tiers=tiers, **how)
        disks.append(disk)
        return disk, DiskStore(StoreOptions(disk=disk, tiers=tiers))

    yield make
    for disk in disks:
        disk.close()
    left = [thread for thread in threading.enumerate() if thread not in before]
    assert not [thread for thread in left if "penstock-disk" in thread.name]


@pytest.fixture
def saver():
    """Makes what keeps the saved tensors of a net; behind the test no byte and no thread of it is left."""
    settle()
    made = []

    def make(net, **options):
        made.append(saved_for(net, **options))
        return made[-1]

    yield make
    for saved in made:
        saved.close()
        assert saved._packer.store.num_bytes == 0
    assert memory_threads() == []
