"""``penstock train`` under torchrun: on one machine, and on two, each with an agent of its own."""

import concurrent.futures
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from checkout import run
from commands import DEADLY, SMALL, same_model, trained
from processes import children, free_port

import penstock
from penstock.conf.schema import TrainConfig
from penstock.pipeline.distributed.launcher import fresh
from penstock.pipeline.distributed.process_group import Notices
from penstock.pipeline.run import torchrun
from penstock.pipeline.run.run_folder import RunFolder
from penstock.scripts import command

pytestmark = pytest.mark.ranks

JOB = f"{SMALL.replace(' threads=1', '')} batch_size=50 micro_batches=3 max_steps=2 deadline=60".split()
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
OWN = f"{DEADLY.replace(' epochs=2', '')} checkpoint.every=2 deadline=20 stages=2"
SUPPORT = Path(__file__).parents[2] / "support"


def launched(tmp_path, *options, ranks=2, name="train"):
    """Start a ``penstock`` command as a launcher does; returns exit codes and what each rank printed."""
    meeting = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    line, started = [sys.executable, "-m", "penstock", name, *options], []
    for rank in map(str, range(ranks)):
        own = {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": str(ranks)}
        how = {"cwd": tmp_path, "env": os.environ | meeting | own, "text": True}
        started.append(subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **how))
    try:
        printed = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [process.returncode for process in started], printed


