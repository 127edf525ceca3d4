"""A client, and what is left of processes that are killed, stopped or lie: nothing, within a second."""

import contextlib
import fcntl
import gc
import mmap
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
from array import array
from pathlib import Path

import pytest
from brokers import (
    PAGE,
    SOON,
    Said,
    broker_process,
    broker_thread,
    client,
    payload,
    state,
    watched_lru,
    within,
)

from penstock.compression.errors import ConfigError
from penstock.pipeline.data.cache.broker import SharedMemory, available, listening
from penstock.pipeline.data.cache.client import Hit, Link
from penstock.pipeline.data.cache.policy import Times
from penstock.pipeline.data.cache.wire import Kind, default_socket

ORDER = range(100)
TIMES = Times(epoch=9.0, batch_io=0.4, sample_io=0.1, augmentation=0.1, training=0.2, hidden=0.3)
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.sock"


def begun(path, **said):
    one = client(path, **said)
    one.begin(0, ORDER, ORDER)
    return one


def fill(one, indices):
    """Store samples that are not there; how many the cache took."""
    assert one.use(indices) == [None] * len(indices)
    return one.store(indices, [payload(index) for index in indices])


def filled(path, indices, **said):
    """A client whose run has stored samples."""
    one = begun(path, **said)
    assert fill(one, indices) == len(indices)
    return one


def test_samples_of_all_sizes_come_back_byte_for_byte_with_their_stamps(path):
    sizes = [0, 1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE, 80 * PAGE]
    data = [os.urandom(num_bytes) for num_bytes in sizes]
    stamps = [b"x" * 64, b"", *(b"then %d" % num_bytes for num_bytes in sizes[2:])]
    buffers = [data[0], bytearray(data[1]), *data[2:-1], memoryview(data[-1]).cast("H")]
    indices = list(range(len(sizes)))
    with broker_thread(path) as broker:
        one = begun(path)
        one.use([*indices, 9])
        assert one.store(indices, buffers, stamps) == len(indices)
        one.begin(1, ORDER, None)
        hits = list(map(Hit, data, stamps))
        assert one.use([3, 9, *indices, 3]) == [hits[3], None, *hits, hits[3]]
        # When a batch is copied nobody reads its pages any more.
        within(SOON, lambda: not any(stored.leases for stored in broker.core.pages.entries.values()))
        one.close()


def test_copies_stay_as_they_are_when_the_pages_are_written_anew(path):
    with broker_thread(path, watched_lru(5 * PAGE)):
        one = filled(path, [1])
        (hit,) = one.use([1])
        one.use([2, 3, 4])
        one.store([2, 3, 4], [b"\xff" * 10_000] * 3)
        assert one.use([1]) == [None]
        assert hit.payload == payload(1)
        one.close()


def test_pages_that_there_are_not_are_no_sample(path):
    with broker_thread(path):
        one = filled(path, [1])
        with pytest.raises(ConnectionError, match="pages that there are not"):
            one._link._copy(array("I", [99, 100]), 2 * PAGE)
        one.close()


def in_a_child(work):
    """Run ``work`` in a forked process; return what it returned."""
    queue = FORK.SimpleQueue()
    process = FORK.Process(target=lambda: queue.put(work()))
    process.start()
    process.join(10)
    assert process.exitcode == 0
    return queue.get()


def test_a_forked_process_and_a_pickled_client_have_connections_of_their_own(path):
    with broker_thread(path):
        one = filled(path, [1])

        def work():
            return not one._link and one.use([1]) == [Hit(payload(1), b"")] and state(path)["jobs"]

        (job,) = in_a_child(work)
        assert (job["connections"], job["uses"]) == (2, 1)
        assert one.use([1]) == [Hit(payload(1), b"")]
        within(SOON, lambda: state(path)["jobs"][0]["connections"] == 1)
        again = pickle.loads(pickle.dumps(one))
        assert not again._link
        assert again.use([1]) == [Hit(payload(1), b"")]
        again.close()
        one.close()


