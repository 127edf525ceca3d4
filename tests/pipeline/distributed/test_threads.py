"""Ranks as threads: what becomes of errors, waits, signals and of a model that two of them have."""

import contextlib
import os
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from small_pipelines import profile_of
from torch import nn

import penstock
from penstock.pipeline.distributed.process_group import ReplicaGroup, hearing, thread_of
from penstock.pipeline.distributed.processes import Stopped
from penstock.pipeline.distributed.thread_group import ThreadGroup
from penstock.pipeline.distributed.threads import run_threads, worlds_of


def ranks_left():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rank")]


def test_threads_are_named_ranks_of_their_own_and_gone_afterwards():
    seen = []

    def work(world):
        seen.append(threading.current_thread().name)
        world.barrier()
        assert torch.get_num_threads() == 3
        torch.set_num_threads(1)
        return world.rank, world.size, world.is_alone, thread_of(world.group)

    torch.set_num_threads(3)  # every test begins with one
    assert penstock.in_threads(work, ranks=3) == [(rank, 3, False, rank) for rank in range(3)]
    assert torch.get_num_threads() == 3
    assert sorted(seen) == ["rank0", "rank1", "rank2"]
    assert ranks_left() == []
    assert penstock.in_threads(lambda world: world.all_gather([3.0]), ranks=1) == [[[3.0]]]
    with pytest.raises(penstock.ConfigError, match="ranks=0 must be 1 or more"):
        penstock.in_threads(work, ranks=0)


@contextlib.contextmanager
def ends_within(seconds):
    """The block takes no longer, and leaves no rank."""
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < seconds
    assert ranks_left() == []


def test_an_error_in_one_thread_ends_all_and_is_the_one_that_is_raised():
    told = {}

    def work(world):
        if world.rank == 2:
            raise ValueError("the third layer broke")
        try:
            world.barrier()
        except penstock.TransportError as error:
            told[world.rank] = str(error)
            raise

    with ends_within(10), pytest.raises(ValueError, match="the third layer broke"):
        penstock.in_threads(work, ranks=3, deadline=60)
    assert sorted(told) == [0, 1]
    assert all("rank 2: ValueError: the third layer broke" in said for said in told.values())


def test_an_error_is_told_where_somebody_else_has_a_default_group(tmp_path):
    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)

    def work(world):
        group = ReplicaGroup(world, [0, 1], stage=0)
        if world.rank:
            raise ValueError("it broke")
        group.largest(torch.ones(3), at="a sum")

    try:
        with pytest.raises(ValueError, match="it broke"):
            penstock.in_threads(work, ranks=2)
    finally:
        dist.destroy_process_group()


def test_threads_that_share_a_model_are_refused_on_all_of_them():
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    plan = penstock.partition(profile_of(model), stages=2)
    settings = {"loss": nn.functional.mse_loss, "optimizer": torch.optim.SGD}
    said = r"every rank has its own copy of the model, and 0\.weight is a parameter of another thread's, too"
    with pytest.raises(penstock.PlanError, match=said):
        penstock.in_threads(lambda world: penstock.Pipeline(model, plan, world=world, **settings), ranks=2)


def test_a_thread_that_never_comes_ends_the_others_by_the_deadline():
    said = r"rank 0 lost the group of ranks.*Timed out waiting 300ms"
    with pytest.raises(penstock.TransportError, match=said):
        penstock.in_threads(lambda world: world.rank == 1 or world.barrier(), ranks=2, deadline=0.3)
    assert ranks_left() == []


def test_a_thread_that_hangs_is_named_beside_the_error():
    go = threading.Event()

    def work(world):
        if world.rank:
            go.wait(60)
        else:
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken") as found:
        penstock.in_threads(work, ranks=2, deadline=0.2)
    assert found.value.__notes__ == ["rank1 did not end within 0.2 s, and may still run"]
    go.set()
    while ranks_left():
        time.sleep(0.01)


def test_a_signal_is_told_to_the_threads_that_listen():
    worlds, heard = worlds_of(2, deadline=30), []
    group = worlds[0].group
    assert isinstance(group, ThreadGroup)
    post = group.post

    def work(world):
        with hearing(world.group, lambda number: heard.append((world.rank, number))):
            world.barrier()
            if world.rank == 0:
                post.hear(signal.SIGTERM)
            world.barrier()
        world.barrier()

    run_threads(worlds, work)
    assert sorted(heard) == [(0, signal.SIGTERM), (1, signal.SIGTERM)]
    with pytest.raises(Stopped):
        post.hear(signal.SIGTERM)


@pytest.mark.parametrize("ends", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_main_thread_ends_the_ranks(ends):
    """A signal's handler runs in the main thread, which waits for the ranks."""

    def handler(*_):
        raise ends

    def work(world):
        if world.rank == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        while True:
            world.barrier()
            time.sleep(0.01)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with ends_within(10), pytest.raises(ends):
            penstock.in_threads(work, ranks=2, deadline=60)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.MAX], ids=str)
