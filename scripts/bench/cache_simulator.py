"""Jobs that read through a cache from slow storage, simulated event by event, and bounds of their hits.

The simulator drives a policy as the broker does, so hit rates, stalls and makespans are known before anything
runs. A job loads one sample after another; with ``lookahead`` its loader is up to so many batches ahead of
training, and starts again each epoch, as torch's DataLoader does. The same seeds give the same result. The
bounds of a hit rate are closed forms and the offline optimum.

Sources: MLPerf Storage (utilisation = seconds of computing / seconds of the run); L. A. Belady, A study of
replacement algorithms for a virtual-storage computer, IBM Systems Journal 1966."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from math import exp, inf, log

import numpy as np

from penstock.pipeline.data.cache.gain import Gain
from penstock.pipeline.data.cache.policies import POLICIES
from penstock.pipeline.data.cache.policy import Job, Policy, Times
from penstock.pipeline.data.random_draws import order_of

CONTESTANTS: dict[str, Callable[[int], Policy]] = POLICIES | {"gain_last_0": partial(Gain, last_gain=0)}
"""Policies by name: those of the library, and ``gain`` whose slowest job asks its neighbour only."""


class TokenBucket:
    """Storage that grants ``rate`` bytes a second, in the order of asking; unused grants add up to ``burst``.

    A read ends ``latency`` seconds after its grant; latencies of several readers pass at once."""

    def __init__(self, rate: float = inf, *, latency: float = 0.0, burst: float = 0.0) -> None:
        self.rate, self.latency, self.burst = rate, latency, burst
        self.granted = -inf  # until when the tokens are given away, if none add up

    def read(self, num_bytes: int, now: float) -> float:
        """Return when a read that is asked for ``now`` ends; calls come in the order of time."""
        if self.rate == inf:
            return now + self.latency
        self.granted = max(self.granted, now - self.burst / self.rate) + num_bytes / self.rate
        return max(now, self.granted) + self.latency


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One job.

    Attributes:
        data: Name of its data; None: its own.
        training: Seconds of a batch.
        start: When it begins.
        seed: Decides its orders, which are those of ``penstock.cached``.
    """

    name: str
    num_samples: int
    batch_size: int
    epochs: int
    training: float
    sample_bytes: int
    data: str | None = None
    start: float = 0.0
    seed: int = 0

    @property
    def reads(self) -> str:
        """Name of its data."""
        return self.data or self.name

    def job(self, times: Times | None) -> Job:
        """Return what a policy learns of it."""
        counts = {"num_samples": self.num_samples, "batch_size": self.batch_size}
        return Job(name=self.name, data=self.reads, times=times, **counts)

    def order(self, epoch: int) -> list[int]:
        """Return the samples of an epoch."""
        return order_of(self.num_samples, seed=self.seed, epoch=epoch).tolist()


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Result of a job.

    Attributes:
        uses, hits: By epoch.
        loads: Number of reads from storage.
        begin, end: First and last second.
        computing: Seconds of training.
        stalled: Seconds of waiting for reads.
        reading: Seconds of loading, whether or not anybody waited.
    """

    name: str
    uses: list[int] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    loads: int = 0
    begin: float = 0.0
    end: float = 0.0
    computing: float = 0.0
    stalled: float = 0.0
    reading: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the whole run."""
        return self.end - self.begin

    def times(self, load: Load, now: float, *, hidden: float) -> Times:
        """Return the measurements of its first epoch, which is over now."""
        sample = self.reading / max(1, self.loads)
        io = {"batch_io": sample * load.batch_size, "sample_io": sample, "hidden": hidden}
        return Times(epoch=now - load.start, augmentation=0.0, training=load.training, **io)


def hit_rate(outcomes: Iterable[Outcome], since: int = 1) -> float:
    """Hits by uses from an epoch on, counted from 0: nothing is there to be hit in the first."""
    jobs = list(outcomes)
    return sum(sum(job.hits[since:]) for job in jobs) / max(1, sum(sum(job.uses[since:]) for job in jobs))