def test_a_child_that_never_asks_does_not_keep_its_parents_connection(path):
    with broker_thread(path):
        one = filled(path, [1])
        process = FORK.Process(target=time.sleep, args=(30,))
        process.start()
        one.close()
        within(SOON, lambda: state(path)["jobs"] == [])
        process.kill()
        process.join()
        process.close()


def test_a_client_that_is_forgotten_leaves_no_trace(path):
    with broker_thread(path):
        one = filled(path, [1])
        del one
        gc.collect()
        within(SOON, lambda: state(path)["jobs"] == [])
        in_a_child(lambda: True)


def test_without_a_broker_nothing_is_there_which_is_said_once_and_one_that_comes_is_found(path):
    said, policy = Said(), watched_lru(100 * PAGE)
    one = client(path, tell=said)
    one.begin(0, ORDER, None)
    one.measured(TIMES)
    assert one.use([1, 2]) == [None, None]
    assert one.store([1, 2], [b"a", b"b"]) == 0
    one.drop(1, b"")
    one._next_try = 0.0
    assert one.use([1]) == [None]
    (line,) = said
    assert f"{path} has no broker; start one by penstock cache serve" in line
    with broker_thread(path, policy):
        assert one.use([1]) == [None]
        assert not one._link  # it looks for one once a second
        within(2, lambda: one.use([1]) == [None] and one._link)
        assert one.store([1], [b"a"]) == 1
        assert [call[0] for call in policy.calls] == ["join", "join", "begin", "use", "offer"]
        assert policy.jobs["run:1:a"].times == TIMES
        one.close()


def test_a_batch_is_one_round_trip_and_the_orders_of_an_epoch_are_sent_by_one_connection(path, monkeypatch):
    kinds, send = [], Link.send
    monkeypatch.setattr(Link, "send", lambda link, kind, *body: kinds.append(kind) or send(link, kind, *body))
    with broker_thread(path):
        one = filled(path, list(range(20)))
        assert kinds == [Kind.HELLO, Kind.BEGIN, Kind.ORDERS, Kind.USE, Kind.OFFER]
        other = begun(path)
        assert [hit.payload for hit in other.use(range(20))] == [payload(index) for index in range(20)]
        assert kinds[5:] == [Kind.HELLO, Kind.BEGIN, Kind.USE, Kind.DONE]
        for each in (one, other):
            each.close()


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
        one = filled(path, [1, 2])
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
        one = filled(path, [1], tell=told)
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
        one = filled(path, [1], tell=told, timeout=0.5)
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


def test_whoever_closed_a_connection_waits_for_the_next_as_for_the_first(path):
    told = Said()
    with broker_process(path) as broker:
        one = filled(path, [1], tell=told)
        one.close()
        os.kill(broker.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, broker.pid, os.WSTOPPED | os.WNOWAIT)
        busy = threading.Timer(0.5, os.kill, [broker.pid, signal.SIGCONT])
        busy.start()
        one.use([1])
        busy.join()
    assert told == []


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


JOB, ROOT, OLD = "sys/fs/cgroup/job/memory.", "sys/fs/cgroup/memory.", "sys/fs/cgroup/memory/memory."
FIRST_GROUPS = {"proc/self/cgroup": "4:memory:/here\n3:cpu:/here\n"}


def group(where, **files):
    return {f"{where}{name}": text for name, text in files.items()}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 6144),
        (group(JOB, max="5000", current="1000"), 4000),
        (group(ROOT, max="3000", current="1000"), 2000),
        (group(JOB, max="max", current="1000"), 6144),
        (group(JOB, max="5000", current="4000", stat="anon 900\ninactive_file 3000\n"), 4000),
        (FIRST_GROUPS | group(OLD, limit_in_bytes="2500", usage_in_bytes="500"), 2000),
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
