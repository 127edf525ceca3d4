"""Processes that are killed or stopped, and what is left of them: nothing, within a second."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from brokers import PAGE, SOON, Said, broker_process, client, payload, state, within

from penstock.compression.errors import ConfigError
from penstock.pipeline.samples.cache import place
from penstock.pipeline.samples.cache.link import Hit, Link
from penstock.pipeline.samples.cache.slab import Slab, available
from penstock.pipeline.samples.cache.wire import Wire

pytestmark = pytest.mark.ranks
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
    """What it reads is given up meanwhile: its pages are nobody's until it is gone, and then free."""

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
        assert state(path)["crowded"] == 1
        assert state(path)["free_bytes"] == 0
        kill(process)
        within(SOON, lambda: state(path)["free_bytes"] == 3 * PAGE)
        assert one.use([2]) == [Hit(payload(2), b"")]
        assert fill(one, [4]) == 1
        one.close()


def test_a_worker_that_is_killed_in_the_middle_of_a_put_leaves_no_half_sample(path):
    def worker(one, ready):
        send = Wire.send

        def half(wire, *data):
            if len(data) > 1:  # a put: its header, and samples
                send(wire, data[0], data[1], data[2][: PAGE + 100])
                within(5, lambda: state(path)["free_bytes"] == 94 * PAGE)
                ready.set()
                signal.pause()
            send(wire, *data)

        one.use([1, 2])
        setattr(Wire, "send", half)  # noqa: B010
        one.store([1, 2], [payload(1), payload(2)])

    with broker_process(path):
        one = begun(path)
        process = started(worker, one)
        kill(process)
        within(SOON, lambda: state(path)["free_bytes"] == 97 * PAGE)
        assert one.use([1, 2]) == [Hit(payload(1), b""), None]
        assert state(path)["entries"] == 1
        one.close()


def test_jobs_in_processes_of_their_own_share_the_bytes_of_one_data_set(path):
    def job(name, ready):
        one = begun(path, name)
        assert fill(one, [1, 2]) == 2
        ready.set()
        return one

    with broker_process(path):
        process = started(job, "a")
        told = Said()
        other = begun(path, "b", tell=told)
        found = other.use([1, 2, 3])
        assert (told, [hit is not None for hit in found], len(state(path)["jobs"])) == (
            [],
            [True, True, False],
            2,
        )
        assert found == [Hit(payload(1), b""), Hit(payload(2), b""), None]
        assert state(path)["held_bytes"] == 6 * PAGE
        kill(process)
        within(SOON, lambda: [job["job"] for job in state(path)["jobs"]] == ["b"])
        assert other.use([1]) == [Hit(payload(1), b"")]
        other.close()


def test_a_killed_broker_stops_nobody_and_another_takes_its_place(path):
    told = Said()
    with broker_process(path) as broker:
        one = begun(path, tell=told)
        fill(one, [1])
        broker.kill()
        broker.wait()
        began = time.monotonic()
        for index in range(100):
            assert one.use([index]) == [None]
            assert one.store([index], [payload(index)]) == 0
        assert time.monotonic() - began < 0.5
        assert path.exists()
    with broker_process(path):
        within(3, lambda: one.use([1]) == [None] and one.is_connected)
        assert one.store([1], [payload(1)]) == 1
        assert one.use([1]) == [Hit(payload(1), b"")]
        one.close()
    assert len(told) == 1


def test_a_stopped_broker_stops_nobody_for_long_and_is_used_again_when_it_goes_on(path):
    told = Said()
    with broker_process(path) as broker:
        one = begun(path, tell=told, timeout=0.5)
        fill(one, [1])
        broker.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        until = began + 2.2
        slowest, asked = 0.0, 0
        while time.monotonic() < until:
            before = time.monotonic()
            assert one.use([1]) == [None]
            if asked:
                slowest = max(slowest, time.monotonic() - before)
            asked += 1
        assert slowest < 0.3, "it is waited for more than once"
        assert asked > 500
        broker.send_signal(signal.SIGCONT)
        within(5, lambda: one.use([1]) == [None] and one.is_connected)
        assert one.store([1], [payload(1)]) == 1
        one.close()
    assert told == [f"training goes on without the sample cache: {path} does not answer"]


def test_a_client_that_meets_a_stopped_broker_first_waits_once(path):
    with broker_process(path) as broker:
        broker.send_signal(signal.SIGSTOP)
        one = client(path, timeout=0.3)
        began = time.monotonic()
        one.begin(0, ORDER, None)
        for _ in range(50):
            assert one.use([1]) == [None]
        assert 0.25 < time.monotonic() - began < 0.6
        broker.send_signal(signal.SIGCONT)
        within(5, lambda: one.use([1]) == [None] and one.is_connected)
        one.close()


