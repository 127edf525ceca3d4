"""The broker's socket, in a folder that only its user may enter.

The system tells who is at the other end, so both ends refuse another user. A socket whose broker was killed
is taken over; the folder is the lock, so two brokers that start at once do not take it from each other."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ....compression.errors import ConfigError
from ....stages.files import reason

_LONGEST_PATH = 107  # bytes; unix(7)
_BACKLOG = 128  # connections that the system keeps until they are accepted
_CREDENTIALS = struct.Struct("3i")


def default_socket(runtime: str | None) -> Path:
    """Return the path of this user's broker; ``runtime``: the user's XDG_RUNTIME_DIR, if any."""
    if runtime:
        return Path(runtime) / "penstock" / "cache.sock"
    return Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}" / "cache.sock"


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


def connect(path: Path, timeout: float | None) -> socket.socket:
    """Connect to the broker at ``path``; with ``timeout`` 0 without any wait.

    Raises: OSError: nobody is there. PermissionError: another user's process is."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(str(path))
        if not is_ours(connection):
            raise PermissionError(errno.EACCES, f"{path} is another user's")
    except BaseException:
        connection.close()
        raise
    return connection


def is_ours(connection: socket.socket) -> bool:
    """True if the process at the other end is of the same user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] == os.getuid()


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
