"""Law L1 as one function: a pipeline and the plain loop, step by step, every bit of the training state."""

import copy

import pytest
import torch
from cases import OPTIMIZERS, decayed, loss_of, pipeline_of, plan_of, scaler_of
from late import garbage
from reference import casting, plain_loop, same_bits
from torch.utils._pytree import tree_flatten, tree_unflatten
from zoo import build

import penstock
from penstock.stages.memory.saved import SavedActivations
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
        scheduler=decayed if case.scheduler else None,
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
        self.wait()

    patch.setattr(stage, "LEAST_SAVED", 1)
    patch.setattr(SavedActivations, "offload", waits)


def differences(case):
    """Train a pipeline and the plain loop side by side; names of everything that differs in a bit."""
    with pytest.MonkeyPatch.context() as patch:
        everything_leaves(patch)
        with garbage():
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
        with pipe.near():
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


def rank_differences(case, plan_path, random_layers):
    """The same on this rank of a group: its own gradients, and on rank 0 the gathered state."""
    with garbage():
        return _rank_differences(case, plan_path, random_layers)


def _rank_differences(case, plan_path, random_layers):
    plan = penstock.Plan.load(plan_path)
    model, batches = build(case.model, case.dtype, case.steps)
    plain = copy.deepcopy(model)
    pipe = pipeline_of(case, plan, model)
    del model
    loop = plain_of(case, plain, batches, random_layers)
    return differences_of_rank(case, pipe, batches, ({**expected, "plain": plain} for expected in loop))


def thread_differences(case):
    """The same on the ranks of a plan as threads of this process."""
    plan, random_layers = plan_of(case)
    model, batches = build(case.model, case.dtype, case.steps)
    plain, models = copy.deepcopy(model), [copy.deepcopy(model) for _ in range(plan.num_ranks)]
    loop = plain_of(case, plain, batches, random_layers)  # draws from the generator of all threads: first
    expected = [copy.deepcopy({**step, "plain": plain}) for step in loop]

    def train(world):
        pipe = pipeline_of(case, plan, models[world.rank], world=world)
        try:
            return differences_of_rank(case, pipe, batches, expected)
        finally:
            pipe.close()

    assert plan.num_ranks > 1
    before = torch.get_rng_state()
    with garbage():
        found = penstock.in_threads(train, ranks=plan.num_ranks, deadline=case.deadline)
    if not same_bits(torch.get_rng_state(), before):
        found.append(["the state of the generator of all threads"])
    return [f"rank {rank}: {what}" for rank, of_rank in enumerate(found) for what in of_rank]


def split_for(pipe, inputs):
    """The inputs of a batch by micro-batch, without memory where this rank does not read them."""
    leaves, spec = tree_flatten(inputs)
    number = min(pipe.plan.micro_batches, len(leaves[0]))
    rows = zip(*(leaf.tensor_split(number) for leaf in leaves), strict=True)
    given = [[leaf if pipe.reads(i) else leaf.to("meta") for leaf in row] for i, row in enumerate(rows)]
    return penstock.Split(tuple(tree_unflatten(row, spec) for row in given))


def differences_of_rank(case, pipe, batches, steps):
    """What differs on one rank from the ``steps`` of the plain loop, each with the plain model behind it."""
    mine, found, plain = pipe.update.named, [], None
    for (x, y), expected in zip(batches, steps, strict=True):
        given = split_for(pipe, x) if case.splits else x
        plain, report = expected["plain"], pipe.step(given, y)
        found += (
            []
            if report.loss == expected["loss"]
            else [f"step {report.step} loss {report.loss} {expected['loss']}"]
        )
        with pipe.near():
            found += [
                f"step {report.step} gradient {n}"
                for n, p in mine.items()
                if not (case.sharded and p.grad is None)  # updated by another replica
                and not same_layout(expected["gradients"][n], p.grad)
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
        assert plain is not None
        with torch.no_grad(), casting(case.autocast):
            found += [] if same_bits(outputs, plain.eval()(batches[0][0])) else ["outputs of evaluate"]
    return found