@dataclass(slots=True)
class Simulation:
    """Jobs at one cache.

    Attributes:
        lookahead: Batches that a loader is ahead of training; 0: training waits for every read.
        sample_seconds: Seconds that a loader takes for each sample, hit or loaded.
        keys: Number of the first sample of each data set, in the trace.
        trace: Sample of each use, in the order of time.
        epochs: Epoch of its job that each use was in.
    """

    policy: Policy
    storage: TokenBucket
    lookahead: int
    sample_seconds: float
    keys: dict[str, int]
    jobs: dict[str, Outcome] = field(default_factory=dict)
    trace: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)

    @property
    def hits(self) -> int:
        """Hits of all jobs in all epochs."""
        return sum(sum(job.hits) for job in self.jobs.values())

    def life(self, load: Load) -> Generator[float, float, None]:
        """Run a job: yield when something happens to it next, and be sent that time when it has come."""
        outcome = self.jobs[load.name] = Outcome(name=load.name, begin=load.start)
        now = yield load.start
        self.policy.join(load.job(None), now)
        for epoch in range(load.epochs):
            if epoch == 1:
                hidden = max(0.0, load.training - self.sample_seconds * load.batch_size)
                times = outcome.times(load, now, hidden=hidden if self.lookahead else 0.0)
                self.policy.join(load.job(times), now)
            following = load.order(epoch + 1) if epoch + 1 < load.epochs else None
            self.policy.begin(load.name, load.order(epoch), following, now)
            outcome.uses.append(load.num_samples)
            outcome.hits.append(0)
            now = yield from self._epoch(load, load.order(epoch), now)
        self.policy.leave(load.name, now)
        outcome.end = now

    def _epoch(self, load: Load, order: Sequence[int], now: float) -> Generator[float, float, float]:
        """Load and train all batches. Returns: when the last is trained."""
        outcome, ahead = self.jobs[load.name], self.lookahead
        begun: list[float] = []  # when the training of each batch began
        free = now
        for at in range(0, load.num_samples, load.batch_size):
            asked = now
            for index in order[at : at + load.batch_size]:
                now = yield from self._read(load, index, now)
            begun.append(max(now, free))
            outcome.stalled += begun[-1] - free if ahead else now - asked
            outcome.computing += load.training
            free = begun[-1] + load.training
            # Batch n is loaded while n - lookahead is trained; without lookahead, when the last is done.
            held_up = 0.0 if len(begun) < ahead else begun[len(begun) - ahead] if ahead else free
            now = yield free if at + load.batch_size >= load.num_samples else max(now, held_up)
        return now

    def _read(self, load: Load, index: int, now: float) -> Generator[float, float, float]:
        """Read a sample. Returns: when it is there."""
        outcome = self.jobs[load.name]
        self.trace.append(self.keys[load.reads] + index)
        self.epochs.append(len(outcome.hits) - 1)
        if self.policy.use(load.name, index, now).entry is not None:
            outcome.hits[-1] += 1
        else:
            end = self.storage.read(load.sample_bytes, now)
            outcome.loads += 1
            outcome.reading += end - now
            if end > now:
                now = yield end
            self.policy.offer(load.name, index, load.sample_bytes, now)
        if self.sample_seconds:
            now = yield now + self.sample_seconds
        return now


def simulate(
    loads: Sequence[Load],
    policy: Policy,
    *,
    storage: TokenBucket,
    lookahead: int = 0,
    sample_seconds: float = 0.0,
) -> Simulation:
    """Run jobs side by side until all have ended; see ``Simulation``."""
    most, keys = max(load.num_samples for load in loads), dict[str, int]()
    for load in loads:
        keys.setdefault(load.reads, most * len(keys))
    simulation = Simulation(policy, storage, lookahead, sample_seconds, keys)
    lives = [simulation.life(load) for load in loads]
    events = [(next(life), number) for number, life in enumerate(lives)]
    heapify(events)
    while events:
        now, number = heappop(events)
        try:
            heappush(events, (lives[number].send(now), number))
        except StopIteration:
            pass  # the job has ended
    return simulation


# Bounds.


def optimum(keys: Sequence[int], num_slots: int) -> np.ndarray:
    """Return whether each use of a trace hits with ``num_slots`` samples cached, as the optimum has it.

    Args:
        keys: Sample of each use, as whole numbers from 0, in the order of time.
    """
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


# Hit rates in closed form, for jobs of one speed that use each sample once an epoch in random orders.
# ``share`` is the capacity relative to all samples: of one data set where jobs read the same, else of all
# data sets together. Derived for phases that are spread evenly, and as fluids: many samples, many jobs.


def lru(share: float) -> float:
    """Hit rate of a job alone, or of several that each have their part.

    A sample survives if fewer others than fit came since: f + (1 - f) ln(1 - f)."""
    return share + (1 - share) * log(1 - share) if share < 1 else 1.0


def next_use_own(share: float) -> float:
    """Hit rate of many jobs with data of their own: h = (1.06 c)^(2/3), where that is below a half.

    A sample used with the rest u of an epoch to go, and at position v of the next, holds its slot for u + v;
    the shortest are kept."""
    return (1.06 * share) ** (2 / 3)


def next_use_same(share: float) -> float:
    """Hit rate of many jobs with one data set: c = 1 - e^-x (1 + x), h = 1 - e^-x.

    Times between the uses of a sample are exponential, and the shortest are kept."""
    if share >= 1:
        return 1.0
    low, high = 0.0, 50.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - exp(-middle) * (1 + middle) < share else (low, middle)
    return 1 - exp(-low)


CLOSED: dict[tuple[str, str], Callable[[float], float]] = {
    ("lru", "own"): lru,
    ("next_use", "own"): next_use_own,
    ("next_use", "same"): next_use_same,
}
"""Closed forms by policy and data."""
