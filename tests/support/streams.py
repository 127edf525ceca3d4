"""Law L2 as one function: asynchronous training and its replay, every loss, gradient and bit of the state."""

import copy
import dataclasses
import functools
import tempfile
from pathlib import Path

import pytest
from cases import OPTIMIZERS, Case, loss_of, on_ranks, pipeline_of, plan_of, scheduler_of
from law import everything_leaves, resumed
from reference import same_bits
from replay import Replay
from zoo import build

import penstock
from penstock.pipeline.runtime import ownership


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamCase(Case):
    """One asynchronous run: ``steps`` batches, a drain, and as many again."""

    schedule: str = "async_1f1b"
    weights: str = "stashed"
    weights_tier: str = "device"
    prediction: bool = False
    error_feedback: bool = False
    cuts: object = 4
    steps: int = 6
    clip: float | None = None

    __str__ = Case.__str__


def differences(case, ranks=None):
    """Names of everything in which a pipeline and the replay of its stages differ."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if case.world == "processes":
            return on_ranks(ranks, rank_differences, case, Path(folder))
        everything_leaves(patch)
        patch.setattr(ownership, "LEAST_MIRRORED", 1)
        plan, random_layers = plan_of(case)
        return differences_of(case, plan, random_layers, folder)


def differences_of(case, plan, random_layers, folder):
    model, batches = build(case.model, case.dtype, case.steps)
    plain = copy.deepcopy(model)
    updates = {}
    pipe = recorded(case, plan, model, updates)
    make = functools.partial(recorded, case, plan, build(case.model, case.dtype)[0], updates)
    replay = Replay(
        plain,
        stages=[stage.parameters for stage in plan.stages],
        policy=case.weights,
        micro_batches=case.micro_batches,
        prediction=case.prediction,
        error_feedback=case.error_feedback,
        random=random_layers,
        loss=loss_of(case),
        optimizer=OPTIMIZERS[case.optimizer],
        scheduler=scheduler_of(case),
        clip=case.clip,
    )
    found = []
    for half in ("first", "second"):
        losses = {}
        for x, y in batches:
            pipe.step(x, y)
            losses |= pipe.engine.losses
            replay.feed(x, y)
        pipe.drain()
        losses |= pipe.engine.losses
        expected = replay.drain()
        found += [f"{half}: {what}" for what in _compared(pipe, plain, losses, updates, expected)]
        updates.update({s: [] for s in updates})
        if half == "first" and case.resume:
            pipe = resumed(case.resume, pipe, make, folder)
    return found


def recorded(case, plan, model, updates):
    """The pipeline of a case, which notes the gradients of its updates by stage."""
    scope = "stage" if case.schedule == "async_1f1b" else "global"
    pipe = pipeline_of(dataclasses.replace(case, clip_scope=scope), plan, model)
    names = {id(p): name for name, p in pipe.update.named.items()}

    def note(optimizer, *_, own):
        """Add what an update finds; of offloaded parameters it is some of them at a time."""
        found = {names[id(p)]: p.grad for group in optimizer.param_groups for p in group["params"]}
        if not own or own[-1].keys() & found.keys():
            own.append({})
        own[-1] |= found

    for s, optimizer in pipe.update.optimizers.items():
        updates[s] = []
        optimizer.register_step_pre_hook(lambda *given, s=s: note(*given, own=updates[s]))
    return pipe


def _compared(pipe, plain, losses, updates, expected):
    if pipe.is_last:
        assert len(losses) == len(expected["losses"])
        yield from (f"loss {m}" for m, b in enumerate(expected["losses"]) if not same_bits(losses[m], b))
    for own in updates.values():
        assert len(own) == len(expected["gradients"])
        for number, (ours, theirs) in enumerate(zip(own, expected["gradients"], strict=True)):
            yield from (f"gradient {number} of {n}" for n in ours if not same_bits(ours[n], theirs[n]))
    state = pipe.state_dict()
    if pipe.rank == 0:
        pairs = plain.state_dict().items()
        yield from (name for name, tensor in pairs if not same_bits(tensor, state["model"][name]))
        for name, kept in expected["state"].items():
            ours = state["optimizer"][name]["state"]
            assert set(ours) == set(kept)
            yield from (
                f"optimizer {what} of {name}" for what in kept if not same_bits(kept[what], ours[what])
            )


def rank_differences(case, plan_path, random_layers):
    """The same on this rank of a group."""
    folder = Path(plan_path).parent / "checkpoint"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ownership, "LEAST_MIRRORED", 1)
        return differences_of(case, penstock.Plan.load(plan_path), random_layers, folder)
