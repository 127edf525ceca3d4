"""The options: their rules, their defaults, and that what the YAML files list is what the targets take."""

import dataclasses
import inspect
import itertools
import pkgutil
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from penstock import ConfigError, PenstockError
from penstock.compression import names
from penstock.compression.codec import CODECS, LOSSY_CODECS
from penstock.conf import schema
from penstock.conf.groups import OF_THE_RUN
from penstock.conf.schema import (
    CheckpointConfig,
    ClipConfig,
    MemoryConfig,
    PlanConfig,
    PlanningConfig,
    ReplicasConfig,
    TrainConfig,
)
from penstock.pipeline.data.samples import Description
from penstock.pipeline.run import build, early
from penstock.pipeline.schedules import SCHEDULES
from penstock.pipeline.schedules.building_blocks import layout
from penstock.scripts import command_line

CONF = Path(str(resources.files("penstock.conf")))
SAMPLES, SGD = "penstock.pipeline.data", "torch.optim.SGD"
WARMUP = "penstock.pipeline.run.schedulers.warmup"
ONE_CYCLE = "torch.optim.lr_scheduler.OneCycleLR"
GROUPS = ("model", "data", "loss", "optimizer", "scheduler")


def count(number: Any, **more: Any) -> dict[str, Any]:
    return {"replicas": {"count": number, **more}}


