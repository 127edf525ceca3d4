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
