"""Ranks that a launcher such as torchrun started: who they are, and a part of its store for them alone."""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from typing import TYPE_CHECKING

from ...compression.errors import ConfigError, TransportError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

MEETING = "PENSTOCK_MEETING"
"""The environment variable with the folder where the ranks of a local run meet."""

_PAUSE = 0.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """This process among those that the launcher started."""

    rank: int
    ranks: int

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
        return Launched(rank=int(rank), ranks=int(ranks))

    def check(self, ranks: int) -> None:
        """Refuse a run of another number of ranks than there are.

        Raises: ConfigError: it is another."""
        if ranks != self.ranks:
            raise ConfigError(
                f"the launcher started {self.ranks} processes (WORLD_SIZE={self.ranks}), and the run has "
                f"ranks={ranks}; start as many as it has ranks, or leave ranks= out"
            )


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
