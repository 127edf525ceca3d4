"""Law L6 with real kills: a run that is killed at any moment goes on with the bits of one that was not.

The moments are drawn with a seed from all that an undisturbed run does: instructions, evaluations, bytes
that a part is made of, names that are given, old files that go."""

import json
import random
import signal

import kills
import pytest
from commands import losses, summary
from reference import same_bits

from penstock.pipeline.checkpoint import Checkpoint

KINDS = ("B", "tensor", "index", "sync", "remove", "evaluation", "F", "U", "part")
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nobody disturbed, and of a second one on two ranks how often what came."""
    folder = tmp_path_factory.mktemp("whole")
    for ranks in (1, 2):
        codes, said = kills.run(folder, f"hydra.run.dir=run_{ranks}", ranks=ranks, counts=f"counts_{ranks}")
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
    codes, said = kills.run(folder, f"{options} hydra.run.dir=run resume=auto", ranks=ranks)
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
    codes, said = kills.run(tmp_path, "hydra.run.dir=run", ranks=ranks, kill=kill)
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
    codes, said = kills.run(tmp_path, by_time, kill=(0, "U", 6))
    assert codes == [-signal.SIGKILL], said
    resumed, said = goes_on(tmp_path, whole, "stages=3 checkpoint.minutes=60")
    assert 3 <= resumed["step"] <= 5
    assert resumed["repeated_steps"] == 5 - resumed["step"]
