"""Jobs at one cache, simulated use by use, and the offline optimum of their hits.

The simulator drives a policy as the broker does; a job keeps its pace, whatever it hits. The same seeds give
the same result.

Source: L. A. Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal
1966."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, merge

import numpy as np

from penstock.pipeline.data.cache.policy import Job, Policy, Times
from penstock.pipeline.data.random_draws import order_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One job; ``data``: number of its data set; ``start``: second of its first use; each takes a second."""

    name: str
    data: int
    num_samples: int
    batch_size: int
    epochs: int
    start: float = 0.0
    seed: int = 0

    def order(self, epoch: int) -> list[int]:
        """Return the samples of an epoch, in the order of ``penstock.cached``."""
        return order_of(self.num_samples, seed=self.seed, epoch=epoch).tolist()

    def uses(self) -> Iterator[tuple[float, str, int, int]]:
        """Yield time, name, epoch and place of each use."""
        for number in range(self.epochs * self.num_samples):
            yield (self.start + number, self.name, *divmod(number, self.num_samples))


@dataclass(slots=True)
class Trace:
    """Uses of all jobs in the order of time: sample (numbered over all data sets), epoch, and if it hit."""

    keys: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    hits: list[bool] = field(default_factory=list)

    def hit_rate(self, hits: Sequence[bool] | np.ndarray | None = None) -> float:
        """Hits by uses from the second epoch on: nothing is there to be hit in the first."""
        later = np.asarray(self.epochs) > 0
        return float(np.asarray(self.hits if hits is None else hits)[later].mean())


def simulate(loads: Sequence[Load], policy: Policy) -> Trace:
    """Run jobs side by side until all have ended; a sample has one byte."""
    trace, jobs, orders = Trace(), {load.name: load for load in loads}, dict[str, list[int]]()
    most = max(load.num_samples for load in loads)
    for now, name, epoch, place in merge(*(load.uses() for load in loads)):
        load = jobs[name]
        if place == 0 and epoch <= 1:
            size, batch, times = load.num_samples, load.batch_size, None
            if epoch:  # its first epoch was measured: reading is not hidden, so every sample is wanted
                io = {"batch_io": float(batch), "sample_io": 1.0, "hidden": 0.0}
                times = Times(epoch=float(size), augmentation=0.0, training=0.0, **io)
            job = Job(name=name, data=f"data {load.data}", num_samples=size, batch_size=batch, times=times)
            policy.join(job, now)
        if place == 0:
            following = load.order(epoch + 1) if epoch + 1 < load.epochs else None
            orders[name] = load.order(epoch)
            policy.begin(name, orders[name], following, now)
        index = orders[name][place]
        hit = policy.use(name, index, now).entry is not None
        if not hit:
            policy.offer(name, index, 1, now)
        trace.keys.append(most * load.data + index)
        trace.epochs.append(epoch)
        trace.hits.append(hit)
        if (epoch, place) == (load.epochs - 1, load.num_samples - 1):
            policy.leave(name, now)
    return trace


def optimum(keys: Sequence[int], num_slots: int) -> np.ndarray:
    """Return whether each use of ``keys`` (samples from 0) hits with ``num_slots`` cached by the optimum."""
    uses = np.asarray(keys, dtype=np.int64)
    # Place of the next use of each use's sample; the number of uses where there is none.
    order = np.argsort(uses, kind="stable")
    following = np.full(uses.size, uses.size, dtype=np.int64)
    same = uses[order[:-1]] == uses[order[1:]]
    following[order[:-1][same]] = order[1:][same]
    hits = np.zeros(uses.size, dtype=bool)
    cached: dict[int, int] = {}  # when each is used next
    farthest: list[tuple[int, int]] = []  # (minus that, key); outdated where `cached` differs
    for at, (key, then) in enumerate(zip(uses.tolist(), following.tolist(), strict=True)):
        hits[at] = key in cached
        cached.pop(key, None)
        if then == uses.size or not num_slots:
            continue  # never used again
        if len(cached) >= num_slots:
            while cached.get(farthest[0][1]) != -farthest[0][0]:
                heappop(farthest)
            if -farthest[0][0] < then:
                continue  # all that is cached is used sooner
            del cached[heappop(farthest)[1]]
        cached[key] = then
        heappush(farthest, (-then, key))
    return hits
