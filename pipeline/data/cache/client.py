"""A training process's side of the sample cache: what is there comes as copies; nothing ever fails for it.

Without a broker, or with one that dies or stops, every sample is None, that is told once, and the cache comes
back when a broker does. A forked process has a connection of its own, and so has a pickled copy."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ....compression.errors import TransportError
from . import wire
from .policy import Times
from .wire import Hello, Kind

_RETRY_SECONDS = 1.0  # until a broker that is away is looked for again
_GRACE_SECONDS = 0.05  # that one which is back may take to answer before training goes on
_BATCH_BYTES = 8 << 20

Bytes = bytes | bytearray | memoryview
_T = TypeVar("_T")


class Hit(NamedTuple):
    """A sample of the cache: a copy of its bytes, and the stamp that its writer gave it."""

    payload: bytes
    stamp: bytes


class NotTaken(Exception):
    """The broker does not want this run; the message says why."""


class Link:
    """A connection to the broker at ``path``, whose answers may take ``timeout`` seconds.

    Its methods raise OSError and TransportError: the broker is gone, stopped, or none of ours."""

    def __init__(self, path: Path, timeout: float) -> None:
        self._socket, self._view = wire.connect(path, timeout), memoryview(b"")

    def send(self, kind: Kind, *body: Bytes) -> None:
        """Send a message."""
        wire.send(self._socket, bytes([kind]), *body)

    def ask(self, kind: Kind, *body: Bytes, longest: int) -> bytearray:
        """Send a message and return its answer, which has ``longest`` bytes at most."""
        self.send(kind, *body)
        return wire.receive(self._socket, longest)

    def join(self, hello: Hello, timeout: float) -> None:
        """Say whose connection it is, and map the shared memory; ``timeout`` is for later answers."""
        answer = self.ask(Kind.HELLO, wire.pack_json(hello), longest=wire.LONGEST_CONTROL)
        welcome: wire.Welcome = wire.unpack_json(answer, wire.Welcome)
        if welcome.refused:
            raise NotTaken(welcome.refused)
        _, files, *_ = socket.recv_fds(self._socket, 1, 1)
        try:
            num_bytes = welcome.num_pages * welcome.page_bytes
            self._view = memoryview(mmap.mmap(files[0], num_bytes, prot=mmap.PROT_READ))
        except (IndexError, ValueError) as error:
            raise ConnectionError(f"the broker answers a hello without its memory: {error}") from error
        finally:
            for file in files:
                os.close(file)
        self._num_pages, self._page_bytes = welcome.num_pages, welcome.page_bytes
        self._socket.settimeout(timeout)
        # Untouched, and freed: glibc then keeps twice as much, see mallopt(3). It would else give every batch
        # of copies back to the system, whose fresh pages cost several times the copying.
        bytes(_BATCH_BYTES)

    def use(self, epoch: int, indices: Sequence[int]) -> list[Hit | None]:
        """Copy what is there of samples, each named once; None for the others."""
        size = len(indices) * wire.LEASED.size
        longest = size + 4 * (len(indices) + self._num_pages)
        body = memoryview(self.ask(Kind.USE, wire.pack_words(epoch, then=indices), longest=longest))
        if len(body) < size or (len(body) - size) % 4:
            raise ConnectionError(f"the broker answers for other than {len(indices)} samples")
        pages, at = wire.unpack_words(body[size:]), 0
        found: list[Hit | None] = []
        for num_bytes, stamp in wire.LEASED.iter_unpack(body[:size]):
            if num_bytes == wire.NOWHERE:
                found.append(None)
                continue
            end = at + wire.pages_of(num_bytes, self._page_bytes)
            found.append(Hit(self._copy(pages[at:end], num_bytes), stamp))
            at = end
        if at:  # nothing is read any more, so its pages may go to others
            self.send(Kind.DONE)
        return found

    def store(self, epoch: int, samples: Sequence[tuple[int, Bytes, bytes]]) -> int:
        """Offer samples (index, bytes, stamp), and send those that are accepted; return how many were."""
        views = [memoryview(data).cast("B") for _, data, _ in samples]
        rows = zip(samples, views, strict=True)
        offers = [wire.OFFERED.pack(index, len(view), stamp) for (index, _, stamp), view in rows]
        answer = self.ask(Kind.OFFER, wire.pack_words(epoch), *offers, longest=len(samples))
        if len(answer) != len(samples):
            raise ConnectionError(f"the broker answers for {len(answer)} samples of {len(samples)}")
        filled = [view for view, wanted in zip(views, answer, strict=True) if wanted and len(view)]
        for view in filled:
            wire.send(self._socket, view)
        if filled:
            wire.receive(self._socket, 0)
        return sum(map(bool, answer))

    def close(self) -> None:
        """End the connection; of a copy in a forked process this copy alone."""
        self._socket.close()
        with contextlib.suppress(BufferError):  # in a fork of a process that is just copying
            self._view.release()

    def _copy(self, pages: array[int], num_bytes: int) -> bytes:
        view = self._view
        copy = b"".join([view[start:end] for start, end in wire.pieces(pages, num_bytes, self._page_bytes)])
        if len(copy) != num_bytes:
            raise ConnectionError("the broker names pages that there are not")
        return copy


class Client:
    """One connection of a run to the broker at ``path``, for one thread at a time.

    ``tell`` hears once why there is no cache; a broker that takes ``timeout`` seconds to answer is gone."""

    def __init__(
        self, path: Path, hello: Hello, *, tell: Callable[[str], None], timeout: float = 2.0
    ) -> None:
        self._path, self._hello, self._tell, self._timeout = Path(path), hello, tell, timeout
        self._begun: tuple[int, Sequence[int], Sequence[int] | None] | None = None
        self._measured: Times | None = None
        self._has_told = self._refused = False
        self._reset()

    def begin(self, epoch: int, order: Sequence[int], following: Sequence[int] | None) -> None:
        """Begin an epoch of these samples, each once; ``following``: None if it is the last."""
        self._begun = epoch, order, following
        self._check(max(len(order), len(following or ())))
        self._ask(self._send_begun, None, repeats=True)

    def has_turn(self) -> bool:
        """Return whether the run may begin its first epoch; where there is no broker, it may."""
        return self._ask(lambda link: link.ask(Kind.TURN, longest=1) == b"\1", True)

    def measured(self, times: Times) -> None:
        """Tell the times of the run's warm-up epoch, which is over."""
        self._measured = times
        self._ask(self._send_measured, None, repeats=True)

    def use(self, indices: Sequence[int], *, epoch: int | None = None) -> list[Hit | None]:
        """Return copies of what there is; None: read it, and ``store`` it.

        ``epoch``: None is that which the run began last, in whatever process."""
        once = list(dict.fromkeys(indices))
        self._check(max(once, default=-1) + 1)
        if not once:
            return []
        nothing: list[Hit | None] = [None] * len(once)
        found = self._ask(lambda link: link.use(wire.NOWHERE if epoch is None else epoch, once), nothing)
        hits = dict(zip(once, found, strict=True))
        return [hits[index] for index in indices]

    def store(
        self,
        indices: Sequence[int],
        payloads: Sequence[Bytes],
        stamps: Sequence[bytes] | None = None,
        *,
        epoch: int | None = None,
    ) -> int:
        """Offer samples that were read, with stamps of up to 64 bytes; return how many the cache took."""
        rows = zip(indices, payloads, stamps or [b""] * len(indices), strict=True)
        samples = [row for row in rows if memoryview(row[1]).nbytes < wire.NOWHERE]
        return self._ask(lambda link: link.store(wire.NOWHERE if epoch is None else epoch, samples), 0)

    def drop(self, index: int, stamp: bytes) -> None:
        """Say that a sample is no longer what it was under ``stamp``, which ``use`` returned with it."""
        self._ask(lambda link: link.send(Kind.DROP, wire.pack_words(index), stamp), None)

    def close(self) -> None:
        """End the connection; the next call makes a new one, and waits for it as for the first."""
        if self._link is not None:
            self._link.close()
        self._link, self._is_new = None, True

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # whoever forgot to close it, or an interpreter that ends
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_link", "_next_try", "_is_new")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def _reset(self) -> None:
        """Begin without a connection; a child does at once, or it would keep its killed parent's alive."""
        self._link: Link | None = None
        self._begin_here()
        _CLIENTS.add(self)

    def _begin_here(self) -> None:
        """Close, in a child, the copies of what belongs to the parent."""
        self.close()
        self._next_try = 0.0

    def _check(self, num_samples: int) -> None:
        """Do without the cache from now on if the data set has grown: the broker would refuse the number."""
        limit = self._hello.num_samples
        if num_samples > limit and not self._refused:
            self._refused = True
            self._disconnect(
                f"a data set of {limit} samples is asked for {num_samples}; it may not grow in a job"
            )

    def _ask(self, ask: Callable[[Link], _T], otherwise: _T, *, repeats: bool = False) -> _T:
        """Ask the broker, or go on with ``otherwise``; ``repeats``: a new connection has sent it already."""
        try:
            before = self._link
            link = self._connected()
            if link is None or (repeats and link is not before):
                return otherwise
            return ask(link)
        except NotTaken as error:
            self._refused = True
            self._disconnect(str(error))
        except TimeoutError:
            self._disconnect(f"{self._path} does not answer")
        except (FileNotFoundError, ConnectionRefusedError):
            self._disconnect(f"{self._path} has no broker; start one by penstock cache serve")
        except (OSError, TransportError) as error:
            self._disconnect(f"{self._path} is gone ({error})")
        return otherwise

    def _connected(self) -> Link | None:
        if self._link is not None or self._refused or time.monotonic() < self._next_try:
            return self._link
        # The first time it is waited for; later one that is stopped shall not stop training every second.
        link = Link(self._path, self._timeout if self._is_new else _GRACE_SECONDS)
        try:
            link.join(self._hello, self._timeout)
            self._send_measured(link)
            self._send_begun(link)
        except BaseException:
            link.close()
            raise
        self._link, self._is_new = link, False
        return link

    def _send_begun(self, link: Link) -> None:
        if self._begun is None:
            return
        epoch, order, following = self._begun
        if link.ask(Kind.BEGIN, wire.pack_words(epoch), longest=1) == b"\1":
            counts = epoch, len(order), wire.NOWHERE if following is None else len(following)
            orders = wire.pack_words(*counts, then=order), wire.pack_words(then=following or ())
            link.ask(Kind.ORDERS, *orders, longest=0)  # so that whoever asks now has them

    def _send_measured(self, link: Link) -> None:
        if self._measured is not None:
            link.send(Kind.MEASURED, wire.pack_json(self._measured))

    def _disconnect(self, why: str) -> None:
        """Go on without the broker, for a second at least."""
        self.close()
        self._next_try, self._is_new = time.monotonic() + _RETRY_SECONDS, False
        if not self._has_told:
            self._has_told = True
            self._tell(f"training goes on without the sample cache: {why}")


_CLIENTS = weakref.WeakSet[Client]()
os.register_at_fork(after_in_child=lambda: [client._begin_here() for client in list(_CLIENTS)])


def state_of(path: Path, *, timeout: float) -> dict[str, Any]:
    """Return what a person sees of the broker at ``path``; raises OSError where none answers."""
    with contextlib.closing(Link(path, timeout)) as link:
        return wire.unpack_json(link.ask(Kind.STATUS, longest=wire.LONGEST_STATE))
