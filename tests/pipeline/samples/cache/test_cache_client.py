"""A client: copies and stamps, forks and pickles, and training goes on whatever the broker does."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import time
from array import array

import pytest
from brokers import PAGE, SOON, Said, broker_thread, client, payload, state, within
from small_policies import Lru

from penstock.pipeline.samples.cache.client import Client
from penstock.pipeline.samples.cache.link import Hit
from penstock.pipeline.samples.cache.policy import Times

ORDER = range(100)
TIMES = Times(epoch=9.0, batch_io=0.4, sample_io=0.1, augmentation=0.1, training=0.2, hidden=0.3)


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


@pytest.mark.parametrize("num_bytes", [0, 1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE, 90 * PAGE])
def test_samples_of_all_sizes_come_back_byte_for_byte_with_their_stamps(path, num_bytes):
    data = [os.urandom(num_bytes), os.urandom(7)]
    with broker_thread(path):
        one = client(path)
        one.begin(0, ORDER, ORDER)
        one.use([3, 4, 5])
        assert one.store([3, 4], data, [b"then", b"x" * 64]) == 2
        one.begin(1, ORDER, None)
        assert one.use([3, 5, 4, 3]) == [
            Hit(data[0], b"then"),
            None,
            Hit(data[1], b"x" * 64),
            Hit(data[0], b"then"),
        ]
        one.close()


def test_copies_stay_as_they_are_when_the_pages_are_written_anew(path):
    with broker_thread(path, Lru(5 * PAGE)):
        one = filled(path, [1])
        (hit,) = one.use([1])
        one.use([2, 3, 4])
        one.store([2, 3, 4], [b"\xff" * 10_000] * 3)
        assert one.use([1]) == [None]
        assert hit.payload == payload(1)
        one.close()


def test_any_buffer_is_stored(path):
    with broker_thread(path):
        one = client(path)
        one.begin(0, ORDER, ORDER)
        one.use([1, 2])
        assert one.store([1, 2], [bytearray(b"abcd"), memoryview(b"abcd").cast("H")]) == 2
        assert [hit.payload for hit in one.use([1, 2])] == [b"abcd", b"abcd"]
        one.close()


def test_a_sample_larger_than_the_cache_is_not_taken(path):
    with broker_thread(path, Lru(3 * PAGE)):
        one = client(path)
        one.begin(0, ORDER, ORDER)
        one.use([1, 2])
        assert one.store([1, 2], [bytes(4 * PAGE), b"small"]) == 1
        assert one.use([1, 2]) == [None, Hit(b"small", b"")]
        one.close()


def test_what_changed_is_dropped_and_stored_anew(path):
    with broker_thread(path):
        one = client(path)
        one.begin(0, ORDER, ORDER)
        one.use([1])
        one.store([1], [b"old"], [b"1"])
        one.drop(1, one.use([1])[0].stamp)
        assert one.use([1]) == [None]
        assert one.store([1], [b"new"], [b"2"]) == 1
        assert one.use([1]) == [Hit(b"new", b"2")]
        one.close()


def test_a_run_says_an_order_once_and_its_workers_need_not(path):
    policy = Lru(100 * PAGE)
    with broker_thread(path, policy):
        one = filled(path, [1])
        worker = client(path)
        assert worker.use([1], epoch=0)[0].payload == payload(1)
        worker.use([2], epoch=0)
        assert worker.store([2], [payload(2)], epoch=0) == 1
        same = client(path)
        same.begin(0, ORDER, ORDER)
        same.measured(TIMES)
        assert same.is_connected
        same.use([2])
        assert [call[0] for call in policy.calls].count("begin") == 1
        assert policy.jobs["run:1:a"].times == TIMES
        for other in (one, worker, same):
            other.close()
        within(SOON, lambda: state(path)["jobs"] == [])
    assert [call[0] for call in policy.calls].count("leave") == 1


def test_the_slab_cannot_be_written_by_who_reads_it(path):
    with broker_thread(path):
        one = filled(path, [1])
        with pytest.raises(TypeError, match="read-only"):
            one._link._window.view[0] = 1
        one.close()


def in_a_child(work, *values):
    """Run ``work`` in a forked process; return what it returned."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=lambda: queue.put(work(*values)))
    process.start()
    process.join(10)
    assert process.exitcode == 0
    return queue.get()


def test_when_a_batch_is_copied_nobody_reads_its_pages_any_more(path):
    with broker_thread(path) as broker:
        one = filled(path, [1])
        one.begin(1, ORDER, None)
        (stored,) = broker.core.ledger.entries.values()
        assert one.use([1]) == [Hit(payload(1), b"")]
        within(SOON, lambda: stored.leases == 0)
        one.close()


def test_pages_that_there_are_not_are_no_sample(path):
    with broker_thread(path):
        one = filled(path, [1])
        with pytest.raises(ConnectionError, match="pages that there are not"):
            one._link._copy(array("I", [99, 100]), 2 * PAGE)
        one.close()


