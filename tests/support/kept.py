"""What a driver of a policy of the sample cache keeps: every answer is held against it and the bytes."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.pipeline.samples.cache.policy import Admitted, Entry, Found, Job, Policy, Times

ALONE = Times(epoch=10.0, batch_io=2.0, sample_io=1.0, augmentation=0.0, training=1.0, hidden=0.0)


class Kept:
    """A policy and the bytes that are kept as it says; ``there``: of each entry."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.capacity = policy, policy.capacity
        self.there: dict[Entry, int] = {}
        self._data: dict[str, str] = {}

    @property
    def held(self):
        return self.policy.held

    def join(self, job: Job, now: float) -> None:
        self._data[job.name] = job.data
        self.policy.join(job, now)
        self._hold()

    def leave(self, name: str, now: float) -> tuple[Entry, ...]:
        gone = self._free(self.policy.leave(name, now))
        self._data.pop(name, None)
        return gone

    def begin(
        self, name: str, order: Sequence[int], following: Sequence[int] | None, now: float
    ) -> tuple[Entry, ...]:
        return self._free(self.policy.begin(name, order, following, now))

    def use(self, name: str, index: int, now: float) -> Found:
        found = self.policy.use(name, index, now)
        if found.entry is None:
            assert (name, index) not in self.there
            assert found.freed == ()
        else:
            assert found.entry in self.there
            assert found.entry in ((name, index), (self._data[name], index))
        self._free(found.freed)
        return found

    def offer(self, name: str, index: int, num_bytes: int, now: float) -> Admitted:
        admitted = self.policy.offer(name, index, num_bytes, now)
        assert admitted.entry not in admitted.freed
        for entry in admitted.freed:
            del self.there[entry]
        if admitted.entry is not None:
            assert admitted.entry in ((name, index), (self._data[name], index))
            self.there.setdefault(admitted.entry, num_bytes)
        else:
            assert admitted.freed == ()  # nobody leaves for nothing
        self._hold()
        return admitted

    def takes(self, name: str, index: int, now: float = 0.0, num_bytes: int = 10) -> bool:
        """Use a sample and load it if it is not there; whether it is there now."""
        if self.use(name, index, now).entry is not None:
            return True
        return self.offer(name, index, num_bytes, now).entry is not None

    def drop(self, entry: Entry) -> None:
        self.policy.drop(entry)
        self.there.pop(entry, None)
        self._hold()

    def _free(self, gone: tuple[Entry, ...]) -> tuple[Entry, ...]:
        for entry in gone:
            del self.there[entry]
        self._hold()
        return gone

    def _hold(self) -> None:
        held = sum(self.there.values())
        assert held <= self.capacity
        assert sum(self.policy.held.values()) == held
        assert set(self.policy.held) <= set(self._data)
