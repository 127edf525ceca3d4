"""Loading a state is all or nothing: whatever is wrong with one is said, and then not a bit has changed."""

import copy
import functools
import io
import random
import re
from typing import Any

import numpy
import pytest
import small_pipelines
import torch
from cases import OPTIMIZERS
from reference import plain_loop, same_bits, same_tree
from small_pipelines import profile_of
from torch import nn
from zoo import cross_entropy

import penstock

SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5),
    "cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=20),
    "two": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5)], [2]
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
    "by_name": by_name,
    "tensor_lr": lambda named: torch.optim.SGD(named, lr=torch.tensor(0.05), momentum=0.9),
    "amsgrad": lambda named: torch.optim.Adam(named, lr=0.01, amsgrad=True),
    "some": lambda named: torch.optim.SGD([p for n, p in named if n[0] != "5"], lr=0.05, momentum=0.9),
    "some_adam": lambda named: torch.optim.Adam([p for n, p in named if n[0] != "5"]),
    **{
        name: lambda named, name=name: getattr(torch.optim, name)(named, lr=0.01)
        for name in "Adafactor Adagrad NAdam RAdam ASGD Rprop RMSprop Adadelta Adamax".split()
    },
}


def model_of(width=16, dtype=torch.float32):
    torch.manual_seed(0)
    body = (nn.Linear(12, width), nn.ReLU(), nn.Linear(width, 12), nn.BatchNorm1d(12), nn.ReLU())
    return nn.Sequential(*body, nn.Linear(12, 5)).to(dtype)


def batches(steps=6):
    source = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 12, generator=source), torch.randint(5, (8,), generator=source)) for _ in range(steps)
    ]


@functools.cache
def plan_for(cuts, width=16, dtype=torch.float32):
    profile = profile_of(model_of(width, dtype), (torch.randn(4, 12, dtype=dtype),))
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
    for x, y in batches(3):
        pipe.step(x, y)
    return pipe


