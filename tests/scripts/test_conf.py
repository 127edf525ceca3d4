"""The options: their rules, their defaults, and that what the YAML files list is what the targets take."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import pkgutil
import re
from importlib import resources
from pathlib import Path

import pytest
from hydra._internal.utils import get_args_parser
from omegaconf import OmegaConf

from penstock import ConfigError
from penstock.compression import names
from penstock.compression.codec import CODECS, LOSSY_CODECS
from penstock.conf import schema
from penstock.conf.bench_codecs import BenchCodecsConfig
from penstock.conf.groups import OF_THE_RUN
from penstock.conf.parts import ClipConfig
from penstock.conf.planning import PlanningConfig
from penstock.conf.schema import PlanConfig, TrainConfig
from penstock.pipeline.schedules import SCHEDULES
from penstock.pipeline.schedules.placement import layout
from penstock.scripts import flags, usage
from penstock.scripts.bench import codecs_subjects, topics

CONF = Path(str(resources.files("penstock.conf")))
GROUPS = ("model", "data", "optimizer", "scheduler")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"ranks": 0}, "ranks=0"),
        ({"ranks": -2}, "ranks=-2"),
        ({"stages": 0}, "stages=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"micro_batches": 0}, "micro_batches=0"),
        ({"threads": 0}, "threads=0"),
        ({"extra_in_flight": -1}, "extra_in_flight=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"epochs": 0}, "epochs=0"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"deadline": 0.0}, "deadline=0.0"),
        ({"deadline": float("nan")}, "deadline=nan"),
        ({"device": "tpu"}, "device=tpu is not known; known are cpu, cuda, cuda:N and auto"),
        ({"ranks": 3, "stages": 2}, "ranks=3 is more than the 2 stages of stages=2"),
        ({"batch_size": 4}, "batch_size=4 is too small for micro_batches=8"),
        ({"ranks": 3, "cuts": ["a"]}, "ranks=3 is more than the 2 stages"),
        ({"stages": 3, "cuts": ["a"]}, "stages=3 contradicts cuts=[a]"),
        ({"plan": "p.json", "cuts": ["a"]}, "plan=p.json already decides the cuts"),
        ({"plan": "p.json", "program": "p.txt", "schedule": "custom"}, "drop program=p.txt"),
        ({"program": "p.txt"}, "program=p.txt is for schedule=custom, found schedule=1f1b"),
        ({"autocast": "float32"}, "autocast=float32 is not known; known are bfloat16, float16"),
        ({"loss_scale": "static"}, "loss_scale=static must be dynamic or a number above 0"),
        ({"loss_scale": 0}, "loss_scale=0 "),
        ({"loss_scale": True}, "loss_scale=True "),
        ({"loss_scale": float("inf")}, "loss_scale=inf "),
        (
            {"schedule": "async_1f1b", "clip": ClipConfig(norm=1.0)},
            "clip.norm=1.0 needs one; add clip.scope=stage",
        ),
        ({"schedule": "async_1f1b", "loss_scale": "dynamic"}, "give a number: loss_scale=1024"),
    ],
)
def test_an_option_out_of_its_range_is_refused_by_name_and_value(given, told):
    with pytest.raises(ConfigError) as refused:
        TrainConfig(**given)
    assert told in str(refused.value)


def test_clipping_to_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"clip\.norm=0"):
        ClipConfig(norm=0.0)


def test_what_is_clipped_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"clip\.scope=rank is not known; known are global, stage"):
        ClipConfig(scope="rank")


def test_densities_lie_between_0_and_1():
    with pytest.raises(ConfigError, match=r"found 1\.5"):
        BenchCodecsConfig(densities=[0.5, 1.5])


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"ranks": 1},
        {"stages": 5},
        {"cuts": ["a", "b"]},
        {"cuts": ["a"], "stages": 2},
        {"ranks": 1, "cuts": []},
        {"schedule": "custom", "program": "p.txt"},
        {"schedule": "custom", "plan": "p.json"},
        {"schedule": "async_1f1b", "clip": ClipConfig(norm=1.0, scope="stage"), "loss_scale": 1024},
        {"autocast": "float16", "loss_scale": "dynamic"},
    ],
)
def test_what_fits_together_is_accepted(given):
    assert isinstance(TrainConfig(**given), PlanConfig)


def test_what_the_schema_lists_is_what_there_is():
    """The schema is read without torch, so it lists the names of its own accord."""
    (line,) = [line for line in (PlanConfig.__doc__ or "").splitlines() if "schedule:" in line]
    assert re.findall(r"\w+", line.partition("schedule:")[2].partition(";")[0]) == [*SCHEDULES]
    assert {*schema.TWO_A_RANK} == {name for name in SCHEDULES if layout(name) in ("loop", "vee")}


def test_names_that_are_known_before_torch_are_those_there_are():
    assert (names.lossless(), names.LOSSY) == (tuple(CODECS), tuple(LOSSY_CODECS))
    assert topics.CLASSES == tuple(codecs_subjects.CLASSES)


def test_our_table_of_flags_is_that_of_hydra():
    actions = [action for action in get_args_parser()._actions if action.option_strings]
    assert {action.option_strings[0] for action in actions} == {*flags.FLAGS}
    pairs = [action.option_strings for action in actions if action.option_strings[1:]]
    assert {short: long for long, short in pairs} == flags.SHORT
    assert {action.option_strings[0] for action in actions if action.nargs == 0} == {*flags.ALONE}
    few = {action.option_strings[0]: tuple(action.choices) for action in actions if action.choices}
    assert few == {"--cfg": flags.VALUED["--cfg"], **flags.MAY_HAVE_A_VALUE}


def test_the_defaults_are_the_published_ones():
    config = TrainConfig()
    assert (config.ranks, config.stages, config.batch_size, config.micro_batches) == (2, None, 128, 8)
    assert (config.schedule, config.codec, config.extra_in_flight) == ("1f1b", "auto", "auto")
    assert (config.weights, config.prediction, config.clip.scope) == ("latest", False, "global")
    assert (config.autocast, config.loss_scale) == (None, None)
    assert config.deterministic
    assert config.deadline == 60.0


@pytest.mark.parametrize(
    "file", [f for group in GROUPS for f in sorted((CONF / group).glob("*.yaml"))], ids=str
)
def test_a_group_lists_what_its_target_takes_with_the_same_defaults(file):
    options = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(options, dict)
    for name in itertools.chain(*OF_THE_RUN.values()):
        options.pop(name, None)
    target = options.pop("_target_", None)
    if target in (None, "???"):  # none and own
        assert not options
        return
    known = inspect.signature(pkgutil.resolve_name(target)).parameters
    assert options.keys() <= known.keys()
    if target.startswith("penstock."):
        taken = {name: one.default for name, one in known.items() if one.kind is one.KEYWORD_ONLY}
        taken = {name: list(v) if isinstance(v, tuple) else v for name, v in taken.items()}
        assert options == {name: "???" if v is inspect.Parameter.empty else v for name, v in taken.items()}


@pytest.mark.parametrize("schema", [PlanConfig, PlanningConfig, TrainConfig, BenchCodecsConfig])
def test_every_option_has_its_meaning_in_the_help(schema):
    meanings = usage.meanings(schema)
    assert meanings.keys() == {field.name for field in dataclasses.fields(schema)}
    text = usage.text("command", schema)
    for line in text.splitlines():
        assert len(line) <= 120
    for name in ("ranks=2 ", "cuts=null", "memory.device=null", "model=NAME", "extra_in_flight=auto"):
        assert name in text
    assert "digits, fake, fashion_mnist, image_folder, own, text" in " ".join(text.split())
