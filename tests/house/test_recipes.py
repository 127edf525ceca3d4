"""The recipes of CONTRIBUTING.md, executed: each adds a toy from a folder of its own, and trains with it.

A recipe that needs more than its files and the row it names fails here; rows are put back after each test."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import law
import pytest
import replay
import streams
import torch
from cases import Case
from checkout import ROOT
from reference import same_bits
from streams import StreamCase
from torch import nn
from zoo import ZOO

from penstock.compression import names
from penstock.compression.codec import CODECS, decode, encode
from penstock.compression.codec_cost import candidates, trial
from penstock.pipeline.schedules import SCHEDULES
from penstock.scripts import command
from penstock.stages.memory.stores import STORES
from penstock.stages.plan import plan
from penstock.stages.weight_versions.policies import POLICIES

RECIPES = {  # of what: the files to write or to edit, the table's own among them
    "codec": {"compression/NAME.py", "compression/registry.py", "compression/names.py"},
    "schedule": {"pipeline/schedules/NAME.py", "pipeline/schedules/__init__.py"},
    "policy of the weights": {"stages/weight_versions/policies.py"},
    "model": {"pipeline/models.py", "conf/model/NAME.yaml"},
    "tier": {"stages/memory/stores.py", "stages/memory/byte_budget.py", "pipeline/partition/choose.py"},
}


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Writes the text of a module into a folder and imports it from there."""

    def made(text):
        (tmp_path / "toy.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "toy", raising=False)
        return importlib.import_module("toy")

    yield made
    sys.modules.pop("toy", None)


CODEC = '''
"""The words without the zeros at their end."""

import ctypes

from penstock.compression.frame import FLOATS
from penstock.compression.raw import Packed, Raw

packed = []


class Trim:
    name, dtypes = "trim", FLOATS

    def max_bytes(self, num_words, bits):
        return num_words * bits // 8

    def fits(self, num_words, bits, num_bytes):
        size = bits // 8
        return num_bytes % size == 0 and size <= num_bytes < num_words * size

    def pack(self, words, out):
        size, data = words.bits // 8, ctypes.string_at(words.address, words.num_words * words.bits // 8)
        kept = max(1, -(-len(data.rstrip(bytes(1))) // size)) * size
        if kept == len(data):
            return Raw().pack(words, out)
        packed.append(kept)
        ctypes.memmove(out, data, kept)
        return Packed(self.name, kept)

    def unpack(self, payload, num_bytes, out):
        ctypes.memmove(out.address, payload, num_bytes)
        ctypes.memset(out.address + num_bytes, 0, out.num_words * out.bits // 8 - num_bytes)
'''


@pytest.fixture
def trim(toy, monkeypatch):
    module = toy(CODEC)
    monkeypatch.setitem(CODECS, "trim", module.Trim())
    monkeypatch.setattr(names, "CODEC_NAMES", (*names.CODEC_NAMES, "trim"))
    monkeypatch.setitem(ZOO, "zeros_at_the_end", (zeros_at_the_end, ZOO["mlp"][1]))
    return module


def zeros_at_the_end():
    """A model between whose stages every tensor ends with two zeros."""
    linear = nn.Linear(192, 16)
    with torch.no_grad():
        linear.bias[-2:] = -1000
    return nn.Sequential(nn.Flatten(1), linear, nn.ReLU(), nn.Linear(16, 10))


def test_a_codec_that_was_added_trains_with_the_bits_of_the_plain_loop(trim):
    tensor = torch.tensor([1.5, -0.0, torch.nan, 0.0, 0.0, 0.0, 0.0, 0.0])
    frame = encode(tensor, "trim")
    assert frame.numel() < encode(tensor, "raw").numel()
    assert same_bits(decode(frame), tensor)
    trim.packed.clear()
    assert law.differences(Case(model="zeros_at_the_end", cuts="every", codec="trim", steps=2)) == []
    assert trim.packed


def test_auto_tries_a_codec_on_the_dtypes_that_it_declares(trim, monkeypatch):
    assert "trim" in candidates(torch.bfloat16)
    assert "trim" not in candidates(torch.int64)
    tried = []

    def watched(tensor, codec, *rest, **settings):
        tried.append(codec)
        return trial(tensor, codec, *rest, **settings)

    monkeypatch.setattr("penstock.pipeline.runtime.auto_codec.trial", watched)
    assert law.differences(Case(model="zeros_at_the_end", cuts="every", codec="auto", steps=4)) == []
    assert "trim" in tried


SCHEDULE = '''
"""GPipe by pairs: at most two micro-batches in flight."""

from penstock.pipeline.schedules.building_blocks import backward, check, forward


def pairs(stages_of_rank, num_micro_batches, *, extra_in_flight=0):
    # rank 0   F0 F1 .. .. B0 B1 F2 ..
    # rank 1   .. F0 F1 B0 B1 .. .. F2
    check(stages_of_rank, num_micro_batches, extra_in_flight)
    return [
        [
            step
            for first in range(0, num_micro_batches, 2)
            for half in (forward, backward)
            for index in range(first, min(first + 2, num_micro_batches))
            for step in half(stages, index)
        ]
        for stages in stages_of_rank
    ]
'''


def test_a_schedule_that_was_added_trains_with_the_bits_of_the_plain_loop(toy, monkeypatch):
    monkeypatch.setitem(SCHEDULES, "pairs", toy(SCHEDULE).pairs)
    options: list[dict[str, Any]] = [{"micro_batches": 5}, {"micro_batches": 4, "tier": "packed"}]
    for more in options:
        assert law.differences(Case(model="mlp", schedule="pairs", cuts=3, **more)) == []


POLICY = """
from penstock.stages.weight_versions.policies import VersionRule

BEHIND = VersionRule(delay=lambda stage, stages: stages - stage)
"""


@pytest.mark.parametrize("weights_tier", ["device", "packed"])
def test_a_policy_of_the_weights_that_was_added_equals_its_replay(toy, monkeypatch, weights_tier):
    """One version older than ``stashed``, by the closed form that the replay is told of apart."""
    monkeypatch.setitem(POLICIES, "behind", toy(POLICY).BEHIND)
    known = replay.version_of

    def version_of(policy, m, *, stage, num_stages, batch=0):
        if policy == "behind":
            return max(0, m - (num_stages - stage))
        return known(policy, m, stage=stage, num_stages=num_stages, batch=batch)

    monkeypatch.setattr(replay, "version_of", version_of)
    case = StreamCase(model="mlp", weights="behind", cuts=3, steps=4, weights_tier=weights_tier)
    assert streams.differences(case) == []


MODEL = '''
from torch import nn


def narrow(describe, *, width=8):
    """Return a network of two linear layers: (batch, *input_shape) -> (batch, num_classes)."""
    size = describe.input_shape[0] * describe.input_shape[1] * describe.input_shape[2]
    return nn.Sequential(
        nn.Flatten(), nn.Linear(size, width), nn.Tanh(), nn.Linear(width, describe.num_classes)
    )
'''


def test_a_model_that_was_added_trains_by_its_name(toy, tmp_path, monkeypatch):
    toy(MODEL)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "narrow.yaml").write_text("_target_: toy.narrow\nwidth: 8\nleaves: []\n")
    monkeypatch.chdir(tmp_path)
    job = (
        "model=narrow model.width=6 data.size=8 data.channels=1 batch_size=40 micro_batches=3 max_steps=3"
        " ranks=1 stages=2 optimizer.lr=0.1 optimizer.momentum=0.9 optimizer.weight_decay=0"
        " optimizer.nesterov=false scheduler=none seed=5 threads=1 hydra.run.dir=run"
    )
    assert command.run(["train", "--config-dir", str(tmp_path), *job.split()]) == 0
    assert Path("run/summary.json").exists()