def test_a_forked_process_has_a_connection_of_its_own(path):
    with broker_thread(path):
        one = filled(path, [1])

        def work():
            return not one.is_connected and one.use([1]) == [Hit(payload(1), b"")] and state(path)["jobs"]

        (job,) = in_a_child(work)
        assert (job["connections"], job["uses"]) == (2, 1)
        assert one.use([1]) == [Hit(payload(1), b"")]
        within(SOON, lambda: state(path)["jobs"][0]["connections"] == 1)
        one.close()


def test_a_child_that_never_asks_does_not_keep_its_parents_connection(path):
    with broker_thread(path):
        one = filled(path, [1])
        context = multiprocessing.get_context("fork")
        process = context.Process(target=time.sleep, args=(30,))
        process.start()
        one.close()
        within(SOON, lambda: state(path)["jobs"] == [])
        process.kill()
        process.join()
        process.close()


def used_there(one, queue):
    queue.put(one.use([1]))
    one.close()


def test_a_pickled_client_connects_anew(path):
    with broker_thread(path):
        one = filled(path, [1])
        again = pickle.loads(pickle.dumps(one))
        assert not again.is_connected
        assert again.use([1]) == [Hit(payload(1), b"")]
        again.close()
        one.close()


@pytest.mark.slow
@pytest.mark.ranks
def test_a_spawned_process_connects_anew(path):
    with broker_thread(path):
        one = Client(path, client(path)._hello, tell=print)
        one.begin(0, ORDER, ORDER)
        one.use([1])
        one.store([1], [payload(1)])
        context = multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        process = context.Process(target=used_there, args=(one, queue))
        process.start()
        assert queue.get() == [Hit(payload(1), b"")]
        process.join()
        one.close()


def test_a_client_that_is_forgotten_leaves_no_trace(path):
    with broker_thread(path):
        one = filled(path, [1])
        one.close()
        del one
        gc.collect()
        within(SOON, lambda: state(path)["jobs"] == [])
        in_a_child(lambda: True)


def test_without_a_broker_nothing_is_there_and_that_is_said_once(path):
    told = Said()
    one = client(path, tell=told)
    one.begin(0, ORDER, None)
    one.measured(TIMES)
    assert one.use([1, 2]) == [None, None]
    assert one.store([1, 2], [b"a", b"b"]) == 0
    one.drop(1, b"")
    one._next_try = 0.0
    assert one.use([1]) == [None]
    assert told == [
        f"training goes on without the sample cache: {path} has no broker; start one by penstock cache serve"
    ]


def test_a_broker_is_looked_for_once_a_second_and_found_when_it_comes(path):
    one = client(path)
    one.begin(0, ORDER, None)
    one.measured(TIMES)
    policy = Lru(100 * PAGE)
    with broker_thread(path, policy):
        assert one.use([1]) == [None]
        assert not one.is_connected
        within(2, lambda: one.use([1]) == [None] and one.is_connected)
        assert one.store([1], [b"a"]) == 1
        assert [call[0] for call in policy.calls] == ["join", "join", "begin", "use", "offer"]
        one.close()


def test_after_a_broker_ended_its_samples_are_away_and_the_next_ones_are_used(path):
    told = Said()
    with broker_thread(path):
        one = filled(path, [1], tell=told)
    assert one.use([1]) == [None]
    with broker_thread(path):
        within(3, lambda: one.use([1]) == [None] and one.is_connected)
        assert one.store([1], [payload(1)]) == 1
        assert one.use([1]) == [Hit(payload(1), b"")]
        one.close()
    assert len(told) == 1


def test_more_samples_than_a_message_takes_are_several(path, monkeypatch):
    monkeypatch.setattr("penstock.pipeline.samples.cache.client.MOST_AT_ONCE", 7)
    with broker_thread(path):
        one = filled(path, list(range(20)))
        assert [hit.payload for hit in one.use(range(20))] == [payload(index) for index in range(20)]
        one.close()


@pytest.mark.parametrize("wrong", [([1], [], None), ([1], [b""], []), ([1], [b""], [b"x" * 65])])
def test_lists_that_do_not_fit_are_an_error_of_the_caller(path, wrong):
    with pytest.raises(ValueError, match="as many samples as payloads and stamps"):
        client(path).store(*wrong)


def test_a_batch_of_hits_is_one_round_trip(path, monkeypatch):
    from penstock.pipeline.samples.cache import wire

    with broker_thread(path):
        one = filled(path, list(range(32)), num_samples=100)
        asked = []
        real = wire.Wire.ask
        monkeypatch.setattr(wire.Wire, "ask", lambda *given: asked.append(given[2]) or real(*given))
        assert all(one.use(range(32)))
        assert len(asked) == 1
        one.close()
