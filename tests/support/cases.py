"""Training runs as data: what a case trains, and the plan, pipeline and scaler that it asks for."""

import contextlib
import dataclasses
import functools
import random
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from late import LateDevice
from torch.optim import lr_scheduler
from zoo import DAGS, build, cross_entropy

import penstock
from penstock.pipeline.distributed.process_group import World
from penstock.pipeline.partition.choose import TooSmall
from penstock.stages.memory.byte_budget import MemoryOptions

OPTIMIZERS = {
    "sgd": lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "plain": lambda named: torch.optim.SGD(named, lr=0.05),
    "nesterov": lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda named: torch.optim.Adam(named, lr=1e-3),
    "no_biases": lambda named: torch.optim.SGD([p for n, p in named if "bias" not in n], lr=0.05),
    "adamw": lambda named: torch.optim.AdamW(named, lr=1e-3),
    "muon": lambda named: torch.optim.Muon([p for _, p in named if p.dim() == 2], lr=0.02),
    "fused": lambda named: torch.optim.AdamW(named, lr=1e-3, fused=True),
}


# Three stages on two ranks, 0 and 2 on the first; a B in halves, and whole ones behind it.
CUSTOM = ("0F0 0F1 2F0 2B0 0F2 2F1 2F2 0B0 2B1 2B2 0B1 0B2", "1F0 1I0 1F1 1W0 1F2 1B1 1B2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One training run; ``cuts``: layer names, a number of stages, "every" or ("random", stages, seed)."""

    model: str
    cuts: object = 2
    ranks: int | None = None
    schedule: str = "1f1b"
    codec: str = "zero_value"
    optimizer: str = "sgd"
    micro_batches: int = 3
    extra_in_flight: int | str = 0
    clip: float | None = 1.0
    dtype: torch.dtype | None = None
    steps: int = 3
    scheduler: bool | str = False  # or one of SCHEDULERS
    tier: str = "device"
    near: int | None = 1  # layers ahead of which what a tier keeps is there: of these networks most leaves
    weights_first: bool = False
    recompute: bool | tuple = False
    program: tuple = ()
    clip_scope: str = "global"
    scaler: tuple[float, int] | float | None = None  # a GradScaler's initial scale and growth interval
    autocast: torch.dtype | None = None
    late: tuple = ()  # ranks that compute on a device that does everything late
    direct: bool = False  # whose payloads go to other ranks over groups of their own, as over NCCL
    deadline: float = 30
    detect_anomaly: bool = False
    parameters_tier: str = "device"
    replicas: object = 1
    exact: bool = False
    sharded: bool = False
    owner: str = "spread"
    shares: tuple = ()
    splits: bool = False
    budget: str | None = None  # bytes of the device tier; "least": the smallest that the planner takes
    least_mirrored: int = 1  # bytes
    far: bool = False  # a store that keeps nothing of what it is given but its bytes
    world: str = "alone"  # or "threads", "processes"
    # after the first step, from a checkpoint: on the "same" plan or an "other"; from a "state"
    resume: str = ""
    evaluates: bool = False  # behind each step
    bare: bool = False  # on the meta device, its values in a file

    def __str__(self):
        shown = [
            str(getattr(self, f.name)) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        ]
        return "-".join(shown).replace(" ", "").replace("torch.", "")


# Models that take seconds; of the transformers gpt_relu is for the quick round, of the random graphs dag0.
LARGE = {"resnet18", "resnet18_channels_last", "mobilenet", "densenet", "squeezenet"}
LARGE |= {"gpt_tied", "gpt_gelu_dropout", *DAGS[1:]}


def parameters(cases, *, slow=False):
    """Cases as parameters of a test, named by what they say; those of large models are slow, or all."""
    return [
        pytest.param(case, id=str(case), marks=pytest.mark.slow) if slow else marked(case, case.model)
        for case in cases
    ]


def marked(parameter, model):
    """A parameter of a test, slow if its model is large."""
    return pytest.param(parameter, id=str(parameter), marks=pytest.mark.slow if model in LARGE else ())


PLANNED = ("schedule", "codec", "micro_batches", "extra_in_flight", "tier", "ranks", "weights", "program")
PLANNED += ("weights_tier", "parameters_tier", "weights_first", "recompute", "prediction")
PLANNED += ("error_feedback",)
PLANNED += ("replicas", "exact", "sharded", "owner", "shares")


@functools.cache
def profile_of(name, dtype, micro_batches, autocast=None):
    model, batches = build(name, dtype)
    example = (batches[0][0].tensor_split(micro_batches)[0].clone(),)
    graph = penstock.trace(model, example, autocast=autocast)
    return penstock.measure(graph, example, repeats=1), graph.train_probe.random


def plan_of(case):
    """The plan of a case; the same on every rank but for its predicted seconds."""
    micro_batches = case.micro_batches if case.budget else 3  # any size, but for what is held to bytes
    profile, random_layers = profile_of(case.model, case.dtype, micro_batches, case.autocast)
    names = [layer.name for layer in profile.layers]
    legal = [i for i in range(len(names) - 1) if i not in profile.refused]
    settings = {name: getattr(case, name) for name in PLANNED if hasattr(case, name)}
    if isinstance(case.cuts, int):
        settings["stages"] = case.cuts
    elif case.cuts == "every":
        settings["cuts"] = [names[i] for i in legal]
    elif case.cuts[0] == "random":
        _, stages, seed = case.cuts
        settings["cuts"] = [names[i] for i in sorted(random.Random(seed).sample(legal, stages - 1))]
    else:
        settings["cuts"] = list(case.cuts)
    return penstock.partition(profile, **settings, memory=budget_of(case, profile, settings)), random_layers


def plan_file(case, folder):
    """The path of a file in ``folder`` that has the plan of a case."""
    plan_of(case)[0].save(folder / "plan.json")
    return str(folder / "plan.json")


def budget_of(case, profile, settings):
    """The bytes of a case's budget: "least" is what a refusal of one byte calls the smallest that does."""
    if case.budget != "least":
        return case.budget
    with pytest.raises(TooSmall) as refused:
        penstock.partition(profile, **settings, memory="1B")
    return refused.value.needed


def on_ranks(ranks, differences, case, folder):
    """The ``differences`` that every rank of a plan finds. Measured is here alone, not on each of them."""
    plan, random_layers = plan_of(case)
    plan.save(folder / "plan.json")
    (plan_of(resumed_case(case))[0] if case.resume == "other" else plan).save(folder / "resumed.json")
    found = ranks.run(differences, case, str(folder / "plan.json"), random_layers, ranks=plan.num_ranks)
    assert len(found) == plan.num_ranks > 1
    return [f"rank {rank}: {what}" for rank, of_rank in enumerate(found) for what in of_rank]


def resumed_case(case):
    """The case that goes on from a checkpoint of another: another schedule and tiers, alone other cuts."""
    plain = ("late", "budget", "recompute", "extra_in_flight", "sharded", "owner", "program")
    other = {field.name: field.default for field in dataclasses.fields(Case) if field.name in plain}
    other["tier"] = "packed" if case.tier == "device" else "device"
    other["schedule"] = "gpipe" if case.schedule == "1f1b" else "1f1b"
    if case.replicas != 1 and case.ranks is not None:  # of several stages a rank
        other["schedule"] = case.schedule
    if case.replicas == 1:
        other["ranks"] = plan_of(case)[0].num_ranks
        other["parameters_tier"] = "host" if case.parameters_tier == "device" else "device"
        if case.world == "alone":
            other |= {"ranks": None, "cuts": 1 if case.cuts == 2 else 2}
    return dataclasses.replace(case, **other)


def pipeline_of(case, plan, model, *, world=None):
    """The pipeline of a case."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    late = rank in case.late
    if late:
        world = World.default(device=LateDevice(seed=rank), deadline=30)
    with values_in_a_file(model) if case.bare else contextlib.nullcontext((model, {})) as (model, values):
        pipe = penstock.Pipeline(
            model,
            plan,
            loss=loss_of(case),
            optimizer=OPTIMIZERS[case.optimizer],
            scheduler=scheduler_of(case),
            clip=case.clip,
            clip_scope=case.clip_scope,
            scaler=scaler_of(case),
            autocast=case.autocast,
            deadline=case.deadline,
            detect_anomaly=case.detect_anomaly,
            world=world,
            memory=MemoryOptions(prefetch_layers=case.near, writeout_layers=case.near),
            **values,
        )
    assert late == any(isinstance(device, LateDevice) for device in pipe.devices.values())
    return pipe


def pipeline_with_batches(case, plan=None, *, world=None):
    """The pipeline of a case, on its plan where there is no other, and its batches."""
    model, batches = build(case.model, case.dtype, case.steps)
    return pipeline_of(case, plan or plan_of(case)[0], model, world=world), batches


def refusal_of(call, *args):
    """The error of Penstock that a call ends with, for a rank to return; "" if there is none."""
    try:
        call(*args)
    except penstock.PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextlib.contextmanager
def values_in_a_file(model):
    """The model on the meta device, and where a pipeline finds its values."""
    from valueless import positions, saved, without_values  # which imports this file

    with tempfile.TemporaryDirectory() as folder:
        file = saved(model, Path(folder) / "model.safetensors")
        yield without_values(model), {"load_weights": file, "init_weights": positions}


def loss_of(case):
    """The loss of a case; with a scaler a loud one, so that float32 overflows too."""
    return cross_entropy if case.scaler is None else loud


def loud(outputs, targets):
    return 32 * cross_entropy(outputs, targets)


def scaler_of(case):
    """The argument ``scaler`` of a pipeline: a new GradScaler, a number or None."""
    if not isinstance(case.scaler, tuple):
        return case.scaler
    scale, interval = case.scaler
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)


def scheduler_of(case):
    """The argument ``scheduler`` of a pipeline."""
    return SCHEDULERS[case.scheduler] if case.scheduler else None


class Warm(lr_scheduler.LRScheduler):
    """One that keeps its whole past."""

    def __init__(self, optimizer):
        self.past = []
        super().__init__(optimizer)

    def get_lr(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        self.past = [*self.past, 1.0]
        return [0.01 * len(self.past) for _ in self.optimizer.param_groups]


SCHEDULERS = {
    True: lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7),
    "warm": Warm,
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(optimizer, 2)]),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.001, 0.01, step_size_up=2),
}
