"""Ranks on several machines, each with a launcher of its own: machine 0's decides, the others follow it.

    generation 1, 2, ...     one start of all ranks; machine 0 counts
    ready/NODE               a launcher says who it is, and for which generation it waits
    job/GENERATION           what to run, and the launchers who shall: one that came later waits for the next
    end/GENERATION/NODE      how its ranks ended, and what they left
    over, left/NODE          the run has ended, and who knows it

All of it lies in the store of ``meeting.py``, where the ranks of a generation meet, too."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...compression.errors import ConfigError, PenstockError, TransportError
from .failure import Failure, Lost, cause, keep
from .meeting import Address, Meeting, named
from .processes import Ends
from .signals import Stopped

PAUSE = 0.2
_WORD_SECONDS = 12.0
"""How long the other machines may take to say how their ranks ended, once those of machine 0 have."""

RunRanks = Callable[[Mapping[str, Any], Sequence[int], Callable[[], bool]], tuple[Ends, list[Failure]]]
"""Runs those ranks by a job, until they end or the last argument says that they shall."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of several.

    Attributes: patience: seconds to wait for the others. said: what must be alike on all, by its name."""

    number: int
    nodes: int
    master: Address
    secret: bytes
    patience: float
    said: Mapping[str, str]

    def ranks(self, of: int) -> range:
        """The ranks of this machine."""
        each = of // self.nodes
        return range(self.number * each, (self.number + 1) * each)


class Lead:
    """Machine 0: keeps the store, tells the others what to run, and decides how that ended."""

    def __init__(self, node: Node, tell: Callable[[str], None]) -> None:
        self.node, self.tell = node, tell
        self._meeting = Meeting(node.master, node.secret)
        self._ask = self._meeting.items.ask
        self._generation = 0
        self._others = range(1, node.nodes)
        self._met: set[int] = set()

    @property
    def address(self) -> Address:
        """Where the store listens."""
        return self._meeting.address

    def run(
        self,
        job: Mapping[str, Any],
        run: RunRanks,
        *,
        stages_of_rank: Sequence[Sequence[int]],
        errors: Path,
    ) -> None:
        """Run the ranks of ``job`` on all machines, those of this one by ``run``.

        Args:   errors: the folder for what failing ranks of the others left.
        Raises: Stopped: the ranks were asked to stop, and did. Lost: some were killed or lost, or a machine
                was. PenstockError: a rank's own error, or machines that do not come, or differ."""
        self._generation += 1
        self._ask("set", "generation", self._generation)
        members = self._gather()
        job = {**job, "members": members, "ranks": len(stages_of_rank), "generation": self._generation}
        self._set(f"job/{self._generation}", job)
        with watching(lambda: self._is_broken(members)) as broken:
            ours = told_of(*run(job, self.node.ranks(len(stages_of_rank)), broken))
        self._set(f"end/{self._generation}/0", ours)
        others = self._ends()
        for one in others.values():
            keep(errors, [Failure(**left) for left in one["failures"]])
        if asked := Ends(codes=codes_of([ours, *others.values()]), stuck=[]).stopped:
            raise Stopped(asked)
        if has_failed(ours) or broken():
            silent = [number for number in self._others if number not in others]
            raise cause_of([ours, *others.values()], silent, stages_of_rank)

    def close(self, sentence: str = "", *, patience: float = 10.0) -> None:
        """Tell the others that the run has ended, by ``sentence`` if it failed, and wait until they know.

        Args: patience: seconds to wait."""
        self._set("over", sentence)
        until = time.monotonic() + patience
        while time.monotonic() < until and not all(self._ask("get", f"left/{n}") for n in self._met):
            time.sleep(PAUSE)
        self._meeting.close()

    def _gather(self) -> dict[str, str]:
        """Wait until every machine is ready for this generation; return who speaks for each."""
        began, told = time.monotonic(), False
        while True:
            ready = {number: self._get(f"ready/{number}") for number in self._others}
            here = {n: one for n, one in ready.items() if one and one["generation"] == self._generation}
            self._met |= here.keys()
            for number, one in here.items():
                self._compare(number, one["said"])
            missing = [str(number) for number in self._others if number not in here]
            if not missing:
                return {str(number): one["id"] for number, one in here.items()}
            waited, who = time.monotonic() - began, f"node {', '.join(missing)} of {self.node.nodes}"
            if waited > self.node.patience:
                raise TransportError(
                    f"{who} did not come to master={named(self.node.master)} within "
                    f"{self.node.patience:g} s; start the same command there with its own node="
                )
            if waited > 2 and not told:
                self.tell(f"waiting for {who} to come to {named(self.node.master)}")
                told = True
            time.sleep(PAUSE)

    def _compare(self, number: int, theirs: Mapping[str, str]) -> None:
        for name, there in theirs.items():
            if (ours := self.node.said.get(name, "nothing")) != there:
                raise ConfigError(
                    f"{name} must be alike on all nodes, found {ours} on node 0 and {there} on node {number}"
                )

    def _is_broken(self, members: Mapping[str, str]) -> bool:
        """Whether a machine's ranks have failed, or it came anew and so lost them."""
        if any(map(has_failed, self._known_ends().values())):
            return True
        return any((self._get(f"ready/{n}") or {}).get("id") != one for n, one in members.items())

    def _known_ends(self) -> dict[int, Any]:
        ends = {number: self._get(f"end/{self._generation}/{number}") for number in self._others}
        return {number: end for number, end in ends.items() if end}

    def _ends(self) -> dict[int, Any]:
        """How the ranks of the others ended, as far as they tell it in time."""
        until = time.monotonic() + _WORD_SECONDS
        while len(known := self._known_ends()) < len(self._others) and time.monotonic() < until:
            time.sleep(PAUSE)
        return known

    def _get(self, key: str) -> Any:
        text = self._ask("get", key)
        return json.loads(text) if text else None

    def _set(self, key: str, item: Any) -> None:
        self._ask("set", key, json.dumps(item))


