"""Loading a state is all or nothing: whatever is wrong with one is said, and then not a bit has changed."""

import copy
import functools
import io
import random
import re

import numpy
import pytest
import torch
from cases import OPTIMIZERS
from reference import plain_loop, same_bits
from torch import nn
from zoo import cross_entropy

import penstock

SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5),
    "cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=20),
    "two": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5)],
        [2],
    ),
}


def by_name(named):
    """Groups by name, so that stages have other numbers of them."""
    weights = [p for n, p in named if n.endswith("weight") and n[0] in "05"]
    rest = [p for n, p in named if not any(p is w for w in weights)]
    groups = [{"params": weights, "lr": 0.02, "weight_decay": 0.1}, {"params": rest}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)


KINDS = {
    **OPTIMIZERS,
    **{
        name: lambda named, name=name: getattr(torch.optim, name)(named, lr=0.01)
        for name in "Adafactor Adagrad NAdam RAdam ASGD Rprop RMSprop Adadelta Adamax".split()
    },
    "by_name": by_name,
    "tensor_lr": lambda named: torch.optim.SGD(named, lr=torch.tensor(0.05), momentum=0.9),
    "amsgrad": lambda named: torch.optim.Adam(named, lr=0.01, amsgrad=True),
    "some": lambda named: torch.optim.SGD([p for n, p in named if n[0] != "5"], lr=0.05, momentum=0.9),
}


def model_of(width=16, dtype=torch.float32):
    torch.manual_seed(0)
    body = (nn.Linear(12, width), nn.ReLU(), nn.Linear(width, 12), nn.BatchNorm1d(12), nn.ReLU())
    return nn.Sequential(*body, nn.Linear(12, 5)).to(dtype)


def batches(steps=6, dtype=torch.float32):
    source = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 12, generator=source).to(dtype), torch.randint(5, (8,), generator=source))
        for _ in range(steps)
    ]


@functools.cache
def plan_for(cuts, width=16, dtype=torch.float32):
    example = (torch.randn(4, 12, dtype=dtype),)
    model = model_of(width, dtype)
    profile = penstock.measure(penstock.trace(model, example), example, repeats=1)
    return penstock.partition(profile, cuts=list(cuts), micro_batches=2)


def pipeline(cuts=("_1",), *, width=16, dtype=torch.float32, **settings):
    settings = {
        "loss": cross_entropy,
        "optimizer": OPTIMIZERS["adam"],
        "scheduler": SCHEDULERS["step"],
        "scaler": torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2),
        **settings,
    }
    return penstock.Pipeline(model_of(width, dtype), plan_for(cuts, width, dtype), **settings)


def trained(**settings):
    pipe = pipeline(**settings)
    for x, y in batches(3, settings.get("dtype", torch.float32)):
        pipe.step(x, y)
    return pipe


def everything(pipe):
    """All that a load may change, and the random states."""
    states = (torch.get_rng_state(), repr(random.getstate()), repr(numpy.random.get_state()))
    return copy.deepcopy((pipe.state_dict(), pipe.num_steps, states))


