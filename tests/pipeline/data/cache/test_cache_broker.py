"""The broker with malformed, untrue, unfinished or unread frames; others do not notice."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import time

import pytest
from brokers import PAGE, SOON, Said, broker_thread, client, payload, state, watched_lru, within

from penstock.pipeline.data.cache import broker
from penstock.pipeline.data.cache.client import Hit
from penstock.pipeline.data.cache.wire import NOWHERE, OFFERED, Kind, pack_json, pack_words

HELLO = {"job": "b", "run": "1", "data": "d", "num_samples": 100, "batch_size": 4, "epochs": 3}
TIMES = dict.fromkeys(("epoch", "batch_io", "sample_io", "augmentation", "training", "hidden"), 1.0)


def message(kind, body=b""):
    """A message as a client sends it; of kind None the bytes of a sample."""
    whole = body if kind is None else bytes([kind]) + body
    return len(whole).to_bytes(8, "little") + whole


def words(kind, *values, then=b""):
    return message(kind, pack_words(*values) + then)


def hello(**changed):
    return message(Kind.HELLO, pack_json(HELLO | changed))


HELLO_SENT = hello()
BEGUN = HELLO_SENT + words(Kind.ORDERS, 0, 2, NOWHERE, 1, 2)
USED = words(Kind.USE, 0, 1, 2)


def offered(*sizes):
    """A run that has used samples 1 and 2, and offers as many as there are sizes."""
    samples = b"".join(OFFERED.pack(1 + at, size, b"") for at, size in enumerate(sizes))
    return BEGUN + USED + words(Kind.OFFER, 0, then=samples)


@pytest.fixture
def said():
    return Said()


@pytest.fixture
def path(tmp_path, said):
    """Path of a broker that serves a run which has stored a sample, and goes on serving it."""
    with broker_thread(tmp_path / "cache.sock", said=said):
        one = client(tmp_path / "cache.sock")
        one.begin(0, range(100), range(100))
        one.use([7])
        assert one.store([7], [payload(7)]) == 1
        yield tmp_path / "cache.sock"
        assert one.use([7]) == [Hit(payload(7), b"")]
        one.close()


def raw(path, *said, timeout=5.0):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout)
    connection.connect(str(path))
    for one in said:
        connection.sendall(one)
    return connection


# What is sent, and a word of the line that tells why its connection was ended.
MALFORMED = [
    (b"GET / HTTP/1.1\r\n\r\n", "bytes, 65536 are the most"),
    (message(99), "no message of kind 63"),
    (message(None), "no message of kind"),
    (b"\0\0\0\0\0\1\0\0", "a message has 1099511627776 bytes"),
    (message(Kind.HELLO, b"\xff\xfe"), "not JSON"),
    (message(Kind.HELLO, b"[" * 60_000), "not JSON"),
    (message(Kind.HELLO, b'{"num_samples": ' + b"9" * 5000 + b"}"), "not JSON"),
    (message(Kind.HELLO, b"[]"), "an object"),
    (message(Kind.HELLO, b'{"job": "b"}'), "lacks the key run"),
    (hello(more=1), 'unknown key "more"'),
    (hello(epochs=10**30), "epochs"),
    (hello(num_samples=0), "1 to"),
    (hello(job="a\nb"), "printable"),
    (hello(num_samples=5), "name different data differently"),
    (hello(data="e", num_samples=1 << 26), "keeps orders of 58,254 samples"),
    (USED, "first whose it is"),
    (HELLO_SENT * 2, "job b is ended: a connection says once whose it is"),
    (HELLO_SENT + message(Kind.BEGIN, b"1"), "malformed message of kind BEGIN"),
    (HELLO_SENT + message(Kind.USE), "malformed message of kind USE"),
    (HELLO_SENT + message(Kind.USE, b"12345"), "malformed message of kind USE"),
    (HELLO_SENT + (1 << 17).to_bytes(8, "little"), "a message has 131072 bytes"),  # 100 samples need fewer
    (HELLO_SENT + words(Kind.ORDERS, 0, 2), "malformed message of kind ORDERS"),
    (HELLO_SENT + words(Kind.ORDERS, 0, 2, NOWHERE, 1), "orders of 2"),
    (HELLO_SENT + words(Kind.ORDERS, 0, 1, 1, 1), "orders of 1 and 1"),
    (HELLO_SENT + words(Kind.ORDERS, 0, 2, NOWHERE, 1, 100), "sample 100 of 100"),
    (HELLO_SENT + message(Kind.MEASURED, pack_json(TIMES | {"epoch": "x"})), "Times.epoch is of type float"),
    (HELLO_SENT + message(Kind.DROP), "malformed message of kind DROP"),
    (offered(2**32 - 1), "fewer than 4294967295"),
    (BEGUN + words(Kind.OFFER, 0, 1), "malformed message of kind OFFER"),
    (offered(9) + message(None, b"x" * 8), "8 bytes come where 9 were accepted"),
    (offered(9) + message(None, b"x" * 10), "a message has 10 bytes, 9 are the most"),
]


def test_what_is_malformed_or_untrue_ends_its_connection_with_one_line(path, said):
    for sent, subject in MALFORMED:
        with raw(path, sent) as connection, contextlib.suppress(ConnectionResetError):
            while connection.recv(1 << 20):
                pass
        within(5, lambda: said)
        (line,) = said
        assert subject in line
        within(5, lambda: len(state(path)["jobs"]) == 1)
        assert state(path)["held_bytes"] == 3 * PAGE, subject
        said.clear()


def test_a_refused_run_is_told_why_and_does_not_ask_again(path, said):
    told = Said()
    other = client(path, "b", num_samples=5, tell=told)
    assert other.use([1]) == [None]
    assert len(told) == 1
    assert "data d has 100 samples for job a and 5 for job b" in told[0]
    other._next_try = 0.0
    assert other.use([1]) == [None]
    within(5, lambda: len(said) == 1)  # the broker says it behind its answer
    assert not other._link


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_garbage_ends_its_connection_and_nothing_else(path, said, seed):
    """Real messages with bytes changed, left out and put in; the fixture's run goes on."""
    drawn = random.Random(seed)
    whole = [offered(9, 9), BEGUN, USED, message(None, b"x" * 9) * 2, message(Kind.DONE)]
    whole += [message(Kind.MEASURED, pack_json(TIMES)), words(Kind.DROP, 1), message(Kind.STATUS)]
    for _ in range(60):
        sent = bytearray(b"".join([BEGUN, *drawn.choices(whole, k=4)][drawn.randrange(2) :]))
        for _ in range(drawn.randrange(4)):
            at = drawn.randrange(len(sent))
            if (how := drawn.randrange(3)) == 0:
                sent[at] ^= 1 << drawn.randrange(8)
            elif how == 1:
                del sent[at : at + drawn.randrange(1, 9)]
            else:
                sent[at:at] = drawn.randbytes(drawn.randrange(1, 9))
        connection = raw(path)
        with contextlib.suppress(OSError):
            connection.sendall(sent)
        connection.close()
    within(5, lambda: [job["job"] for job in state(path)["jobs"]] == ["a"])
    assert all(line.startswith("a connection") for line in said)


