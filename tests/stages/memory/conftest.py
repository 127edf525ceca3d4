"""Disks of the tests in this folder."""

import threading

import pytest

from penstock.stages.memory.disk import Disk
from penstock.stages.memory.disk_store import DiskStore
from penstock.stages.memory.room import DiskOptions
from penstock.stages.memory.slab import Slab
from penstock.stages.memory.store import StoreOptions


@pytest.fixture
def opened(tmp_path):
    """Makes disks with their stores, and closes them."""
    disks = []

    def make(slab=Slab, *, depth=4, most_waiting=64 << 20, **options):
        disk = Disk(
            DiskOptions(**{"path": tmp_path, "shared": False, **options}),
            slab=slab,
            depth=depth,
            most_waiting=most_waiting,
        )
        disks.append(disk)
        return disk, DiskStore(StoreOptions(disk=disk))

    yield make
    for disk in disks:
        disk.close()
    assert not [thread for thread in threading.enumerate() if "penstock-disk" in thread.name]
