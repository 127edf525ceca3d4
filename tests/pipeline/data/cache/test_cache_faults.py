"""Processes that are killed, stopped or lie, and what is left of them: nothing, within a second."""

import contextlib
import fcntl
import mmap
import multiprocessing
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from brokers import PAGE, SOON, Said, broker_process, client, payload, state, within

from penstock.compression.errors import ConfigError
from penstock.pipeline.data.cache.broker import SharedMemory, available, listening
from penstock.pipeline.data.cache.client import Hit, Link
from penstock.pipeline.data.cache.wire import default_socket

ORDER = range(100)
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.sock"


def started(work, *values):
    """A forked process that has said that it is ready, and then waits."""
    ready = FORK.Event()

    def run():
        signal.alarm(60)  # whatever becomes of the test, it ends
        kept = work(*values, ready)  # a client that is forgotten has left
        while True:
            signal.pause()
            kept = (kept,)

    process = FORK.Process(target=run, daemon=False)
    process.start()
    assert ready.wait(10)
    return process


def kill(process):
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    process.close()


def begun(path, job="a", **said):
    one = client(path, job, **said)
    one.begin(0, ORDER, ORDER)
    return one


def fill(one, indices):
    one.use(indices)
    return one.store(indices, [payload(index) for index in indices])


def test_a_killed_job_leaves_nothing_within_a_second(path):
    def job(ready):
        one = begun(path)
        fill(one, [1, 2, 3])
        workers = [FORK.Process(target=worker, args=(one, index)) for index in (4, 5)]
        for process in workers:
            process.start()
        within(5, lambda: state(path)["entries"] == 5)
        ready.set()
        return one

    def worker(one, index):
        fill(one, [index])
        os.kill(os.getpid(), signal.SIGSTOP)

    with broker_process(path):
        whole = state(path)["free_bytes"]
        process = started(job)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 2
        kill(process)
        assert len(state(path)["jobs"]) == 1, "its workers are of the job, too"
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        within(SOON, lambda: state(path)["jobs"] == [])
        assert state(path)["free_bytes"] == whole


def test_a_worker_that_is_killed_while_it_reads_gives_its_pages_back(path):
    """A sample that is evicted while it is read: its pages are nobody's until the reader is gone, and then
    free.
    """

    def worker(one, ready):
        def copy(*_):
            ready.set()
            signal.pause()

        setattr(Link, "_copy", copy)  # noqa: B010
        one.use([1])

    with broker_process(path, capacity=6 * PAGE):
        one = begun(path)
        assert fill(one, [1, 2]) == 2
        process = started(worker, one)
        assert fill(one, [3]) == 0, "what is read was written over"
        assert (state(path)["crowded"], state(path)["free_bytes"]) == (1, 0)
        kill(process)
        within(SOON, lambda: state(path)["free_bytes"] == 3 * PAGE)
        assert one.use([2]) == [Hit(payload(2), b"")]
        assert fill(one, [4]) == 1
        one.close()


def used_again(one):
    """A broker that is there again is found, and holds samples."""
    within(5, lambda: one.use([1]) == [None] and one._link)
    assert one.store([1], [payload(1)]) == 1
    assert one.use([1]) == [Hit(payload(1), b"")]
    one.close()
    return True


def test_a_killed_broker_stops_nobody_leaves_no_memory_and_another_takes_its_place(path):
    told = Said()
    before = sorted(os.listdir("/dev/shm"))
    with broker_process(path, capacity=4096 * PAGE) as broker:
        one = begun(path, tell=told)
        fill(one, [1])
        broker.kill()
        broker.join()
        assert sorted(os.listdir("/dev/shm")) == before
        began = time.monotonic()
        for index in range(100):
            assert one.use([index]) == [None]
            assert one.store([index], [payload(index)]) == 0
        assert time.monotonic() - began < 0.5
    assert os.listdir(path.parent) == ["cache.sock"]  # which the next one takes over
    with broker_process(path):
        assert used_again(one)
    assert len(told) == 1


def test_a_stopped_broker_stops_nobody_for_long_and_is_used_again_when_it_goes_on(path):
    told = Said()
    with broker_process(path) as broker:
        one = begun(path, tell=told, timeout=0.5)
        fill(one, [1])
        os.kill(broker.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, broker.pid, os.WSTOPPED | os.WNOWAIT)  # all its threads are
        assert one.use([1]) == [None]
        slowest, until = 0.0, time.monotonic() + 2.2
        while time.monotonic() < until:
            before = time.monotonic()
            assert one.use([1]) == [None]
            slowest = max(slowest, time.monotonic() - before)
            time.sleep(0.002)
        assert slowest < 0.3, "it is waited for more than once"
        os.kill(broker.pid, signal.SIGCONT)
        assert used_again(one)
    assert len(told) == 1
    assert f"{path} does not answer" in told[0]


