"""The store where machines meet: who has the secret is served, nobody else is, and nothing is taken twice."""

from __future__ import annotations

import contextlib
import datetime
import socket
import threading

import pytest

from penstock import ConfigError, TransportError
from penstock.pipeline.ranks.conversation import Conversation, Refused
from penstock.pipeline.ranks.meeting import Meeting, MeetingStore, named
from penstock.pipeline.ranks.network_device import device_with

SECRET = b"a secret of the run"
HERE = ("127.0.0.1", 0)


@pytest.fixture
def meeting():
    kept = Meeting(HERE, SECRET)
    yield kept
    kept.close()


@pytest.fixture
def store(meeting):
    joined = MeetingStore(meeting.address, SECRET, room="ranks/1/")
    yield joined
    joined.close()


@pytest.fixture
def tcp():
    """Makes connections, as both their ends."""
    with contextlib.ExitStack() as opened:

        def connection():
            with socket.create_server(HERE) as listening:
                ours = opened.enter_context(socket.create_connection(listening.getsockname()))
                return ours, opened.enter_context(listening.accept()[0])

        yield connection


def pair(tcp):
    """Both ends of a connection, each of which knows the other."""
    ours, theirs = tcp()
    ends = []
    other = threading.Thread(target=lambda: ends.append(Conversation(theirs, SECRET, first=False)))
    other.start()
    first = Conversation(ours, SECRET, first=True)
    other.join(10)
    return first, ends[0]


def test_a_store_does_what_a_group_of_ranks_asks_of_it(meeting, store):
    store.set("a", b"\x00\xff bytes")
    assert store.get("a") == b"\x00\xff bytes"
    store.set("words", "ein Gruß")
    assert store.get("words").decode() == "ein Gruß"
    assert store.check(["a", "words"])
    assert not store.check(["a", "b"])
    assert (store.add("n", 2), store.add("n", 3)) == (2, 5)
    assert meeting.items.ask("get", "ranks/1/n") == "5"
    assert store.delete_key("n")
    assert not store.check(["n"])
    with pytest.raises(RuntimeError, match="nobody set b in time"):
        store.wait(["b"], datetime.timedelta(seconds=0.2))


def test_rooms_of_two_starts_do_not_meet(meeting, store):
    other = MeetingStore(meeting.address, SECRET, room="ranks/2/")
    store.set("joined", "1")
    assert not other.check(["joined"])
    other.close()


def test_another_secret_is_refused_and_told_nothing(meeting):
    with pytest.raises(Refused, match="do not have the same secret"):
        MeetingStore(meeting.address, b"another secret of 16")


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 64, b"\xff" * 4096])
def test_a_stranger_is_told_no_more_than_a_number(meeting, said):
    with socket.create_connection(meeting.address, timeout=10) as stranger:
        stranger.sendall(said)
        heard = b""
        with contextlib.suppress(OSError):  # it hung up, on what it did not even read
            stranger.shutdown(socket.SHUT_WR)
            while more := stranger.recv(4096):
                heard += more
    assert len(heard) <= 32
    after = MeetingStore(meeting.address, SECRET)
    after.set("still", "here")
    after.close()


def test_a_proof_that_was_heard_is_worth_nothing(meeting, tcp):
    """Somebody who listened says again what a launcher said."""
    ours, theirs = tcp()
    recorded = []

    def relay():
        with socket.create_connection(meeting.address) as server:
            for side, other, length in ((theirs, server, 32), (server, theirs, 32), (theirs, server, 32)):
                data = side.recv(length, socket.MSG_WAITALL)
                recorded.append((side is theirs, data))
                other.sendall(data)
            theirs.sendall(server.recv(32, socket.MSG_WAITALL))

    between = threading.Thread(target=relay)
    between.start()
    Conversation(ours, SECRET, first=True)
    between.join(10)
    with socket.create_connection(meeting.address, timeout=10) as again:
        for from_launcher, data in recorded:
            if from_launcher:
                again.sendall(data)
        assert again.recv(32, socket.MSG_WAITALL)  # its number
        assert again.recv(32) == b""


@pytest.mark.parametrize("change", ["alter", "repeat", "return"])
def test_a_message_that_is_altered_or_said_again_ends_the_conversation(change, tcp):
    first, second = pair(tcp)
    first.say({"number": 1})
    size = 4 + 32 + len(b'{"number": 1}')
    raw = second.connection.recv(size, socket.MSG_WAITALL)
    receiver = second
    ours, theirs = tcp()
    second.connection = theirs
    if change == "alter":
        ours.sendall(raw.replace(b"1}", b"2}"))
    elif change == "repeat":
        ours.sendall(raw * 2)
        assert receiver.hear() == {"number": 1}
    else:
        first.connection, receiver = theirs, first
        ours.sendall(raw)
    with pytest.raises(ConnectionError, match="altered"):
        receiver.hear()


def test_a_store_that_has_gone_is_an_error_at_once(meeting, store):
    store._talk.connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(RuntimeError, match=r"the meeting at 127\.0\.0\.1:\d+ has gone"):
        store.check(["a"])


def test_an_address_that_is_not_free_or_not_ours_is_refused(meeting):
    for address in (meeting.address, ("192.0.2.1", 29500), ("no.such.host.invalid", 29500)):
        with pytest.raises(ConfigError, match="must be a free port at an address of node 0") as refused:
            Meeting(address, SECRET)
        assert f"master={named(address)}" in str(refused.value)


def test_the_device_that_has_an_address():
    assert device_with("127.0.0.1").startswith("lo")
    with pytest.raises(TransportError, match=r"no network device of this machine has 192\.0\.2\.1"):
        device_with("192.0.2.1")
