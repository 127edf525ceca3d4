"""Jobs that read through a cache from slow storage, simulated event by event, and bounds of their hits.

The simulator drives a policy as the broker does, so hit rates, stalls and makespans are known before anything
runs. A job loads one sample after another; with ``lookahead`` its loader is up to so many batches ahead of
training, and starts again each epoch, as torch's DataLoader does. The same seeds give the same result. The
bounds of a hit rate are closed forms and the offline optimum.

Sources: MLPerf Storage (utilisation = seconds of computing / seconds of the run); L. A. Belady, A study of
replacement algorithms for a virtual-storage computer, IBM Systems Journal 1966."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heapify, heappop, heappush
from math import exp, inf, log
from zlib import crc32

import numpy as np

from penstock.compression.errors import ConfigError
from penstock.pipeline.samples.cache.gain import Gain
from penstock.pipeline.samples.cache.lru import Lru
from penstock.pipeline.samples.cache.next_use import NextUse
from penstock.pipeline.samples.cache.policies import POLICIES
from penstock.pipeline.samples.cache.policy import Job, Policy, Times


class TokenBucket:
    """Grants ``rate`` bytes a second, in the order of asking; what nobody asks for adds up to ``burst``.

    A read ends ``latency`` seconds behind its grant; latencies of several readers pass at once."""

    def __init__(self, rate: float = inf, *, latency: float = 0.0, burst: float = 0.0) -> None:
        if not rate > 0 or latency < 0 or burst < 0:
            found = f"rate={rate} latency={latency} burst={burst}"
            raise ConfigError(
                f"storage needs a rate above 0, a latency and a burst of 0 or more, found {found}"
            )
        self.rate, self.latency, self.burst = rate, latency, burst
        self.granted = -inf  # until when the tokens are given away, if none add up

    def read(self, num_bytes: int, now: float) -> float:
        """When a read that is asked for ``now`` ends; calls come in the order of time."""
        if self.rate == inf:
            return now + self.latency
        self.granted = max(self.granted, now - self.burst / self.rate) + num_bytes / self.rate
        return max(now, self.granted) + self.latency


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One job that is simulated.

    Attributes:
        data:         None: its own. Sizes of samples belong to the data.
        sample_bytes: mean size of a sample. spread: sigma of the logarithm of sizes; 0: all alike.
        training, augmentation: seconds of a batch.
        start:        when it begins.
        error:        what it says of its epoch is so many times as long.
    """

    name: str
    num_samples: int
    batch_size: int
    epochs: int
    training: float
    data: str | None = None
    augmentation: float = 0.0
    sample_bytes: int = 110_000
    spread: float = 0.0
    start: float = 0.0
    error: float = 1.0

    def __post_init__(self) -> None:
        least = min(self.num_samples, self.batch_size, self.epochs, self.sample_bytes)
        if least < 1 or min(self.training, self.augmentation, self.spread, self.start) < 0:
            raise ConfigError(
                f"a job has 1 sample, batch, epoch and byte or more, no time below 0; found {self}"
            )

    @property
    def reads(self) -> str:
        """The name of its data."""
        return self.data or self.name

    def job(self, times: Times | None) -> Job:
        """What a policy is told of it."""
        return Job(
            name=self.name,
            data=self.reads,
            num_samples=self.num_samples,
            batch_size=self.batch_size,
            times=times,
        )

    def sizes(self, seed: int) -> np.ndarray:
        """Bytes of each sample."""
        if not self.spread:
            return np.full(self.num_samples, self.sample_bytes)
        drawn = np.random.default_rng([seed, crc32(self.reads.encode())])
        mean = np.log(self.sample_bytes) - self.spread**2 / 2
        return np.maximum(1, drawn.lognormal(mean, self.spread, self.num_samples)).astype(np.int64)

    def order(self, epoch: int, seed: int) -> list[int] | None:
        """The samples of an epoch; None behind the last."""
        if epoch >= self.epochs:
            return None
        drawn = np.random.default_rng([seed, crc32(self.name.encode()), 1 + epoch])
        return drawn.permutation(self.num_samples).tolist()


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of a job.

    Attributes:
        uses, hits: by epoch. loads: from storage. bytes_loaded: by them.
        begin, end: its first and last second. computing: seconds of training. stalled: of waiting for reads.
        reading:    seconds of loading, whether or not anybody waited.
    """

    name: str
    uses: list[int] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    loads: int = 0
    bytes_loaded: int = 0
    begin: float = 0.0
    end: float = 0.0
    computing: float = 0.0
    stalled: float = 0.0
    reading: float = 0.0

    def hit_rate(self, since: int = 1) -> float:
        """Hits by uses from an epoch on, counted from 0: nothing is there to be hit in the first."""
        return sum(self.hits[since:]) / max(1, sum(self.uses[since:]))

    @property
    def seconds(self) -> float:
        """Of the whole run."""
        return self.end - self.begin

    @property
    def utilisation(self) -> float:
        """AU of MLPerf Storage."""
        return self.computing / self.seconds if self.seconds else 1.0

    @property
    def stall_share(self) -> float:
        """Seconds in which training waited for reads, by all."""
        return self.stalled / self.seconds if self.seconds else 0.0


Life = Generator[float, float, None]
"""Yields when something happens to a job next, and is sent that time when it has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What became of all jobs.

    Attributes:
        trace:  the sample of each use, numbered, in the order of time.
        epochs: which epoch of its job each use was in.
    """

    jobs: dict[str, Outcome]
    trace: list[int]
    epochs: list[int]

    def hit_rate(self, since: int = 1) -> float:
        """Of all jobs together, from an epoch on."""
        hits = sum(sum(job.hits[since:]) for job in self.jobs.values())
        return hits / max(1, sum(sum(job.uses[since:]) for job in self.jobs.values()))

    @property
    def hits(self) -> int:
        """Of all jobs, in all epochs."""
        return sum(sum(job.hits) for job in self.jobs.values())

    @property
    def makespan(self) -> float:
        """From the first job's beginning to the last one's end."""
        return max(job.end for job in self.jobs.values()) - min(job.begin for job in self.jobs.values())


@dataclass(frozen=True, slots=True)
class Shared:
    """What all jobs have in common."""

    policy: Policy
    storage: TokenBucket
    lookahead: int
    sample_seconds: float
    seed: int
    keys: dict[str, int]
    trace: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)


def simulate(
    loads: Sequence[Load],
    policy: Policy,
    *,
    storage: TokenBucket | None = None,
    lookahead: int = 0,
    warm_up: bool = False,
    sample_seconds: float = 0.0,
    seed: int = 0,
) -> Simulated:
    """Run jobs side by side until all have ended.

    Args: storage: None: reads take no time. It is new, nobody has read from it.
          lookahead: batches that a loader is ahead of training; 0: training waits for every read.
          warm_up: a job's times are those of its own first epoch here, told when that is over; else they are
                   those of an epoch alone without a cache, told when it joins.
          sample_seconds: that a loader takes for each sample, hit or loaded."""
    if len({load.name for load in loads}) < len(loads) or lookahead < 0:
        raise ConfigError(f"jobs have names of their own and lookahead={lookahead} is 0 or more")
    bucket = TokenBucket() if storage is None else storage
    shared = Shared(policy, bucket, lookahead, sample_seconds, seed, _keys(loads))
    runs = [_Run(load, shared) for load in loads]
    lives = [run.live(None if warm_up else alone(run.load, shared)) for run in runs]
    events = [(next(life), number) for number, life in enumerate(lives)]
    heapify(events)
    while events:
        now, number = heappop(events)
        try:
            heappush(events, (lives[number].send(now), number))
        except StopIteration:
            pass  # the job has ended
    outcomes = {run.load.name: run.outcome for run in runs}
    return Simulated(jobs=outcomes, trace=shared.trace, epochs=shared.epochs)


def alone(load: Load, shared: Shared) -> Times:
    """The times of an epoch alone, without a cache (CN114968588A, steps S11 and S12)."""
    one, storage = replace(load, epochs=1, start=0.0), shared.storage
    fresh = TokenBucket(storage.rate, latency=storage.latency, burst=storage.burst)
    own = replace(shared, policy=Lru(0), storage=fresh, keys=_keys([one]), trace=[], epochs=[])
    run = _Run(one, own)
    life = run.live(None)
    now = next(life)
    try:
        while True:
            now = life.send(now)
    except StopIteration:
        return run.measured(now)


def _keys(loads: Sequence[Load]) -> dict[str, int]:
    """The number of the first sample of each data set, in a trace."""
    most, keys = max((load.num_samples for load in loads), default=0), {}
    for load in loads:
        keys.setdefault(load.reads, most * len(keys))
    return keys


class _Run:
    """A job that runs; ``outcome``: what has become of it so far."""

    def __init__(self, load: Load, shared: Shared) -> None:
        self.load, self.shared = load, shared
        self.outcome = Outcome(name=load.name, begin=load.start, end=load.start)
        self._sizes: list[int] = load.sizes(shared.seed).tolist()

    def live(self, times: Times | None) -> Life:
        """Go through all epochs."""
        load, policy, outcome = self.load, self.shared.policy, self.outcome
        now = yield load.start
        policy.join(load.job(times), now)
        for epoch in range(load.epochs):
            if epoch == 1 and times is None:
                policy.join(load.job(self.measured(now)), now)
            order, following = load.order(epoch, self.shared.seed), load.order(epoch + 1, self.shared.seed)
            assert order is not None
            policy.begin(load.name, order, following, now)
            outcome.uses.append(load.num_samples)
            outcome.hits.append(0)
            now = yield from self._epoch(order, now)
        policy.leave(load.name, now)
        outcome.end = now

    def _epoch(self, order: Sequence[int], now: float) -> Generator[float, float, float]:
        """Load and train all batches.  Returns: when the last is trained."""
        load, outcome, ahead = self.load, self.outcome, self.shared.lookahead
        begun: list[float] = []  # when the training of each batch began
        free = now
        for at in range(0, load.num_samples, load.batch_size):
            began = now
            now = yield from self._read(order[at : at + load.batch_size], now)
            ready = now + load.augmentation
            begun.append(max(ready, free))
            outcome.stalled += begun[-1] - free if ahead else now - began
            outcome.computing += load.training
            free = begun[-1] + load.training
            last = at + load.batch_size >= load.num_samples
            # Batch n is loaded while n - lookahead is trained; without lookahead, when the last is done.
            held_up = 0.0 if len(begun) < ahead else begun[len(begun) - ahead] if ahead else free
            now = yield free if last else max(ready, held_up)
        return now

    def _read(self, indices: Sequence[int], now: float) -> Generator[float, float, float]:
        """Read the samples of a batch, one after another.  Returns: when the last is there."""
        name, policy, storage = self.load.name, self.shared.policy, self.shared.storage
        outcome, first, trace = self.outcome, self.shared.keys[self.load.reads], self.shared.trace
        for index in indices:
            trace.append(first + index)
            self.shared.epochs.append(len(outcome.hits) - 1)
            if policy.use(name, index, now).entry is not None:
                outcome.hits[-1] += 1
            else:
                num_bytes = self._sizes[index]
                then = storage.read(num_bytes, now)
                outcome.loads += 1
                outcome.bytes_loaded += num_bytes
                outcome.reading += then - now
                if then > now:
                    now = yield then
                policy.offer(name, index, num_bytes, now)
            if self.shared.sample_seconds:
                now = yield now + self.shared.sample_seconds
        return now

    def measured(self, now: float) -> Times:
        """What the first epoch has shown, if that is over now."""
        load = self.load
        prepared = load.augmentation + self.shared.sample_seconds * load.batch_size
        sample_io = self.outcome.reading / max(1, self.outcome.loads)
        return Times(
            epoch=(now - load.start) * load.error,
            batch_io=sample_io * load.batch_size,
            sample_io=sample_io,
            augmentation=load.augmentation,
            training=load.training,
            hidden=max(0.0, load.training - prepared) if self.shared.lookahead else 0.0,
        )


# Policies to compare.

CONTESTANTS: dict[str, Callable[[int], Policy]] = POLICIES | {
    "gain_last_0": partial(Gain, last_gain=0),
    "next_use_told": partial(NextUse, watch=False),
    "next_use_uncapped": partial(NextUse, caps=False),
    "next_use_floors": partial(NextUse, floors=True),
}
"""Policies of the library, some of them with other options than their own, by name."""


# Bounds.


def optimum(keys: Sequence[int], num_slots: int) -> np.ndarray:
    """Whether each use of a trace hits with ``num_slots`` samples cached, as the optimum has it.

    Args: keys: the sample of each use, as whole numbers from 0, in the order of time."""
    asked = np.asarray(keys, dtype=np.int64)
    following = _following(asked)
    hits = np.zeros(asked.size, dtype=bool)
    cached: dict[int, int] = {}  # when each is used next
    farthest: list[tuple[int, int]] = []  # (minus that, key); outdated where `cached` says otherwise
    for at, (key, then) in enumerate(zip(asked.tolist(), following.tolist(), strict=True)):
        hits[at] = key in cached
        cached.pop(key, None)
        if then == asked.size or not num_slots:
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


def _following(asked: np.ndarray) -> np.ndarray:
    """For each use the place of the next one of its sample; the number of uses where there is none."""
    order = np.argsort(asked, kind="stable")
    found = np.full(asked.size, asked.size, dtype=np.int64)
    same = asked[order[:-1]] == asked[order[1:]]
    found[order[:-1][same]] = order[1:][same]
    return found


# Hit rates in closed form, for jobs of one speed that use each sample once an epoch in random orders.
# ``share`` is the capacity relative to all samples: of one data set where jobs read the same, else of all
# data sets together. Derived for phases that are spread evenly, and as fluids: many samples, many jobs.


def lru(share: float) -> float:
    """Of a job alone, or of several that each have their part.

    A sample survives if fewer others than fit came since: f + (1 - f) ln(1 - f)."""
    return share + (1 - share) * log(1 - share) if share < 1 else 1.0


def next_use_own(share: float) -> float:
    """Of many jobs with data of their own: h = (1.06 c)^(2/3), where that is below a half.

    A sample used with the rest u of an epoch to go, and at position v of the next, holds its slot for u + v;
    the shortest are kept."""
    return (1.06 * share) ** (2 / 3)


def next_use_same(share: float) -> float:
    """Of many jobs with one data set: c = 1 - e^-x (1 + x), h = 1 - e^-x.

    Times between the uses of a sample are exponential, and the shortest are kept."""
    if share >= 1:
        return 1.0
    low, high = 0.0, 50.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - exp(-middle) * (1 + middle) < share else (low, middle)
    return 1 - exp(-low)
