"""Law L7: ranks that fail, die or never start end all within the deadline, and one sentence tells why."""

import builtins
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import OPTIMIZERS
from processes import wait_for_the_end
from small_pipelines import profile_of
from torch import nn
from zoo import cross_entropy, images

import penstock
from penstock import ConfigError, PenstockError, TransportError
from penstock.pipeline.distributed import launcher, process_group
from penstock.pipeline.distributed.failure import Failure, Lost, cause, leave, read_failures
from penstock.pipeline.distributed.launcher import PREFIX, SECONDS, check_ranks, private_folder, start_ranks
from penstock.pipeline.distributed.process_group import World, init_group
from penstock.pipeline.distributed.processes import Ends
from penstock.pipeline.distributed.rank import LAUNCHER
from penstock.pipeline.distributed.transport import measured_rates

TWO = [[0], [1, 2]]


def start(what, folder, monkeypatch, *, which="1"):
    """Two ranks of which one ends so; what they leave lies in ``folder / "errors"``."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    errors = folder / "errors"
    start_ranks("endings", [what, str(errors), which], errors=errors, stages_of_rank=TWO)


@pytest.mark.ranks
def test_ranks_that_end_well_raise_nothing_and_leave_nothing(tmp_path, monkeypatch):
    before = dict(os.environ)
    start("end well", tmp_path, monkeypatch)
    assert not list(tmp_path.iterdir())
    assert dict(os.environ) == before


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("what", "which", "kind", "told"),
    [
        ("be killed", "1", Lost, r"rank 1 \(stages 1, 2\) was killed by SIGKILL; .*; rank 0: a neighbour"),
        ("stop", "1", Lost, r"rank 1 \(stages 1, 2\) was stopped or hangs: .*; rank 0: a neighbour waited"),
        ("stop", "0", Lost, r"rank 0 \(stage 0\) was stopped or hangs: .*; rank 1: a neigh"),
        ("exit", "1", PenstockError, "rank 1: SystemExit: 3; its traceback is in"),
        ("raise", "1", PenstockError, "rank 1, stage 1, forward of micro-batch 2: the sky fell"),
    ],
)
def test_the_cause_is_told_and_not_its_consequence(what, which, kind, told, tmp_path, monkeypatch, capfd):
    before = time.monotonic()
    with pytest.raises(PenstockError, match=f"^{told}") as failed:
        start(what, tmp_path, monkeypatch, which=which)
    assert type(failed.value) is kind
    assert time.monotonic() - before < 60
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.ranks
def test_what_a_rank_started_and_left_ends_with_it(tmp_path, monkeypatch):
    with pytest.raises(Lost, match=r"rank 1 \(stages 1, 2\) ended with exit code 7"):
        start("leave a child", tmp_path, monkeypatch)
    wait_for_the_end(int((tmp_path / "child").read_text()))


SLOW = r"""
import os, time
os.write(1, b"%d\n" % os.getpid())  # in one piece: another rank writes there, too
time.sleep(60)  # as long as an import may take
"""
STARTER = """
from pathlib import Path
from penstock.pipeline.distributed.launcher import start_ranks
start_ranks("slow_to_import", [], errors=Path("errors"), stages_of_rank=[[0], [1]])
"""


@pytest.mark.ranks
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's promise is Linux's")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_ranks_that_still_import_end_with_their_launcher(number, tmp_path):
    (tmp_path / "slow_to_import.py").write_text(SLOW)
    command = [sys.executable, "-c", STARTER]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path
    ) as launcher:
        assert launcher.stdout is not None
        pids = [int(launcher.stdout.readline()) for _ in range(2)]
        launcher.send_signal(number)
    wait_for_the_end(*pids)


def test_a_rank_whose_launcher_went_before_it_could_be_tied_ends_at_once():
    command = [sys.executable, "-m", "penstock.pipeline.distributed.rank", "nothing"]
    gone = os.environ | {LAUNCHER: "1" if os.getpid() != 1 else "2"}
    ended = subprocess.run(command, env=gone, capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "")


@pytest.mark.ranks
def test_a_rank_that_cannot_be_started_is_one_sentence_and_leaves_none(tmp_path):
    with pytest.raises(TransportError, match=r"^nowhere could not be started: No such file"):
        start_ranks("time", [], errors=tmp_path, stages_of_rank=TWO, ends=[["sleep", "60", ";"], ["nowhere"]])


def test_ranks_that_find_no_folder_to_meet_in_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(TransportError, match=r"temporary folder, and there is none .*; name one with TMPDIR"):
        start_ranks("time", [], errors=tmp_path, stages_of_rank=TWO)


def test_more_ranks_than_the_machine_starts_are_refused(monkeypatch):
    monkeypatch.setattr(launcher, "cores", lambda: 3)
    check_ranks(12)
    with pytest.raises(ConfigError, match=r"ranks=13 .* 3 cores .* lower ranks to 12"):
        check_ranks(13)


def test_threads_share_the_cores_that_this_process_may_use_and_are_at_least_one(monkeypatch):
    assert 1 <= launcher.cores() <= (os.cpu_count() or 1)
    monkeypatch.setattr(launcher, "cores", lambda: 6)
    assert [launcher.threads_per_rank(ranks) for ranks in (1, 2, 4, 6, 12)] == [6, 3, 1, 1, 1]


HOLD = """
from penstock.pipeline.distributed.launcher import private_folder
with private_folder() as folder:
    print(folder, flush=True)
    input()
"""


def holder() -> Any:
    command, pipe = [sys.executable, "-c", HOLD], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)


def age(path):
    then = path.stat().st_mtime - SECONDS - 1
    os.utime(path, (then, then))


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_folder_goes_with_its_block_and_others_may_not_enter(temporary):
    with private_folder() as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not any(temporary.iterdir())


def test_a_file_system_without_locks_has_folders_too(temporary, monkeypatch):
    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with private_folder() as left:
        age(left)
        with private_folder() as folder:
            assert {*temporary.iterdir()} == {left, folder}  # nobody can tell that it is left over
    assert not any(temporary.iterdir())


def test_the_next_takes_away_what_a_killed_process_left_and_nothing_else(temporary):
    with holder() as killed, holder() as alive:
        left, lives = (temporary / one.stdout.readline().strip() for one in (killed, alive))
        (left / "config.yaml").write_text("x")
        new, weights = temporary / f"{PREFIX}new", temporary / "penstock_weights_x"
        for path in (new, weights):
            path.mkdir()
        for path in (left, lives, weights):
            age(path)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        with private_folder() as folder:
            assert {*temporary.iterdir()} == {folder, lives, new, weights}
        alive.communicate("\n")
    assert alive.returncode == 0
    assert not lives.exists()


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


def test_a_port_that_is_in_use_is_named(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for name, value in {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(TransportError, match=f"^MASTER_PORT={port} is in use on this machine"):
            penstock.init(deadline=10)