def by_file(state):
    """The state as it comes out of a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def everything(pipe):
    """All that a load may change, and the random states."""
    states = (torch.get_rng_state(), repr(random.getstate()), repr(numpy.random.get_state()))
    return copy.deepcopy((pipe.state_dict(), pipe.num_steps, states))


def refused(pipe, state, told):
    """A load is refused with this sentence, and nothing has changed."""
    before = everything(pipe)
    with pytest.raises(penstock.PlanError, match=told):
        pipe.load_state_dict(state)
    assert same_tree(before, everything(pipe))


GONE = object()
BIAS, KEPT = ("model", "5.bias"), ("optimizer", "5.bias")
GROUP, AVERAGE, UPDATES = (*KEPT, "group"), (*KEPT, "state", "exp_avg"), (*KEPT, "state", "step")
NAN = float("nan")

# Where a state is damaged, what stands there then (or a function of what stood there), and what is named.
DAMAGES = [
    (("model",), GONE, "model is missing"),
    (("model",), [], "model of a state is a dict by name, found list"),
    (BIAS, GONE, "belongs to the model .* 5.bias is in this training only"),
    (("model", "zz"), torch.zeros(1), "zz is in the state only"),
    (("model", 3), torch.zeros(1), "3 is in the state only"),
    (BIAS, torch.zeros(3), r"shape \(5,\), the state \(3,\)"),
    (BIAS, lambda t: t.double(), "dtype torch.float32, the state"),
    (BIAS, "x", "dense tensor, found str"),
    (BIAS, lambda t: t.to("meta"), "found a meta tensor"),
    (BIAS, lambda t: t.to_sparse(), "a sparse or quantised one"),
    (BIAS, lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), "a sparse or quantised one"),
    (BIAS, lambda t: torch.masked.masked_tensor(t, t > 0), "a MaskedTensor"),
    (("model", "3.num_batches_tracked"), torch.tensor(1.5), "dtype torch.int64"),
    (("optimizer",), None, "optimizer of a state is a dict by name"),
    (("optimizer",), lambda kept: kept | {"zz": kept["5.bias"]}, "the optimizer .* zz is in the state only"),
    (("optimizer_class",), "SGD", "taken from, SGD, and this is Adam"),
    (("optimizer_class",), 7, "optimizer_class of a state is a name"),
    (KEPT, GONE, "to the optimizer .* 5.bias is in this training only"),
    (KEPT, "x", "two dicts for 5.bias, state and group, found str"),
    ((*KEPT, "state"), "x", "found str and dict"),
    (GROUP, GONE, "found dict and NoneType"),
    (AVERAGE, GONE, "exp_avg of 5.bias in the optimizer is in this training only"),
    ((*KEPT, "state", "evil"), torch.zeros(5), "evil of 5.bias in the optimizer is in the state only"),
    (AVERAGE, torch.zeros(3), r"exp_avg of 5.bias .* \(5,\), the state \(3,\)"),
    (AVERAGE, lambda t: t.half(), "exp_avg of 5.bias .* torch.float16"),
    (AVERAGE, lambda _: print, "exp_avg of 5.bias in the optimizer is"),
    (UPDATES, 3, "dense tensor, found int"),
    ((*GROUP, "lr"), "fast", "lr of 5.bias in the optimizer is of kind float.*'fast'"),
    ((*GROUP, "lr"), NAN, "lr of 5.bias .* found float nan"),
    ((*GROUP, "lr"), torch.zeros(2), "lr of 5.bias in the optimizer is of kind float"),
    ((*GROUP, "lr"), 0.5, "in one group with others"),
    ((*GROUP, "lr"), GONE, "lr of 5.bias in the optimizer is in this training only"),
    ((*GROUP, "amsgrad"), 1.0, "amsgrad of 5.bias in the optimizer is of kind bool"),
    ((*GROUP, "betas"), (0.9,), "betas of 5.bias in the optimizer is of kind tuple"),
    ((*GROUP, "evil"), "x", "evil of 5.bias in the optimizer is in the state only"),
    (("step",), "many", "step of a state is a whole number from 0, found str"),
    (("step",), -5, "found int -5"),
    (("step",), True, "found bool True"),
    (("scheduler",), None, "a scheduler and the state has none"),
    (("scheduler",), {"x": 1}, "of the scheduler is in this training only"),
    (("scheduler",), 3, "the scheduler is of kind dict"),
    (("scheduler", "get_lr"), 1, "get_lr of the scheduler is in the state only"),
    (("scheduler", "gamma"), "x", "gamma of the scheduler is of kind float"),
    (("scaler",), None, "a GradScaler and the state has none"),
    (("scaler",), {"x": 1}, "of the GradScaler is in this training only"),
    (("scaler", "scale"), "x", "scale of the GradScaler is of kind float"),
    (("versions",), {"x": 1}, "made with, no known versions, found a synchronous"),
]  # fmt: skip


@pytest.fixture(scope="module")
def state():
    """One of a training of three steps."""
    return by_file(trained().state_dict())


@pytest.fixture(scope="module")
def other():
    """A pipeline of another cut that has taken a step."""
    pipe = pipeline(cuts=("_0", "_3"))
    pipe.step(*batches()[5])
    return pipe


@pytest.mark.filterwarnings("ignore:.*(MaskedTensors|quantize)")
@pytest.mark.parametrize(("path", "value", "told"), DAMAGES, ids=[told for _, _, told in DAMAGES])
def test_a_damaged_state_is_refused_and_nothing_changes(path, value, told, state, other):
    damaged = copy.deepcopy(state)
    *way, last = path
    place = functools.reduce(lambda found, key: found[key], way, damaged)
    if value is GONE:
        del place[last]
    else:
        place[last] = value(place[last]) if callable(value) else value
    refused(other, damaged, told)


@pytest.mark.parametrize("junk", [None, [1], "state", torch.zeros(2)], ids=str)
def test_what_is_no_state_is_refused(junk, other):
    refused(other, junk, "a state is a dict from state_dict, found")


# A training that a state does not suit, whether the state names the class of its optimizer (states did not
# always, and what they hold tells), and what is named.
UNSUITED = [
    ({"optimizer": KINDS["sgd"]}, True, "taken from, Adam, and this is SGD"),
    ({"optimizer": KINDS["sgd"]}, False, r"\w+ of 0.weight in the optimizer is in (the state|this)"),
    ({"optimizer": KINDS["adamw"]}, True, "taken from, Adam, and this is AdamW"),
    ({"optimizer": KINDS["some_adam"]}, False, "belongs to the optimizer .* is in the state only"),
    ({"scheduler": SCHEDULERS["cycle"]}, False, "base_momentum of 0.weight .* is in this training only"),
    ({"width": 8}, True, r"0.weight of the model has shape \(8, 12\), the state \(16, 12\)"),
    ({"dtype": torch.bfloat16}, True, "0.weight of the model has dtype torch.bfloat16, the state"),
]


@pytest.mark.parametrize(("settings", "named", "told"), UNSUITED, ids=[told for *_, told in UNSUITED])
def test_a_state_of_another_training_is_refused(settings, named, told, state):
    given = copy.deepcopy(state)
    if not named:
        del given["optimizer_class"]
    refused(pipeline(**settings), given, told)


def test_an_optimizer_that_keeps_entries_from_the_start_needs_them():
    state = trained(optimizer=KINDS["Adagrad"]).state_dict()
    state["optimizer"]["5.bias"]["state"] = {}
    told = r"st?[a-z]+ of 5\.bias in the optimizer is in this training only"
    refused(pipeline(optimizer=KINDS["Adagrad"]), state, told)


class Late(torch.optim.SGD):
    """Keeps the newest gradient, and from its second update on the number of updates."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if "newest" in self.state[p]:
                self.state[p]["count"] = self.state[p].get("count", 1) + 1
            self.state[p]["newest"] = p.grad.clone()
        return super().step(closure)


