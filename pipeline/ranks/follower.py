"""A machine other than 0 of a run on several: runs its ranks whenever machine 0 says so (``nodes.py``)."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...compression.errors import ConfigError, PenstockError, TransportError
from .conversation import Refused
from .failure import Failure
from .meeting import MeetingStore, named
from .nodes import PAUSE, Node, has_failed, told_of, watching
from .processes import Ends

RunJob = Callable[
    [MeetingStore, Mapping[str, Any], Sequence[int], Callable[[], bool]], tuple[Ends, list[Failure]]
]
"""Runs those ranks by a job, until they end or the last argument says that they shall."""


def follow(node: Node, run: RunJob, tell: Callable[[str], None]) -> None:
    """Run what machine 0 says, until it says that the run is over.

    Raises: PenstockError: why the run failed, as machine 0 tells it; or machine 0 is not there."""
    while True:
        follower = _Follower(node, _connect(node), run)
        try:
            return follower.serve()
        except RuntimeError as error:
            if follower.over:
                raise PenstockError(follower.over) from error
            if not follower.restarts:
                raise TransportError(f"node 0 has gone, and the run with it: {error}") from error
            tell(f"node 0 has gone; waiting for it to come back to {named(node.master)}")
        finally:
            follower.store.close()


def _connect(node: Node) -> MeetingStore:
    until = time.monotonic() + node.patience
    while True:
        try:
            return MeetingStore(node.master, node.secret)
        except Refused as error:
            raise ConfigError(
                f"node 0 at master={named(node.master)} has another secret; set PENSTOCK_SECRET alike "
                "on all nodes"
            ) from error
        except OSError as error:
            if time.monotonic() > until:
                raise TransportError(
                    f"node 0 did not answer at master={named(node.master)} within {node.patience:g} s: "
                    f"{error.strerror or error}; start the same command there with node=0"
                ) from error
            time.sleep(PAUSE)


class _Follower:
    """A machine other than 0, as long as machine 0 is there.

    ``restarts``: it may come back. ``over``: what it said at the end, which it does not wait for everybody to
    read."""

    def __init__(self, node: Node, store: MeetingStore, run: RunJob) -> None:
        self.node, self.store, self.run = node, store, run
        self.id, self.restarts, self.over = secrets.token_hex(8), False, ""
        self._ready = f"ready/{node.number}"

    def serve(self) -> None:
        """Follow until the run is over. Raises RuntimeError where machine 0 is gone."""
        said = ran = 0
        while True:
            if (over := self._get("over")) is not None:
                self._set(f"left/{self.node.number}", True)
                if over:
                    raise PenstockError(over)
                return
            self._check_alone(said)
            generation = int(self.store.ask("get", "generation") or 0)
            if generation > said:
                said = generation
                told = {"id": self.id, "generation": generation, "said": dict(self.node.said)}
                self._set(self._ready, told)
            job = self._get(f"job/{generation}") if generation > ran else None
            if job and job["members"][str(self.node.number)] == self.id:
                ran = generation
                self._work(job)
            time.sleep(PAUSE)

    def _work(self, job: Mapping[str, Any]) -> None:
        """Run this machine's ranks once, and say how they ended."""
        self.restarts = bool(job["restarts"])
        key = f"end/{job['generation']}/{self.node.number}"
        gone: list[RuntimeError] = []

        def broken() -> bool:
            try:
                return self._is_over(job)
            except RuntimeError as error:
                gone.append(error)
                return True

        try:
            with watching(broken) as watched:
                ends, failures = self.run(self.store, job, self.node.ranks(job["ranks"]), watched)
        except PenstockError as error:  # what this machine lacks
            said = f"node {self.node.number}: {error}"
            ends = Ends(codes={-1: 1}, stuck=[])
            failures = [Failure(rank=-1, sentence=said, consequence=False, at=time.time(), trace=[])]
        except KeyboardInterrupt as stop:
            with contextlib.suppress(RuntimeError):
                self._set(key, told_of(Ends(codes={}, stuck=[]), [], stopped=str(stop) or "SIGINT"))
            raise
        if gone:
            raise gone[0]
        self._set(key, told_of(ends, failures))

    def _is_over(self, job: Mapping[str, Any]) -> bool:
        if (over := self._get("over")) is not None:
            self.over = over
            return True
        if int(self.store.ask("get", "generation")) > job["generation"]:
            return True
        ends = (self._get(f"end/{job['generation']}/{number}") for number in range(self.node.nodes))
        return any(end and has_failed(end) for end in ends)

    def _check_alone(self, said: int) -> None:
        there = self._get(self._ready) if said else None
        if there and there["id"] != self.id:
            raise ConfigError(f"node={self.node.number} was started twice; number each machine apart")

    def _get(self, key: str) -> Any:
        text = self.store.ask("get", key)
        return json.loads(text) if text else None

    def _set(self, key: str, item: Any) -> None:
        self.store.ask("set", key, json.dumps(item))
