"""On how many machines the ranks of a run are started, and how often again: options of ``penstock train``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..compression.errors import ConfigError
from .rules import at_least


@dataclass
class MachinesConfig:
    """Machines and restarts.

    Attributes:
        max_restarts: how often ranks that were killed, lost or hang are started again from a checkpoint
        min_ranks: fewest ranks to go on with, on one machine, where one is lost again at once; null: all
        nodes: machines that share the ranks evenly; the same command runs on each, with its own node=
        node: the number of this machine; machine 0 plans and keeps the run folder
        master: HOST:PORT where the machines meet, an address of machine 0
        join_deadline: seconds that machines wait until all have come, or have come back
    """

    max_restarts: int = 0
    min_ranks: int | None = None
    nodes: int = 1
    node: int = 0
    master: str | None = None
    join_deadline: float = 600.0

    @property
    def meeting(self) -> tuple[str, int]:
        """The host and the port of ``master``."""
        host, _, port = str(self.master).rpartition(":")
        return host.strip("[]"), int(port)

    def check_machines(self) -> None:
        """Refuse machines that do not fit each other."""
        for name, least in (("max_restarts", 0), ("min_ranks", 1), ("nodes", 1), ("node", 0)):
            at_least(least, name, getattr(self, name))
        if not self.join_deadline > 0:
            raise ConfigError(f"join_deadline={self.join_deadline} must be above 0; write seconds")
        if self.node >= self.nodes:
            raise ConfigError(f"node={self.node} must be below nodes={self.nodes}: they count from 0")
        if self.nodes > 1 and self.master is None:
            raise ConfigError(
                f"nodes={self.nodes} meet at an address of node 0, and there is none; add master=HOST:PORT"
            )
        if self.nodes == 1 and self.master is not None:
            raise ConfigError(f"master={self.master} is where several nodes meet; add nodes=, or drop it")
        if self.master is not None and not _is_address(self.master):
            raise ConfigError(
                f"master={self.master} must be HOST:PORT with a port from 1 to 65535, such as 10.0.0.1:29500"
            )

    def check_ranks(self, ranks: int, *, fixed: str | None) -> None:
        """Refuse ranks that machines or restarts cannot take; ``fixed``: what keeps the ranks as they are."""
        if ranks % self.nodes:
            raise ConfigError(f"ranks={ranks} are shared evenly by nodes={self.nodes}; take a multiple of it")
        if self.min_ranks in (None, ranks):
            return
        if self.min_ranks > ranks:
            raise ConfigError(f"min_ranks={self.min_ranks} is more than ranks={ranks}; lower it")
        if not self.max_restarts:
            raise ConfigError(f"min_ranks={self.min_ranks} is for restarts; add max_restarts=")
        if fixed:
            raise ConfigError(f"min_ranks={self.min_ranks} does not go with {fixed}; drop either")


def _is_address(text: str) -> bool:
    found = re.fullmatch(r"(\[[^\[\]]+\]|[^:\[\]]+):(\d{1,5})", text)
    return bool(found) and 0 < int(found[2]) < 1 << 16