class Machine:
    """An agent of torchrun with one rank, in a folder with a copy of the modules that the run names."""

    def __init__(self, number, port, options, *, restarts=0, **surroundings):
        self.folder = Path(f"machine_{number}")
        self.folder.mkdir(exist_ok=True)
        shutil.copy(SUPPORT / "own_digits.py", self.folder)
        self.said = self.folder / f"said_{time.monotonic_ns()}.txt"
        agent = f"--nnodes 2 --node-rank {number} --master-addr 127.0.0.1 --master-port {port}"
        typed = f"{agent} --max-restarts {restarts} -m penstock train {options}".split()
        how = {"cwd": self.folder, "env": os.environ | surroundings}
        with self.said.open("w") as file:
            self.agent = subprocess.Popen([*TORCHRUN, *typed], stdout=file, stderr=subprocess.STDOUT, **how)

    @property
    def text(self):
        return self.said.read_text()

    def end(self, seconds=240):
        return self.agent.wait(seconds)

    def lose(self):
        """End the agent and its rank at once."""
        for pid in (self.agent.pid, *children(self.agent)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.agent.wait(30)


@contextlib.contextmanager
def machines(options, *, more=("", ""), **how):
    """Start a run on two machines; end what is left of it. Gives what starts one of them again, too."""
    port = free_port()
    with contextlib.ExitStack() as stack:

        def start(number):
            machine = Machine(number, port, f"{options} {more[number]}", **how)
            stack.callback(machine.lose)
            return machine

        yield start(0), start(1), start


def until(condition, machine, *, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, machine.text
        assert machine.agent.poll() is None, machine.text
        time.sleep(0.05)


def steps(folder):
    with contextlib.suppress(OSError):
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    return 0


def same_as_in_one_process(folder, options):
    """True if the run in ``folder`` ended with the bits of an undisturbed one."""
    shutil.copy(SUPPORT / "own_digits.py", "own_digits.py")
    trained(f"{OWN} {options} hydra.run.dir=ours ranks=1")
    return same_model("ours", folder)


def test_torchrun_launches_them_with_the_same_bits(tmp_path):
    job = [*JOB, "threads=1"]
    words = "--nproc-per-node", "2", "-m", "penstock", "train", *job, "hydra.run.dir=theirs"
    run(*TORCHRUN[1:], *words, cwd=tmp_path, seconds=240)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
    trained(f"{' '.join(job)} hydra.run.dir=ours ranks=1")
    assert same_model("ours", "theirs")


@pytest.mark.slow
def test_two_machines_train_with_the_bits_of_one_process(tmp_path):
    """Each finds the data set in its own folder, and names the run by its own clock."""
    parent = f"hydra.run.dir={tmp_path}/runs/${{now:%f}}"
    with machines(f"{OWN} epochs=2 {parent}") as (*both, _):
        assert [one.end() for one in both] == [0, 0], [one.text for one in both]
        assert "penstock" not in both[1].text
    (folder,) = Path("runs").iterdir()
    assert same_as_in_one_process(folder, "epochs=2")


@pytest.mark.slow
def test_a_killed_rank_of_another_machine_goes_on_from_the_last_checkpoint(tmp_path):
    death = tmp_path / "machine_1" / "kill_0"
    death.parent.mkdir()
    death.touch()
    job = f"{OWN} epochs=2 hydra.run.dir={tmp_path}/run resume=auto"
    with machines(job, restarts=1, VICTIM="1", AFTER="281") as (*both, _):
        assert [one.end() for one in both] == [0, 0], [one.text for one in both]
        assert re.search(r"goes on behind step \d", both[0].text)
    assert not death.exists()
    assert same_as_in_one_process("run", "epochs=2")


@pytest.mark.slow
def test_a_machine_that_is_lost_comes_back_by_the_same_line(tmp_path):
    folder = tmp_path / "run"
    job = f"{OWN} epochs=40 hydra.run.dir={folder} resume=auto"
    with machines(job, restarts=3) as (first, second, start):
        until(lambda: steps(folder) > 5, first)
        second.lose()
        time.sleep(5)  # in which the first one starts its rank again, and that waits
        again = start(1)
        assert (first.end(), again.end()) == (0, 0), first.text + again.text
    assert "goes on behind step" in first.text
    assert steps(folder) == 200
    assert same_as_in_one_process("run", "epochs=40")


@pytest.mark.slow
def test_without_the_first_machine_every_agent_ends_by_the_deadline(tmp_path):
    folder = tmp_path / "run"
    job = f"{OWN} epochs=400 hydra.run.dir={folder} resume=auto"
    with machines(job, restarts=2) as (first, second, _):
        until(lambda: steps(folder) > 5, first)
        first.lose()
        begun = time.monotonic()
        assert second.end() != 0
        assert time.monotonic() - begun < 60  # of deadline=20, and what an interpreter takes
        assert "penstock: rank 1" in second.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("", "seed=4"), "seed= is 3 on rank 0 and 4 on rank 1; type the same line on every machine"),
        (
            ("hydra.run.dir={}/a", "hydra.run.dir={}/elsewhere/a"),
            "all ranks write a checkpoint into one folder",
        ),
    ],
)
def test_machines_that_do_not_fit_are_refused_on_both(more, sentence, tmp_path):
    more = [option.format(tmp_path) for option in more]
    with machines(f"{OWN} epochs=2", more=more) as (*both, _):
        assert all(one.end() for one in both)
        for one in both:
            (said,) = re.findall("^penstock: .*", one.text, flags=re.MULTILINE)
            assert sentence in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["ranks=3"], "the launcher started 2 processes (WORLD_SIZE=2), and the run has ranks=3"),
        (["cuts=[nowhere]"], "nowhere"),
        (["optimizer.lr=-1"], "Invalid learning rate: -1"),
        (["--multirun", "seed=3,4"], "the ranks of a launcher meet for one"),
    ],
)
def test_a_refusal_ends_all_and_is_told_once(tmp_path, options, sentence):
    codes, printed = launched(tmp_path, *JOB, *options)
    assert (codes, printed[1]) == ([command.REFUSED, command.REFUSED], ""), printed
    (said,) = printed[0].splitlines()
    assert sentence in said


@pytest.mark.slow
def test_what_one_process_does_is_done_and_told_once(tmp_path):
    for name, options, said in [
        ("plan", (*JOB[:4], "hydra.run.dir=planned"), "2 stages on 2 ranks"),
        ("train", ("--help",), "penstock train"),
        ("train", (*JOB, "--cfg", "job"), "max_steps: 2"),
    ]:
        codes, printed = launched(tmp_path, *options, name=name)
        assert (codes, printed[1]) == ([0, 0], ""), printed
        assert said in printed[0]


