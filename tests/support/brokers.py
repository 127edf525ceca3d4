"""A broker of the sample cache, in a thread or a process of its own; policies held against the bytes."""

import contextlib
import multiprocessing
import time
from collections.abc import Sequence
from typing import Any

from penstock.pipeline.data.cache.broker import serving
from penstock.pipeline.data.cache.client import Client, state_of
from penstock.pipeline.data.cache.policies import Lru
from penstock.pipeline.data.cache.policy import Decision, Entry, Job, Policy, Times
from penstock.pipeline.data.cache.wire import Hello

PAGE = 4096
SOON = 3.0  # a second, on a machine that has other things to do


class Said(list):
    """Collects lines; to be told by a broker or a client."""

    def __call__(self, line):
        self.append(line)


def hello(job="a", *, run="1", data="d", num_samples=100, batch_size=4, epochs=3):
    return Hello(job=job, run=run, data=data, num_samples=num_samples, batch_size=batch_size, epochs=epochs)


def client(path, job="a", *, timeout=5.0, tell=None, **said) -> Any:
    return Client(path, hello(job, **said), tell=Said() if tell is None else tell, timeout=timeout)


def payload(index, num_bytes=10_000):
    return index.to_bytes(4, "big") * (num_bytes // 4)


@contextlib.contextmanager
def broker_thread(path, policy=None, *, said=None, **options):
    """A broker in this process; yields it."""
    options |= {"page_bytes": PAGE, "tell": Said() if said is None else said}
    with serving(path, policy or watched_lru(100 * PAGE), **options) as broker:
        yield broker


@contextlib.contextmanager
def broker_process(path, capacity=100 * PAGE, page=PAGE):
    """A broker in a forked process of its own, to be stopped and killed; yields the process."""
    fork = multiprocessing.get_context("fork")
    listens = fork.Event()

    def serve():
        with serving(path, watched_lru(capacity), page_bytes=page, tell=Said()):
            listens.set()
            time.sleep(60)

    process: Any = fork.Process(target=serve, name="broker")
    process.start()
    try:
        assert listens.wait(10), "the broker does not listen"
        yield process
    finally:
        process.kill()
        process.join()


def state(path):
    return state_of(path, timeout=5.0)


def within(seconds, is_so):
    """Wait until something is so; returns the seconds that it took."""
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < seconds, "it did not come to be so in time"
        time.sleep(0.005)
    return time.monotonic() - began


ALONE = Times(epoch=10.0, batch_io=2.0, sample_io=1.0, augmentation=0.0, training=1.0, hidden=0.0)


class Watched:
    """Another policy, and what it must have by what it answered.

    ``entries``: what it keeps, with its bytes; ``calls``, ``jobs``: what it was told."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.capacity, self.takes_shares = policy, policy.capacity, policy.takes_shares
        self.calls: list[tuple[Any, ...]] = []
        self.jobs: dict[str, Job] = {}
        self.entries: dict[Entry, int] = {}

    @property
    def held(self):
        return self.policy.held

    def join(self, job: Job, now: float) -> None:
        self.calls.append(("join", job))
        self.jobs[job.name] = job
        self.policy.join(job, now)
        self._hold()

    def leave(self, name: str, now: float) -> tuple[Entry, ...]:
        self.calls.append(("leave", name))
        gone = self._gone(self.policy.leave(name, now))
        self.jobs.pop(name, None)
        return gone

    def begin(
        self, name: str, order: Sequence[int], following: Sequence[int] | None, now: float
    ) -> tuple[Entry, ...]:
        self.calls.append(("begin", name, list(order), None if following is None else list(following)))
        return self._gone(self.policy.begin(name, order, following, now))

    def use(self, name: str, index: int, now: float) -> Decision:
        self.calls.append(("use", name, index))
        found = self.policy.use(name, index, now)
        if found.entry is None:
            assert found.evicted == ()
            assert (name, index) not in self.entries
        else:
            assert found.entry in self.entries
            assert found.entry in places(self.jobs[name], index)
        self._gone(found.evicted)
        return found

    def offer(self, name: str, index: int, num_bytes: int, now: float) -> Decision:
        self.calls.append(("offer", name, index, num_bytes))
        admitted = self.policy.offer(name, index, num_bytes, now)
        assert admitted.entry not in admitted.evicted
        for entry in admitted.evicted:
            del self.entries[entry]
        if admitted.entry is None:
            assert admitted.evicted == ()  # nobody leaves for nothing
        else:
            assert admitted.entry in places(self.jobs[name], index)
            self.entries.setdefault(admitted.entry, num_bytes)
        self._hold()
        return admitted

    def takes(self, name: str, index: int, now: float = 0.0, num_bytes: int = 10) -> bool:
        """Use a sample and load it if it is not there; whether it is there now."""
        if self.use(name, index, now).entry is not None:
            return True
        return self.offer(name, index, num_bytes, now).entry is not None

    def drop(self, entry: Entry) -> None:
        self.calls.append(("drop", entry))
        self.entries.pop(entry, None)
        self.policy.drop(entry)
        self._hold()

    def _gone(self, entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
        for entry in entries:
            del self.entries[entry]
        self._hold()
        return entries

    def _hold(self) -> None:
        held = sum(self.entries.values())
        assert held <= self.capacity
        assert sum(self.policy.held.values()) == held
        assert all(name in self.jobs or name.startswith("expected ") for name in self.policy.held)


def watched_lru(capacity: int) -> Watched:
    return Watched(Lru(capacity))


def places(job: Job, index: int) -> tuple[Entry, Entry]:
    """Places of a sample of a job: with those of its data, or with its own."""
    return (job.data, index), (job.name, index)
