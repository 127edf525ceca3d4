"""A thread that does tasks in turn, and what becomes of a task that no thread can be had for."""

import threading

import pytest

from penstock.stages.worker import Worker


def test_where_no_thread_can_be_started_nothing_is_queued_and_the_next_task_is_done(monkeypatch):
    worker, done = Worker("penstock-test"), []

    def none(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            worker.submit(lambda: done.append(1))
    worker.drain()
    worker.submit(lambda: done.append(2))
    worker.close()
    assert done == [2]


def test_who_queues_waits_for_the_lock_and_the_thread_takes_what_is_first_or_waits():
    worker, done, queued = Worker("penstock-test", idle_seconds=5), [], threading.Event()
    worker.submit(lambda: done.append("first"))
    worker.wait()
    (thread,) = worker._threads
    assert thread.is_alive()  # it waits for a task

    def queue():
        worker.submit_first(lambda: done.append("urgent"))
        queued.set()

    with worker._changed:
        threading.Thread(target=queue).start()
        assert not queued.wait(0.1)
    assert queued.wait(5)
    worker.close()
    assert done == ["first", "urgent"]
    assert not thread.is_alive()
