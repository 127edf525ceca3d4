"""Law L6 with real kills: a run that is killed at any moment goes on with the bits of one that was not.

The moments are drawn with a seed from all that an undisturbed run does: instructions, evaluations, bytes
that a part is made of, names that are given, old files that go. Runs are processes forked from one that has
torch already, and joined as a launcher such as torchrun joins them, so that they take a second or two. The
one that is to die counts what it does (``KINDS``), and sends itself a SIGKILL instead of the n-th of a kind:
nothing of it is in the code that is tested."""

import collections
import functools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from commands import OWN, losses, summary
from processes import free_port
from ranks import context
from reference import same_bits

from penstock.pipeline.checkpoint import Checkpoint

KINDS = ("B", "tensor", "index", "sync", "remove", "evaluation", "F", "U", "part")
"""Instructions; bytes of a tensor read for its part; a file or folder told to the disk; a part and an index
that get their names; something old that is removed."""

NUM_POINTS, EARLY = 30, 18
LATER = (
    "stages=1",
    "stages=2 schedule=gpipe memory.tier=packed",
    "stages=3 schedule=zb_h1",
    "stages=4 codec=raw",
    "ranks=2 stages=4 schedule=interleaved",
    "stages=2 memory.tier=host extra_in_flight=1",
    "ranks=2 schedule=gpipe codec=zero_value",
    "ranks=3 schedule=zb_h1",
    "ranks=4 stages=4",
)
"""On what else a run goes on: other stages, ranks, schedules, tiers and codecs."""

GRACE = 3.0  # seconds that the others may take to notice a rank that was killed
LIMIT = 180.0  # seconds for a run

DEEP = """


class Deep(torch.nn.Sequential):
    def __init__(self, num_classes):
        super().__init__(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Dropout(0.2),
            torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.Dropout(0.2),
            torch.nn.Linear(8, num_classes),
        )
"""
JOB = (
    "model._target_=own.Deep data._target_=own.samples batch_size=20 micro_batches=4 epochs=3 seed=3"
    " optimizer=adamw scheduler=cosine clip.norm=1 checkpoint.every=2 checkpoint.keep=2 deadline=30"
    " extra_in_flight=0 threads=1"
)
"""Nine steps, evaluated after every third; the last checkpoint is behind the eighth."""


