"""Pipelines of small models, and the plain loop beside them, while a person changes both between steps."""

import dataclasses
import inspect
from typing import Any

import torch
from cases import OPTIMIZERS
from reference import casting, plain_loop, same_bits
from torch import nn
from torch.utils._pytree import tree_leaves
from zoo import cross_entropy

import penstock


def batch(samples=9, inputs=6):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(samples, inputs, generator=generator)
    return x, torch.randint(3, (samples,), generator=generator)


def model_of(forward, *, name="Net", **parts):
    """A module that holds ``parts``, whose class of its own has this ``forward``."""
    model = type(name, (nn.Module,), {"forward": forward})()
    for path, part in parts.items():
        setattr(model, path, part)
    return model


def built(make):
    torch.manual_seed(1)
    return make()


def profile_of(model, example=None, **options):
    """A profile of ``model``, traced with three samples where there is no other example."""
    example = (batch(3)[0],) if example is None else example
    return penstock.measure(penstock.trace(model, example, **options), example, repeats=1)


def allowed(profile):
    """The layers behind which a cut is allowed."""
    return [layer.name for i, layer in enumerate(profile.layers[:-1]) if i not in profile.refused]


PLANNED = {*inspect.signature(penstock.partition).parameters} - {"profile", "memory", "shares"}


def pipeline_of(model, *, example=None, leaves=(), **settings):
    """A pipeline of three micro-batches, cut behind ``cuts``; without: at every layer where a cut is allowed.

    Args:    settings: of ``partition`` or of ``Pipeline``."""
    profile = profile_of(model, example, leaves=leaves)
    wishes: dict[str, Any] = {"micro_batches": 3} | {
        name: settings.pop(name) for name in PLANNED & settings.keys()
    }
    cuts = wishes.pop("cuts", None)
    if cuts is None and "stages" not in wishes:
        cuts = allowed(profile)
    wishes |= {"cuts": cuts} if cuts else {"stages": wishes.get("stages", 1)}
    plan = penstock.partition(profile, **wishes)
    return penstock.Pipeline(
        model, plan, **{"loss": cross_entropy, "optimizer": OPTIMIZERS["sgd"]} | settings
    )


def nothing(model):
    pass


def differences(
    make, changes=(nothing, nothing), *, data=None, random=(), optimizer="sgd", evaluates=True, **settings
):
    """Train with ``changes[i]`` made to the model before step i, beside the plain loop; what differs.

    Args:    make: makes the model; called twice, since a copy may share less memory.
             data: a batch for all steps, or a list of one for each; the first has the example.
             random: names of the layers that draw.
             settings: of ``pipeline_of``; those that the plain loop has too are for both."""
    model, plain = built(make), built(make)
    batches = data if isinstance(data, list) else [batch() if data is None else data] * len(changes)
    changes = [*changes, *[nothing] * (len(batches) - len(changes))]
    settings = {"loss": cross_entropy, "example": (batches[0][0][:3].clone(),), "deadline": 30} | settings
    settings["optimizer"] = OPTIMIZERS.get(optimizer, optimizer)
    pipe = pipeline_of(model, **settings)
    ours = {name: settings[name] for name in ("loss", "optimizer", "clip", "autocast") if name in settings}
    loop = plain_loop(plain, batches, micro_batches=3, random=random, **ours)
    found = []
    for step, (change, (x, y)) in enumerate(zip(changes, batches, strict=True)):
        change(model)
        change(plain)
        flags = [module.training for module in model.modules()]
        report, expected = pipe.step(x, y), next(loop)
        state = pipe.state_dict()["model"]
        if report.loss != expected["loss"]:
            found.append(f"step {step}: loss {report.loss}, {expected['loss']}")
        if pipe.rank == 0:
            pairs = plain.state_dict().items()
            found += [f"step {step}: {name}" for name, t in pairs if not same_bits(t, state[name])]
        if evaluates:
            outputs, wanted = pipe.evaluate(x), evaluated(plain, x, settings.get("autocast"))
            if pipe.is_last and not same_outputs(outputs, wanted):
                found.append(f"step {step}: outputs of evaluate")
        if flags != [module.training for module in model.modules()]:
            found.append(f"step {step}: the flags")
    return found


def evaluated(model, x, autocast=None):
    """Output of ``model`` in eval mode; its flags are then as they were."""
    flags = [module.training for module in model.modules()]
    with torch.no_grad(), casting(autocast):
        outputs = model.eval()(x)
    for module, training in zip(model.modules(), flags, strict=True):
        module.training = training
    return outputs


def same_outputs(ours, theirs):
    """True if what a model returned, a dataclass perhaps, has the same bits in all its leaves."""
    ours, theirs = (tree_leaves(vars(o) if dataclasses.is_dataclass(o) else o) for o in (ours, theirs))
    return len(ours) == len(theirs) and all(map(same_bits, ours, theirs))
