"""Ranks that were given different things refuse, all of them, and name the first; a plan of rank 0 is
everybody's."""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from disagreements import CASES, batches, built, pipeline, plan_of, sgd
from reference import plain_loop, same_bits
from sampling import is_whole, seed_of
from torch.nn import functional as F

import penstock


def said_by(call):
    """Result of a call, or the error that it raises."""
    try:
        return call()
    except (penstock.PenstockError, RuntimeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"


def sentences(names):
    """Sentences of this rank on these cases; the group goes on after each."""
    said = {name: str(said_by(CASES[name][dist.get_rank()])) for name in names}
    return said, pipeline(plan_of()).step(*batches(1)[0]).loss


def test_ranks_that_were_given_different_things_say_so_all_of_them(ranks, pytestconfig):
    """By default in a third of the cases, drawn by the seed of the run."""
    names = [*CASES]
    if not is_whole(pytestconfig):
        names = random.Random(seed_of(pytestconfig)).sample(names, len(names) // 3)
    (first, loss), (second, same) = ranks.run(sentences, names, ranks=2)
    alone = {"no gradients on one", "a clip that none takes", "an optimizer that fails on one stage"}
    for name in names:
        part = CASES[name][2]
        assert part in first[name], f"{name}: {first[name]}"
        assert part in second[name], f"{name}: {second[name]}"
        assert first[name] == second[name] or name in alone
        assert name not in alone or first[name].startswith("Disagreement: rank 1: "), first[name]
    assert loss == same == pipeline(plan_of(ranks=1)).step(*batches(1)[0]).loss


# What rank 0 and rank 1 give as their plan: each measured for itself, or one has none.
WAYS = [(lambda: plan_of(0, stages=2), other) for other in (lambda: plan_of(1, stages=2), lambda: None)]


def trained():
    """For every way: losses and state of two steps, and the plan that ran."""
    found = []
    for way in WAYS:
        pipe = pipeline(way[dist.get_rank()]())
        losses = [pipe.step(x, y).loss for x, y in batches(2)]
        found.append((losses, pipe.state_dict()["model"], pipe.plan))
    return found


def test_the_plan_of_rank_0_is_everybodys_and_has_the_bits_of_the_plain_loop(ranks):
    own = [plan_of(rank, stages=2) for rank in range(2)]
    assert own[0].cuts != own[1].cuts
    model, settings = built(), {"loss": F.cross_entropy, "optimizer": sgd, "micro_batches": 3}
    expected = [step["loss"] for step in plain_loop(model, batches(2), random=("drop",), **settings)]
    for (losses, state, plan), (also, _, other) in zip(*ranks.run(trained, ranks=2), strict=True):
        assert losses == also == expected
        assert all(same_bits(tensor, state[name]) for name, tensor in model.state_dict().items())
        assert plan == other
        assert plan.cuts == own[0].cuts


def test_one_process_takes_no_plan_from_anybody():
    with pytest.raises(penstock.PlanError, match="one process has no other rank to take a plan from"):
        pipeline(None)


def watched(state):
    """Sentences of this rank on batches of which some differ; the group goes on after each refusal."""
    pipe, own = pipeline(plan_of()), dist.get_rank()
    pipe.same.every = 3
    x, y = batches(1)[0]
    said = []

    def tries(call):
        said.append(said_by(call))

    tries(lambda: pipe.step(*batches(1, seed=own)[0]))  # every rank shuffles for itself
    tries(lambda: pipe.step(x, y.roll(own)))
    tries(lambda: pipe.step(x[: 9 - own], y[: 9 - own]))
    tries(lambda: pipe.step(x, y[: 9 - own]))  # rank 1 refuses this by itself
    for shift in (0, own, own, own):  # steps 0 to 2 run, of which only the first is compared
        tries(lambda shift=shift: pipe.step(x, y.roll(shift)).step)
    torch.set_num_threads(1 + own)
    tries(lambda: pipe.step(x, y))
    torch.set_num_threads(1)
    tries(lambda: pipe.step(x, y) if own else pipe.evaluate(x))
    tries(lambda: pipe.evaluate(x + own))
    tries(lambda: pipe.evaluate(x) is None)
    other = {name: tensor + own * (name == "b.bias") for name, tensor in state["model"].items()}
    tries(lambda: pipe.load_state_dict({**state, "model": other}))
    tries(lambda: pipe.load_state_dict(state if own else {"model": {}}))
    tries(lambda: pipe.load_state_dict(state))
    tries(lambda: pipe.step(x, y.roll(own)))  # the first after a load is compared
    tries(lambda: pipe.step(x, y).step)
    return said


def test_a_batch_or_state_that_ranks_do_not_share_is_refused(ranks):
    state = pipeline(plan_of(ranks=1)).state_dict()
    first, second = ranks.run(watched, state, ranks=2)
    differs = "Disagreement: all ranks train one model alike: the "
    expected = [
        differs + "checksum of the input x of the batch is ",
        differs + "checksum of the targets of the batch is ",
        differs
        + "input x of the batch is torch.float32 (9, 6) with strides (6, 1) on rank 0 and torch.float32 (8,",
        "Disagreement: rank 1: inputs and targets of a batch have the same number of samples",
        *range(3),
        differs + "checksum of the targets of the batch is ",
        differs + "number of threads of torch is 1 on rank 0 and 2 on rank 1; set it alike",
        "Disagreement: all ranks call a Pipeline alike: rank 0 is at evaluation 0, rank 1 at step 3; make",
        differs + "checksum of the input x of the batch is ",
        True,
        differs + "state['model']['b.bias'] is torch.float32 (8,) with strides (1,), checksum ",
        "Disagreement: rank 0: a state has the keys model, optimizer and step, found model",
        None,
        differs + "checksum of the targets of the batch is ",
        0,
    ]
    second[3] = second[3].replace("PlanError", "Disagreement: rank 1")  # its own error
    first[13] = first[13].replace("PlanError", "Disagreement: rank 0")
    second[11] = not second[11]  # it has the outputs
    for ours, theirs, said in zip(first, second, expected, strict=True):
        assert ours == theirs
        assert ours.startswith(said) if isinstance(said, str) else ours == said


def refuses_alone():
    pipe = pipeline(plan_of(), deadline=3)
    x, y = batches(1)[0]
    pipe.step(x, y)
    said: list[Any] = [said_by(lambda: pipe.step(x, y[: 9 - dist.get_rank()])) for _ in range(2)]
    raise RuntimeError(" / ".join(said))  # this group cannot be left as after success


@pytest.mark.slow
def test_a_rank_that_refuses_a_batch_alone_is_named_by_the_others(ranks):
    texts = [text for text, _ in ranks.try_run(refuses_alone, ranks=2)]
    why = "rank 1, the batch of step 1: inputs and targets of a batch have the same number of samples"
    assert f"PlanError: {why}" in texts[1]
    assert f": {why}" in texts[0]
    assert all("/ TransportError: these ranks stopped in the middle of a step" in text for text in texts)
