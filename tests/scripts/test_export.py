"""``penstock export``: the model of a checkpoint, as a finished run would have written it."""

import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from cases import Case, pipeline_with_batches
from commands import answer
from reference import same_tree
from safetensors.torch import load_file
from zoo import build

import penstock
from penstock.scripts import command
from penstock.stages import safetensors_io

TIED = Case(model="gpt_tied", cuts=3, optimizer="adamw", steps=3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run folder with two checkpoints, and the states they were made of."""
    torch.manual_seed(0)
    run = tmp_path_factory.mktemp("trained") / "run"
    pipe, batches = pipeline_with_batches(TIED)
    states = {}
    for step, batch in enumerate(batches[:2], start=1):
        pipe.step(*batch)
        penstock.save(pipe, run / "checkpoints" / f"step_{step:08}")
        states[step] = {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}
    return run, states


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained[0], "run")
    return trained[1]


def harm(step):
    part = next(Path(f"run/checkpoints/step_{step:08}").glob("rank_0_*"))
    data = bytearray(part.read_bytes())
    length = 8 + int.from_bytes(data[:8], "little")
    data[length + json.loads(data[8:length])["model/token.weight"]["data_offsets"][0]] ^= 1
    part.write_bytes(data)


def test_the_file_is_that_of_a_finished_run_and_loads_strictly(run, capfd):
    code, out, err = answer("export run", capfd)
    assert (code, err) == (0, "")
    assert "model_step_2.safetensors: the model behind step 2, from run/checkpoints/step_00000002" in out
    found = load_file("model_step_2.safetensors")
    assert same_tree(found, run[2])
    safetensors_io.write_tensors(Path("finished.safetensors"), run[2])
    assert Path("finished.safetensors").read_bytes() == Path("model_step_2.safetensors").read_bytes()
    model, _ = build(TIED.model, TIED.dtype, 1)
    tied = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert len(tied) > len(list(model.parameters()))
    model.load_state_dict(found, strict=True)


def test_one_checkpoint_and_one_output_are_named(run, capfd):
    code, out, _ = answer("export run/checkpoints/step_00000001 output=one.safetensors", capfd)
    assert code == 0
    assert out.startswith("one.safetensors: the model behind step 1")
    assert same_tree(load_file("one.safetensors"), run[1])


def test_a_damaged_checkpoint_is_told_and_the_one_before_taken(run, capfd):
    harm(2)
    code, out, err = answer("export run", capfd)
    assert code == 0
    assert "is damaged" in err
    assert "the checkpoint before is taken" in err
    assert out.startswith("model_step_1.safetensors: the model behind step 1")
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["model_step_1.safetensors", "run"]
    harm(1)
    code, out, err = answer("export run output=new.safetensors", capfd)
    assert (code, out) == (command.REFUSED, "")
    assert "is damaged" in err.splitlines()[-1]
    assert not list(Path.cwd().glob("*.part"))
    assert not Path("new.safetensors").exists()


def test_no_more_than_one_tensor_is_held(run, capfd, monkeypatch):
    read, held = safetensors_io.TensorFile.read, []

    def watched(file, name):
        assert [one for one in held if one() is not None] == []
        tensor = read(file, name)
        held.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(safetensors_io.TensorFile, "read", watched)
    assert answer("export run", capfd)[0] == 0
    assert len(held) == len(run[2])


@pytest.mark.parametrize(
    ("typed", "subject"),
    [
        ("nowhere", "nowhere holds no checkpoint"),
        ("run", "model_step_2.safetensors is there already and is not written over"),
        ("run output=there", "there is there already and is not written over"),
        ("run output=no/folder/a", "no/folder/a cannot be written (No such file or directory)"),
    ],
)
def test_what_cannot_be_is_one_sentence(run, capfd, typed, subject):
    files = [Path("there"), Path("model_step_2.safetensors")]
    for file in files:
        file.write_text("mine")
    code, out, error = answer(f"export {typed}", capfd)
    assert (code, out, error.count("\n")) == (command.REFUSED, "", 1)
    assert subject in error
    assert [file.read_text() for file in files] == ["mine", "mine"]