def test_who_stops_in_the_middle_of_a_message_blocks_nobody_and_leaves_no_half_sample(path):
    free = state(path)["free_bytes"]
    put = offered(5000, 6000) + message(None, b"x" * 5000) + message(None, b"x" * 6000)[:1000]
    stops = [raw(path, said) for said in (HELLO_SENT[:7], HELLO_SENT[:-3], BEGUN[:-1], put)]
    one = client(path, "c", data="e")
    one.begin(0, range(100), None)
    one.use([1])
    assert one.store([1], [payload(1)]) == 1
    assert one.use([1])[0].payload == payload(1)
    one.close()
    for connection in stops:
        connection.close()
    within(SOON, lambda: state(path)["free_bytes"] == free - 2 * PAGE)
    other = client(path, "b")
    assert other.use([1, 2]) == [Hit(b"x" * 5000, b""), None]
    other.close()


def test_who_does_not_read_its_answers_is_not_heard_and_blocks_nobody(path):
    silent = raw(path, HELLO_SENT)
    silent.setblocking(False)
    num_sent, until = 0, time.monotonic() + 0.5
    while time.monotonic() < until:
        with contextlib.suppress(BlockingIOError):
            num_sent += silent.send(message(Kind.STATUS) * 100)
    assert num_sent < 1 << 20, "the broker goes on to hear it, so answers pile up"
    assert len(state(path)["jobs"]) == 2
    silent.close()


