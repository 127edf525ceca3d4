"""The broker: one thread that serves all connections, moves bytes into shared memory, and asks ``core.py``.

Nobody waits for anybody: a connection that has sent half a frame, or does not read its answers, stops where
it is until its socket is ready again. A malformed frame ends its connection, with one line; nothing else
happens.

The broker alone writes the shared memory, which has no name, so nothing stays behind of it. The kernel seals
it: no process that is given it can change its size or map it for writing, not even by way of /proc. Source:
the manual pages memfd_create(2) and fcntl(2) of Linux, F_SEAL_FUTURE_WRITE.

The system tells who is at the other end of a socket, so both ends refuse another user. A socket whose broker
was killed is taken over; its folder is the lock, so two brokers that start at once do not take it from each
other."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import selectors
import socket
import struct
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from ....compression.errors import ConfigError, TransportError
from ....stages.files import reason
from ....stages.units import show_bytes
from .core import Core, Member, NotWelcome, Pages, Stored
from .policy import Policy, Times
from .wire import (
    HEADER,
    LEASED,
    NOWHERE,
    OFFERED,
    PAGE_BYTES,
    Hello,
    Kind,
    Welcome,
    check_length,
    connect,
    is_ours,
    pack,
    pack_json,
    pieces,
    unpack_header,
    unpack_json,
    unpack_words,
)

MOST_CONNECTIONS = 1000
_AT_ONCE = 1 << 18  # bytes that are read of a connection before others are heard
_MOST_PAGES_AT_ONCE = 512  # of a sample; the system takes 1024 pieces in a call
_SCRAP = bytearray(1 << 16)  # takes the bytes of a sample that was evicted meanwhile; nobody reads it

Waits = Generator[int, None, None]
"""Yields the event of the socket that must come before it goes on."""

_LONGEST_PATH = 107  # bytes; unix(7)
_BACKLOG = 128  # connections that the system keeps until they are accepted
_SEAL_FUTURE_WRITE = 0x10  # of linux/fcntl.h, since Linux 5.1
_GROUP_FILES = {
    "": ("", "memory.max", "memory.current"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""Folder, limit and use of memory of a control group, by its controllers: version 2 and version 1."""


