"""A training process's side of the sample cache: what is there comes as copies; nothing ever fails for it.

Without a broker, or with one that dies or stops, every sample is None, that is said once, and the cache comes
back by itself when a broker does. A forked process has a connection of its own, and so has a pickled copy."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ....compression.errors import TransportError
from .link import Hit, Link, NotTaken, has_answered, say_hello
from .messages import LONGEST_STAMP, MOST_AT_ONCE, NOWHERE, Hello
from .policy import Times
from .wire import Bytes, Wire

_AGAIN_SECONDS = 1.0
"""How long until a broker that is away is looked for again."""

_GRACE_SECONDS = 0.05
"""How long one that was found again may take to answer before training goes on; it is asked later."""

_T = TypeVar("_T")


class Client:
    """One connection of a run; for one thread at a time.

    Args: path: where the broker listens.
          timeout: seconds after which a broker that does not answer counts as gone.
          tell: is told once why there is no cache; to be pickled, so a function with a name.
    """

    def __init__(
        self, path: Path, hello: Hello, *, tell: Callable[[str], None], timeout: float = 2.0
    ) -> None:
        self._path, self._hello, self._tell, self._timeout = Path(path), hello, tell, timeout
        self._begun: tuple[int, Sequence[int], Sequence[int] | None] | None = None
        self._measured: Times | None = None
        self._told = self._refused = False
        self._reset()

    @property
    def is_connected(self) -> bool:
        """Whether there was a broker when it was last needed."""
        return self._link is not None and self._process == os.getpid()

    def begin(self, epoch: int, order: Sequence[int], following: Sequence[int] | None) -> None:
        """An epoch begins.

        Args: order: the samples that the whole run uses in it, each once, as far as they are known;
              following: those of the next epoch, None if this is the last.
        """
        self._begun = epoch, order, following
        self._check(max(len(order), len(following or ())))
        self._asked(lambda link: link.begin(epoch, order, following), None, new=True)

    def measured(self, times: Times) -> None:
        """The warm-up epoch of the run is over."""
        self._measured = times
        self._asked(lambda link: link.measured(times), None, new=True)

    def use(self, indices: Sequence[int], *, epoch: int | None = None) -> list[Hit | None]:
        """Return copies of what there is of ``indices``, best a whole batch; None: read it, and ``store`` it.

        Args: epoch: which; None: that which the run began last, in whatever process."""
        number = NOWHERE if epoch is None else epoch
        once = list(dict.fromkeys(indices))
        self._check(max(once, default=0) + 1)
        found: dict[int, Hit | None] = {}
        for at in range(0, len(once), MOST_AT_ONCE):
            part = once[at : at + MOST_AT_ONCE]
            nothing: list[Hit | None] = [None] * len(part)
            hits = self._asked(lambda link, part=part: link.use(number, part), nothing)
            found.update(zip(part, hits, strict=True))
        return [found[index] for index in indices]

    def store(
        self,
        indices: Sequence[int],
        payloads: Sequence[Bytes],
        stamps: Sequence[bytes] | None = None,
        *,
        epoch: int | None = None,
    ) -> int:
        """Offer samples that were not there and were read. Returns: how many the cache took.

        Args: stamps: at most 64 bytes each, by which whoever gets the sample sees whether it is still true.
        """
        stamps = [b""] * len(indices) if stamps is None else stamps
        if not len(indices) == len(payloads) == len(stamps) or any(
            len(one) > LONGEST_STAMP for one in stamps
        ):
            raise ValueError(f"as many samples as payloads and stamps, of {LONGEST_STAMP} bytes at most each")
        number, taken = NOWHERE if epoch is None else epoch, 0
        fit = [place for place, payload in enumerate(payloads) if memoryview(payload).nbytes < NOWHERE]
        for at in range(0, len(fit), MOST_AT_ONCE):
            part = fit[at : at + MOST_AT_ONCE]
            said = [(indices[place], payloads[place], stamps[place]) for place in part]
            taken += self._asked(lambda link, said=said: link.store(number, said), 0)
        return taken

    def drop(self, index: int, stamp: bytes) -> None:
        """A sample is no longer what it was under ``stamp``, which ``use`` returned with it."""
        self._asked(lambda link: link.drop(index, stamp), None)

    def close(self) -> None:
        """End the connection; the next call would make a new one."""
        for one in (self._link, self._joining):
            if one is not None:
                one.close()
        self._link = self._joining = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # whoever forgot to close it, or an interpreter that ends
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_link", "_joining", "_process", "_next_try", "_is_new")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def _reset(self) -> None:
        """Begin without a connection, in this process."""
        self._link: Link | None = None
        self._joining: Wire | None = None
        self._next_try, self._is_new = 0.0, True
        self._process = os.getpid()
        this = weakref.ref(self)
        # At once: a copy that a child has would keep the connection of its parent alive when that is killed.

        def forked() -> None:
            if (client := this()) is not None:
                client._leave_to_parent()

        os.register_at_fork(after_in_child=forked)

    def _leave_to_parent(self) -> None:
        """In a child: close the copies of what belongs to the parent."""
        self.close()
        self._next_try, self._is_new, self._process = 0.0, True, os.getpid()

    def _check(self, num_samples: int) -> None:
        """Do without the cache from now on where there are more samples than it was told of.

        It would take a number beyond them for a mistake, and close."""
        told = self._hello.num_samples
        if num_samples > told and not self._refused:
            self._refused = True
            self._lost(f"a data set of {told} samples is asked for {num_samples}; it may not grow in a job")

    def _asked(self, ask: Callable[[Link], _T], otherwise: _T, *, new: bool = False) -> _T:
        """Ask the broker, or go on with ``otherwise``; ``new``: what a new connection says anyway."""
        if self._process != os.getpid():  # forked without Python's knowledge
            self._leave_to_parent()
        try:
            before = self._link
            link = self._connected()
            if link is None or (new and link is not before):
                return otherwise
            return ask(link)
        except NotTaken as error:
            self._refused = True
            self._lost(str(error))
        except (OSError, TransportError) as error:
            self._lost(f"{self._path} {_said(error)}")
        return otherwise

    def _connected(self) -> Link | None:
        if self._link is not None or self._refused:
            return self._link
        if self._joining is None:
            if time.monotonic() < self._next_try:
                return None
            self._next_try = time.monotonic() + _AGAIN_SECONDS
            # The first time it is waited for; later one that is stopped shall not stop training every second.
            patience = self._timeout if self._is_new else _GRACE_SECONDS
            self._joining = say_hello(self._path, self._hello, timeout=self._timeout, patience=patience)
        else:
            patience = 0.0
        if not has_answered(self._joining, patience):
            self._is_new = False
            self._say(f"{self._path} does not answer")
            return None
        self._is_new = False
        link = Link(self._joining)
        self._joining, self._link = None, link
        if self._measured is not None:
            link.measured(self._measured)
        if self._begun is not None:
            link.begin(*self._begun)
        return link

    def _lost(self, why: str) -> None:
        self._is_new = False
        self._next_try = time.monotonic() + _AGAIN_SECONDS
        self.close()
        self._say(why)

    def _say(self, why: str) -> None:
        if not self._told:
            self._told = True
            self._tell(f"training goes on without the sample cache: {why}")


def _said(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "does not answer"
    if isinstance(error, FileNotFoundError | ConnectionRefusedError):
        return "has no broker; start one by penstock cache serve"
    return f"is gone ({error})"