TIER = """
def attic_of(store):
    class Attic(store):
        put_away = 0

        def admit(self, key, num_bytes, **how):
            Attic.put_away += 1
            return super().admit(key, num_bytes, **how)

        def put(self, key, frame):
            Attic.put_away += 1
            super().put(key, frame)

    return Attic
"""


def test_a_tier_that_was_added_holds_saved_tensors_and_idle_versions(toy, monkeypatch):
    attic = toy(TIER).attic_of(STORES["packed"])
    monkeypatch.setitem(STORES, "attic", attic)
    monkeypatch.setattr(plan, "TIERS", (*plan.TIERS, "attic"))
    assert law.differences(Case(model="mlp", tier="attic", steps=2)) == []
    saved = attic.put_away
    assert saved > 0
    assert streams.differences(StreamCase(model="mlp", weights_tier="attic", cuts=3, steps=3)) == []
    assert attic.put_away > saved


def test_every_recipe_is_executed_and_names_these_files():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    recipes = dict(re.findall(r"^\*\*Add a ([\w ]+)\.\*\*(.*?)(?=\n\n)", text, re.DOTALL | re.MULTILINE))
    assert set(recipes) == set(RECIPES)
    for what, recipe in recipes.items():
        named = set(re.findall(r"`((?:compression|conf|pipeline|stages)/[\w/]+\.(?:py|yaml))`", recipe))
        assert RECIPES[what] <= named, what
        assert all((ROOT / name).is_file() or "NAME" in name for name in named), what
