"""Law L1 as one function: a pipeline and the plain loop, step by step, every bit of the training state."""

import copy
import dataclasses
import functools
import random

import pytest
import torch
from reference import casting, plain_loop, same_bits
from zoo import build, cross_entropy

import penstock
from penstock.stages import stage

OPTIMIZERS = {
    "sgd": lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "plain": lambda named: torch.optim.SGD(named, lr=0.05),
    "nesterov": lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda named: torch.optim.Adam(named, lr=1e-3),
    "adamw": lambda named: torch.optim.AdamW(named, lr=1e-3),
}


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
    extra_in_flight: int = 0
    clip: float | None = 1.0
    dtype: torch.dtype | None = None
    steps: int = 3
    scheduler: bool = False
    tier: str = "device"
    weights_first: bool = False
    program: tuple = ()
    clip_scope: str = "global"
    scaler: tuple[float, int] | float | None = None  # a GradScaler's initial scale and growth interval
    autocast: torch.dtype | None = None

    def __str__(self):
        shown = [
            str(getattr(self, f.name)) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        ]
        return "-".join(shown).replace(" ", "").replace("torch.", "")


VERSIONS = ("weights", "weights_tier", "weights_first", "prediction", "program")


@functools.lru_cache(maxsize=8)
def profile_of(name, dtype, micro_batches, autocast=None):
    model, batches = build(name, dtype)
    example = (batches[0][0].tensor_split(micro_batches)[0].clone(),)
    graph = penstock.trace(model, example, autocast=autocast)
    return penstock.measure(graph, example, repeats=1), graph.train_probe.random


def plan_of(case):
    """The plan of a case; the same on every rank but for its predicted seconds."""
    profile, random_layers = profile_of(case.model, case.dtype, case.micro_batches, case.autocast)
    names = [layer.name for layer in profile.layers]
    legal = [i for i in range(len(names) - 1) if i not in profile.refused]
    settings = {
        "schedule": case.schedule,
        "codec": case.codec,
        "micro_batches": case.micro_batches,
        "extra_in_flight": case.extra_in_flight,
        "tier": case.tier,
        "ranks": case.ranks,
    }
    settings |= {name: getattr(case, name) for name in VERSIONS if hasattr(case, name)}
    if isinstance(case.cuts, int):
        return penstock.partition(profile, stages=case.cuts, **settings), random_layers
    chosen = case.cuts
    if case.cuts == "every":
        chosen = [names[i] for i in legal]
    elif case.cuts[0] == "random":
        _, stages, seed = case.cuts
        chosen = [names[i] for i in sorted(random.Random(seed).sample(legal, stages - 1))]
    return penstock.partition(profile, cuts=list(chosen), **settings), random_layers


def pipeline_of(case, plan, model):
    """The pipeline of a case."""
    return penstock.Pipeline(
        model,
        plan,
        loss=loss_of(case),
        optimizer=OPTIMIZERS[case.optimizer],
        scheduler=_schedule if case.scheduler else None,
        clip=case.clip,
        clip_scope=case.clip_scope,
        scaler=scaler_of(case),
        autocast=case.autocast,
        deadline=30,
    )


def loss_of(case):
    """The loss of a case; with a scaler a loud one, so that float32 overflows too."""
    return cross_entropy if case.scaler is None else loud


def loud(outputs, targets):
    return 32 * cross_entropy(outputs, targets)


def scaler_of(case):
    """What a pipeline is given as ``scaler``: a new GradScaler, a number or None."""
    if not isinstance(case.scaler, tuple):
        return case.scaler
    scale, interval = case.scaler
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)


def plain_scaler_of(case):
    """The same for the plain loop, where a number is a GradScaler that neither grows nor shrinks."""
    if not isinstance(case.scaler, float):
        return scaler_of(case)
    scaler = torch.amp.GradScaler("cpu", init_scale=case.scaler)
    scaler.set_growth_factor(1.0)
    scaler.set_backoff_factor(1.0)
    return scaler


def _schedule(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)