def test_what_an_optimizer_of_ones_own_keeps_is_checked_as_far_as_an_update_shows_it():
    settings = {"optimizer": lambda named: Late([p for _, p in named], lr=0.1), "scaler": None}
    state, pipe = trained(**settings).state_dict(), pipeline(**settings)
    assert set(state["optimizer"]["5.bias"]["state"]) == {"newest", "count"}
    for newest, told in [
        (GONE, "newest of 5.bias in the optimizer is in this training only"),
        (torch.zeros(5, dtype=torch.half), "newest of 5.bias .* torch.float32, the state torch.float16"),
        (torch.zeros(4), r"newest of 5.bias .* shape \(5,\), the state \(4,\)"),
    ]:
        damaged = copy.deepcopy(state)
        damaged["optimizer"]["5.bias"]["state"] = {"count": 3} | (
            {} if newest is GONE else {"newest": newest}
        )
        refused(pipe, damaged, told)
    pipe.load_state_dict(state)
    assert same_tree(pipe.state_dict()["optimizer"], state["optimizer"])


COURSES = [("adam", "cycle"), ("sgd", "two"), ("by_name", "two"), ("by_name", None), ("Adagrad", "step")]
COURSES += [("some", "step"), ("tensor_lr", "step")]
OTHERS = [("by_name", "cycle"), ("adamw", None)]
OTHERS += [(kind, "step") for kind in KINDS if (kind, "step") not in COURSES]
COURSES += [pytest.param(*one, marks=pytest.mark.slow) for one in OTHERS]


@pytest.mark.parametrize(("kind", "scheduler"), COURSES)
def test_a_training_goes_on_in_another_cut_with_the_bits_of_the_plain_loop(kind, scheduler):
    settings = {"optimizer": KINDS[kind], "scheduler": SCHEDULERS.get(scheduler)}
    first = trained(**settings, scaler=None)
    second = pipeline(cuts=("_0", "_3"), **settings, scaler=None)
    second.load_state_dict(by_file(first.state_dict()))
    assert same_tree(first.state_dict()["optimizer"], second.state_dict()["optimizer"])
    plain, pairs = model_of(), batches()
    *_, _ = plain_loop(plain, pairs, loss=cross_entropy, micro_batches=2, **settings)
    for x, y in pairs[3:]:
        second.step(x, y)
    assert same_tree(second.state_dict()["model"], dict(plain.state_dict()))
    assert second.num_steps == 6


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
    assert same_tree(state, kept)
    assert same_tree(pipe.state_dict(), twin.state_dict())


