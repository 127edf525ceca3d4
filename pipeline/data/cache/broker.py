"""The broker: a thread for each connection that moves bytes into shared memory, and asks ``core.py``.

The lock of the core is never held while a socket is read or written, so a connection that stops in the middle
of a message keeps only its own thread waiting. A malformed message ends its connection, with one line.

The broker alone writes the shared memory, which has no name, so nothing stays behind of it. The kernel seals
it: no process that is given it can change its size or map it for writing, not even by way of /proc (Linux's
memfd_create(2) and fcntl(2), F_SEAL_FUTURE_WRITE). A socket whose broker was killed is taken over; its folder
is the lock, so two brokers that start at once do not take it from each other."""

import contextlib
import fcntl
import mmap
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ....compression.errors import ConfigError, TransportError
from ....stages.files import reason
from ....stages.units import show_bytes
from . import wire
from .core import Core, Member, NotWelcome, Pages
from .policy import Policy, Times
from .wire import Hello, Kind

MOST_CONNECTIONS = 1000
_LONGEST_PATH = 107  # bytes; unix(7)
_BACKLOG = 128  # connections that the system keeps until they are accepted
_SEAL_FUTURE_WRITE = 0x10  # of linux/fcntl.h, since Linux 5.1
_GROUP_FILES = {
    "": ("", "memory.max", "memory.current"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""Folder, limit and use of memory of a control group, by its controllers: version 2 and version 1."""


class SharedMemory:
    """Memory that this process writes by ``view``; raises ConfigError where the machine has not so much."""

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
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
            try:
                fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, seals | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
            except OSError:  # an older kernel: clients that can only read are trusted not to reopen it
                fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, seals)
        except (OSError, OverflowError, ValueError) as error:
            os.close(self._file)
            why = reason(error) if isinstance(error, OSError) else str(error)
            raise ConfigError(f"{show_bytes(num_bytes)} cannot be shared ({why}); choose less") from error
        self.view = memoryview(self._map)

    def for_reading(self) -> int:
        """Return a new file descriptor of it that can be read only; the caller closes it."""
        return os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Let go of it; those who read it keep it until they do, too."""
        self.view.release()
        self._map.close()
        os.close(self._file)


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
    """Listen at ``path`` where no broker does and no other user may write; remove the socket at the end."""
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
        wire.connect(path, 0).close()
    except ConnectionRefusedError:
        return  # its broker is gone
    except BlockingIOError:
        pass  # it has more to do than it can take
    except OSError as error:
        raise ConfigError(f"socket={path} is in use ({reason(error)}); name another") from error
    raise ConfigError(f"a broker listens at socket={path}; use that one, end it, or name another")


class Broker:
    """Answers at ``listener``, in threads; ``tell`` hears of every connection that it refuses or ends."""

    def __init__(
        self, listener: socket.socket, core: Core, memory: SharedMemory, *, tell: Callable[[str], None]
    ) -> None:
        self.core, self._memory, self._listener, self._tell = core, memory, listener, tell
        self._lock = threading.Lock()  # of the core, and of what is written into the memory
        self._free = threading.Semaphore(MOST_CONNECTIONS)
        self._threads: dict[threading.Thread, socket.socket] = {}
        self._closed = threading.Event()
        self._accepting = threading.Thread(target=self._accept, name="penstock-listener", daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            self._free.acquire()
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                self._free.release()
                if self._closed.is_set():
                    return
                self._tell(f"a connection is not taken: {error}")  # too many open files
                self._closed.wait(1.0)
                continue
            thread = threading.Thread(
                target=self._serve, args=[connection], name="penstock-connection", daemon=True
            )
            with self._lock:
                self._threads[thread] = connection
            try:
                thread.start()
            except RuntimeError as error:  # no memory for its stack, or too many threads of this user
                self._tell(f"a connection is not taken: {error}")
                with self._lock:
                    del self._threads[thread]
                connection.close()
                self._free.release()

    def close(self) -> None:
        """End all connections."""
        self._closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._end_connections()  # one of them may be what the listener waits for
        self._accepting.join()
        for thread in self._end_connections():
            thread.join()

    def _end_connections(self) -> list[threading.Thread]:
        with self._lock:
            for connection in self._threads.values():
                with contextlib.suppress(OSError):  # its other end is gone
                    connection.shutdown(socket.SHUT_RDWR)
            return list(self._threads)

    def _serve(self, connection: socket.socket) -> None:
        """Answer a connection until it ends, or sends what it may not; its run leaves with its last one."""
        member, who = None, "a connection"
        try:
            if not wire.is_ours(connection):
                raise TransportError("it is of another user")
            while True:
                longest = 0 if member is None else wire.OFFERED.size * member.run.hello.num_samples
                message = wire.receive(connection, wire.LONGEST_CONTROL + longest)
                if not message or message[0] not in set(Kind):
                    raise TransportError(f"there is no message of kind {message[:1].hex()}")
                kind, body = Kind(message[0]), memoryview(message)[1:]
                if kind is Kind.STATUS:
                    with self._lock:
                        state = self.core.status(time.monotonic())
                    wire.send(connection, wire.pack_json(state))
                elif member is not None:
                    self._answer(connection, member, kind, body)
                elif kind is Kind.HELLO:
                    hello: Hello = wire.unpack_json(body, Hello)
                    with self._lock:
                        member = self.core.join(hello, time.monotonic())
                    who += f" of job {hello.job}"
                    pages = self.core.pages
                    welcome = wire.Welcome(num_pages=pages.num_pages, page_bytes=pages.page_bytes)
                    wire.send(connection, wire.pack_json(welcome))
                    with open(self._memory.for_reading(), "rb", buffering=0) as file:
                        socket.send_fds(connection, [b"\0"], [file.fileno()])
                else:
                    raise TransportError(f"a {kind.name} comes from one that says first whose it is")
        except (TransportError, MemoryError) as error:
            self._tell(f"{who} is ended: {error or 'there is no memory for what it sends'}")
            if isinstance(error, NotWelcome):
                with contextlib.suppress(OSError):
                    wire.send(connection, wire.pack_json(wire.Welcome(refused=str(error))))
        except OSError:
            pass  # the other end is gone
        finally:
            with self._lock:
                if member is not None:
                    self.core.leave(member, time.monotonic())
                del self._threads[threading.current_thread()]
                connection.close()
            self._free.release()

    def _answer(self, connection: socket.socket, member: Member, kind: Kind, body: memoryview) -> None:
        """Do what a message asks for, and send its answer, if it has one."""
        try:
            with self._lock:
                answer = self._ask_core(member, kind, body, time.monotonic())
        except (ValueError, struct.error) as error:
            raise TransportError(f"a malformed message of kind {kind.name} ({error})") from error
        if answer is not None:
            wire.send(connection, answer)
        if not member.writing:
            return
        while member.writing:
            stored = member.writing[0]
            data = memoryview(wire.receive(connection, stored.num_bytes))
            if len(data) != stored.num_bytes:
                raise TransportError(f"{len(data)} bytes come where {stored.num_bytes} were accepted")
            with self._lock:
                if stored.kept:  # else its pages are another sample's
                    for start, end in wire.pieces(stored.pages, len(data), self.core.pages.page_bytes):
                        self._memory.view[start:end], data = data[: end - start], data[end - start :]
                self.core.wrote(member)
        wire.send(connection)

    def _ask_core(self, member: Member, kind: Kind, body: memoryview, now: float) -> bytes | None:
        core = self.core
        if kind is Kind.HELLO:
            raise TransportError("a connection says once whose it is")
        if kind is Kind.MEASURED:
            core.measured(member, wire.unpack_json(body, Times), now)
        elif kind is Kind.TURN:
            return bytes([core.has_turn(member, now)])
        elif kind is Kind.BEGIN:
            (epoch,) = wire.unpack_words(body)
            core.release(member)
            return bytes([epoch > member.run.epoch])
        elif kind is Kind.ORDERS:
            epoch, num_order, num_following, *_ = words = wire.unpack_words(body)
            order, following = words[3 : 3 + num_order], words[3 + num_order :]
            is_last = num_following == wire.NOWHERE
            if len(words) != 3 + num_order + (0 if is_last else num_following):
                raise TransportError(f"orders of {num_order} and {num_following} samples, not {len(words)}")
            core.begin(member, epoch, order, None if is_last else following, now)
            return b""
        elif kind is Kind.USE:
            epoch, *indices = wire.unpack_words(body)
            found = core.use(member, epoch, indices, now)
            missing = wire.LEASED.pack(wire.NOWHERE, b"")
            rows = [missing if one is None else wire.LEASED.pack(one.num_bytes, one.stamp) for one in found]
            return b"".join([*rows, *(one.pages.tobytes() for one in found if one is not None)])
        elif kind is Kind.DONE:
            core.release(member)
        elif kind is Kind.OFFER:
            (epoch,) = wire.unpack_words(body[:4])
            samples = list(wire.OFFERED.iter_unpack(body[4:]))
            if any(num_bytes == wire.NOWHERE for _, num_bytes, _ in samples):
                raise TransportError(f"a sample has fewer than {wire.NOWHERE} bytes")
            return bytes(stored is not None for stored in core.offer(member, epoch, samples, now))
        elif kind is Kind.DROP:
            (index,) = wire.unpack_words(body[:4])
            core.drop(member, index, bytes(body[4:]))
        return None


@contextlib.contextmanager
def serving(
    path: Path, policy: Policy, *, tell: Callable[[str], None], page_bytes: int, alone: bool = False
) -> Iterator[Broker]:
    """Run a block with a broker at ``path`` that has memory of the policy's capacity; nothing is left behind.

    Raises: ConfigError: the machine has not the memory, or the path is taken."""
    num_pages = policy.capacity // page_bytes
    if not num_pages:
        raise ConfigError(
            f"capacity={show_bytes(policy.capacity)} is less than a page of {show_bytes(page_bytes)}"
        )
    with contextlib.closing(SharedMemory(num_pages * page_bytes)) as memory, listening(path) as listener:
        pages = Pages(num_pages, page_bytes)  # once that memory is known to be there
        core = Core(policy, pages, alone=alone)
        with contextlib.closing(Broker(listener, core, memory, tell=tell)) as broker:
            yield broker