def told_of(ends: Ends, failures: Sequence[Failure], stopped: str = "") -> dict[str, Any]:
    """How the ranks of a machine ended, as JSON says it."""
    left = [dataclasses.asdict(failure) for failure in failures]
    codes = {str(rank): code for rank, code in ends.codes.items()}
    return {"codes": codes, "stuck": list(ends.stuck), "failures": left, "stopped": stopped}


def has_failed(told: Mapping[str, Any]) -> bool:
    """Whether the ranks of a machine did not end well, as it told."""
    return bool(told["codes"] or told["stuck"] or told["stopped"])


def codes_of(told: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """The exit codes of ranks that did not end well, on all machines."""
    return {int(rank): code for one in told for rank, code in one["codes"].items()}


def cause_of(
    told: Sequence[Mapping[str, Any]], silent: Sequence[int], stages_of_rank: Sequence[Sequence[int]]
) -> PenstockError:
    """The cause among all that machines told of their ranks; ``silent``: those that told nothing."""
    codes = codes_of(told)
    stuck = [rank for one in told for rank in one["stuck"]]
    failures = sorted((Failure(**left) for one in told for left in one["failures"]), key=lambda left: left.at)
    stopped = [one["stopped"] for one in told if one["stopped"]]
    found = None
    if codes or stuck:
        found = cause(Ends(codes=codes, stuck=stuck), failures, stages_of_rank=stages_of_rank)
    if found and not isinstance(found, Lost):
        return found
    if "SIGINT" in stopped:
        return TransportError("a node was stopped by Ctrl-C, and the run with it")
    if silent and (found is None or found.rank is None):  # what the others saw are consequences
        seen = f"; {found}" if found else ""
        return Lost(f"node {', '.join(map(str, silent))} gives no word of its ranks any more{seen}")
    return found or Lost(f"a node was stopped{''.join(f' by {one}' for one in stopped[:1])}")


@contextlib.contextmanager
def watching(look: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
    """Ask ``look`` beside the block until it says yes; give what tells whether it has."""
    found, done = threading.Event(), threading.Event()

    def watch() -> None:
        while not done.wait(PAUSE):
            if look():
                found.set()
                return

    thread = threading.Thread(target=watch, name="penstock-nodes", daemon=True)
    thread.start()
    try:
        yield found.is_set
    finally:
        done.set()
