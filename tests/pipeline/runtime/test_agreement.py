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
from small_pipelines import model_of
from torch import nn
from torch.nn import functional as F

import penstock
from penstock import trace
from penstock.compression.errors import Disagreement
from penstock.pipeline.runtime import fingerprints
from penstock.pipeline.runtime.agreement import Agreement
from penstock.pipeline.runtime.fingerprints import Fact


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
    tries(lambda: pipe.load_state_dict(state))
    tries(lambda: pipe.step(x, y.roll(own)))  # the first after a load is compared
    tries(lambda: pipe.step(x, y).step)
    return said


def test_a_batch_that_ranks_do_not_share_is_refused(ranks):
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
        None,
        differs + "checksum of the targets of the batch is ",
        0,
    ]
    second[3] = second[3].replace("PlanError", "Disagreement: rank 1")  # its own error
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


class Rows:
    """A world whose other ranks have told their facts."""

    def __init__(self, *rows):
        self.size, self.rank, self.rows = len(rows), 0, rows

    def all_gather_json(self, item, at=""):
        if len(item) == 3 and item[0] == "here":  # a place, a digest, no refusal: all digests differ
            return [["here", f"digest {rank}", ""] for rank in range(self.size)]
        return [[[fact.what, fact.value, fact.remedy, fact.among] for fact in row] for row in self.rows]


def agree(*rows):
    agreement = Agreement(Rows(*rows))  # pyright: ignore[reportArgumentType] (it has what is asked of it)
    agreement.agree("here", lambda: rows[0])


def of(kind, variant, **more):
    alike = [Fact(f"the {name}", value, "do it") for name, value in more.items()]
    return [*alike[:1], Fact("the variant", variant, "install it", among=kind), *alike[1:]]


def test_ranks_on_other_kinds_of_device_may_differ_in_what_goes_with_it():
    agree(of("cpu", "", seed="1"), of("cuda", "cu132", seed="1"), of("cuda", "cu132", seed="1"))


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([("cpu", ""), ("cuda", "cu132"), ("cuda", "cu126")], "variant is cu132 on rank 1 and cu126"),
        ([("cpu", ""), ("cuda", "cu132", {"seed": "2"})], "the seed is 1 on rank 0 and 2 on rank 1; do it"),
        ([("cpu", ""), ("cuda", "", {"more": "2"})], "rank 0 has no more where rank 1 has the more; do it"),
    ],
)
def test_what_must_be_alike_still_is(rows, told):
    with pytest.raises(Disagreement, match=told):
        agree(*(of(kind, variant, **{"seed": "1", **dict(*more)}) for kind, variant, *more in rows))


def test_the_variant_of_a_build_goes_with_the_device(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.15.0+cu132")
    told = {fact.what: (fact.value, fact.among) for fact in fingerprints.of_process(torch.device("cuda", 1))}
    assert told["the variant of the build of torch"] == ("cu132", "cuda")
    value, among = told["the build of torch"]
    assert value.startswith("2.15.0 (")
    assert not among
    assert [f.among for f in fingerprints.of_process() if f.among] == ["cpu", "cpu"]


def test_where_a_layer_makes_tensors_is_told_alike_on_every_rank():
    makes = model_of(lambda self, x: x + torch.ones(4, device=x.device))
    graph = trace(nn.Sequential(nn.Linear(4, 4), makes, nn.Linear(4, 4)), (torch.randn(2, 4),))
    told = [fact.value for fact in fingerprints.of_layers(graph) if "ones" in fact.what]
    assert told
    assert all("where ranks compute" in text and "cpu" not in text for text in told)


def test_a_parameter_under_a_further_name_is_told_with_its_first():
    def told(other):
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in "abc"})
        model["c"].weight = model[other].weight
        return {fact.what: fact.value for fact in fingerprints._of_model(model)}["the parameter c.weight"]

    assert [told("a"), told("b")] == ["that of a.weight", "that of b.weight"]


def test_an_optimizer_that_cannot_be_made_of_all_parameters_is_told_and_not_raised():
    def optimizer(named):
        raise ValueError(f"found {len([*named])}")

    facts = fingerprints.of_pipeline(nn.Linear(2, 2), optimizer, None, {}, torch.device("cpu"))
    told = {fact.what: fact.value for fact in facts}["the argument optimizer"]
    assert told == "one that cannot be made of all parameters (ValueError: found 2)"


def test_a_tensor_that_a_kind_of_device_computed_is_compared_among_its_ranks():
    parts = {"linear": nn.Linear(4, 4), "table": torch.arange(4.0).sin()}
    graph = trace(model_of(lambda self, x: self.linear(x) * self.table, **parts), (torch.randn(2, 4),))
    assert {f.among for f in fingerprints.of_layers(graph) if f.what.startswith("the tensor")} == {"cpu"}
