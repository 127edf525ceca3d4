"""Whatever is killed, stopped or asked to stop ends the run with a sentence, and no process stays."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from commands import lines, same_run, train, trained
from faults import JOB, OWN, ended, started
from processes import children, ranks_in

from penstock.pipeline.runtime.engine import Engine
from penstock.scripts import command

pytestmark = pytest.mark.ranks

RUN = "checkpoint.every=1 hydra.run.dir=run"
slow = pytest.mark.slow


@pytest.fixture
def own(monkeypatch, tmp_path):
    """Lets runs train what ``FAULT`` harms; the module of one's own may change the engine of this process."""
    for name in ("step", "evaluate"):
        monkeypatch.setattr(Engine, name, getattr(Engine, name))
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.setenv("FAULT", "- - 0 -")
    return lambda fault: monkeypatch.setenv("FAULT", fault)


def left(folder, error):
    """The last line of a run that failed, which must have left no process and nothing half written."""
    assert not ranks_in(folder / "run")
    assert not list((folder / "run").rglob("*.part"))
    return error.splitlines()[-1]


@pytest.mark.parametrize(
    ("fault", "more", "told"),
    [
        ("1 forward 9 SIGKILL", "ranks=2", r"rank 1 \(stage 1\) was killed by SIGKILL; .*did not arrive"),
        pytest.param(
            "1 forward 9 SIGSTOP",
            "ranks=2 deadline=15",
            r"rank 1 \(stage 1\) was stopped or hangs: .*; rank 0, stage 0, backward of micro-batch 0, "
            r"step \d: the gradient of \w+ of micro-batch 0, [\d,]+ bytes from stage 1 to stage 0, did not "
            r"arrive from rank 1 within 15 s: ",
            marks=slow,
        ),
    ],
)
def test_a_rank_that_is_killed_or_stopped_is_named_and_the_run_goes_on(
    fault, more, told, own, tmp_path, capfd
):
    own(fault)
    assert command.run(["train", *f"{JOB} {more} {RUN}".split()]) == 2  # by ranks that are truly started
    assert re.match(f"penstock: {told}", said := left(tmp_path, capfd.readouterr().err)), said
    assert not Path("run/summary.json").exists()
    own("- - 0 -")
    trained(f"{JOB} ranks=1 stages=2 hydra.run.dir=run resume=auto checkpoint.every=1")
    assert len(lines("run")) == 12


@pytest.mark.slow
def test_a_rank_that_is_stopped_before_the_ranks_meet_is_named(tmp_path):
    process = started(tmp_path, f"ranks=2 deadline=15 {RUN}")
    until = time.monotonic() + 60
    while len(ranks := children(process)) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(ranks[1], signal.SIGSTOP)
    told = r"penstock: rank 1 \(stage 1\) was stopped or hangs: .*rank 1 of 2 did not join within 15 s"
    code, out, error, _ = ended(process, seconds=90)
    assert code == 2, out + error
    assert re.match(told, said := left(tmp_path, error)), said


def test_a_worker_of_a_loader_that_dies_is_named_with_its_rank(own, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("LOADER", "1")
    assert train(f"{JOB} ranks=2 {RUN}") == 2
    told = r"penstock: rank [01]: train sample \d+ cannot be read: \w+: .*; its traceback is in "
    assert re.match(told, said := left(tmp_path, capfd.readouterr().err)), said


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ("ranks=2", False),
        pytest.param("ranks=2 traceback=true", True, marks=slow),
        ("ranks=1 traceback=true", True),
    ],
)
def test_the_traceback_of_a_rank_is_a_file_away_or_on_the_terminal(more, shown, own, capfd):
    own(f"{'0' if '=1' in more else '1'} forward 5 raise")
    assert train(f"{JOB} {more} stages=2 hydra.run.dir=run") == 2
    error = capfd.readouterr().err
    told = r"penstock: rank \d, stage \d, forward of micro-batch \d, step \d: layer \w+: ValueError: sky; "
    found = re.fullmatch(told + r"its traceback is in (.*run/errors/rank\d.json)", error.splitlines()[-1])
    assert found, error
    assert "come_to" in Path(found[1]).read_text()
    assert ("come_to" in error) == shown
    assert (error.count("\n") == 1) != shown


