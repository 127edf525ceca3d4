"""Jobs that read through a cache from slow storage, simulated event by event.

It drives a policy as the broker does, so that hit rates, stalls and makespans are known before anything
runs. A job loads one sample after another; with ``lookahead`` its loader is up to so many batches ahead of
training, and begins anew each epoch, as torch's DataLoader does. The same seeds give the same result."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from ....compression.errors import ConfigError
from .loads import Load, Outcome
from .policy import Policy, Times
from .simple import NeverEvict
from .storage import TokenBucket

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
    own = replace(shared, policy=NeverEvict(0), storage=fresh, keys=_keys([one]), trace=[], epochs=[])
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
