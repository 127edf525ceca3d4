"""The default policy: what will be used soonest stays, by the predicted time of its next use.

It has what the patent has (CN114968588A: two known orders, S32; seconds of an epoch, S11) and uses it for
Belady's rule (A study of replacement algorithms, 1966): the sample that is used last makes room, and one
that is used later still passes the cache by. The next use is predicted as now + positions until then x T_i
/ N_i, the soonest among the jobs that read the data.

Samples are ranked before they are compared by time. A batch of a job that has its E_i samples
(``needs.desired``) gains nothing by more: with ``caps`` those only use space that is idle. That is for a
job that reads its data alone: what others read too serves them next. With ``floors`` the s_i samples that a
batch is due (``needs.due``) leave for nobody else's, so that batches stay even; that costs many hits (four
jobs, a quarter of the samples, simulated: 0.27 instead of 0.40), so it is not the default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....compression.errors import ConfigError
from . import needs
from .laid import Laid, User
from .policy import Admitted, Entry, Found, Job
from .shelf import Shelf

_NOWHERE, _REFUSED = Found(None), Admitted(None)


class NextUse:
    """See the module.

    Args: caps, floors: see there.
          watch: an epoch that a job has gone through counts more than the times that it told, which were
                 measured when it was alone."""

    def __init__(self, capacity: int, *, caps: bool = True, floors: bool = False, watch: bool = True) -> None:
        self.capacity, self._shelf, self._laid = capacity, Shelf(capacity), Laid()
        self._caps, self._floors, self._watch = caps, floors, watch
        self._users: dict[str, User] = {}
        self._seen = [0, 0]  # samples that were offered, and their bytes

    @property
    def held(self) -> Mapping[str, int]:
        """See ``Policy``."""
        return self._shelf.held

    def join(self, job: Job, now: float) -> None:
        """See ``Policy``."""
        if job.name in self._users:
            self._users[job.name].tell(job)
        else:
            self._users[job.name] = User(job, watch=self._watch)
        self._regroup()

    def leave(self, name: str, now: float) -> tuple[Entry, ...]:
        """See ``Policy``: what others use is theirs from now on."""
        user = self._users.pop(name, None)
        if user is None:
            return ()
        self._regroup()
        user.sharers = [other for other in user.sharers if other is not user]
        gone = self._anew(user, now)
        for entry in self._shelf.admitted_by(name):
            self._shelf.hand(entry, self._laid.user(entry).job.name)
        return gone

    def begin(
        self, name: str, order: Sequence[int], following: Sequence[int] | None, now: float
    ) -> tuple[Entry, ...]:
        """See ``Policy``: what is cached keeps its positions, unless the epoch is not as it was foretold."""
        user = self._user(name)
        gone = () if user.begin(order, following, now) else self._anew(user, now)
        self._regroup()
        return gone

    def use(self, name: str, index: int, now: float) -> Found:
        """See ``Policy``."""
        user = self._user(name)
        user.use(index, now)
        entry = (user.job.data, index)
        if entry not in self._laid:
            return _NOWHERE
        if self._laid.user(entry) is user and not self._again(entry, user, now):
            return Found(entry, (entry,))
        return Found(entry)  # if another uses it next, it does so as before

    def offer(self, name: str, index: int, num_bytes: int, now: float) -> Admitted:
        """See ``Policy``."""
        user = self._user(name)
        entry = (user.job.data, index)
        if entry in self._laid:
            return Admitted(entry)
        if not 0 <= num_bytes <= self.capacity:
            return _REFUSED
        self._seen[0] += 1
        self._seen[1] += num_bytes
        then = self._laid.soonest(user.sharers, index, now)
        if then.user is None:
            return _REFUSED
        gone = ()
        if not self._shelf.fits(num_bytes):
            gone = self._room(num_bytes, then.user.rank(then.position), then.when, now)
            if not gone:
                return _REFUSED
        self._shelf.put(entry, num_bytes, name)
        self._laid.lay(entry, then.user, then.position)
        return Admitted(entry, gone)

    def drop(self, entry: Entry) -> None:
        """See ``Policy``."""
        if entry in self._laid:
            self._laid.lift(entry)
            self._shelf.take(entry)

    def _user(self, name: str) -> User:
        try:
            return self._users[name]
        except KeyError:
            raise ConfigError(f"a job joins before it uses samples, {name} has not; join first") from None

    def _regroup(self) -> None:
        users = list(self._users.values())
        known = [user.pace for user in users if user.pace is not None]
        self._laid.pace = sum(known) / len(known) if known else 1.0
        seen, total = self._seen
        slots = self.capacity * seen / total / len(users) if total and users else 0.0
        for user in users:
            user.sharers = [other for other in users if other.job.data == user.job.data]
            capped = self._caps and len(user.sharers) == 1
            user.desired = needs.desired(user.job) if capped else user.job.batch_size
            user.due = needs.due(user.job, slots) if self._floors else 0.0

    def _again(self, entry: Entry, user: User, now: float) -> bool:
        """Lay an entry to whoever uses it next now; False: nobody does, and it is no longer there."""
        self._laid.lift(entry)
        then = self._laid.soonest(user.sharers, entry[1], now)
        if then.user is None:
            self._shelf.take(entry)
            return False
        self._laid.lay(entry, then.user, then.position)
        return True

    def _anew(self, user: User, now: float) -> tuple[Entry, ...]:
        """Lay all that was laid to a job once more; what is no longer there."""
        return tuple(entry for entry in self._laid.of(user) if not self._again(entry, user, now))

    def _room(self, num_bytes: int, rank: int, when: float, now: float) -> tuple[Entry, ...]:
        """Take away what is of a lower rank, or used later than ``when``; nothing if that is not enough."""
        gone: list[Entry] = []
        lacking = self._shelf.num_bytes + num_bytes - self.capacity
        for lower in range(rank + 1):
            while lacking > 0:
                found = self._laid.last(self._users.values(), lower, now)
                if found is None or (lower == rank and found[1] <= when):
                    break
                self._laid.aside(found[0])
                gone.append(found[0])
                lacking -= self._shelf.size(found[0])
        if lacking > 0:
            for entry in gone:
                self._laid.back(entry)
            return ()
        for entry in gone:
            self.drop(entry)
        return tuple(gone)
