"""Law L1 as one function: a pipeline and the plain loop, step by step, every bit of the training state."""

import contextlib
import copy
import functools
import io
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from cases import OPTIMIZERS, loss_of, on_ranks, pipeline_of, plan_of, resumed_case, scaler_of, scheduler_of
from far import FarStore, small_pieces
from late import garbage
from reference import plain_loop, same_bits
from saving import wait
from small_pipelines import evaluated, same_outputs
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_flatten, tree_unflatten
from zoo import build

import penstock
from penstock.pipeline.distributed import gpu_transport
from penstock.pipeline.distributed.gpu_transport import Direct
from penstock.pipeline.runtime import ownership
from penstock.stages.memory.activations import SavedActivations
from penstock.stages.stage import stage


def plain_of(case, model, batches, random_layers):
    """The plain loop of a case."""
    return plain_loop(
        model,
        batches,
        loss=loss_of(case),
        optimizer=OPTIMIZERS[case.optimizer],
        micro_batches=case.micro_batches,
        clip=case.clip,
        scheduler=scheduler_of(case),
        random=random_layers,
        scaler=plain_scaler_of(case),
        autocast=case.autocast,
    )


def plain_scaler_of(case):
    """The same for the plain loop, where a number is a GradScaler that neither grows nor shrinks."""
    if not isinstance(case.scaler, float):
        return scaler_of(case)
    scaler = torch.amp.GradScaler("cpu", init_scale=case.scaler)
    scaler.set_growth_factor(1.0)
    scaler.set_backoff_factor(1.0)
    return scaler


def everything_leaves(patch):
    """Of models as small as these, that train faster than a thread begins, little would leave otherwise."""
    offload = SavedActivations.offload

    def waits(self, *what):
        offload(self, *what)
        wait(self)

    patch.setattr(stage, "LEAST_SAVED", 1)
    patch.setattr(SavedActivations, "offload", waits)


@contextlib.contextmanager
def surroundings(case):
    """Make faults show: memory is overwritten when it is free, and tensors leave that are small."""
    with pytest.MonkeyPatch.context() as patch, garbage():
        if case.world == "alone":  # ranks keep their own pace, so that threads overtake each other
            everything_leaves(patch)
        patch.setattr(ownership, "LEAST_MIRRORED", case.least_mirrored)
        small_pieces(patch)
        if case.direct:
            routes = direct_routes()
            patch.setattr(gpu_transport, "direct_routes", lambda *args, **kwargs: routes)
        if case.far:
            patch.setattr(ownership, "open_store", lambda tier, options: FarStore())
        yield


def direct_routes():
    """Routes of this rank to all others over two groups of gloo, where there would be two of NCCL."""
    ranks, mine, limit = range(dist.get_world_size()), dist.get_rank(), timedelta(seconds=30)
    down, up = (cast("ProcessGroup", dist.new_group(list(ranks), limit, "gloo")) for _ in range(2))
    ways = {rank: (down, up) if rank > mine else (up, down) for rank in ranks if rank != mine}
    return {rank: Direct(rank, *groups) for rank, groups in ways.items()}


def differences(case, ranks=None):
    """Train a pipeline and the plain loop side by side; names of everything that differs in a bit.

    ``ranks``: the pool of processes for cases whose world are processes."""
    with tempfile.TemporaryDirectory() as folder:
        if case.world == "processes":
            return on_ranks(ranks, rank_differences, case, Path(folder))
        if case.world == "threads":
            return thread_differences(case, folder)
        plan, random_layers = plan_of(case)
        return process_differences(case, plans_of(case, plan), random_layers, folder)


def process_differences(case, plans, random_layers, folder):
    """The same of a pipeline, or of its part, that is in this process."""
    with surroundings(case):
        model, batches = build(case.model, case.dtype, case.steps)
        plain, _ = build(case.model, case.dtype)  # not a copy, which may forget that it is compiled
        loop = plain_of(case, plain, batches, random_layers)
        steps = ({**step, "plain": plain} for step in loop)
        return trained(case, model, batches, steps, plans, folder)


def plans_of(case, plan):
    """The plan of a case and the one that a resumed half of it goes on with."""
    return plan, plan_of(resumed_case(case))[0] if case.resume == "other" else plan


def rank_differences(case, plan_path, random_layers):
    """The same on this rank of a group: its own gradients, and on rank 0 the gathered state."""
    other = Path(plan_path).with_name("resumed.json") if case.resume else plan_path
    plans = [penstock.Plan.load(path) for path in (plan_path, other)]
    return process_differences(case, plans, random_layers, Path(plan_path).parent / "checkpoint")


def thread_differences(case, folder):
    """The same on the ranks of a plan as threads of this process."""
    plan, random_layers = plan_of(case)
    plans = plans_of(case, plan)
    model, batches = build(case.model, case.dtype, case.steps)
    plain, models = copy.deepcopy(model), [copy.deepcopy(model) for _ in range(plan.num_ranks)]
    loop = plain_of(case, plain, batches, random_layers)  # draws from the generator of all threads: first
    expected = [copy.deepcopy({**step, "plain": plain}) for step in loop]

    def train(world):
        return trained(case, models[world.rank], batches, expected, plans, folder, world=world)

    assert plan.num_ranks > 1
    before = torch.get_rng_state()
    with surroundings(case):
        found = penstock.in_threads(train, ranks=plan.num_ranks, deadline=case.deadline)
    if not same_bits(torch.get_rng_state(), before):
        found.append(["the state of the generator of all threads"])
    return [f"rank {rank}: {what}" for rank, of_rank in enumerate(found) for what in of_rank]


