"""Counting bytes in many threads, and what a rank's tiers make of it."""

import gc
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.stages.memory.byte_budget import ByteCounter, Share, Tiers


def test_a_gauge_knows_what_there_is_and_the_most_there_was():
    whole = ByteCounter(100)
    part = ByteCounter(part_of=whole)
    part.add(60)
    whole.add(30)
    part.add(-20)
    assert (whole.now, whole.peak, part.now, part.peak) == (70, 90, 40, 60)
    assert whole.fits(30)
    assert not whole.fits(31)
    whole.add(35)
    assert not whole.fits(0)
    whole.begin()
    part.add(-40)
    assert (whole.now, whole.peak, part.peak) == (65, 105, 60)


def test_threads_and_a_collector_in_their_midst_lose_no_byte():
    counter, threads = ByteCounter(), 4

    class Counted:
        def __init__(self):
            self.itself = self  # only the collector frees it
            counter.add(7)

        def __del__(self):
            counter.add(-7)

    def work(_):
        for _ in range(2000):
            Counted()
            counter.add(3)
            counter.add(-2)

    before, _ = gc.get_threshold(), gc.set_threshold(5)
    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert counter.now == threads * 2000


class Paused(deque):
    """Of whose takers the first is held in the middle."""

    def __init__(self):
        super().__init__()
        self.taken, self.gate = threading.Event(), threading.Event()

    def popleft(self):
        found, first = super().popleft(), not self.taken.is_set()
        self.taken.set()
        if first:
            assert self.gate.wait(10)
        return found


@pytest.mark.parametrize("folds", ["itself", "another thread"])
def test_who_waits_hears_of_every_byte_less_whoever_folds_it(folds):
    counter, heard = ByteCounter(), []
    counter.add(3)
    changes = Paused()
    if folds == "another thread":
        counter._changes = changes
    waits = threading.Thread(
        target=lambda: heard.append(counter.wait(lambda: counter._now == 0)), daemon=True
    )
    waits.start()
    adds = threading.Thread(target=counter.add, args=(-1,))
    adds.start()
    assert folds == "itself" or changes.taken.wait(10)
    counter.add(-2)  # perhaps while the other is in the middle of it, which then takes it along
    assert waits.is_alive() or folds == "itself"
    changes.gate.set()
    adds.join(10)
    waits.join(10)
    assert heard == [None]


def test_a_share_says_all_that_it_has():
    counter = ByteCounter()
    share, other = Share(counter), Share(counter)
    share.set(50)
    other.set(10)
    share.set(20)
    assert (counter.now, counter.peak) == (30, 60)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_frames_in_host_memory_are_a_cpus_own(on_gpu):
    tiers = Tiers(device=1000, host=80, on_gpu=on_gpu)
    tiers.fix(100)
    tiers.named("packed").add(10)
    tiers.named("host").add(20)
    tiers.named("disk").add(40)
    assert tiers.device.now == 110 + 20 * (not on_gpu)
    assert tiers.peaks == {"device": tiers.device.now, "packed": 10, "host": 20, "disk": 40}
    assert tiers.host.fits(60)
    assert not tiers.host.fits(61)


def test_half_of_what_is_not_fixed_is_kept_free():
    tiers = Tiers(device=1000)
    assert Tiers().excess is None
    tiers.fix(400)
    tiers.device.add(300)
    assert tiers.excess == 0
    tiers.device.add(250)
    tiers.leaving.add(50)
    assert tiers.excess == 200
    tiers.fix(1200)  # more than there is: nothing is free
    assert tiers.excess == 1200 + 550 - 50 - 1000