def test_a_state_of_live_tensors_loads_as_it_was():
    """Two weights that change places: the copy of one must not be what the other is then given."""
    pipe = pipeline(width=12)
    state, live = pipe.state_dict(), dict(pipe.update.named)
    state["model"]["0.weight"], state["model"]["2.weight"] = live["2.weight"], live["0.weight"]
    expected = {"0.weight": live["2.weight"].detach().clone(), "2.weight": live["0.weight"].detach().clone()}
    pipe.load_state_dict(state)
    assert same_tree({name: live[name] for name in expected}, expected)


def test_other_geometry_loads(state, other):
    odd = copy.deepcopy(state)
    odd["model"]["0.weight"] = odd["model"]["0.weight"].t().contiguous().t()
    odd["model"]["5.bias"] = odd["model"]["5.bias"][:1].expand(5)
    odd["optimizer"]["0.weight"]["state"]["exp_avg"].requires_grad_()
    other.load_state_dict(odd)
    assert same_bits(other.state_dict()["model"]["0.weight"], state["model"]["0.weight"])
    other.load_state_dict(state)


def test_a_tied_tensor_has_one_value():
    model: Any = small_pipelines.model_of(
        lambda self, x: self.b(torch.relu(self.a(x))), a=nn.Linear(6, 6), b=nn.Linear(6, 6)
    )
    model.b.weight = model.a.weight
    names = list(model.state_dict())
    pipe = small_pipelines.pipeline_of(model, cuts=["relu"])
    state = pipe.state_dict()
    assert list(state["model"]) == names
    pipe.load_state_dict(state)
    state["model"]["b.weight"] = state["model"]["b.weight"] + 1
    refused(pipe, state, r"b\.weight and a\.weight are one tensor of the model")


def test_what_a_state_cannot_hold_is_said():
    class Listing(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for p in self.param_groups[0]["params"]:
                self.state[p]["history"] = [torch.zeros(1)]

    pipe = trained(optimizer=lambda named: Listing(named, lr=0.1), scaler=None)
    with pytest.raises(penstock.PlanError, match=r"the optimizer keeps history of .* as list"):
        pipe.state_dict()


def test_ranks_refuse_together():
    plan = plan_for(("_1",))
    good = trained(scheduler=None, scaler=None).state_dict()
    wrong, less, later = copy.deepcopy(good), copy.deepcopy(good), copy.deepcopy(good)
    wrong["optimizer"]["5.bias"]["state"]["exp_avg"] = torch.zeros(3)  # of rank 1
    del less["optimizer"]["0.bias"]  # of rank 0
    later["model"]["0.bias"] = later["model"]["0.bias"] + 1
    states = [(wrong, wrong), (wrong, good), (good, wrong), (less, less), (good, later), (good, good)]
    models = [model_of() for _ in range(2)]

    def load(world):
        """Return the refusal of every state, and whether anything changed."""
        settings = {"loss": cross_entropy, "optimizer": OPTIMIZERS["adam"], "world": world}
        pipe, said = penstock.Pipeline(models[world.rank], plan, **settings), []
        world.barrier()  # what a pipeline draws as it is made goes back into the generator of all threads
        for given in states:
            before, told = everything(pipe), ""
            try:
                pipe.load_state_dict(given[world.rank])
            except penstock.PlanError as error:
                told = str(error).removeprefix(f"rank {1 - world.rank}: ")
            said.append((told, same_tree(before, everything(pipe))))
        return said

    one, two = penstock.in_threads(load, ranks=2)
    assert one == two
    for number, told in (
        (0, "exp_avg of 5.bias"),
        (2, "exp_avg of 5.bias"),
        (3, "0.bias is in this training only"),
    ):
        assert told in one[number][0]
    assert re.search(r"the state\['model'\]\['0\.bias'\] is .* on rank 0 and .* on rank 1", one[4][0])
    assert [unchanged for _, unchanged in one] == [True] * 5 + [False]
    assert one[5][0] == ""
