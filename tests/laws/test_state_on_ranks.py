"""What several stages hold of one model stays one model: tied in training alone, frozen in two stages,
loaded."""

import copy
import gc

import pytest
import torch
from cases import OPTIMIZERS
from reference import plain_loop, same_bits
from torch import nn
from zoo import cross_entropy

import penstock


class TiedInTraining(nn.Module):
    """The layer ``b`` runs twice in training, once in eval mode, where another stage would run it."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 20), nn.Linear(20, 20), nn.Linear(20, 20)
        self.end = nn.Linear(20, 3)

    def forward(self, x):
        y = self.a(x)
        if self.training:
            y = y + 0.1 * self.b(y)
        return self.end(torch.relu(self.b(torch.tanh(self.c(y)))))


class FrozenTwice(TiedInTraining):
    """A frozen layer that two stages run: each holds a copy, and a load must reach both."""

    def __init__(self):
        super().__init__()
        self.b.requires_grad_(False)

    def forward(self, x):
        y = self.a(x)
        y = y + 0.1 * self.b(y)
        return self.end(torch.relu(self.b(torch.tanh(self.c(y)))))


def batches():
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(11, 6, generator=generator), torch.randint(3, (11,), generator=generator))
        for _ in range(3)
    ]


def built(kind, seed):
    torch.manual_seed(seed)
    return kind()


def pipeline(kind, plan_path, seed, *, deadline=20):
    return penstock.Pipeline(
        built(kind, seed),
        penstock.Plan.load(plan_path),
        loss=cross_entropy,
        optimizer=OPTIMIZERS["sgd"],
        deadline=deadline,
    )


def loaded_and_evaluated(kind, plan_path, state):
    """Another start, the state of the first, then one step and an evaluation."""
    pipe = pipeline(kind, plan_path, seed=99)
    pipe.load_state_dict(state)
    pairs = batches()
    losses = [pipe.step(x, y).loss for x, y in pairs[2:]]
    return losses, pipe.evaluate(pairs[0][0])


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [TiedInTraining, FrozenTwice])
def test_a_loaded_state_trains_and_evaluates_like_the_plain_model(kind, ranks, tmp_path):
    model, pairs = built(kind, seed=5), batches()
    example = (pairs[0][0][:4].clone(),)
    profile = penstock.measure(penstock.trace(model, example), example, repeats=1)
    plan = penstock.partition(profile, cuts=["add"], micro_batches=3)
    plan.save(tmp_path / "plan.json")
    single = penstock.Pipeline(copy.deepcopy(model), plan, loss=cross_entropy, optimizer=OPTIMIZERS["sgd"])
    for x, y in pairs[:2]:
        single.step(x, y)
    loop = plain_loop(model, pairs, loss=cross_entropy, optimizer=OPTIMIZERS["sgd"], micro_batches=3)
    *_, last = loop
    found = ranks.run(loaded_and_evaluated, kind, str(tmp_path / "plan.json"), single.state_dict(), ranks=2)
    assert [losses for losses, _ in found] == [[last["loss"]]] * 2
    with torch.no_grad():
        assert same_bits(found[1][1], model.eval()(pairs[0][0]))


def steps_after_a_failure(plan_path):
    """The loss fails on rank 1 in the first step; what a second step and a state then say."""
    pipe = pipeline(TiedInTraining, plan_path, seed=5, deadline=4)
    said = []
    for targets in (torch.full((11,), 7), torch.zeros(11, dtype=torch.long)):
        try:
            pipe.step(batches()[0][0], targets)
        except penstock.PenstockError as error:
            said.append(f"{type(error).__name__}: {error}")
    pipe.close()  # waits for nobody
    raise RuntimeError(" / ".join(said))  # this group cannot be left as after success


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_that_stopped_in_a_step_refuse_another(ranks, tmp_path):
    model = built(TiedInTraining, seed=5)
    example = (batches()[0][0][:4].clone(),)
    profile = penstock.measure(penstock.trace(model, example), example, repeats=1)
    penstock.partition(profile, cuts=["add"], micro_batches=3).save(tmp_path / "plan.json")
    results = ranks.try_run(steps_after_a_failure, str(tmp_path / "plan.json"), ranks=2)
    texts = [text for text, _ in results]
    assert "StageError: rank 1, stage 1, forward of micro-batch 0, step 0: the loss: IndexError" in texts[1]
    for text in texts:
        assert " / TransportError: these ranks stopped in the middle of a step" in text


def step_with_a_loss_that_trains(plan_path):
    """The loss has a parameter of its own, made where one of the model was that another rank trains."""
    model, own = built(TiedInTraining, seed=5), []
    pipe = penstock.Pipeline(
        model,
        penstock.Plan.load(plan_path),
        loss=lambda outputs, targets: cross_entropy(outputs, targets) + own[-1].square(),
        optimizer=OPTIMIZERS["sgd"],
        deadline=20,
    )
    gone = {id(parameter) for parameter in model.parameters()}
    del model
    gc.collect()
    while not own or (id(own[-1]) not in gone and len(own) < 10_000):
        own.append(nn.Parameter(torch.ones(())))
    pipe.step(*batches()[0])
    return id(own[-1]) in gone


@pytest.mark.ranks
def test_a_loss_keeps_its_parameters_where_some_of_the_model_were(ranks, tmp_path):
    model = built(TiedInTraining, seed=5)
    example = (batches()[0][0][:4].clone(),)
    profile = penstock.measure(penstock.trace(model, example), example, repeats=1)
    penstock.partition(profile, cuts=["add"], micro_batches=3).save(tmp_path / "plan.json")
    assert ranks.run(step_with_a_loss_that_trains, str(tmp_path / "plan.json"), ranks=2)[1]
