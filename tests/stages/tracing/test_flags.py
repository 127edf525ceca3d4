"""Flags set on the model between steps count as in the plain loop, or are refused by the layer's name."""

import copy

import pytest
import torch
from cases import OPTIMIZERS
from reference import plain_loop, same_bits
from small_pipelines import batch, built, differences, model_of, nothing, pipeline_of
from torch import nn
from torch.nn import functional as F
from zoo import cross_entropy

import penstock


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.4)

    def forward(self, x):
        return x + self.drop(torch.relu(self.norm(self.linear(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.first, self.second = nn.Linear(6, 8), Block(), Block()
        self.end, self.warmth, self.scale = nn.Linear(8, 3), 0.5, nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = self.second(self.first(self.start(x)))
        return self.end(torch.relu(x * self.warmth * self.scale))


def viewed():
    """A view of a value that is used again behind it."""

    def forward(self, x):
        x = self.first(x)
        return self.last(self.middle(self.relu(x.view(-1, 8))) + x)

    parts = {"first": nn.Linear(6, 8), "relu": nn.ReLU(), "middle": nn.Linear(8, 8), "last": nn.Linear(8, 3)}
    return model_of(forward, **parts)


def pooled():
    """Zeros of a pool over a ReLU stop gradients: what is written there later might not."""

    def forward(self, x):
        x = self.pool(self.relu(self.first(x)[:, None]))
        return self.last((self.act(x.view(-1, 1, 4)) + x)[:, 0])

    parts = {"first": nn.Linear(6, 8), "relu": nn.ReLU(), "pool": nn.MaxPool1d(2), "act": nn.Hardswish()}
    return model_of(forward, last=nn.Linear(4, 3), **parts)


class Twice(Net):
    """The input of a dropout is read beside it."""

    def forward(self, x):
        x = self.start(x)
        return self.end(torch.relu(self.first.drop(x)) + x)


class Awake(nn.BatchNorm1d):
    """Stays in train mode whatever it is told."""

    def train(self, mode=True):
        return super().train(True)


Awake.__module__ = "torch.nn.modules.made_up"  # a leaf of the trace


def quiet():
    """No layer draws."""
    model = Net()
    model.first.drop.p = model.second.drop.p = 0.0
    return model


def one_draws():
    model = quiet()
    model.second.drop.p = 0.5
    return model


def asleep():
    """Parts that are in eval mode when they are traced: layers that draw nothing, and return their input."""
    model = quiet()
    model.first.eval()
    model.first.drop.p = 0.4
    return model


def awake():
    model = quiet()
    model.first.norm = Awake(8, momentum=0.0)
    return model


def sleep(path):
    return lambda model: model.get_submodule(path).eval()


def wake(path):
    return lambda model: model.get_submodule(path).train()


def still(path):
    """Nothing, then a part in eval mode, then in train mode again."""
    return [nothing, sleep(path), wake(path)]


def set_on(path, name, value):
    return lambda model: setattr(model.get_submodule(path), name, value)


def trains(path, flag):
    return lambda model: model.get_submodule(path).requires_grad_(flag)


def used(model):
    """Use a model as people do between steps."""
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 6))
    model.train()


def hook(factor):
    def change(model):
        hooks = model.first.linear._forward_hooks
        hooks.clear()
        hooks.update({7: lambda module, args, output: output * factor} if factor else {})

    return change


DROPS, CUTS = ["first_drop", "second_drop"], ["start", "first_norm", "first_drop", "second_linear"]
FEW = ["start", "second_linear"]
IN_PLACE = [nothing, set_on("relu", "inplace", True), set_on("relu", "inplace", False)]
COUNTS = {
    "a norm sleeps": (Net, still("first.norm"), DROPS, CUTS),
    "a block sleeps": (Net, still("first"), DROPS, CUTS),
    "a dropout sleeps": (Net, still("first.drop"), DROPS, CUTS),
    "another block sleeps": (Net, still("second"), DROPS, CUTS),
    "a block sleeps, cut at every layer": (Net, still("first"), DROPS, None),
    "a part wakes": (asleep, [nothing, wake("first"), sleep("first")], DROPS[:1], ["start", "first_linear"]),
    "one value for two": (Twice, still("first.drop"), DROPS[:1], ["start"]),
    "all sleep": (one_draws, [nothing, sleep(""), wake("")], DROPS[1:], CUTS),
    "it ran in eval mode": (Net, [nothing, used, used], DROPS, CUTS),
    "freezing": (Net, [nothing, trains("start", False), trains("start", True)], DROPS, FEW),
    "a hook on a layer": (Net, [nothing, *map(hook, (2, 3, 0, 2))], DROPS, FEW),
    "an attribute of a layer": (Net, [nothing, set_on("first.norm", "momentum", 0.5)], DROPS, FEW),
    "dropout that begins later": (quiet, [nothing, set_on("first.drop", "p", 0.3)], DROPS[:1], FEW),
    "a module that eval() leaves awake": (awake, [nothing, nothing], (), CUTS),
}


@pytest.mark.parametrize("name", COUNTS)
def test_what_is_set_on_a_layer_counts_as_in_the_plain_loop(name):
    make, changes, random, cuts = COUNTS[name]
    assert differences(make, changes, random=random, cuts=cuts) == []


@pytest.mark.parametrize("cut", ["middle", "first"])
def test_a_write_through_a_view_counts_where_every_reader_sees_it(cut):
    assert differences(viewed, IN_PLACE, cuts=[cut], evaluates=False) == []


def on_ranks():
    return differences(Net, still("second.norm"), random=DROPS, cuts=["second_linear"], ranks=2)


def test_the_flags_of_the_moment_count_on_ranks(ranks):
    assert ranks.run(on_ranks, ranks=2) == [[], []]


ACT_IN_PLACE = [set_on("act", "inplace", True), set_on("act", "inplace", False)]
REFUSED = [  # the model, its cuts, a change and what takes it back, the sentence
    (
        asleep,
        ["first_drop"],
        [wake("first"), sleep("first")],
        "first_drop returned .* make the Pipeline anew",
    ),
    (Twice, ["first_drop"], still("first.drop")[1:], "first_drop returned .* make the Pipeline anew"),
    (viewed, ["first", "middle"], IN_PLACE[1:], "relu wrote to the memory of first, which goes on"),
    (pooled, ["act"], ACT_IN_PLACE, "act wrote to the memory of pool, which goes on"),
]


@pytest.mark.parametrize(("make", "cuts", "changes", "subject"), REFUSED)
def test_what_a_cut_was_made_without_is_refused_by_the_layer_until_it_is_set_back(
    make, cuts, changes, subject
):
    model, (change, undo) = built(make), changes
    pipe = pipeline_of(model, cuts=cuts)
    pipe.step(*batch())
    change(model)
    for _ in range(2):
        with pytest.raises(penstock.StageError, match=subject):
            pipe.step(*batch())
    undo(model)
    pipe.step(*batch())


def test_unfreezing_what_a_cut_was_made_without_is_refused_by_name():
    model = Net()
    model.start.requires_grad_(False)
    pipe = pipeline_of(model, cuts=["start", "first_norm"])
    pipe.step(*batch())
    model.start.requires_grad_(True)
    with pytest.raises(penstock.StageError, match=r"start .* start\.weight, start\.bias unfrozen; make"):
        pipe.step(*batch())
    state = pipe.state_dict()
    again = pipeline_of(model, cuts=["start", "first_norm"])
    again.load_state_dict(state)
    again.step(*batch())


def test_what_was_frozen_arrives_without_asking_for_a_gradient():
    """Some kernels are picked by it: a product folds its dimensions only where no gradient is asked for."""
    model, asked = quiet(), []
    pipe = pipeline_of(model, cuts=["first"])
    model.second.linear.register_forward_pre_hook(lambda module, args: asked.append(args[0].requires_grad))
    for part in (model.start, model.first):
        part.requires_grad_(False)
    pipe.step(*batch())
    assert asked[-3:] == [False] * 3
    model.first.requires_grad_(True)
    pipe.step(*batch())
    assert asked[-3:] == [True] * 3


FROZEN, STILL = nn.Linear(8, 8).requires_grad_(False), nn.BatchNorm1d(8, affine=False).eval()
SHARED = {
    "trained": (FROZEN, trains("part", True), r"part\.(weight|bias) was frozen .* is used on several stages"),
    "written": (STILL, wake("part"), "part was in eval mode .* writes to a buffer"),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_part_of_two_stages_that_is_trained_or_written_later_is_refused(name):
    part, change, subject = SHARED[name]

    def forward(self, x):
        return self.end(self.part(torch.relu(self.part(self.start(x)))))

    model = model_of(forward, start=nn.Linear(6, 8), part=copy.deepcopy(part), end=nn.Linear(8, 3))
    pipe = pipeline_of(model, cuts=["relu"])
    pipe.step(*batch())
    change(model)
    with pytest.raises(penstock.PlanError, match=subject):
        pipe.step(*batch())


def test_a_failed_evaluation_leaves_the_flags():
    model = Net()
    pipe = pipeline_of(model, cuts=["start"])
    model.first.eval()
    flags = [module.training for module in model.modules()]

    def fail(*_):
        raise RuntimeError("on purpose")

    handle = model.end.register_forward_hook(fail)
    with pytest.raises(penstock.StageError, match="on purpose"):
        pipe.evaluate(batch()[0])
    assert flags == [module.training for module in model.modules()]
    handle.remove()
    pipe.step(*batch())


def test_a_stream_takes_the_flags_of_the_step():
    model = quiet()
    pipe = pipeline_of(model, cuts=["first_norm"], schedule="async_1f1b")
    pipe.step(*batch())
    model.first.norm.eval()
    statistics = model.first.norm.get_buffer("running_mean")
    before = statistics.clone()
    pipe.step(*batch())
    assert same_bits(statistics, before)
    model.warmth = 2.0
    with pytest.raises(penstock.PlanError, match=r"warmth was 0\.5"):
        pipe.step(*batch())


class Cell(nn.Module):
    """A layer of one's own, which draws where its table says so."""

    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(8, 8), {"p": 0.0}

    def forward(self, x):
        return F.dropout(self.linear(x), self.table["p"], self.training)


def noisy(model, patch):
    model[1].table["p"] = 0.5


def noisy_class(model, patch):
    patch.setattr(Cell, "forward", lambda self, x: F.dropout(self.linear(x), 0.5, self.training))


@pytest.mark.parametrize("change", [noisy, noisy_class])
@pytest.mark.parametrize("seed", [3, 4])
def test_a_layer_of_ones_own_that_begins_to_draw_is_seeded(change, seed, monkeypatch):
    model = built(lambda: nn.Sequential(nn.Linear(6, 8), Cell(), nn.Linear(8, 3)))
    plain, pipe = copy.deepcopy(model), pipeline_of(model, cuts=["_0"], leaves=[Cell])
    calls = iter((step, index) for step in range(3) for index in range(3))

    def seeded(module, args):
        torch.manual_seed(penstock.layer_seed(0, *next(calls), "_1"))

    plain[1].register_forward_pre_hook(seeded)
    runs = plain_loop(plain, [batch()] * 3, loss=cross_entropy, optimizer=OPTIMIZERS["sgd"], micro_batches=3)
    for step in range(3):
        torch.manual_seed(seed)
        assert pipe.step(*batch()).loss == next(runs)["loss"]
        assert all(map(same_bits, model.parameters(), plain.parameters()))
        if not step:
            change(model, monkeypatch)
            change(plain, monkeypatch)
    monkeypatch.undo()
    pipe.step(*batch())
    assert not pipe.engine.model_guards.moved
