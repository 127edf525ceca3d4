"""``penstock.Loader`` and the newest checkpoint: a loop of one's own that goes on within an epoch."""

import copy
import shutil
from typing import Any

import pytest
import torch
from reference import same_tree
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import penstock
from penstock.pipeline.data.samples import samples_of


class Augmented(torch.utils.data.Dataset):
    """Samples that draw."""

    def __len__(self):
        return 23

    def __getitem__(self, index):
        return torch.rand(6) + index, index % 3


def test_its_batches_are_those_of_a_run_whoever_loads_and_wherever_it_begins():
    samples = samples_of(Augmented(), target="own", batch_size=4)
    wanted = [[*samples.batches("train", batch_size=4, seed=5, epoch=epoch)] for epoch in range(2)]
    for workers in (0, 2):
        loader = penstock.Loader(Augmented(), 4, 5, workers=workers)
        assert len(loader) == len(wanted[0]) == 5
        assert same_tree([[*loader] for _ in range(2)], wanted)
        assert (loader.epoch, loader.batch) == (2, 0)
    for done in range(6):
        loader, other = (penstock.Loader(DataLoader(Augmented(), 4), 4, 5) for _ in range(2))
        _ = [next(batches) for batches in [iter(loader)] for _ in range(done)]
        other.load_state_dict(loader.state_dict())
        assert same_tree([*other], wanted[0][done:])
        assert same_tree([*other], wanted[1])
    assert len(penstock.Loader(Augmented(), 4, drop_last=False)) == 6
    with pytest.raises(penstock.ConfigError, match=r"found seed=6, and the state is of seed=5"):
        penstock.Loader(Augmented(), 4, 6).load_state_dict(penstock.Loader(Augmented(), 4, 5).state_dict())
    with pytest.raises(penstock.ConfigError, match="leaves no batch of 23 samples"):
        penstock.Loader(Augmented(), 24)
    with pytest.raises(penstock.ConfigError, match="takes a data set, found a list"):
        penstock.Loader([1, 2], 1)
    wrong: Any
    for wrong in ({"workers": -1}, {"seed": "a"}):
        with pytest.raises(penstock.ConfigError, match="must be a whole number of at least 0"):
            penstock.Loader(Augmented(), 4, **wrong)


def test_a_loop_goes_on_from_the_newest_checkpoint_within_an_epoch(tmp_path):
    data = TensorDataset(torch.randn(20, 6), torch.randint(3, (20,)))
    plain = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))

    def train(world, model, folder, stop, begin):
        made = {"loss": nn.functional.cross_entropy, "optimizer": torch.optim.Adam, "world": world}
        pipe = penstock.Pipeline.of(model, (torch.zeros(2, 6),), stages=2, micro_batches=2, **made)
        loader, losses = penstock.Loader(data, 4, 7), []
        if found := begin or penstock.newest(folder):
            loader.load_state_dict(penstock.load(pipe, found)["loader"])
        while loader.epoch < 2:
            for inputs, targets in loader:
                losses.append(pipe.step(inputs, targets).loss)
                penstock.save(pipe, folder, notes={"loader": loader.state_dict()}, keep=2)
                if pipe.num_steps == stop:
                    return losses
        return losses

    def run(folder, stop=None, begin=None):
        models, path = [copy.deepcopy(plain) for _ in range(2)], tmp_path / folder
        return penstock.in_threads(lambda w: train(w, models[w.rank], path, stop, begin), ranks=2)[0]

    whole = run("whole")
    assert len(whole) == 10
    assert {path.name for path in (tmp_path / "whole").iterdir()} == {"step_00000009", "step_00000010"}
    for stop in (5, 7):
        assert run(f"at {stop}", stop) + run(f"at {stop}") == whole
    shutil.copytree(tmp_path / "at 7/step_00000010", tmp_path / "at 7/step_00000099")  # of another past
    (tmp_path / "at 7/step_00000008").mkdir()  # it was never whole
    assert run("at 7", begin=tmp_path / "at 7/step_00000009") == whole[9:]
    assert {path.name for path in (tmp_path / "at 7").iterdir()} == {"step_00000009", "step_00000010"}
    assert penstock.newest(tmp_path / "nowhere") is None