def same(a, b):
    if isinstance(a, dict) and isinstance(b, dict):
        return set(a) == set(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return same_bits(a, b)


def written(*path, value):
    """A damage: put ``value``, or what a function makes of what is there, at a place of a state."""

    def damage(state):
        for key in path[:-1]:
            state = state[key]
        state[path[-1]] = value(state[path[-1]]) if callable(value) else value

    return damage


def without(*path):
    def damage(state):
        for key in path[:-1]:
            state = state[key]
        del state[path[-1]]

    return damage


LAST = ("optimizer", "5.bias")
ENTRY = (*LAST, "state", "exp_avg")
DAMAGES = {
    "no model": (without("model"), "found optimizer, .*; model is missing, take one from state_dict"),
    "model a list": (written("model", value=[]), "model of a state is a dict by name, found list"),
    "a tensor less": (without("model", "5.bias"), "5.bias is not in both"),
    "a tensor more": (written("model", "zz", value=torch.zeros(1)), "zz is not in both"),
    "a number as a name": (written("model", 3, value=torch.zeros(1)), "3 is not in both"),
    "another shape": (written("model", "5.bias", value=torch.zeros(3)), r"shape \(5,\), the state \(3,\)"),
    "broadcasts": (written("model", "5.bias", value=torch.zeros(())), r"shape \(5,\), the state \(\)"),
    "another dtype": (
        written("model", "5.bias", value=lambda t: t.double()),
        "dtype torch.float32, the state",
    ),
    "complex": (written("model", "5.bias", value=lambda t: t + 0j), "the state torch.complex64"),
    "text": (written("model", "5.bias", value="x"), "dense tensor, found str"),
    "numpy": (written("model", "5.bias", value=lambda t: t.numpy()), "dense tensor, found ndarray"),
    "meta": (written("model", "5.bias", value=lambda t: t.to("meta")), "found a meta tensor"),
    "sparse": (written("model", "5.bias", value=lambda t: t.to_sparse()), "a sparse or quantised one"),
    "quantised": (
        written("model", "5.bias", value=lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8)),
        "a sparse or quantised one",
    ),
    "a subclass": (
        written("model", "5.bias", value=lambda t: torch.masked.masked_tensor(t, t > 0)),
        "a MaskedTensor",
    ),
    "a count": (written("model", "3.num_batches_tracked", value=torch.tensor(1.5)), "dtype torch.int64"),
    "no optimizer": (written("optimizer", value=None), "optimizer of a state is a dict by name"),
    "a parameter less": (without(*LAST), "5.bias is a parameter of the optimizer only"),
    "a parameter more": (
        written("optimizer", value=lambda o: o | {"zz": o["5.bias"]}),
        "zz is a parameter of the state only",
    ),
    "another class": (written("optimizer_class", value="SGD"), "taken from, SGD, and this is Adam"),
    "a class of no text": (written("optimizer_class", value=7), "optimizer_class of a state is a name"),
    "a parameter of text": (written(*LAST, value="x"), "two dicts for 5.bias, state and group, found str"),
    "entries of text": (written(*LAST, "state", value="x"), "found str and dict"),
    "no group": (without(*LAST, "group"), "found dict and NoneType"),
    "an entry less": (without(*ENTRY), "exp_avg is missing in the state"),
    "an entry more": (written(*LAST, "state", "evil", value=torch.zeros(5)), "evil is not of this optimizer"),
    "an entry's shape": (
        written(*ENTRY, value=torch.zeros(3)),
        r"exp_avg of 5.bias .* \(5,\), the state \(3,\)",
    ),
    "an entry's dtype": (written(*ENTRY, value=lambda t: t.half()), "exp_avg of 5.bias .* torch.float16"),
    "an entry of text": (written(*ENTRY, value="x"), "exp_avg of 5.bias .* dense tensor, found str"),
    "an entry of code": (written(*ENTRY, value=lambda _: print), "exp_avg of 5.bias in the optimizer is"),
    "a count of updates": (written(*LAST, "state", "step", value=3), "dense tensor, found int"),
    "updates below 0": (written(*LAST, "state", "step", value=torch.tensor(-1.0)), "from 0, found -1"),
    "updates of nan": (
        written(*LAST, "state", "step", value=torch.tensor(float("nan"))),
        "from 0, found nan",
    ),
    "a rate of text": (written(*LAST, "group", "lr", value="fast"), "lr of 5.bias is of kind float.*'fast'"),
    "a rate of nan": (written(*LAST, "group", "lr", value=float("nan")), "lr of 5.bias .* nan"),
    "a rate of two": (written(*LAST, "group", "lr", value=torch.zeros(2)), "lr of 5.bias is of kind float"),
    "another rate": (written(*LAST, "group", "lr", value=0.5), "in one group with others"),
    "a bool": (written(*LAST, "group", "amsgrad", value=1.0), "amsgrad of 5.bias is of kind bool"),
    "one beta": (written(*LAST, "group", "betas", value=(0.9,)), "betas of 5.bias is of kind tuple"),
    "no rate": (without(*LAST, "group", "lr"), "hyper-parameter lr of 5.bias is not in both"),
    "a setting more": (written(*LAST, "group", "evil", value="x"), "hyper-parameter evil of 5.bias"),
    "a step of text": (written("step", value="many"), "step of a state is a whole number from 0, found str"),
    "a step below 0": (written("step", value=-5), "found int -5"),
    "a step of nan": (written("step", value=float("nan")), "found float nan"),
    "a step of truth": (written("step", value=True), "found bool True"),
    "no scheduler": (written("scheduler", value=None), "a scheduler and the state has none"),
    "a junk scheduler": (written("scheduler", value={"x": 1}), "a dict with last_epoch, found dict with x"),
    "a scheduler's name": (written("scheduler", "get_lr", value=1), "get_lr is not in both, this is StepLR"),
    "a scheduler's kind": (
        written("scheduler", "gamma", value="x"),
        "gamma of the scheduler is of kind float",
    ),
    "an epoch": (written("scheduler", "last_epoch", value=0.5), "last_epoch of the scheduler is a whole"),
    "no scaler": (written("scaler", value=None), "a GradScaler and the state has none"),
    "a junk scaler": (written("scaler", value={"x": 1}), "scaler of a state is a dict with scale, .* with x"),
    "a scale of 0": (written("scaler", "scale", value=0.0), "scale of the scaler is out of its range"),
    "a scale of text": (written("scaler", "scale", value="1"), "scale of the scaler is out of its range"),
    "a tracker": (written("scaler", "_growth_tracker", value=-1), "_growth_tracker of the scaler"),
    "versions": (written("versions", value={"x": 1}), "made with, no known versions, found a synchronous"),
}


