"""What ranks leave for each other in the store of their group: why one stops, and that one still runs.

The store may have gone with the rank or the link that held it, and torch's look-ups in such a store never
return. So each runs in a thread that is given a moment, and after one that got stuck whoever asked tries no
other."""

from __future__ import annotations

import contextlib
import datetime
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

from torch.distributed.distributed_c10d import Store

from ...compression.errors import TransportError

MOMENT = 1.5
"""Seconds that a look-up in the store may take, of which ranks have one to give a sign of life."""

_SIGN_SECONDS = 1.0
_POLL_SECONDS = 0.1
_ASKING = "penstock-store"
_DONE = "done"

T = TypeVar("T")


def bounded(call: Callable[[], T], *, seconds: float) -> T:
    """What ``call`` returns or raises, if it does within ``seconds``.

    Raises: TimeoutError: it does not, or an earlier one still has not; it is left to itself.
    """
    # A thread that is stuck is the memory of it: the store did not answer this thread once.
    name = f"{_ASKING}-{threading.get_ident()}"
    if any(thread.name == name for thread in threading.enumerate()):
        raise TimeoutError("the store of the ranks did not answer before")
    answers: list[T] = []
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            answers.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=ask, name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"the store of the ranks did not answer within {seconds:g} s")
    return answers[0]


class Notices:
    """What this rank and its peers leave in the store of their group; without a store nobody is there."""

    def __init__(self, store: Store | None, rank: int, size: int) -> None:
        self.store, self.rank = store, rank
        self.others = [other for other in range(size) if other != rank]

    def post_failure(self, sentence: str) -> None:
        """Tell the other ranks why this one stops."""
        self._ask(lambda store: store.set(f"failed/{self.rank}", sentence), otherwise=None)

    def peer_failures(self) -> str:
        """Why other ranks stopped, as they told it; "" if none did."""

        def look(store: Store) -> str:
            keys = [f"failed/{other}" for other in self.others]
            return "; ".join(store.get(key).decode(errors="replace") for key in keys if store.check([key]))

        return self._ask(look, otherwise="")

    def why(self, error: RuntimeError) -> str:
        """Why a wait for all failed: in the words of a rank that failed, else who gives no sign of life."""
        if told := self.peer_failures():
            return told
        quiet = self._ask(
            lambda store: silent(store, f"lost/{self.rank}", "lost", self.others), otherwise=self.others
        )
        who = f"{ranks_named(quiet)} did not answer: " if quiet else ""
        return f"{who}{of_gloo(error)}"

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Leave a sign of life every second while the block lasts; the others are in ``wait_for``."""
        store, done = self.store, threading.Event()
        assert store is not None, "there is somebody who waits"

        def beat() -> None:
            count = 0
            with contextlib.suppress(RuntimeError):  # the store has gone: the next exchange tells
                while not done.wait(_SIGN_SECONDS):
                    store.set(f"busy/{self.rank}", str(count := count + 1))

        thread = threading.Thread(target=beat, name="penstock-busy", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(MOMENT)
            with contextlib.suppress(RuntimeError):
                store.set(f"busy/{self.rank}", _DONE)

    def wait_for(self, rank: int, *, deadline: float) -> None:
        """Wait until ``rank`` has left its ``busy`` block, for as long as it gives signs of life.

        Args:   deadline: seconds between two signs.
        Raises: TransportError: it gives none, or the store has gone."""
        store, key = self.store, f"busy/{rank}"
        assert store is not None, "there is somebody to wait for"
        seen, until = "", time.monotonic() + deadline
        try:
            while seen != _DONE:
                before = seen
                seen = bounded(
                    lambda: store.get(key).decode(errors="replace") if store.check([key]) else "",
                    seconds=deadline,
                )
                if seen != before:
                    until = time.monotonic() + deadline
                elif time.monotonic() > until:
                    raise TimeoutError(f"it gave no sign of life for {deadline:g} s")
                time.sleep(_POLL_SECONDS)
        except (RuntimeError, TimeoutError) as error:
            raise TransportError(f"rank {self.rank} waited for rank {rank}: {of_gloo(error)}") from error

    def part(self, seconds: float) -> None:
        """Say that nothing is left to do, and wait until all have said so."""
        if self.store is not None:
            self.store.set(f"left/{self.rank}", "")
            self.store.wait([f"left/{other}" for other in self.others], datetime.timedelta(seconds=seconds))

    def _ask(self, look: Callable[[Store], T], *, otherwise: T) -> T:
        store = self.store
        if store is None:
            return otherwise
        try:
            return bounded(lambda: look(store), seconds=MOMENT)
        except Exception:  # the store has gone with the rank that held it; the error itself travels on
            return otherwise


def silent(store: Store, sign: str, kind: str, others: Collection[int]) -> list[int]:
    """Leave ``sign``; return which of ``others`` leave neither one of its ``kind`` nor word of a failure."""
    store.set(sign, "")
    until = time.monotonic() + _SIGN_SECONDS
    while True:
        left = [o for o in others if not (store.check([f"{kind}/{o}"]) or store.check([f"failed/{o}"]))]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.02)


def ranks_named(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 3 and 4``."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def of_gloo(error: BaseException) -> str:
    """What gloo says of a failed transfer, less its source line and its advice."""
    return re.sub(r"^\[[^]]*\] ", "", str(error)).split(". ")[0]