def trained(case, model, batches, steps, plans, folder, *, world=None):
    """Differences on this rank from the ``steps`` of the plain loop, each with the plain model behind it."""
    found, again = [], copy.deepcopy(model) if case.resume else model
    pipe = pipeline_of(case, plans[0], model, world=world)
    try:
        for number, ((x, y), expected) in enumerate(zip(batches, steps, strict=True)):
            if case.resume and number == 1:
                with torch.no_grad():  # all of it is to be replaced
                    for parameter in again.parameters():
                        parameter.mul_(3)
                other = resumed_case(case) if case.resume == "other" else case
                make = functools.partial(pipeline_of, other, plans[1], again, world=world)
                pipe = resumed(case.resume, pipe, make, folder)
            found += [f"step {number} {what}" for what in step_differences(case, pipe, x, y, expected)]
            if case.evaluates:
                outputs = pipe.evaluate(batches[0][0])
                if pipe.is_last:
                    alike = same_outputs(outputs, evaluated(expected["plain"], batches[0][0], case.autocast))
                    found += [] if alike else [f"outputs of evaluate behind step {number}"]
    finally:
        pipe.close_stages(keeps_model=False)
    return found


def resumed(resume, pipe, make, folder):
    """Another pipeline, which ``make`` makes; it goes on where ``pipe`` ends, by a checkpoint or "state"."""
    state = None
    if resume == "state":
        state = pipe.state_dict()
        if dist.is_initialized():  # only the first rank has it
            state = broadcast(state)
    else:
        penstock.save(pipe, folder)
    pipe.close_stages(keeps_model=False)
    pipe = make()
    if state is not None:
        pipe.load_state_dict(state)
    else:
        penstock.load(pipe, folder)
    return pipe


def broadcast(state):
    """State of the first rank; ``torch.save`` takes tensors of every dtype, which pickle does not."""
    written = io.BytesIO()
    torch.save(state, written)
    found = [written.getvalue()]
    dist.broadcast_object_list(found)
    return torch.load(io.BytesIO(found[0]), weights_only=False)


def beside(pipe, plain, batches, **settings):
    """Differences of a pipeline's losses and state from the plain loop, which is told ``settings``."""
    found, loop = [], plain_loop(plain, batches, **settings)
    for (x, y), expected in zip(batches, loop, strict=True):
        found += ["loss"] * (pipe.step(x, y).loss != expected["loss"])
        found += state_differences(pipe.state_dict(), plain, expected["optimizer"])
    return found


def step_differences(case, pipe, x, y, expected):
    """Differences in one step."""
    report, mine = pipe.step(split_for(pipe, x) if case.splits else x, y), pipe.update.named
    rate = expected["learning_rate"] if pipe.update.tensors() else None
    if str((report.gradient_norm, report.learning_rate)) != str((expected["gradient_norm"], rate)):
        yield f"norm {report.gradient_norm} {expected['gradient_norm']}, rate {report.learning_rate} {rate}"
    if str(report.loss) != str(expected["loss"]):  # as NaN has it, too
        yield f"loss {report.loss} {expected['loss']}"
    if pipe.world.is_alone:
        losses = [pipe.engine.losses[i] for i in range(len(expected["losses"]))]
        pairs = zip(losses, expected["losses"], strict=True)
        yield from (f"loss {i}" for i, (a, b) in enumerate(pairs) if not same_bits(a, b))
    with pipe.parameters_resident():
        for name, parameter in mine.items():
            if pipe.plan.sharded and parameter.grad is None:  # updated by another replica
                continue
            if not same_layout(expected["gradients"][name], parameter.grad):
                yield f"gradient {name}"
    state = pipe.state_dict()
    if isinstance(case.scaler, tuple) and state["scaler"] != expected["scaler"]:
        yield f"scaler {state['scaler']} {expected['scaler']}"
    if pipe.rank == 0:
        yield from state_differences(state, expected["plain"], expected["optimizer"])


def same_layout(a, b):
    return same_bits(a, b) and (a is None or a.stride() == b.stride())


def state_differences(state, plain, optimizer):
    """Differences of a pipeline's gathered state and the plain model with its optimizer, bit for bit."""
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


def split_for(pipe, inputs):
    """The inputs of a batch by micro-batch, without memory where this rank does not read them."""
    leaves, spec = tree_flatten(inputs)
    number = min(pipe.plan.micro_batches, len(leaves[0]))
    rows = zip(*(leaf.tensor_split(number) for leaf in leaves), strict=True)
    given = [[leaf if pipe.reads(i) else leaf.to("meta") for leaf in row] for i, row in enumerate(rows)]
    return penstock.Split(tuple(tree_unflatten(row, spec) for row in given))
