"""A client: copies and stamps, forks and pickles, and what it does without a broker."""

import gc
import multiprocessing
import os
import pickle
import time
from array import array

import pytest
from brokers import PAGE, SOON, Said, broker_thread, client, payload, state, within
from small_policies import watched_lru

from penstock.pipeline.data.cache.client import Hit, Link
from penstock.pipeline.data.cache.policy import Times
from penstock.pipeline.data.cache.wire import Kind

ORDER = range(100)
TIMES = Times(epoch=9.0, batch_io=0.4, sample_io=0.1, augmentation=0.1, training=0.2, hidden=0.3)
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.sock"


def filled(path, indices, **said):
    """A client whose run has stored samples."""
    one = client(path, **said)
    one.begin(0, ORDER, ORDER)
    assert one.use(indices) == [None] * len(indices)
    assert one.store(indices, [payload(index) for index in indices]) == len(indices)
    return one


def test_samples_of_all_sizes_come_back_byte_for_byte_with_their_stamps(path):
    sizes = [0, 1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE, 80 * PAGE]
    data = [os.urandom(num_bytes) for num_bytes in sizes]
    stamps = [b"x" * 64, b"", *(b"then %d" % num_bytes for num_bytes in sizes[2:])]
    buffers = [data[0], bytearray(data[1]), *data[2:-1], memoryview(data[-1]).cast("H")]
    indices = list(range(len(sizes)))
    with broker_thread(path) as broker:
        one = client(path)
        one.begin(0, ORDER, ORDER)
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
        other = client(path)
        other.begin(0, ORDER, ORDER)
        assert [hit.payload for hit in other.use(range(20))] == [payload(index) for index in range(20)]
        assert kinds[5:] == [Kind.HELLO, Kind.BEGIN, Kind.USE, Kind.DONE]
        for each in (one, other):
            each.close()


@pytest.mark.parametrize("wrong", [([1], [], None), ([1], [b""], []), ([1], [b""], [b"x" * 65])])
def test_lists_that_do_not_fit_are_an_error_of_the_caller(path, wrong):
    with pytest.raises(ValueError, match="as many samples as payloads and stamps"):
        client(path).store(*wrong)