def test_nobody_who_is_given_the_memory_can_write_or_shrink_it():
    """Not even by opening it anew; without these seals of Linux 5.1 only the descriptor would hold."""
    with contextlib.closing(SharedMemory(4 * PAGE)) as memory:
        file = memory.for_reading()
        assert fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        memory.view[:4] = b"true"
        window = mmap.mmap(file, 4 * PAGE, prot=mmap.PROT_READ)
        anew = os.open(f"/proc/self/fd/{file}", os.O_RDWR)
        for one in (file, anew):
            with pytest.raises(OSError, match=r"not permitted|Permission denied|Bad file descriptor"):
                os.pwrite(one, b"lies", 0)
            with pytest.raises(OSError, match=r"not permitted|Permission denied"):
                mmap.mmap(one, 4 * PAGE)
            with pytest.raises(OSError, match=r"not permitted|Invalid argument"):
                os.ftruncate(one, 0)
        with pytest.raises(TypeError, match="readonly"):
            window[0] = 1
        assert window[:4] == b"true"
        window.close()
        os.close(file)
        os.close(anew)


def test_more_memory_than_the_machine_has_is_refused():
    with pytest.raises(ConfigError, match="capacity=1024 TiB does not fit"):
        SharedMemory(1 << 50)


JOB, ROOT, OLD = "sys/fs/cgroup/job/memory.", "sys/fs/cgroup/memory.", "sys/fs/cgroup/memory/memory."


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 6144),
        ({f"{JOB}max": "5000", f"{JOB}current": "1000"}, 4000),
        ({f"{ROOT}max": "3000", f"{ROOT}current": "1000"}, 2000),
        ({f"{JOB}max": "max", f"{JOB}current": "1000"}, 6144),
        (
            {f"{JOB}max": "5000", f"{JOB}current": "4000", f"{JOB}stat": "anon 900\ninactive_file 3000\n"},
            4000,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/here\n3:cpu:/here\n",
                f"{OLD}limit_in_bytes": "2500",
                f"{OLD}usage_in_bytes": "500",
            },
            2000,
        ),
    ],
)
def test_free_memory_is_what_machine_and_groups_leave(tmp_path, files, free):
    usual = {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:       6 kB\n", "proc/self/cgroup": "0::/job\n"}
    for name, text in (usual | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available(tmp_path) == free


def test_a_second_broker_is_refused_and_the_socket_of_a_dead_one_taken_over(path):
    with listening(path):
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(ConfigError, match=f"a broker listens at socket={path}"), listening(path):
            pass
        assert path.is_socket()
    assert not path.exists()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    with listening(path):
        path.unlink()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
            other.bind(str(path))
    assert path.is_socket(), "another broker's socket was removed"


def test_places_where_no_broker_can_listen_are_refused(path, tmp_path):
    path.write_text("mine")
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    for socket_path, why in (
        (path, "no socket"),
        (tmp_path / ("x" * 108), "longer than the 107 bytes"),
        (path / "below" / "cache.sock", "cannot be made"),
        (open_to_all / "cache.sock", "others may write to"),
    ):
        with pytest.raises(ConfigError, match=why), listening(socket_path):
            pass
    assert path.read_text() == "mine"


def test_the_default_folder_is_the_users_own(tmp_path, monkeypatch):
    assert default_socket("/run/user/7") == Path("/run/user/7/penstock/cache.sock")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = default_socket(None)
    assert path == tmp_path / f"penstock-{os.getuid()}" / "cache.sock"
    with listening(path):
        pass
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"x" * 400, "bytes, 65536 are the most"),
        (b"", "does not answer"),
        (b"\2" + bytes(7) + b"{}\0", "without its memory"),
        (b"\2" + bytes(7) + b"[]", "an object"),
    ],
)
def test_a_lying_socket_is_not_believed(path, answer, why):
    """The program that answers there is no broker; it sends anything."""
    told = Said()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()

        def lie():
            connection, _ = listener.accept()
            with connection, contextlib.suppress(ConnectionResetError):
                connection.sendall(answer)
                while connection.recv(1 << 16):
                    pass

        liar = threading.Thread(target=lie, name="liar", daemon=True)
        liar.start()
        one = client(path, tell=told, timeout=0.5)
        assert one.use([1]) == [None]
        assert len(told) == 1
        assert why in told[0]
        one.close()
        liar.join(10)
        assert not liar.is_alive()