def plain_of(case, model, batches, random_layers):
    """The plain loop of a case."""
    return plain_loop(
        model,
        batches,
        loss=loss_of(case),
        optimizer=OPTIMIZERS[case.optimizer],
        micro_batches=case.micro_batches,
        clip=case.clip,
        scheduler=_schedule if case.scheduler else None,
        random=random_layers,
        scaler=plain_scaler_of(case),
        autocast=case.autocast,
    )


def differences(case):
    """Train a pipeline and the plain loop side by side; names of everything that differs in a bit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "LEAST_SAVED", 1)  # else little of these small models leaves
        return _differences(case)


def _differences(case):
    plan, random_layers = plan_of(case)
    model, batches = build(case.model, case.dtype, case.steps)
    plain, _ = build(case.model, case.dtype)  # not a copy, which may forget that it is compiled
    pipe = pipeline_of(case, plan, model)
    found = []
    for (x, y), expected in zip(batches, plain_of(case, plain, batches, random_layers), strict=True):
        report = pipe.step(x, y)
        step = report.step
        losses = [pipe.engine.losses[i] for i in range(len(expected["losses"]))]
        found += [
            f"step {step} loss {i}"
            for i, (a, b) in enumerate(zip(losses, expected["losses"], strict=True))
            if not same_bits(a, b)
        ]
        found += (
            []
            if report.loss == expected["loss"]
            else [f"step {step} reported loss {report.loss} {expected['loss']}"]
        )
        gradients = {name: p.grad for name, p in model.named_parameters()}
        found += [
            f"step {step} gradient {n}"
            for n, g in expected["gradients"].items()
            if not same_layout(g, gradients[n])
        ]
        state = pipe.state_dict()
        found += [f"step {step} {what}" for what in state_differences(state, plain, expected["optimizer"])]
        found += scale_differences(case, state, expected)
    return found


def scale_differences(case, state, expected):
    """How a GradScaler of the pipeline, on any rank, differs from that of the plain loop."""
    if not isinstance(case.scaler, tuple) or state["scaler"] == expected["scaler"]:
        return []
    return [f"step {state['step']} scaler {state['scaler']} {expected['scaler']}"]


def same_layout(a, b):
    return same_bits(a, b) and (a is None or a.stride() == b.stride())


def state_differences(state, plain, optimizer):
    """What a pipeline's gathered state and the plain model with its optimizer do not share, bit for bit."""
    expected = plain.state_dict()
    found = [] if list(state["model"]) == list(expected) else ["the keys of the state"]
    found += [name for name, tensor in expected.items() if not same_bits(tensor, state["model"][name])]
    for name, parameter in plain.named_parameters():
        kept = optimizer.state.get(parameter, {})
        ours = state["optimizer"].get(name, {}).get("state", {})
        if set(kept) != set(ours):
            found.append(f"optimizer state of {name}")
        found += [
            f"optimizer {what} of {name}"
            for what in kept
            if what in ours and not same_bits(kept[what], ours[what])
        ]
    return found


def rank_differences(case, plan_path):
    """The same on this rank of a group: its own gradients, and on rank 0 the gathered state."""
    plan = penstock.Plan.load(plan_path)
    _, random_layers = profile_of(case.model, case.dtype, case.micro_batches, case.autocast)
    model, batches = build(case.model, case.dtype, case.steps)
    plain = copy.deepcopy(model)
    pipe = pipeline_of(case, plan, model)
    mine = pipe.update.named
    del model
    found = []
    for (x, y), expected in zip(batches, plain_of(case, plain, batches, random_layers), strict=True):
        report = pipe.step(x, y)
        found += (
            []
            if report.loss == expected["loss"]
            else [f"step {report.step} loss {report.loss} {expected['loss']}"]
        )
        found += [
            f"step {report.step} gradient {n}"
            for n, p in mine.items()
            if not same_layout(expected["gradients"][n], p.grad)
        ]
        state = pipe.state_dict()
        found += scale_differences(case, state, expected)
        if pipe.rank == 0:
            found += [
                f"step {report.step} {what}"
                for what in state_differences(state, plain, expected["optimizer"])
            ]
    outputs = pipe.evaluate(batches[0][0])
    if pipe.is_last:
        with torch.no_grad(), casting(case.autocast):
            found += [] if same_bits(outputs, plain.eval()(batches[0][0])) else ["outputs of evaluate"]
    return found