def test_a_group_of_threads_does_what_gloo_does(op):
    """Every collective, on all ranks at once and begun before any is waited for."""
    ranks = 3

    def work(world):
        mine = torch.arange(6, dtype=torch.float64) * (world.rank + 1) - 4
        rows = [torch.empty(6, dtype=torch.float64) for _ in range(ranks)]
        summed, kept, owned = (mine.clone() for _ in range(3))
        piece = torch.empty(2).double()
        later = {"group": world.group, "async_op": True}
        pieces = list(mine.split(2)) if world.rank == 1 else None
        works = [
            dist.all_gather(rows, mine, **later),
            dist.all_reduce(summed, op, **later),
            dist.broadcast(kept, group_src=1, **later),
            dist.reduce(owned, group_dst=2, op=op, **later),
            dist.scatter(piece, pieces, group_src=1, **later),
            world.group.barrier(),
        ]
        mine.fill_(-1)  # what was begun has it
        for one in works[:: 1 if world.rank else -1]:  # in any order
            one.wait()
        return rows, summed, kept, owned, piece

    of = torch.stack([torch.arange(6, dtype=torch.float64) * (rank + 1) - 4 for rank in range(ranks)])
    total = {dist.ReduceOp.SUM: of.sum(0), dist.ReduceOp.MAX: of.amax(0)}[op]
    for rank, (rows, *others) in enumerate(penstock.in_threads(work, ranks=ranks)):
        own = slice(2 * rank, 2 * rank + 2)
        expected = [total, of[1], total if rank == 2 else of[rank], of[1][own]]
        assert torch.equal(torch.stack(rows), of)
        assert all(map(torch.equal, others, expected))


def test_parts_of_a_group_speak_among_themselves():
    """Two of the same ranks are two, in whatever order they are used."""

    def work(world):
        parts = {10.0: [0, 2], 100.0: [1, 2], 1000.0: [1, 2]}
        mine = {n: ReplicaGroup(world, ranks, stage=0) for n, ranks in parts.items() if world.rank in ranks}
        found = {n: torch.tensor([n + world.rank]) for n in mine}
        order = mine if world.rank == 1 else reversed(mine)
        for one in [dist.all_reduce(found[n], group=mine[n].group, async_op=True) for n in order]:
            one.wait()
        return [float(one) for one in found.values()]

    assert penstock.in_threads(work, ranks=3) == [[22.0], [203.0, 2003.0], [22.0, 203.0, 2003.0]]


def test_messages_keep_their_order_and_their_tags():
    def work(world):
        other, sent = 1 - world.rank, [torch.full((4,), 10 * world.rank + i) for i in range(4)]
        first = [world.isend(x, other, tag=i % 2) for i, x in enumerate(sent)]
        into = [torch.zeros(6, dtype=torch.int64) for _ in range(4)]
        second = [world.irecv(into[i], other, tag=i % 2) for i in (1, 0, 3, 2)]
        for one in (*second, *first):
            assert one.wait()
        return [row.tolist() for row in into]

    for rank, rows in enumerate(penstock.in_threads(work, ranks=2)):
        assert rows == [[10 * (1 - rank) + i] * 4 + [0, 0] for i in range(4)]


def test_a_send_waits_until_it_is_taken():
    def work(world):
        if world.rank:
            world.barrier()
            return world.irecv(torch.zeros(3), 0, tag=0).wait()
        work = world.isend(torch.ones(3), 1, tag=0)
        assert not work.there
        world.barrier()
        return work.wait()

    assert penstock.in_threads(work, ranks=2) == [True, True]


def test_a_group_is_ended_for_what_comes_later_too():
    first, second = ThreadGroup.create(2, deadline=30)
    sent = first.send([torch.ones(2)], 1, 0)
    second.recv([into := torch.zeros(2)], 0, 0)
    first.post.end("it is over")
    assert sent.wait()  # what has gone over stays so
    assert into.tolist() == [1, 1]
    for begin in (lambda: second.send([torch.ones(2)], 0, 0), lambda: second.barrier().wait()):
        with pytest.raises(RuntimeError, match="Connection closed by peer: it is over"):
            begin()


def test_recording_a_model_passes_by_what_other_threads_run():
    """A model is recorded again and again while another thread runs modules, and the other way round."""
    go, ran = threading.Event(), 0

    class Marked(nn.Module):
        def forward(self, x):
            return torch.relu(x)

    other, x = nn.Sequential(nn.Linear(4, 4), Marked(), nn.Dropout(0.5)), torch.randn(2, 4)

    def run():
        nonlocal ran
        while not go.is_set():
            other(x)
            ran += 1

    thread = threading.Thread(target=run)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        for _ in range(3):
            model = nn.Sequential(nn.Linear(4, 3), Marked(), nn.Linear(3, 2))
            names = [layer.name for layer in penstock.trace(model, (torch.randn(2, 4),)).train.layers]
            assert names == ["_0", "relu", "_2"]
    finally:
        go.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert ran