@pytest.fixture(scope="module")
def state():
    """One of a training of three steps, as it comes out of a file."""
    file = io.BytesIO()
    torch.save(trained().state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.fixture(scope="module")
def other():
    """A pipeline of another cut that has taken a step."""
    pipe = pipeline(cuts=("_0", "_3"))
    pipe.step(*batches()[5])
    return pipe


@pytest.mark.filterwarnings("ignore:.*(MaskedTensors|quantize)")
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_state_is_refused_and_nothing_changes(name, state, other):
    damage, told = DAMAGES[name]
    damaged, before = copy.deepcopy(state), everything(other)
    damage(damaged)
    with pytest.raises(penstock.PlanError, match=told):
        other.load_state_dict(damaged)
    assert same(before, everything(other))


@pytest.mark.parametrize("junk", [None, [1], "state", torch.zeros(2)], ids=str)
def test_what_is_no_state_is_refused(junk, other):
    with pytest.raises(penstock.PlanError, match="a state is a dict from state_dict, found"):
        other.load_state_dict(junk)


UNSUITED = {
    "SGD": ({"optimizer": OPTIMIZERS["sgd"]}, "taken from, Adam, and this is SGD"),
    "AdamW": ({"optimizer": OPTIMIZERS["adamw"]}, "taken from, Adam, and this is AdamW"),
    "width": ({"width": 8}, r"0.weight of the model has shape \(8, 12\), the state \(16, 12\)"),
    "dtype": ({"dtype": torch.bfloat16}, "0.weight of the model has dtype torch.bfloat16, the state"),
    "cycle": ({"scheduler": SCHEDULERS["cycle"]}, "hyper-parameter .* is not in both"),
    "some": (
        {"optimizer": lambda n: torch.optim.Adam([p for k, p in n if k[0] != "5"])},
        "of the state only",
    ),
}


@pytest.mark.parametrize("name", UNSUITED)
@pytest.mark.parametrize("with_class", [True, False])
def test_a_state_of_another_training_is_refused(name, with_class, state):
    settings, told = UNSUITED[name]
    state = copy.deepcopy(state)
    if not with_class:  # as states were before they named it: what they hold tells
        del state["optimizer_class"]
        told = told if "this is" not in told else "not in both|in one group|is missing|not of this|of kind"
    pipe = pipeline(**settings)
    before = everything(pipe)
    if name == "AdamW" and not with_class:
        return  # the two keep the same
    with pytest.raises(penstock.PlanError, match=told):
        pipe.load_state_dict(state)
    assert same(before, everything(pipe))


def test_a_rate_out_of_its_range_is_refused_as_the_optimizer_would(state, other):
    damaged = copy.deepcopy(state)
    for kept in damaged["optimizer"].values():
        kept["group"]["lr"] = -0.1
    with pytest.raises(penstock.PlanError, match=r"Adam refuses the hyper-parameters of .*: Invalid"):
        other.load_state_dict(damaged)


def test_an_optimizer_that_keeps_entries_from_the_start_needs_them():
    state = trained(optimizer=KINDS["Adagrad"]).state_dict()
    state["optimizer"]["5.bias"]["state"] = {}
    with pytest.raises(penstock.PlanError, match=r"keeps step, sum of 5\.bias, and st?[a-z]+ is missing"):
        pipeline(optimizer=KINDS["Adagrad"]).load_state_dict(state)


COURSES = [*((kind, "step") for kind in KINDS), ("adamw", None), ("sgd", "two"), ("adam", "cycle")]
COURSES += [("by_name", "cycle"), ("by_name", "two"), ("by_name", None)]


@pytest.mark.parametrize(("kind", "scheduler"), COURSES)
def test_a_training_goes_on_in_another_cut_with_the_bits_of_the_plain_loop(kind, scheduler):
    settings = {"optimizer": KINDS[kind], "scheduler": SCHEDULERS.get(scheduler), "scaler": None}
    first = trained(**settings)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = pipeline(cuts=("_0", "_3"), **settings)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert same(first.state_dict()["optimizer"], second.state_dict()["optimizer"])
    plain, pairs = model_of(), batches()
    del settings["scaler"]
    *_, _ = plain_loop(plain, pairs, loss=cross_entropy, micro_batches=2, **settings)
    for x, y in pairs[3:]:
        second.step(x, y)
    theirs = plain.state_dict()
    assert all(same_bits(t, theirs[key]) for key, t in second.state_dict()["model"].items())


def test_a_state_before_the_first_step_loads():
    pipe, late = pipeline(), trained()
    late.load_state_dict(pipe.state_dict())
    assert late.num_steps == 0
    assert late.step(*batches()[0]).loss == pipe.step(*batches()[0]).loss


def test_a_state_shares_no_memory_with_a_pipeline():
    pipe, twin = trained(scheduler=SCHEDULERS["two"]), pipeline(scheduler=SCHEDULERS["two"])
    state = pipe.state_dict()
    kept = copy.deepcopy(state)
    twin.load_state_dict(state)
    for x, y in batches():
        pipe.step(x, y)
        twin.step(x, y)
    assert same(state, kept)
    assert same(pipe.state_dict(), twin.state_dict())


def test_a_state_of_live_tensors_loads_as_it_was():
    """Two weights that change places: the copy of one must not be what the other is then given."""
    pipe = pipeline(width=12)
    state = pipe.state_dict()
    live = dict(pipe.update.named)
    state["model"]["0.weight"], state["model"]["2.weight"] = live["2.weight"], live["0.weight"]
    expected = [live["2.weight"].detach().clone(), live["0.weight"].detach().clone()]
    pipe.load_state_dict(state)
    assert [same_bits(live[n], t) for n, t in zip(("0.weight", "2.weight"), expected, strict=True)] == [
        True
    ] * 2


def test_other_geometry_loads(state, other):
    odd = copy.deepcopy(state)
    odd["model"]["0.weight"] = odd["model"]["0.weight"].t().contiguous().t()
    odd["model"]["5.bias"] = odd["model"]["5.bias"][:1].expand(5)
    odd["optimizer"]["0.weight"]["state"]["exp_avg"].requires_grad_()
    other.load_state_dict(odd)
    assert same_bits(other.state_dict()["model"]["0.weight"], state["model"]["0.weight"])
    other.load_state_dict(state)


def test_a_tied_tensor_has_one_value():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.relu(self.a(x)))

    example = (torch.randn(4, 6),)
    profile = penstock.measure(penstock.trace(Tied(), example), example, repeats=1)
    plan = penstock.partition(profile, cuts=["relu"], micro_batches=2)
    pipe = penstock.Pipeline(Tied(), plan, loss=cross_entropy, optimizer=OPTIMIZERS["sgd"])
    state = pipe.state_dict()
    pipe.load_state_dict(state)
    state["model"]["b.weight"] = state["model"]["b.weight"] + 1
    with pytest.raises(penstock.PlanError, match=r"b\.weight and a\.weight are one tensor of the model"):
        pipe.load_state_dict(state)


