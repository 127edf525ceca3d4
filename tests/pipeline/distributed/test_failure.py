"""Reports of failing ranks, and the choice of one among several failures (law L7)."""

import json

import pytest

from penstock import PenstockError, TransportError
from penstock.pipeline.distributed.failure import Failure, cause, leave, read_failures
from penstock.pipeline.distributed.processes import Ends

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
