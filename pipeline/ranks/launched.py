"""Ranks that somebody else's launcher started, such as torchrun: rank 0 decides, the others follow it.

Rank 0 traces and measures for as long as that takes, so the others wait for its plan without a deadline, at
the launcher's store. What it posts there is JSON: nothing is pickled."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import secrets
import time
from typing import TYPE_CHECKING, Any

from ...compression.errors import ConfigError, TransportError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from .world import World

MEETING = "PENSTOCK_MEETING"
"""The environment variable with the folder where the ranks of a local run meet."""

_PAUSE = 0.05
_LEAVING_SECONDS = 10.0
"""How long rank 0, who may keep the store, waits until the others know that there is no more to do."""


class Launched:
    """This process among those that the launcher started."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.runs = rank, ranks, 0
        self._fresh: Store | None = None

    @staticmethod
    def of_environment() -> Launched | None:
        """What the environment says of the launcher; None for a process, or a rank, that we started.

        Raises: ConfigError: it says no rank among so many."""
        if MEETING in os.environ or not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
            return None
        rank, ranks = os.environ["RANK"], os.environ["WORLD_SIZE"]
        if not (rank.isdecimal() and ranks.isdecimal() and int(rank) < int(ranks)):
            raise ConfigError(
                f"a launcher sets RANK to a number below WORLD_SIZE, found RANK={rank} WORLD_SIZE={ranks}; "
                "unset both, and penstock starts ranks of its own"
            )
        return Launched(int(rank), int(ranks))

    def check(self, ranks: int) -> None:
        """Refuse a run of another number of ranks than there are.

        Raises: ConfigError: it is another."""
        if ranks != self.ranks:
            raise ConfigError(
                f"the launcher started {self.ranks} processes (WORLD_SIZE={self.ranks}), and the run has "
                f"ranks={ranks}; start as many as it has ranks, or leave ranks= out"
            )

    def post(self, run: Any, *, deadline: float) -> None:
        """Tell the others what to run (anything JSON can say).

        Raises: TransportError: they are not there within ``deadline`` seconds."""
        self._join(deadline).set(self._key(), json.dumps(run))

    def follow(self) -> Any:
        """Wait until rank 0 has posted the next run, and return that; None when there are no more.

        Raises: TransportError: the launcher's store has gone."""
        try:
            store = self._join(math.inf)
            while not store.check([key := self._key()]):
                time.sleep(_PAUSE)
            return json.loads(store.get(key))
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.rank} waited for the plan of rank 0, and the launcher's store has gone: {error}"
            ) from error

    def init(self, *, deadline: float) -> World:
        """Become this rank in the group of the run that was posted last, as ``penstock.init`` does."""
        from torch.distributed.distributed_c10d import PrefixStore

        from .world import found

        own = PrefixStore(f"penstock/{self.runs}", self._join(deadline))
        self.runs += 1
        return found(own, rank=self.rank, ranks=self.ranks, deadline=deadline)

    def close(self) -> None:
        """Leave: rank 0 tells the others that there is no more to do, and waits until they know."""
        signs = [f"penstock/left/{rank}" for rank in range(1, self.ranks)]
        with contextlib.suppress(RuntimeError, TransportError):  # whoever kept the store has gone
            if self.rank:
                self._join(_LEAVING_SECONDS).set(signs[self.rank - 1], "")
            elif signs:
                self.post(None, deadline=_LEAVING_SECONDS)
                self._join(_LEAVING_SECONDS).wait(signs, datetime.timedelta(seconds=_LEAVING_SECONDS))

    def _key(self) -> str:
        return f"penstock/run/{self.runs}"

    def _join(self, deadline: float) -> Store:
        """The store of these processes alone."""
        if self._fresh is None:
            from torch.distributed.rendezvous import rendezvous

            try:
                store = next(iter(rendezvous("env://")))[0]
            except (RuntimeError, ValueError) as error:  # MASTER_ADDR is missing, or nobody answers there
                raise TransportError(
                    f"rank {self.rank} found no store of the launcher to meet the others at: {error}"
                ) from error
            self._fresh = fresh(store, rank=self.rank, ranks=self.ranks, deadline=deadline)
        return self._fresh


def fresh(store: Store, *, rank: int, ranks: int, deadline: float) -> Store:
    """The part of ``store`` that only these processes share, and none that was restarted has written to.

    A launcher may keep one store through restarts of its processes and changes of their number, so each of
    them gives a new sign, and rank 0 answers to that sign alone: it names a part of the store that is new.
    Raises: TransportError: a rank gives no sign, or rank 0 no answer, within ``deadline`` seconds."""
    from torch.distributed.distributed_c10d import PrefixStore

    until, own = time.monotonic() + deadline, secrets.token_hex(8)
    left = set(range(1, ranks)) if rank == 0 else {0}
    store.set(f"penstock/sign/{rank}", own)
    while left:
        if rank and store.check([key := f"penstock/answer/{rank}/{own}"]):
            own = store.get(key).decode()
            store.set(f"penstock/heard/{own}/{rank}", "")
            break
        for other in sorted(left) if rank == 0 else ():
            if store.check([key := f"penstock/sign/{other}"]):
                store.set(f"penstock/answer/{other}/{store.get(key).decode()}", own)
            left -= {other} if store.check([f"penstock/heard/{own}/{other}"]) else set()
        if left and time.monotonic() > until:
            raise TransportError(
                f"rank {', '.join(map(str, sorted(left)))} of {ranks} did not join within {deadline:g} s; "
                "see why it did not start"
            )
        time.sleep(_PAUSE)
    return PrefixStore(f"penstock/{own}", store)