def test_what_a_state_cannot_hold_is_said():
    class Listing(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["history"] = [torch.zeros(1)]

    pipe = trained(optimizer=lambda named: Listing(named, lr=0.1), scaler=None)
    with pytest.raises(penstock.PlanError, match=r"the optimizer keeps history of .* as list"):
        pipe.state_dict()


def loaded_on_a_rank(plan_path, states):
    """Load one of ``states`` per rank; what is said, and whether anything changed."""
    plan = penstock.Plan.load(plan_path)
    pipe = penstock.Pipeline(model_of(), plan, loss=cross_entropy, optimizer=OPTIMIZERS["adam"], deadline=20)
    said = []
    for state in states:
        before = everything(pipe)
        try:
            pipe.load_state_dict(state[pipe.rank])
            said.append("")
        except penstock.PlanError as error:
            said.append(str(error).removeprefix(f"rank {1 - pipe.rank}: "))
        said.append(same(before, everything(pipe)))
    return said


@pytest.mark.ranks
def test_ranks_refuse_together(ranks, tmp_path):
    plan_for(("_1",)).save(tmp_path / "plan.json")
    good = trained(scheduler=None, scaler=None).state_dict()
    wrong, less, later = copy.deepcopy(good), copy.deepcopy(good), copy.deepcopy(good)
    wrong["optimizer"]["5.bias"]["state"]["exp_avg"] = torch.zeros(3)  # of rank 1
    del less["optimizer"]["0.bias"]  # of rank 0
    later["model"]["0.bias"] = later["model"]["0.bias"] + 1
    states = [(wrong, wrong), (wrong, good), (good, wrong), (less, less), (good, later), (good, good)]
    one, two = ranks.run(loaded_on_a_rank, str(tmp_path / "plan.json"), states, ranks=2)
    assert one == two
    for told, place in (("exp_avg of 5.bias", 0), ("exp_avg of 5.bias", 4), ("0.bias is a parameter", 6)):
        assert told in one[place]
    assert re.search(r"the state\['model'\]\['0\.bias'\] is .* on rank 0 and .* on rank 1", one[8])
    assert one[1::2] == [True] * 5 + [False]
    assert one[10] == ""