STREAMS = {"schedule": "async_1f1b"}
KEPT: dict[str, Any] = {"checkpoint": {"every": 1}}
AGAIN = KEPT | {"min_ranks": 1, "max_restarts": 1}
THREADS = {"replicas": {"threads": True}}
# Options, and the subject of the sentence that refuses them: by the dataclasses of conf/, ...
RULES = [
    *(({name: 0}, f"{name}=0") for name in ("ranks", "stages", "batch_size", "micro_batches", "threads")),
    *(({name: 0}, f"{name}=0") for name in ("epochs", "max_steps", "deadline")),
    ({"ranks": -2}, "ranks=-2"),
    ({"extra_in_flight": -1}, "extra_in_flight=-1"),
    ({"seed": -1}, "seed=-1"),
    ({"deadline": float("nan")}, "deadline=nan"),
    *(
        ({"recompute": one}, "must be true, false or a list of modules")
        for one in ("layer3", [""], [], [1.5], None)
    ),
    ({"device": "tpu"}, "device=tpu is not known; known are cpu, cuda, cuda:N and auto"),
    ({"device": ["cpu", "tpu"]}, "device=tpu is not known; known are cpu, cuda, cuda:N and auto"),
    ({"batch_size": 4}, "batch_size=4 is too small for micro_batches=8"),
    ({"plan": "p.json", "cuts": ["a"]}, "plan=p.json already decides the cuts"),
    ({"plan": "p.json", "program": "p.txt", "schedule": "custom"}, "drop program=p.txt"),
    ({"program": "p.txt"}, "program=p.txt is for schedule=custom, found schedule=1f1b"),
    ({"autocast": "float32"}, "autocast=float32 is not known; known are bfloat16, float16"),
    *(({"loss_scale": one}, f"loss_scale={one} ") for one in ("static", 0, True, float("inf"))),
    ({**STREAMS, "clip": {"norm": 1.0}}, "clip.norm=1.0 needs one; add clip.scope=stage"),
    ({**STREAMS, "loss_scale": "dynamic"}, "give a number: loss_scale=1024"),
    ({"clip": {"norm": 0.0}}, "clip.norm=0"),
    ({"clip": {"scope": "rank"}}, "clip.scope=rank is not known; known are global, stage"),
    ({**KEPT, "max_restarts": -1}, "max_restarts=-1 must be 0 or more"),
    ({**KEPT, "min_ranks": 1}, "min_ranks=1 is for restarts; add max_restarts="),
    ({**AGAIN, "min_ranks": 3}, "min_ranks=3 is more than ranks=2"),
    ({**AGAIN, "plan": "p.json"}, "does not go with plan=p.json"),
    ({**AGAIN, "schedule": "async_1f1b"}, "on the same cuts; drop either"),
    ({"ranks": 1, **THREADS}, "replicas.threads=true gives each rank a thread, found ranks=1"),
    ({"max_restarts": 1, **THREADS}, "are lost together, so none is started again"),
    ({"ranks": 4, **AGAIN, **count(2)} | {"min_ranks": 3}, "which shrinks by replicas.shrink=true"),
    ({"ranks": 4, **count(1, shrink=True)}, "found replicas.count=1; add replicas.count="),
]
# ... and by early.check, which asks the rules that need neither a model nor torch: of those of the planner a
# few, all are in test_partition.py.
EARLY = [
    ({"ranks": 99}, "ranks=99 is more than"),
    ({"device": ["cpu"]}, "device=[cpu] names 1 for ranks=2; name one for each rank"),
    ({"device": ["cpu", "cuda:0"]}, "computes on cpu and cuda, and layers are measured on one of them"),
    ({"ranks": 3, "cuts": ["a"]}, "ranks=3 cuts=[a]: every rank runs a stage, found ranks=3 for 2 stages"),
    ({"ranks": 4, **count([2, 1])}, "replicas.count=[2, 1]: every replica of a stage has a rank of its own"),
    ({"ranks": 4, **count(2, idle=True)}, "replicas.count=2: idle"),
    ({"schedule": "2f2b"}, "2f2b"),
    ({"schedule": "all"}, "penstock plan schedule=all"),
    ({"schedule": "custom"}, "found none; give program="),
    ({"weights": "stashed"}, "weights=stashed is for weights that change"),
    ({"codec": "zip"}, "zip"),
    ({"link": "fast"}, "link=fast"),
    ({"memory": {"tier": "disc"}}, "memory.tier is one of device, packed, host, disk, found 'disc'"),
    ({"memory": {"device": "lots"}}, "memory.device=lots is not a size in bytes"),
    ({"memory": {"disk": "lots"}}, "memory.disk=lots is not a size in bytes"),
    ({"memory": {"tier": "disk", "disk": 0}}, "memory.disk=0 allows nothing on disk, found memory.tier=disk"),
    ({"data": {"workers": -1}}, "data.workers=-1"),
    ({"data": {"workers": "many"}}, "data.workers=many"),
    ({"data": {"skip_broken": 3}}, "data.skip_broken=3"),
    (count(2, shares=[1, -1]), "shares=[1, -1] must be even, measured, or"),
    ({"ranks": 1, **count(1, shares="measured")}, "is for stages on several ranks"),
    ({"scheduler": {"gamma": 3}}, "scheduler.gamma=3 has no target that takes it"),
    ({"model": {"drop_last": True}}, "there is no option model.drop_last"),
    ({"model": {"_target_": "nowhere.Net"}}, "nowhere.Net cannot be imported"),
    ({"model": {"_target_": "my/own.py:Net"}}, "not a file: model._target_=my.own.Net"),
    ({"model": {"_target_": "nowhere"}}, "write model._target_=MODULE.nowhere"),
    ({"schedule": "autos"}, "async_1f1b, custom, auto"),
    (
        {"data": {"_target_": "penstock.pipeline.samples.fake.load"}},
        "another name now, found penstock.pipeline.samples.fake.load; write penstock.pipeline.data.fake.load",
    ),
    ({"optimizer": {"_target_": SGD, "lr": "abc"}}, "optimizer.lr takes a number, not abc"),
    ({"optimizer": {"_target_": SGD, "lr": None}}, "optimizer.lr takes a number, not null"),
    ({"optimizer": {"_target_": SGD, "nesterov": "perhaps"}}, "optimizer.nesterov takes true or false"),
    ({"data": {"_target_": f"{SAMPLES}.text.load", "path": "/nowhere"}}, "/nowhere"),
]
# Targets that cannot be called as asked, by build.py.
TARGETS = [
    ("optimizer", "torch.optim.adm", {}, "optimizer=adm is not known; did you mean optimizer=adam?"),
    ("loss", "torch.nn.functional.mse", {}, "loss is one of cross_entropy, model, own, or a name of torch"),
    ("optimizer", SGD, {"lr": -1}, "optimizer.lr=-1"),
    ("optimizer", SGD, {"nope": 3}, "optimizer.nope=3; it takes lr"),
    ("loss", "torch.nn.CrossEntropyLoss", {"smooth": 1}, "loss.smooth=1; it takes weight"),
    ("loss", "torch.nn.functional.mse_loss", {"margin": 1}, "loss.margin=1"),
    ("scheduler", ONE_CYCLE, {"max_lr": 1, "pct_start": 3}, "scheduler.pct_start=3"),
    (
        "scheduler",
        WARMUP,
        {"warm_up": 4},
        "scheduler.warm_up=4 scheduler.final=0.0 do not fit a run of 3 steps",
    ),
    ("model", "torchvision.models.resnet18", {"nope": 3}, "model has no option model.nope=3"),
    ("model", "penstock.pipeline.models.torchvision", {"name": "resnet19"}, "model.name=resnet19"),
    ("model", "penstock.pipeline.models.gpt", {}, "data=text"),
    ("model", "os.getcwd", {}, "os.getcwd must return a torch module"),
    ("model", "torch.nn.Linear", {"out_features": 3}, "needs model.in_features="),
    (
        "model",
        "torch.nn.Linear",
        {"in_features": -1, "out_features": 3},
        "torch.nn.Linear cannot be made: Runt",
    ),
    ("model", "torch.nn.Linear", {"in_feature": 3}, "model.in_feature=3; it takes in_features"),
    ("data", "os.getcwd", {}, "os.getcwd returns a str; what works is one of: return torch"),
]


