"""The run folder: files that are whole or not there, and never another run's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_metrics import PLAN

from penstock import ConfigError, Plan
from penstock.conf.schema import TrainConfig
from penstock.pipeline.run_folder import RunFolder, save_json, save_model, writing


def test_the_configuration_comes_back_as_it_was_saved(tmp_path):
    folder = RunFolder(path=tmp_path)
    config = TrainConfig(model={"_target_": "my.Net", "widths": [1, 2]}, stages=2, threads=3, max_steps=7)
    config.clip.norm = 0.5
    folder.save(config, PLAN)
    again = folder.read_config()
    assert again.versions["torch"] == str(torch.__version__)
    again.versions = {}
    assert again == config
    assert Plan.load(folder.plan) == PLAN
    assert folder.plan_picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["summary.json", "results.json"])
def test_a_finished_run_is_not_written_over(name, tmp_path):
    folder = RunFolder(path=tmp_path / "run")
    folder.claim()
    folder.claim()  # nothing was finished there
    save_json(folder.path / name, {"steps": 1})
    with pytest.raises(ConfigError, match=r"run already holds a finished run"):
        folder.claim()


def test_a_folder_that_cannot_be_made_is_refused_with_its_path(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/run cannot be written .*hydra\.run\.dir"):
        RunFolder(path=tmp_path / "file" / "run").claim()


def test_claiming_clears_the_errors_of_the_run_before(tmp_path):
    folder = RunFolder(path=tmp_path)
    folder.errors.mkdir()
    (folder.errors / "rank0.json").write_text("{}")
    folder.claim()
    assert not list(folder.errors.iterdir())


def test_a_released_folder_is_gone_only_when_it_is_empty(tmp_path):
    folder = RunFolder(path=tmp_path / "run")
    folder.claim()
    folder.release()
    assert not folder.path.exists()
    folder.claim()
    folder.config.touch()
    folder.release()
    assert folder.config.exists()


def test_a_full_disk_is_one_sentence():
    with pytest.raises(ConfigError, match=r"x\.json cannot be written \(No space left on device\)"):
        with writing(Path("x.json")):
            raise OSError(28, "No space left on device")


def test_the_model_file_has_every_name_and_plain_strides(tmp_path):
    tied = torch.arange(6.0).view(2, 3)
    weights = {"token": tied, "head": tied, "turned": torch.arange(6.0).view(2, 3).T}
    save_model(tmp_path / "model.safetensors", weights)
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(loaded[name], weight)