def test_a_broker_that_is_told_to_end_or_killed_leaves_no_memory_behind(path):
    before = sorted(os.listdir("/dev/shm"))
    with broker_process(path, capacity=4096 * PAGE) as broker:
        one = begun(path)
        fill(one, [1])
        assert sorted(os.listdir("/dev/shm")) == before
        broker.kill()
        broker.wait()
    assert sorted(os.listdir("/dev/shm")) == before
    assert os.listdir(path.parent) == ["cache.sock"]  # which the next one takes over
    one.close()


def test_a_slab_larger_than_the_machine_is_one_sentence():
    with pytest.raises(
        ConfigError, match=r"capacity=1024 TiB does not fit: .* of this machine's memory are free"
    ):
        Slab(1 << 50)


def test_nobody_who_is_given_the_slab_can_write_or_shrink_it():
    """Not even by opening it anew; without these seals of Linux 5.1 only the descriptor would hold."""
    with contextlib.closing(Slab(4 * PAGE)) as slab:
        file = slab.for_reading()
        slab.view[:4] = b"true"
        window = mmap.mmap(file, 4 * PAGE, prot=mmap.PROT_READ)
        anew = os.open(f"/proc/self/fd/{file}", os.O_RDWR)
        for one in (file, anew):
            with pytest.raises(OSError, match=r"not permitted|Permission denied|Bad file descriptor"):
                os.pwrite(one, b"lies", 0)
            with pytest.raises(OSError, match=r"not permitted|Permission denied"):
                mmap.mmap(one, 4 * PAGE)
            with pytest.raises(OSError, match=r"not permitted|Invalid argument"):
                os.ftruncate(one, 0)
            os.close(one)
        assert window[:4] == b"true"
        window.close()


def test_the_descriptor_that_clients_get_is_for_reading():
    with contextlib.closing(Slab(PAGE)) as slab:
        file = slab.for_reading()
        assert fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        os.close(file)


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 6144),
        ({"sys/fs/cgroup/job/memory.max": "5000", "sys/fs/cgroup/job/memory.current": "1000"}, 4000),
        ({"sys/fs/cgroup/memory.max": "3000", "sys/fs/cgroup/memory.current": "1000"}, 2000),
        ({"sys/fs/cgroup/job/memory.max": "max", "sys/fs/cgroup/job/memory.current": "1000"}, 6144),
        (
            {
                "sys/fs/cgroup/job/memory.max": "5000",
                "sys/fs/cgroup/job/memory.current": "4000",
                "sys/fs/cgroup/job/memory.stat": "anon 900\ninactive_file 3000\n",
            },
            4000,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/here\n3:cpu:/here\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "2500",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "500",
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
    with (
        place.listen(path),
        pytest.raises(ConfigError, match=f"a broker listens at socket={path}; use that one"),
    ):
        place.listen(path)
    assert path.is_socket()
    with place.listen(path) as listener:
        made = os.lstat(path)
        assert path.stat().st_mode & 0o777 == 0o600
        place.leave(path, made)
        assert not path.exists()
        place.listen(path).close()  # of another broker, which is not this one's to remove
        place.leave(path, made)
        assert path.exists()
        assert listener.fileno() >= 0


def test_places_that_are_none_are_one_sentence(path, tmp_path):
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is there already and no socket"):
        place.listen(path)
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match="is longer than the 107 bytes"):
        place.listen(tmp_path / ("x" * 108))
    with pytest.raises(ConfigError, match="cannot be made"):
        place.listen(path / "below" / "cache.sock")
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write to"):
        place.listen(open_to_all / "cache.sock")


def test_the_default_folder_is_the_users_own(tmp_path, monkeypatch):
    assert place.default_socket("/run/user/7") == Path("/run/user/7/penstock/cache.sock")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = place.default_socket(None)
    assert path == tmp_path / f"penstock-{os.getuid()}" / "cache.sock"
    place.listen(path).close()
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"x" * 400, "a message begins with b'PnC1', found b'xxxx'"),
        (b"", "does not answer"),
        (b"PnC1\x02\0\0\0" + b"\xff" * 8, "answers by 18446744073709551615 bytes, where 65536 are the most"),
        (b"PnC1\x02\0\0\0\2" + bytes(7) + b"{}", "answers a hello by something else"),
        (b"PnC1\x10\0\0\0\2" + bytes(7) + b"{}", "answers a hello by something else"),
        (b"PnC1\x10\0\0\0\2" + bytes(7) + b"{}more", "says more than it was asked"),
    ],
)
def test_a_lying_socket_is_not_believed(path, answer, why):
    """What answers there is no broker; it sends anything."""
    told = Said()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()

        def say(ready):
            ready.set()
            connection, _ = listener.accept()
            connection.sendall(answer)
            connection.recv(1 << 16)
            signal.pause()

        process = started(say)
        one = client(path, tell=told, timeout=0.5)
        assert one.use([1]) == [None]
        assert len(told) == 1
        assert why in told[0]
        kill(process)
        one.close()
