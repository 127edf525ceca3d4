"""Law L7: a rank that fails, dies or never starts ends all within the deadline, and is named."""

import builtins
import json
import threading
import time

import pytest
import torch
import torch.distributed as dist
from cases import OPTIMIZERS
from small_pipelines import profile_of
from torch import nn
from zoo import cross_entropy, images

import penstock
from penstock import PenstockError, TransportError
from penstock.pipeline.distributed import process_group
from penstock.pipeline.distributed.failure import Failure, cause, leave, read_failures
from penstock.pipeline.distributed.process_group import World, init_group
from penstock.pipeline.distributed.processes import Ends
from penstock.pipeline.distributed.transport import measured_rates


DEADLINE = 4.0  # seconds; less, and on a busy machine the wrong rank is late


def train(how):
    """Two ranks; the second stage's third forward (or backward) of the first step ends in ``how``."""
    calls, backward = [0], how == "raise in backward"

    def third(*_):
        calls[0] += 1
        if dist.get_rank() == 1 and calls[0] == 3:
            raise getattr(builtins, how, ValueError("the sky fell"))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(1), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 10))
    x, y = images(8)[0]
    plan = penstock.partition(profile_of(model, (x[:3].clone(),)), cuts=["_1"], micro_batches=4)
    settings = {"loss": cross_entropy, "optimizer": OPTIMIZERS["plain"], "deadline": DEADLINE}
    pipe = penstock.Pipeline(model, plan, **settings)
    if backward:
        model[3].register_forward_hook(lambda module, args, out: out.register_hook(third) and None)
    else:
        model[3].register_forward_pre_hook(third)
    pipe.step(x, y)


@pytest.mark.ranks
def test_a_rank_that_never_starts_is_named(tmp_path):
    store = dist.FileStore(str(tmp_path / "rendezvous"), 3)  # type: ignore[attr-defined]
    store.set("penstock/joined/1", "")
    begun = time.monotonic()
    with pytest.raises(penstock.PenstockError, match=r"^rank 2 of 3 did not join within 1 s"):
        init_group(store, rank=0, ranks=3, deadline=1)
    assert time.monotonic() - begun < 10


def told_by(call):
    """Message of a rank that loses the group in ``call``; the pool goes on with a new group."""
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.destroy_process_group()
    return ""


def meet_without(absent):
    """All but one rank meet; that one has left, and has not said so."""
    world = World.default()
    world.barrier()
    return told_by(lambda: None if world.rank == absent else world.barrier())


@pytest.mark.slow
def test_who_gives_no_sign_of_life_is_named_by_a_collective(ranks):
    told = ranks.run(meet_without, 2, ranks=3, deadline=5)
    for rank in (0, 1):
        said = f"TransportError: rank {rank} lost the group of ranks: rank 2 did not answer"
        assert told[rank].startswith(said)


def measure_alone():
    world = World.default()
    return told_by(lambda: measured_rates(world, [(0, 1)], deadline=2) if world.rank == 0 else None)


def test_a_link_that_cannot_be_measured_names_its_other_end(ranks):
    told, _ = ranks.run(measure_alone, ranks=2)
    assert told.startswith("TransportError: rank 0 could not measure its link with rank 1 within 2 s: ")


def step_that_ends(how):
    return told_by(lambda: train(how))


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raise", "StageError: {}forward of micro-batch 2, step 0: layer _3: ValueError: the sky fell"),
        (
            "raise in backward",
            "StageError: {}backward of micro-batch 2, step 0: backward: ValueError: the sky fell",
        ),
        ("SystemExit", "StageError: {}forward of micro-batch 2, step 0: SystemExit"),
        ("KeyboardInterrupt", "KeyboardInterrupt: "),  # which is no error of a stage
    ],
)
def test_whatever_ends_a_step_is_named_by_every_rank(how, told, ranks):
    peer, own = ranks.run(step_that_ends, how, ranks=2)
    where = "rank 1, stage 1, "
    assert own == told.format(where)
    said = told.format(where).removeprefix("StageError: ")
    assert peer.startswith("TransportError: ")
    assert (said if where in said else f"{where}forward of micro-batch 2, step 0: {how}") in peer


def test_a_store_that_does_not_answer_once_is_not_asked_again():
    begun = time.monotonic()
    answer = threading.Event()
    with pytest.raises(TimeoutError, match=r"did not answer within 0\.1 s"):
        process_group.bounded(answer.wait, seconds=0.1)
    asked = []
    with pytest.raises(TimeoutError, match="did not answer before"):
        process_group.bounded(lambda: asked.append(1), seconds=60)
    answer.set()
    assert not asked
    assert time.monotonic() - begun < 30
    while any(thread.name.startswith("penstock-store") for thread in threading.enumerate()):
        time.sleep(0.01)
    assert process_group.bounded(lambda: 5, seconds=60) == 5