def test_the_rest_of_a_sample_that_was_given_up_goes_nowhere(tmp_path):
    """Its pages are another sample's by then."""
    path = tmp_path / "cache.sock"
    with broker_thread(path, watched_lru(3 * PAGE)):
        whole = message(None, b"x" * 3 * PAGE)
        slow = raw(path, offered(3 * PAGE) + whole[:5000])
        within(5, lambda: state(path)["free_bytes"] == 0)
        one = client(path)
        one.begin(0, range(100), None)
        one.use([7])
        assert one.store([7], [payload(7)]) == 1
        slow.sendall(whole[5000:] + message(Kind.STATUS))
        within(5, lambda: slow.recv(1 << 16).endswith(b"}"))
        assert one.use([7]) == [Hit(payload(7), b"")]
        assert one.use([1]) == [None]
        slow.close()
        one.close()


def test_a_thread_that_the_system_refuses_ends_its_connection_and_no_broker(path, said, monkeypatch):
    begin, refused = threading.Thread.start, []

    def start(thread):
        if thread.name == "penstock-connection" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with raw(path) as first:
        assert first.recv(10) == b""
    with raw(path, message(Kind.STATUS)) as second:
        assert second.recv(10)
    (line,) = said
    assert "can't start new thread" in line


def test_no_more_than_so_many_connections_are_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(broker, "MOST_CONNECTIONS", 2)
    path = tmp_path / "cache.sock"
    with broker_thread(path):
        first, second = raw(path, message(Kind.STATUS)), raw(path, message(Kind.STATUS))
        assert first.recv(10)
        assert second.recv(10)
        third = raw(path, message(Kind.STATUS), timeout=0.2)
        with pytest.raises(TimeoutError):
            third.recv(10)
        first.close()
        third.settimeout(5)
        assert third.recv(10)
        second.close()
        third.close()


def test_a_process_of_another_user_is_refused(tmp_path, said):
    """By the system's word for who it is; a file mode that lets everybody in is not what holds."""
    if os.getuid():
        pytest.skip("only root can become somebody else; run the tests as root")
    path = tmp_path / "cache.sock"
    with broker_thread(path, said=said):
        path.chmod(0o777)
        program = (
            "import os, socket\n"
            "connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)\n"
            f"folder = os.open({str(tmp_path)!r}, os.O_RDONLY)\n"
            "os.setuid(65534)\n"
            "os.fchdir(folder)\n"
            "connection.connect('cache.sock')\n"
            f"connection.sendall(bytes.fromhex({message(Kind.STATUS).hex()!r}))\n"
            "print(connection.recv(10))\n"
        )
        tmp_path.chmod(0o711)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert done.stdout == "b''\n" or "reset" in done.stderr or "Broken pipe" in done.stderr, done.stderr
        assert said == ["a connection is ended: it is of another user"]


def test_a_broker_of_another_user_is_not_believed(path, monkeypatch):
    """A stranger's socket at a place that somebody named would else give us samples."""
    told = Said()
    ours = client(path, tell=told)
    with monkeypatch.context() as changed:
        changed.setattr(os, "getuid", lambda: 12345)
        assert ours.use([7]) == [None]
    assert "is another user's" in told[0]