@pytest.mark.parametrize(
    ("fault", "more", "number"),
    [
        ("0 read 61 SIGTERM", "ranks=1 stages=2", signal.SIGTERM),
        ("1 forward 5 SIGTERM", "ranks=2", signal.SIGTERM),
        pytest.param("1 read 61 SIGTERM@launcher", "ranks=3", signal.SIGTERM, marks=slow),
        pytest.param("0 read 121 SIGUSR1", "ranks=2", signal.SIGUSR1, marks=slow),
        pytest.param("0 read 121 SIGTERM", "ranks=2 replicas.threads=true", signal.SIGTERM, marks=slow),
        # Every tenth batch of a test they agree.
        pytest.param("0 test 1 SIGTERM", "ranks=2 batch_size=5", signal.SIGTERM, marks=slow),
    ],
)
def test_a_run_that_is_asked_to_stop_keeps_its_step_and_goes_on(fault, more, number, own, tmp_path, capfd):
    if more == "ranks=2":  # their launcher, this process, is not asked
        own(fault)
        code = train(f"{JOB} {more} hydra.run.dir=run")
        out, error = capfd.readouterr()
        own("- - 0 -")
    else:
        code, out, error, _ = ended(started(tmp_path, f"{more} hydra.run.dir=run", fault=fault))
    assert code == 128 + number, out + error
    done = len(lines("run"))
    told = f"penstock: stopped by {number.name}; {tmp_path}/run keeps a checkpoint, step_{done:08}; go on"
    assert error.startswith(told), error
    assert error.endswith("resume=auto\n")
    assert error.count("\n") == 1
    assert not ranks_in(tmp_path / "run")
    assert not Path("run/errors").exists()
    assert not (fault.startswith("0 test") and "epoch 1/4" in out)
    trained(f"{JOB} {more} hydra.run.dir=run resume=auto")
    trained(f"{JOB} {more} ranks=1 stages=2 replicas.threads=false hydra.run.dir=whole")
    assert 0 < done < len(lines("whole"))
    assert same_run("run", "whole")


@pytest.mark.slow
def test_a_stream_is_stopped_at_the_checkpoint_that_was_asked_for(tmp_path):
    more = "ranks=1 stages=2 schedule=async_1f1b weights=stashed checkpoint.every=2 hydra.run.dir=run"
    code, out, error, _ = ended(started(tmp_path, more, fault="0 forward 9 SIGTERM"))
    assert code == 143, out + error
    assert "keeps a checkpoint, step_00000002;" in error, error
    assert len(lines("run")) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "number"), [(2, signal.SIGINT), (1, signal.SIGTERM), (2, signal.SIGTERM)])
def test_ctrl_c_and_a_second_request_end_at_once(ranks, number, tmp_path):
    """The rank sleeps in a layer, so that its step never ends, as SIGTERM would have it."""
    fault = f"{ranks - 1} forward 5 sleep"
    process = started(tmp_path, f"ranks={ranks} stages=2 hydra.run.dir=run", fault=fault)
    assert process.stdout is not None
    assert any("sleeps" in line for line in process.stdout)
    process.send_signal(number)
    if number == signal.SIGTERM:
        with pytest.raises(Exception, match="timed out"):
            process.wait(timeout=2)
        process.send_signal(number)
    code, _, error, _ = ended(process, seconds=60)
    assert code == 128 + number
    assert "stopped by " + ("Ctrl-C" if number == signal.SIGINT else "SIGTERM") in error
    assert "start it again from the beginning" in error
    assert not ranks_in(tmp_path / "run")