TWO = [[0], [1, 2]]


def failure(rank, *, sentence="it broke", consequence=False, at=1.0):
    return Failure(rank=rank, sentence=sentence, consequence=consequence, at=at, trace=[])


CLOSED = "Connection closed by peer"
LOST = failure(0, sentence="lost", consequence=True)


@pytest.mark.parametrize(
    ("codes", "stuck", "failures", "told"),
    [
        ({0: 1, 1: 1}, [], [LOST, failure(1, sentence="own")], "own"),
        ({0: 1, 1: -11}, [], [LOST], "rank 1 .*killed by SIGSEGV; lost"),
        ({1: -9}, [], [], "rank 1 .*killed by SIGKILL; if nobody did that, memory ran out"),
        ({1: 3}, [], [], "rank 1 .*exit code 3"),
        ({1: 3, 0: -9}, [], [], "rank 1 .*exit code 3"),  # the first comes first
        ({0: -6, 1: -9}, [], [], "rank 1 .*SIGKILL"),  # gloo aborts where a peer has gone
        ({0: -6}, [], [], "rank 0 .*SIGABRT"),
        ({0: 1}, [], [LOST], "lost"),
        ({0: 1}, [1], [LOST], "rank 1 .*was stopped or hangs: .*; lost"),
        ({0: 1}, [1], [failure(0, sentence="own")], "own"),
        ({0: -15, 1: -15}, [], [], "rank 0 .*SIGTERM"),
        ({0: -40}, [], [], "rank 0 .*signal 40"),
    ],
)
def test_the_cause_among_the_ends(codes, stuck, failures, told):
    with pytest.raises(PenstockError, match=f"^{told}"):
        raise cause(Ends(codes=codes, stuck=stuck), failures, stages_of_rank=TWO)


@pytest.mark.parametrize(
    ("codes", "asked", "number"),
    [
        ({0: 143, 1: 143}, [], 15),
        ({0: 143, 1: -15}, [15], 15),  # one had not begun to listen
        ({0: 138}, [], 10),
        ({0: -15, 1: -15}, [], 0),  # nobody asked the launcher
        ({0: 143, 1: 1}, [15], 0),
        ({}, [15], 0),
    ],
)
def test_ranks_that_were_asked_to_stop_did_not_fail(codes, asked, number):
    assert Ends(codes=codes, stuck=[], asked=asked).stopped == number


@pytest.mark.parametrize(
    ("error", "said", "consequence"),
    [
        (PenstockError("rank 3, stage 3: it broke"), "rank 3, stage 3: it broke", False),
        (ZeroDivisionError("division by zero"), "rank 3: ZeroDivisionError: division by zero", False),
        (SystemExit(3), "rank 3: SystemExit: 3", False),
        (TransportError("it is gone"), "rank 3: it is gone", True),
        (RuntimeError(f"[../gloo/transport/tcp/pair.cc:525] {CLOSED}"), "rank 3: RuntimeError: ", True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_rank_leaves_a_sentence_and_its_traceback(error, said, consequence, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    leave(tmp_path, error)
    (found,) = read_failures(tmp_path)
    assert found.sentence.startswith(said)
    assert (found.rank, found.consequence) == (3, consequence)
    assert consequence or f"its traceback is in {tmp_path}/rank3.json" in found.sentence
    assert str(error) in found.trace[-1]


def test_failures_come_in_their_order_and_half_a_file_says_nothing(tmp_path):
    for rank, at in ((0, 2.0), (1, 1.0)):
        content = {"rank": rank, "sentence": "s", "consequence": False, "at": at, "trace": []}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(content))
    (tmp_path / "rank2.json").write_text('{"rank": 2')
    (tmp_path / "rank3.json").write_text('{"rank": 3}')
    assert [found.rank for found in read_failures(tmp_path)] == [1, 0]


def test_a_failure_that_cannot_be_written_is_told(tmp_path, capsys):
    (tmp_path / "errors").write_text("in the way")
    left = leave(tmp_path / "errors", PenstockError("rank 0: it broke"))
    assert capsys.readouterr().err.startswith(f"rank 0: it broke ({tmp_path}/errors/rank0.json cannot be")
    assert left.sentence == "rank 0: it broke"
