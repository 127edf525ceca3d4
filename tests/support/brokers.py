"""A broker of the sample cache, in a thread or in a process of its own, with a policy of a few lines."""

import contextlib
import multiprocessing
import time
from typing import Any

from small_policies import watched_lru

from penstock.pipeline.data.cache.broker import serving
from penstock.pipeline.data.cache.client import Client, state_of
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
def broker_thread(path, policy=None, *, said=None):
    """A broker in this process; yields it."""
    with serving(
        path, policy or watched_lru(100 * PAGE), page_bytes=PAGE, tell=Said() if said is None else said
    ) as broker:
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