@pytest.mark.parametrize("option", ["nodes=2", "+node=1", "master=10.0.0.1:29500", "join_deadline=60"])
def test_options_of_the_former_rendezvous_name_torchrun(option, capfd):
    assert command.run(["train", *JOB, option]) == command.REFUSED
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith(f"penstock: {option} is gone")
    assert "torchrun --nnodes 2 --node-rank N --master-addr HOST -m penstock train" in said


@pytest.mark.parametrize(
    ("surroundings", "sentence"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "found RANK=2 WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "found RANK=0 WORLD_SIZE=two"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "rank 1 found no store to meet the others at"),
    ],
)
def test_surroundings_that_are_none_of_a_launcher_are_refused(monkeypatch, capsys, surroundings, sentence):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in surroundings.items():
        monkeypatch.setenv(name, value)
    assert command.run(["train", *JOB]) == command.REFUSED
    assert sentence in capsys.readouterr().err


@pytest.fixture
def notices(tmp_path):
    """Notices of two ranks in one store."""
    store = dist.FileStore(str(tmp_path / "store"))  # type: ignore[attr-defined]
    return [Notices(store, rank, 2) for rank in range(2)]


def test_ranks_wait_for_one_that_is_busy_however_long(notices):
    waited = threading.Thread(target=notices[1].wait_for, args=[0], kwargs={"deadline": 2}, daemon=True)
    with notices[0].busy():
        waited.start()
        waited.join(4)
        assert waited.is_alive()
    waited.join(4)
    assert not waited.is_alive()


def test_ranks_do_not_wait_for_one_that_gives_no_sign_of_life(notices):
    notices[0].store.set("busy/0", "1")
    with pytest.raises(penstock.TransportError, match="rank 1 waited for rank 0: it gave no sign of life"):
        notices[1].wait_for(0, deadline=0.5)


def test_ranks_that_start_again_share_nothing_with_those_before(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"))  # type: ignore[attr-defined]
    for _ in range(2):
        with concurrent.futures.ThreadPoolExecutor() as pool:
            joined = [pool.submit(fresh, store, rank=rank, ranks=3, deadline=20) for rank in range(3)]
            first, second, third = [one.result() for one in joined]
        assert not any(one.check(["key"]) for one in (first, second, third))
        first.set("key", "")
        assert second.check(["key"])
        assert third.check(["key"])


MESSAGE = {"plan": {}, "threads": 1, "resumes": False, "folder": "run", "record": ""}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (None, "is no plan of a run"),
        ([], "is no plan of a run"),
        ({}, "is no plan of a run"),
        (MESSAGE | {"threads": 0}, "is no plan of a run"),
        (MESSAGE | {"threads": True}, "is no plan of a run"),
        (MESSAGE | {"folder": None}, "is no plan of a run"),
        (MESSAGE, "the plan of rank 0 is not; make one anew"),
    ],
)
def test_what_is_no_message_of_rank_0_is_refused(wrong, said, tmp_path):
    with pytest.raises(penstock.PenstockError, match=said):
        torchrun._take(TrainConfig(), RunFolder(path=tmp_path / "own"), wrong)


@pytest.mark.parametrize(
    ("name", "place"),
    [("run", "run"), ("../run", "own"), ("/run", "own"), ("..", "own"), ("", "own"), (".", "own")],
)
def test_a_rank_writes_next_to_its_own_folder_only(name, place, tmp_path, monkeypatch):
    plan = penstock.Plan.__new__(penstock.Plan)
    monkeypatch.setattr(penstock.Plan, "of_json", lambda *_: plan)
    monkeypatch.setattr(penstock.Plan, "num_stages", 2)
    folder = torchrun._take(TrainConfig(), RunFolder(path=tmp_path / "own"), MESSAGE | {"folder": name})[1]
    assert folder.path == tmp_path / place