PARTS = {
    "checkpoint": CheckpointConfig,
    "clip": ClipConfig,
    "memory": MemoryConfig,
    "replicas": ReplicasConfig,
}


def train_config(given: dict[str, Any]) -> TrainConfig:
    return TrainConfig(**{name: PARTS[name](**one) if name in PARTS else one for name, one in given.items()})


@pytest.mark.parametrize(("given", "subject"), RULES)
def test_options_that_a_rule_forbids_are_refused_by_name_and_value(given, subject):
    with pytest.raises(ConfigError, match=re.escape(subject)):
        train_config(given)


@pytest.mark.parametrize(("given", "subject"), EARLY)
def test_what_needs_no_model_is_refused_by_name_and_value(given, subject):
    with pytest.raises(PenstockError, match=re.escape(subject)) as refused:
        early.check(train_config(given))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("group", "target", "given", "subject"), TARGETS)
def test_a_target_that_cannot_be_called_as_asked_is_refused_by_its_option(group, target, given, subject):
    options, of_images = {"_target_": target, **given}, Description(input_shape=(3, 8, 8), num_classes=10)
    more = {"model": {"describe": of_images, "seed": 0}, "scheduler": {"num_steps": 3}}
    with pytest.raises(PenstockError, match=re.escape(subject)):
        getattr(build, group if group != "data" else "samples")(options, **more.get(group, {}))


def test_a_name_of_torch_is_enough_in_any_case():
    made = build.optimizer({"_target_": "torch.optim.nadam", "lr": 0.5})(
        [("w", torch.nn.Parameter(torch.ones(1)))]
    )
    assert (type(made), made.defaults["lr"]) == (torch.optim.NAdam, 0.5)
    assert build.loss({"_target_": "torch.nn.functional.MSE_LOSS"})(torch.ones(2), torch.zeros(2)) == 1


def test_a_learning_rate_goes_up_in_a_line_and_down_along_a_cosine():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    make = build.scheduler({"_target_": WARMUP, "warm_up": 0.4, "final": 0.5}, num_steps=5)
    assert make is not None
    scheduler, rates = make(optimizer), []
    for _ in range(6):
        rates += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([2 / 3, 4 / 3, 2.0, 1.5, 1.0, 1.0])


def test_what_the_schema_lists_is_what_there_is():
    """The schema is read without torch, so it lists the names of its own accord."""
    (line,) = [line for line in (PlanConfig.__doc__ or "").splitlines() if "schedule:" in line]
    assert re.findall(r"\w+", line.partition("schedule:")[2].partition(";")[0]) == [*SCHEDULES]
    assert {*schema.TWO_A_RANK} == {name for name in SCHEDULES if layout(name) in ("loop", "vee")}


def test_names_that_are_known_before_torch_are_those_there_are():
    assert (names.lossless(), names.LOSSY) == (tuple(CODECS), tuple(LOSSY_CODECS))


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


@pytest.mark.parametrize("schema", [PlanConfig, PlanningConfig, TrainConfig])
def test_every_option_has_its_meaning_in_the_help(schema):
    meanings = command_line.meanings(schema)
    assert meanings.keys() == {field.name for field in dataclasses.fields(schema)}
    text = command_line.help_text("plan" if schema is PlanningConfig else "train", schema)
    for line in text.splitlines():
        assert len(line) <= 120
    known = command_line.names(schema)
    for name in known:
        if not (name.endswith(command_line.NOT_TYPED) or any(one.startswith(f"{name}.") for one in known)):
            assert re.search(rf"(?<!\S){re.escape(name)}=\S", text), name
    for name in ("ranks=2 ", "data=NAME ", "cache.data=null", "model.hidden=[512,512]", "data.root=VALUE"):
        assert text.count(name) == (name != "cache.data=null" or schema is TrainConfig)


def test_a_count_in_quotes_as_the_environment_gives_it_is_a_count():
    data = {"_target_": f"{SAMPLES}.digits.load", "workers": "2"}
    config = PlanConfig(ranks="3", micro_batches="4", extra_in_flight="1", data=data)
    config.memory = MemoryConfig(prefetch_layers="5", writeout_layers="auto")
    early.check(config)
    counts = config.ranks, config.micro_batches, config.extra_in_flight, config.data["workers"]
    assert (*counts, config.memory.prefetch_layers, config.memory.writeout_layers) == (3, 4, 1, 2, 5, "auto")
    with pytest.raises(ConfigError, match="extra_in_flight=-1 must be auto, or 0 or more"):
        PlanConfig(extra_in_flight="-1")