class SharedMemory:
    """Memory of ``num_bytes`` that this process writes.

    Attributes: view: its bytes.
    Raises:     ConfigError: the machine has not so much."""

    def __init__(self, num_bytes: int) -> None:
        room = available()
        if num_bytes > room:
            raise ConfigError(
                f"capacity={show_bytes(num_bytes)} does not fit: {show_bytes(room)} of this machine's memory "
                "are free; choose less"
            )
        self._file = os.memfd_create("penstock-cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._file, num_bytes)
            self._map = mmap.mmap(self._file, num_bytes)
            _seal(self._file)
        except (OSError, OverflowError, ValueError) as error:
            os.close(self._file)
            why = reason(error) if isinstance(error, OSError) else str(error)
            raise ConfigError(f"{show_bytes(num_bytes)} cannot be shared ({why}); choose less") from error
        self.view = memoryview(self._map)

    def for_reading(self) -> int:
        """Return a new file descriptor of it that can be read only; the caller closes it."""
        return os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Give it up; those who read it keep it until they do, too."""
        self.view.release()
        self._map.close()
        os.close(self._file)


def _seal(file: int) -> None:
    fixed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fixed | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except OSError:  # an older kernel: clients that can only read are trusted not to reopen it
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fixed)


def available(root: Path = Path("/")) -> int:
    """Bytes of memory that are free, by what the machine and the groups of this process allow."""
    machine = re.search(r"^MemAvailable:\s+(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    free = [int(machine[1]) * 1024 if machine else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers not in _GROUP_FILES:
            continue
        below, limit_file, used_file = _GROUP_FILES[controllers]
        home = root / "sys/fs/cgroup" / below
        group = home / name.lstrip("/")
        for folder in (group, *group.parents):
            limit, used = _text(folder / limit_file).strip(), _text(folder / used_file).strip()
            if limit.isdigit() and used.isdigit():
                # Pages of files that the group is counted for and would give up first.
                cached = re.search(
                    r"^(?:total_)?inactive_file (\d+)$", _text(folder / "memory.stat"), re.MULTILINE
                )
                free.append(int(limit) - int(used) + (int(cached[1]) if cached else 0))
            if folder == home:
                break
    return max(0, min(free))


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


@contextlib.contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """Listen at ``path``, and remove the socket at the end; its folder is made if there is none.

    Raises: ConfigError: a broker listens there, or others than this user may enter the folder."""
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ConfigError(
            f"socket={path} is longer than the {_LONGEST_PATH} bytes of a socket's path; shorten it"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        with _locked_folder(path):
            if path.exists() or path.is_symlink():
                _refuse_living(path)
                path.unlink()
            mask = os.umask(0o177)
            try:
                listener.bind(str(path))
            except OSError as error:
                raise ConfigError(f"socket={path} cannot be made ({reason(error)}); name another") from error
            finally:
                os.umask(mask)
            listener.listen(_BACKLOG)
            ours = os.lstat(path)
        listener.setblocking(False)
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError, ConfigError), _locked_folder(path):
                if os.path.samestat(os.lstat(path), ours):  # else another broker's
                    path.unlink()


@contextlib.contextmanager
def _locked_folder(path: Path) -> Iterator[None]:
    """Lock the folder of ``path``, which is made for this user alone, while a socket comes or goes."""
    try:
        if not path.parent.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"socket={path} cannot be made ({reason(error)}); name another") from error
    try:
        status = os.fstat(folder)
        others = status.st_mode & 0o022 and not status.st_mode & 0o1000  # who may take the socket away
        if others or status.st_uid not in (os.getuid(), 0):
            raise ConfigError(
                f"others may write to {path.parent}, where the socket would be; choose a folder of your own "
                "with socket="
            )
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _refuse_living(path: Path) -> None:
    if not path.is_socket():
        raise ConfigError(f"socket={path} is there already and no socket; name another")
    try:
        connect(path, 0).close()
    except ConnectionRefusedError:
        return  # its broker is gone
    except BlockingIOError:
        pass  # it has more to do than it can take
    except OSError as error:
        raise ConfigError(f"socket={path} is in use ({reason(error)}); name another") from error
    raise ConfigError(f"a broker listens at socket={path}; use that one, end it, or name another")


class Connection:
    """A client: its socket, and the conversation with it.

    Attributes:
        waits: The conversation, which yields the event that it waits for.
    """

    def __init__(
        self, sock: socket.socket, core: Core, memory: SharedMemory, clock: Callable[[], float]
    ) -> None:
        self.socket, self._core, self._memory, self._clock = sock, core, memory, clock
        self.member: Member | None = None
        self.waits = self._converse()

    def __str__(self) -> str:
        return f"a connection of job {self.member.run.hello.job}" if self.member else "a connection"

    def close(self) -> None:
        """End it; its run leaves with its last connection."""
        self.socket.close()
        if self.member is not None:
            self._core.leave(self.member, self._clock())

    def _converse(self) -> Waits:
        """Answer frames without end.

        Raises:
            TransportError: A frame is malformed, or not its turn.
            OSError: The other end is gone.
        """
        while True:
            # 1. the header, when others had their turn
            yield selectors.EVENT_READ
            kind, length = unpack_header((yield from self._receive(HEADER.size)))
            if self.member is None and kind not in (Kind.HELLO, Kind.STATUS):
                raise TransportError(f"a {kind.name} comes from a connection that says first whose it is")
            check_length(kind, length, self.member.run.hello.num_samples if self.member else 0)
            # 2. the body, of samples straight into their pages
            if kind is Kind.PUT:
                assert self.member is not None
                yield from self._put(self.member, length)
                continue
            body = yield from self._receive(length)
            # 3. the answer
            if kind is Kind.HELLO:
                yield from self._welcome(unpack_json(body, Hello))
            elif kind is Kind.STATUS:
                yield from self._send(pack_json(Kind.ANSWER, self._core.status(self._clock())))
            elif self.member is not None:
                try:
                    answer = self._answer(self.member, kind, memoryview(body))
                except (ValueError, struct.error) as error:
                    raise TransportError(f"a malformed message of kind {kind.name} ({error})") from error
                yield from self._send(answer)

    def _receive(self, num_bytes: int) -> Generator[int, None, bytearray]:
        data = bytearray()
        while len(data) < num_bytes:
            try:
                piece = self.socket.recv(min(num_bytes - len(data), _AT_ONCE))
            except BlockingIOError:
                yield selectors.EVENT_READ
                continue
            if not piece:
                raise ConnectionResetError
            data += piece
            if len(data) < num_bytes:
                yield selectors.EVENT_READ
        return data

    def _send(self, data: bytes) -> Waits:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self.socket.send(rest) :]
            except BlockingIOError:
                yield selectors.EVENT_WRITE

    def _put(self, member: Member, num_bytes: int) -> Waits:
        accepted = sum(stored.num_bytes for stored in member.writing)
        if accepted != num_bytes:
            raise TransportError(f"{num_bytes} bytes come where {accepted} were accepted")
        while member.writing:
            try:
                count = self.socket.recvmsg_into(self._buffers(member.writing[0]))[0]
            except BlockingIOError:
                yield selectors.EVENT_READ
                continue
            if not count:
                raise ConnectionResetError
            self._core.wrote(member, count)
            yield selectors.EVENT_READ

    def _buffers(self, stored: Stored) -> list[memoryview]:
        """The rest of a sample's pages, or nobody's memory if it was evicted."""
        if not stored.kept:
            return [memoryview(_SCRAP)[: stored.num_bytes - stored.written]]
        size = self._core.pages.page_bytes
        first = stored.written // size
        pages, left = stored.pages[first : first + _MOST_PAGES_AT_ONCE], stored.num_bytes - first * size
        return [self._memory.view[a:b] for a, b in pieces(pages, left, size, begin=stored.written % size)]

    def _welcome(self, hello: Hello) -> Waits:
        if self.member is not None:
            raise TransportError("a connection says once whose it is")
        try:
            self.member = self._core.join(hello, self._clock())
        except NotWelcome as error:
            yield from self._send(pack_json(Kind.ANSWER, Welcome(refused=str(error))))
            raise
        pages = self._core.pages
        welcome = pack_json(Kind.ANSWER, Welcome(num_pages=pages.num_pages, page_bytes=pages.page_bytes))
        file = self._memory.for_reading()
        try:  # short, and mostly the first that is sent: it is taken whole or the client is gone
            socket.send_fds(self.socket, [welcome], [file])
        finally:
            os.close(file)

    def _answer(self, member: Member, kind: Kind, body: memoryview) -> bytes:
        """Take a whole frame; return its answer, if it has one."""
        core, now = self._core, self._clock()
        if kind is Kind.MEASURED:
            core.measured(member, unpack_json(bytes(body), Times), now)
        elif kind is Kind.BEGIN:
            (epoch,) = unpack_words(body)
            core.release(member)
            return pack(Kind.ANSWER, bytes([epoch > member.run.epoch]))
        elif kind is Kind.ORDERS:
            epoch, num_order, num_following, *_ = words = unpack_words(body)
            order, following = words[3 : 3 + num_order], words[3 + num_order :]
            is_last = num_following == NOWHERE
            if len(words) != 3 + num_order + (0 if is_last else num_following):
                raise TransportError(f"orders of {num_order} and {num_following} samples, not {len(words)}")
            core.begin(member, epoch, order, None if is_last else following, now)
        elif kind is Kind.USE:
            epoch, *indices = unpack_words(body)
            found = core.use(member, epoch, indices, now)
            missing = LEASED.pack(NOWHERE, b"")
            rows = [missing if one is None else LEASED.pack(one.num_bytes, one.stamp) for one in found]
            return pack(Kind.ANSWER, *rows, *(one.pages.tobytes() for one in found if one is not None))
        elif kind is Kind.DONE:
            core.release(member)
        elif kind is Kind.OFFER:
            (epoch,) = unpack_words(body[:4])
            samples = list(OFFERED.iter_unpack(body[4:]))
            if any(num_bytes == NOWHERE for _, num_bytes, _ in samples):
                raise TransportError(f"a sample has fewer than {NOWHERE} bytes")
            accepted = core.offer(member, epoch, samples, now)
            return pack(Kind.ANSWER, bytes(stored is not None for stored in accepted))
        elif kind is Kind.DROP:
            (index,) = unpack_words(body[:4])
            core.drop(member, index, bytes(body[4:]))
        return b""


class Broker:
    """Answers at ``listener`` until it is closed.

    Args:
        tell: Hears one line of every connection that is refused or ended for what it sent.
    """

    def __init__(
        self,
        listener: socket.socket,
        core: Core,
        memory: SharedMemory,
        *,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        most_connections: int = MOST_CONNECTIONS,
    ) -> None:
        self.core, self._memory, self._listener = core, memory, listener
        self._tell, self._clock, self._most = tell, clock, most_connections
        self._selector = selectors.DefaultSelector()
        self._connections: set[Connection] = set()
        self._listens = False
        self._listen()

    def run(self, *, until: Callable[[], bool] = lambda: False, pause: float | None = None) -> None:
        """Answer until ``until``, which is asked after whatever happens, and every ``pause`` seconds."""
        while not until():
            for key, _ in self._selector.select(pause):
                if key.data is None:
                    self._accept()
                elif key.data in self._connections:
                    self._serve(key.data)

    def close(self) -> None:
        """End all connections."""
        for connection in self._connections:
            connection.socket.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # too many open files: those who wait are taken when somebody leaves
            self._tell(f"a connection is not taken: {error}")
            return self._listen(False)
        sock.setblocking(False)
        if not is_ours(sock):
            self._tell("a connection of another user is refused")
            return sock.close()
        connection = Connection(sock, self.core, self._memory, self._clock)
        self._connections.add(connection)
        self._selector.register(sock, next(connection.waits), connection)
        if len(self._connections) >= self._most:
            self._listen(False)

    def _listen(self, listens: bool = True) -> None:
        if listens and not self._listens:
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        elif self._listens and not listens:
            self._selector.unregister(self._listener)
        self._listens = listens

    def _serve(self, connection: Connection) -> None:
        """Go on with a conversation until it waits again, or end it."""
        why = ""
        try:
            events = next(connection.waits)
            if self._selector.get_key(connection.socket).events != events:
                self._selector.modify(connection.socket, events, connection)
            return
        except TransportError as error:
            why = str(error)
        except MemoryError:
            why = "there is no memory for what it sends"
        except OSError:
            pass  # the other end is gone
        if why:
            self._tell(f"{connection} is ended: {why}")
        self._connections.remove(connection)
        self._selector.unregister(connection.socket)
        connection.close()
        if len(self._connections) < self._most:
            self._listen()


@contextlib.contextmanager
def serving(
    path: Path, policy: Policy, *, tell: Callable[[str], None], page_bytes: int = PAGE_BYTES
) -> Iterator[Broker]:
    """Run a block with a broker at ``path`` that has memory of the policy's capacity; nothing is left behind.

    Raises: ConfigError: the machine has not the memory, or the path is taken."""
    num_pages = policy.capacity // page_bytes
    if not num_pages:
        raise ConfigError(
            f"capacity={show_bytes(policy.capacity)} is less than a page of {show_bytes(page_bytes)}"
        )
    with contextlib.closing(SharedMemory(num_pages * page_bytes)) as memory, listening(path) as listener:
        core = Core(policy, Pages(num_pages, page_bytes))  # once that memory is known to be there
        with contextlib.closing(Broker(listener, core, memory, tell=tell)) as broker:
            yield broker
