"""``model.load_weights=``: a run whose model no process has whole, from its first values to its file."""

import re
from pathlib import Path

import pytest
import torch
from commands import SMALL, refusal, summary, trained
from safetensors.torch import load_file, save_file
from torch import nn
from valueless import plan_of, rank_writes, saved
from zoo import build

from penstock.pipeline import models
from penstock.pipeline.data import digits
from penstock.pipeline.run.build import parameters_on_meta

JOB = f"{SMALL} batch_size=50 micro_batches=3 max_steps=3 cuts=[_2] codec=raw"


def weights():
    """A file of what the model of ``JOB`` begins with."""
    torch.manual_seed(3)
    model = models.mlp(digits.load(size=8, channels=1).describe, hidden=[16, 12])
    save_file(model.state_dict(), "first.safetensors")


@pytest.mark.ranks
def test_a_run_from_a_file_is_that_of_the_model_that_was_made_whole():
    weights()
    trained(f"{JOB} ranks=2 hydra.run.dir=whole")
    trained(f"{JOB} ranks=2 hydra.run.dir=bare model.load_weights=first.safetensors")
    whole, bare = (Path(run) / "model.safetensors" for run in ("whole", "bare"))
    assert whole.read_bytes() == bare.read_bytes() != Path("first.safetensors").read_bytes()
    counts = [[stage["parameters"] for stage in summary(run)["stages"]] for run in ("whole", "bare")]
    assert counts[0] == counts[1]
    assert sum(counts[0]) == sum(tensor.numel() for tensor in load_file(bare).values())


def filled(name, tensor):
    nn.init.constant_(tensor, 0.25)


def test_a_function_gives_all_values_and_one_that_is_not_there_is_refused(capsys):
    job = f"{JOB} ranks=1 optimizer.lr=0 optimizer.weight_decay=0"
    trained(f"{job} hydra.run.dir=run model.init_weights={__name__}.filled")
    found = load_file("run/model.safetensors")
    assert found
    assert all(bool((tensor == 0.25).all()) for tensor in found.values())
    nowhere = "model.init_weights=nowhere.at_all"
    assert f"{nowhere} cannot be imported" in refusal(f"{job} {nowhere}", capsys)
    missing = refusal(f"{job} model.load_weights=nowhere.safetensors", capsys)
    assert "nowhere.safetensors cannot be read (No such file or directory)" in missing


def test_parameters_are_made_without_memory_and_buffers_as_they_are():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
            self.b.weight = self.a.weight
            own = nn.Parameter(torch.ones(3), requires_grad=False)
            self.first = self.second = own
            self.register_buffer("table", torch.arange(5), persistent=False)

    plain = nn.Module.register_parameter
    with parameters_on_meta():
        model = Net()
        with pytest.raises(ZeroDivisionError), parameters_on_meta():
            raise ZeroDivisionError
    assert nn.Module.register_parameter is plain
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.b.weight is model.a.weight
    assert model.first is model.second
    assert not model.first.requires_grad
    buffers = dict(model.named_buffers())
    assert torch.equal(buffers["table"], torch.arange(5))
    assert torch.equal(buffers["norm.running_var"], torch.ones(4))


@pytest.mark.parametrize("full", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_file_is_written_with_one_tensor_of_others_at_a_time(full, ranks, tmp_path):
    model, batches = build("gpt_tied")
    file = str(saved(model, tmp_path / "weights.safetensors"))
    plan_of(model, batches, 3, ranks=3)[0].save(tmp_path / "plan.json")
    arguments = (str(tmp_path / "plan.json"), file, str(tmp_path))
    (said, frames), *others = ranks.run(rank_writes, *arguments, full, ranks=3)
    number = len(model.state_dict())
    assert frames == [1] * number * (1 + full)
    assert others == [("", [0] * len(frames))] * 2
    path = tmp_path / "model.safetensors"
    if full:
        assert not path.exists()
        found = re.fullmatch(r"the disk is full; the trained weights are in (.*)", said)
        assert found
        path = Path(found[1])
    assert path.read_bytes() == (tmp_path / "gathered.safetensors").read_bytes()
    if full:
        path.unlink()
        path.parent.rmdir()