def run(folder, options, *, ranks=1, kill=None, counts=None):
    """Train in ``folder``; returns exit codes by rank (negative for a signal), and what was said.

    Args: kill: (rank, kind, n), the moment at which a rank dies; counts: a file for how often each kind
          came, by rank."""
    (Path(folder) / "own.py").write_text(OWN + DEEP)
    surroundings = _launched(ranks) if ranks > 1 else {}
    words = f"{JOB} ranks={ranks} {options}".split()
    processes = [
        context.Process(
            target=_work,
            args=(str(folder), words, rank, surroundings, kill and kill[0] == rank and kill[1:], counts),
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    until = time.monotonic() + LIMIT
    while any(process.is_alive() for process in processes) and time.monotonic() < until:
        time.sleep(0.02)
        if any(process.exitcode for process in processes):
            until = min(until, time.monotonic() + GRACE)
    for process in processes:
        process.kill()
        process.join()
    said = "".join((Path(folder) / f"said_{rank}").read_text() for rank in range(ranks))
    return [process.exitcode for process in processes], said


def _launched(ranks):
    numbers = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": free_port()}
    names = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    return {name: str(value) for name, value in numbers.items()} | names


def _work(folder, words, rank, surroundings, kill, counts):
    from penstock.scripts import command

    os.chdir(folder)
    sys.path.insert(0, folder)  # as `python -m` does
    file = os.open(f"said_{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if surroundings:
        os.environ.update(surroundings, RANK=str(rank), LOCAL_RANK=str(rank))
    seen = watch(kill)
    code = command.run(["train", *words])
    if counts:
        Path(f"{counts}_{rank}").write_text(json.dumps(seen))
    sys.stdout.flush()
    os._exit(code)


def watch(kill):
    """Count what this process does from now on, and die instead of the n-th of a kind; returns the counts."""
    from penstock.pipeline.runtime.engine import Engine
    from penstock.stages import files, safetensors_io

    seen = collections.Counter()

    def happens(kind):
        seen[kind] += 1
        if kill and (kind, seen[kind]) == tuple(kill):
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(kind, function):
        @functools.wraps(function)
        def call(*args, **options):
            happens(kind)
            return function(*args, **options)

        return call

    for name, kind in {"_forward": "F", "_backward": "B", "_update": "U", "_evaluate": "evaluation"}.items():
        setattr(Engine, name, counted(kind, getattr(Engine, name)))
    safetensors_io.bytes_of = counted("tensor", safetensors_io.bytes_of)
    files.sync = counted("sync", files.sync)

    def hook(event, args):
        if event == "os.rename" and "/checkpoints/" in (target := str(args[1])):
            happens("index" if target.endswith("index.json") else "part")
        elif event in ("os.remove", "os.rmdir") and ("/checkpoints/" in str(args[0]) or args[1] != -1):
            happens("remove")  # by its path, or in an open folder, as shutil.rmtree does

    sys.addaudithook(hook)
    return seen


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nobody disturbed, and of a second one on two ranks how often what came."""
    folder = tmp_path_factory.mktemp("whole")
    for ranks in (1, 2):
        codes, said = run(folder, f"hydra.run.dir=run_{ranks}", ranks=ranks, counts=f"counts_{ranks}")
        assert codes == [0] * ranks, said
    same_run(folder / "run_1", folder / "run_2")
    return folder


def same_run(ours, theirs):
    """Assert that two runs ended with the same model, the same last checkpoint and the same losses."""
    assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    (step, a), (other, b) = (last_state(folder) for folder in (ours, theirs))
    assert step == other
    assert a.keys() == b.keys()
    assert [name for name in a if not same(a[name], b[name])] == []
    assert losses(ours) == losses(theirs)


def same(a, b):
    return a == b if isinstance(a, str) else same_bits(a, b)


def last_state(folder):
    """The step of the newest checkpoint; its tensors by name, and all that it says besides."""
    checkpoint = Checkpoint(max((folder / "checkpoints").iterdir()))
    found = {}
    for part in checkpoint.parts():
        found |= {name: part.read(name) for name in part.names}
        found |= {f"keys of {key}": name for key, name in part.notes["keys"].items()}
        found |= {f"state of {name}": json.dumps(kept) for name, kept in part.notes["optimizer"].items()}
        found["scheduler"] = json.dumps(part.notes["scheduler"])
    return checkpoint.step, found


def check_what_is_left(folder, whole):
    """Whatever has its name is whole, and the run did not end."""
    assert not (folder / "summary.json").exists()
    if (model := folder / "model.safetensors").exists():  # killed on the last steps to its end
        assert model.read_bytes() == (whole / "run_1" / "model.safetensors").read_bytes()
    for index in folder.glob("checkpoints/*/index.json"):
        for part in Checkpoint(index.parent).parts():
            for name in part.names:
                part.read(name)


def goes_on(folder, whole, later, *, killed_at=""):
    ranks = int(later.partition("ranks=")[2][:1] or 1)
    options = later.replace(f"ranks={ranks}", "")
    codes, said = run(folder, f"{options} hydra.run.dir=run resume=auto", ranks=ranks)
    assert codes == [0] * ranks, f"{killed_at} {later}: {said}"
    same_run(folder / "run", whole / "run_1")
    assert not list((folder / "run").rglob("*.part"))
    ended = summary(folder / "run")
    assert ended["steps"] == 9
    return ended["resumed_from"], said


def point(number, whole):
    """The ranks of a run, and who dies when."""
    chance = random.Random(number)
    kind, ranks = KINDS[number % len(KINDS)], 2 if number % 3 == 0 else 1
    counts = [json.loads((whole / f"counts_{ranks}_{rank}").read_text()) for rank in range(ranks)]
    rank = chance.choice([rank for rank in range(ranks) if counts[rank].get(kind)])
    count = counts[rank][kind]
    least = 1 if number >= EARLY else count // 3 + 1  # else there may be no checkpoint yet
    return ranks, (rank, kind, chance.randint(least, count))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("number", range(NUM_POINTS))
def test_a_run_that_was_killed_at_any_moment_ends_with_the_same_bits(number, whole, tmp_path):
    ranks, kill = point(number, whole)
    codes, said = run(tmp_path, "hydra.run.dir=run", ranks=ranks, kill=kill)
    assert codes[kill[0]] == -signal.SIGKILL, said
    check_what_is_left(tmp_path / "run", whole)
    later = LATER[(number + number // len(KINDS)) % len(LATER)]
    resumed, said = goes_on(tmp_path, whole, later, killed_at=f"{kill}")
    if resumed and resumed["repeated_steps"]:
        assert resumed["repeated_steps"] <= 4  # two to the next checkpoint, and two while that is written
        assert "done again" in said


@pytest.mark.ranks
@pytest.mark.slow
def test_checkpoints_by_the_clock_go_on_with_the_same_bits(whole, tmp_path):
    by_time = "checkpoint.every=null checkpoint.minutes=1e-5 hydra.run.dir=run"
    codes, said = run(tmp_path, by_time, kill=(0, "U", 6))
    assert codes == [-signal.SIGKILL], said
    resumed, said = goes_on(tmp_path, whole, "stages=3 checkpoint.minutes=60")
    assert 3 <= resumed["step"] <= 5
    assert resumed["repeated_steps"] == 5 - resumed["step"]
