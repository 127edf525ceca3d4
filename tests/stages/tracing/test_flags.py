"""What is set on the model between steps counts as in the plain loop, or is refused by the module's path."""

import copy
import functools
import gc
import weakref

import pytest
import torch
from cases import OPTIMIZERS
from reference import plain_loop, same_bits
from torch import fx, nn
from zoo import cross_entropy

import penstock

fx.wrap("kept")


def kept(x, training):
    """A function that is given a container's flag, as torchvision's stochastic_depth is."""
    return x * (0.5 if training else 1.0)


class Depth(nn.Module):
    """A container whose forward reads its flag: the trace reads it once."""

    def forward(self, x):
        return kept(x, self.training)


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
        self.depth, self.end, self.relu = Depth(), nn.Linear(8, 3), nn.ReLU()
        self.warmth, self.epoch, self.scale = 0.5, 0, nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = self.second(self.first(self.start(x)))
        return self.end(self.relu(self.depth(x) * self.warmth * self.scale))


DROPS = ["first_drop", "second_drop"]


def net():
    torch.manual_seed(1)
    return Net()


def batch():
    torch.manual_seed(2)
    return torch.randn(9, 6), torch.randint(3, (9,))


def pipe_of(model, *, cuts=None, ranks=None, **settings):
    """A pipeline cut behind ``cuts``, or at every layer where a cut is allowed."""
    example = (torch.randn(3, 6),)
    profile = penstock.measure(penstock.trace(model, example), example, repeats=1)
    if cuts is None:
        cuts = [layer.name for i, layer in enumerate(profile.layers[:-1]) if i not in profile.refused]
    plan = penstock.partition(profile, cuts=cuts, micro_batches=3, ranks=ranks)
    settings = {"loss": cross_entropy, "optimizer": OPTIMIZERS["sgd"], "deadline": 30, **settings}
    return penstock.Pipeline(model, plan, **settings)


def differences(changes, *, made=net, random=(), **settings):
    """Train with ``changes[i]`` made to the model before step i, beside the plain loop; what differs."""
    model = made()
    plain = copy.deepcopy(model)
    pipe = pipe_of(model, **settings)
    loop = plain_loop(
        plain,
        [batch()] * len(changes),
        loss=cross_entropy,
        optimizer=OPTIMIZERS["sgd"],
        micro_batches=3,
        random=random,
    )
    found = []
    for step, change in enumerate(changes):
        change(model)
        change(plain)
        flags = [module.training for module in model.modules()]
        report, expected = pipe.step(*batch()), next(loop)
        state = pipe.state_dict()["model"]
        if report.loss != expected["loss"]:
            found.append(f"step {step}: loss {report.loss}, {expected['loss']}")
        if pipe.rank == 0:
            pairs = plain.state_dict().items()
            found += [f"step {step}: {n}" for n, tensor in pairs if not same_bits(tensor, state[n])]
        outputs = pipe.evaluate(batch()[0])
        before = [module.training for module in plain.modules()]
        with torch.no_grad():
            wanted = plain.eval()(batch()[0])
        for module, training in zip(plain.modules(), before, strict=True):
            module.training = training
        if pipe.is_last and not same_bits(outputs, wanted):
            found.append(f"step {step}: outputs of evaluate")
        if flags != [module.training for module in model.modules()]:
            found.append(f"step {step}: the flags")
    return found


def nothing(model):
    pass


def sleep(path, model):
    model.get_submodule(path).eval()


def wake(path, model):
    model.get_submodule(path).train()


def still(path):
    """Nothing, then a part in eval mode, then in train mode again."""
    return [nothing, functools.partial(sleep, path), functools.partial(wake, path)]


def quiet():
    """No container reads its flag, no layer draws."""
    model = net()
    model.register_module("depth", nn.Identity())
    model.first.drop.p = model.second.drop.p = 0.0
    return model


def asleep():
    """Parts that are in eval mode when they are traced: layers that draw nothing, and return their input."""
    model = quiet()
    model.first.eval()
    model.first.drop.p = 0.4
    return model


CUTS = ["start", "first_norm", "first_drop", "second_linear"]


@pytest.mark.parametrize("path", ["first.norm", "first", "first.drop", "second"])
def test_the_flags_of_the_moment_count(path):
    assert differences(still(path), random=DROPS, cuts=CUTS) == []


def test_the_flags_of_the_moment_count_at_every_cut():
    assert differences(still("first"), random=DROPS) == []


def test_the_flags_of_the_moment_count_on_ranks(ranks):
    assert ranks.run(on_ranks, ranks=2) == [[], []]


def on_ranks():
    return differences(still("second.norm"), random=DROPS, cuts=["second_linear"], ranks=2)


def test_a_part_that_was_traced_in_eval_mode_wakes():
    changes = [nothing, functools.partial(wake, "first"), functools.partial(sleep, "first")]
    assert differences(changes, made=asleep, random=["first_drop"], cuts=["start", "first_linear"]) == []


def test_a_layer_that_wakes_where_its_output_is_sent_is_refused():
    model = asleep()
    pipe = pipe_of(model, cuts=["first_drop"])
    pipe.step(*batch())
    wake("first", model)
    with pytest.raises(penstock.StageError, match=r"layer first_drop returned .* make the Pipeline anew"):
        pipe.step(*batch())
    sleep("first", model)
    pipe.step(*batch())


class Twice(Net):
    """The input of a dropout is read beside it."""

    def forward(self, x):
        x = self.start(x)
        return self.end(torch.relu(self.first.drop(x)) + x)


def test_one_value_in_the_place_of_two_that_are_sent_is_refused():
    model = Twice()
    pipe = pipe_of(model, cuts=["first_drop"])
    model.first.drop.eval()
    with pytest.raises(penstock.StageError, match=r"layer first_drop returned .* make the Pipeline anew"):
        pipe.step(*batch())
    made = functools.partial(copy.deepcopy, Twice())
    changes = still("first.drop")
    assert differences(changes, made=made, random=["first_drop"], cuts=["start"]) == []


def whole(model):
    model.eval()


def used(model):
    """What people do between steps."""
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 6))
    model.train()


def test_a_whole_model_in_eval_mode_trains_so_as_in_the_plain_loop():
    def noisy():
        model = quiet()
        model.second.drop.p = 0.5
        return model

    changes = [nothing, whole, lambda model: model.train()]
    assert differences(changes, made=noisy, random=["second_drop"], cuts=CUTS) == []


def test_running_the_model_in_eval_mode_between_steps_changes_nothing():
    assert differences([nothing, used, used], random=DROPS, cuts=CUTS) == []


def freeze(model):
    model.start.requires_grad_(False)


def melt(model):
    model.start.requires_grad_(True)


def hook(model):
    model.first.linear.register_forward_hook(lambda module, args, output: output * 2)


def count(model):
    model.epoch += 1


CHANGES = {
    "freezing": [nothing, freeze, melt],
    "a hook on a layer": [nothing, hook],
    "an attribute of a layer": [nothing, lambda model: setattr(model.first.norm, "momentum", 0.5)],
    "dropout that begins later": [nothing, lambda model: setattr(model.first.drop, "p", 0.3)],
    "an attribute that no forward reads": [nothing, count],
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_layer_reads_itself_counts(name):
    made = quiet if "dropout" in name else net
    random = ["first_drop"] if "dropout" in name else DROPS
    assert differences(CHANGES[name], made=made, random=random, cuts=["start", "second_linear"]) == []


def replaced(model):
    model.end = copy.deepcopy(model.end)


def own_forward(model):
    model.first.forward = lambda x: x


def own_tensor(model):
    model.scale = nn.Parameter(torch.zeros(8))


def new_flag(model):
    model.depth.training = 1


REFUSED = {
    "a flag that forward read": (functools.partial(sleep, "depth"), r"depth\.training was True"),
    "the flags of all": (whole, r"depth\.training was True when the model was traced.* and is False now"),
    "a number that forward read": (lambda model: setattr(model, "warmth", 0.25), r"warmth was 0\.5"),
    "its type": (lambda model: setattr(model, "warmth", torch.tensor(0.5)), "warmth was 0.5 .* now"),
    "the sign of a zero": (lambda model: setattr(model, "cold", -0.0), r"cold was 0\.0 .* is -0\.0 now"),
    "a hook on a container": (lambda model: model.first.register_forward_hook(print), "through first"),
    "another child": (replaced, "the trace went through the model"),
    "another forward": (own_forward, "the trace went through first"),
    "another parameter": (own_tensor, "the trace went through the model"),
    "a hook on a ReLU": (
        lambda model: model.relu.register_forward_hook(print),
        "stay behind where relu gives",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_trace_took_is_refused_when_it_changes(name):
    class Cold(Net):
        def __init__(self):
            super().__init__()
            self.cold = 0.0

        def forward(self, x):
            return super().forward(x) + self.cold

    model = Cold()
    pipe = pipe_of(model, cuts=["start"])
    pipe.step(*batch())
    change, told = REFUSED[name]
    change(model)
    for _ in range(2):
        with pytest.raises(penstock.PlanError, match=told):
            pipe.step(*batch())
    if "flag" in name:  # evaluating sets them itself
        wanted = copy.deepcopy(model).eval()(batch()[0])
        assert same_bits(pipe.evaluate(batch()[0]), wanted.detach())
    else:
        with pytest.raises(penstock.PlanError, match=told):
            pipe.evaluate(batch()[0])


def test_a_hook_on_all_modules_is_refused():
    pipe = pipe_of(net(), cuts=["start"])
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(penstock.PlanError, match="a hook on all modules"):
            pipe.step(*batch())
    finally:
        handle.remove()
    pipe.step(*batch())


def test_autocast_around_a_pipeline_is_refused_with_the_option_for_it():
    pipe = pipe_of(net(), cuts=["start"])
    with torch.autocast("cpu", torch.bfloat16):
        for call in (lambda: pipe.step(*batch()), lambda: pipe.evaluate(batch()[0])):
            with pytest.raises(penstock.PlanError, match=r"torch\.autocast is on around it; .* autocast= to"):
                call()
        with pytest.raises(penstock.PlanError, match=r"torch\.autocast is on around it"):
            pipe_of(net(), cuts=["start"])
    pipe.step(*batch())


def test_another_default_dtype_is_refused():
    pipe = pipe_of(net(), cuts=["start"])
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(
            penstock.PlanError, match=r"default dtype was torch\.float32 .* torch\.float64 now"
        ):
            pipe.step(*(part if part.dtype == torch.int64 else part.float() for part in batch()))
    finally:
        torch.set_default_dtype(torch.float32)
    pipe.step(*batch())


def test_unfreezing_what_a_cut_was_made_without_is_refused_by_name():
    model = net()
    freeze(model)
    pipe = pipe_of(model, cuts=["start", "first_norm"])
    pipe.step(*batch())
    melt(model)
    with pytest.raises(
        penstock.StageError, match=r"layer start .* start\.weight, start\.bias unfrozen; make"
    ):
        pipe.step(*batch())
    state = pipe.state_dict()
    again = pipe_of(model, cuts=["start", "first_norm"])
    again.load_state_dict(state)
    again.step(*batch())


def test_what_was_frozen_arrives_without_asking_for_a_gradient():
    """Some kernels are picked by it: a product folds its dimensions only where no gradient is asked for."""
    model, asked = quiet(), []
    pipe = pipe_of(model, cuts=["first"])
    model.second.linear.register_forward_pre_hook(lambda module, args: asked.append(args[0].requires_grad))
    for part in (model.start, model.first):
        part.requires_grad_(False)
    pipe.step(*batch())
    assert asked[-3:] == [False] * 3
    model.first.requires_grad_(True)
    pipe.step(*batch())
    assert asked[-3:] == [True] * 3


class Shared(nn.Module):
    """One module called on two stages."""

    def __init__(self, part):
        super().__init__()
        self.start, self.part, self.end = nn.Linear(6, 8), part, nn.Linear(8, 3)

    def forward(self, x):
        return self.end(self.part(torch.relu(self.part(self.start(x)))))


def test_a_shared_part_that_trains_later_is_refused():
    model = Shared(nn.Linear(8, 8).requires_grad_(False))
    pipe = pipe_of(model, cuts=["relu"])
    pipe.step(*batch())
    model.part.weight.requires_grad_(True)
    with pytest.raises(penstock.PlanError, match=r"part\.weight was frozen .* is used on several stages"):
        pipe.step(*batch())


def test_shared_statistics_that_are_written_later_are_refused():
    model = Shared(nn.BatchNorm1d(8, affine=False).eval())
    pipe = pipe_of(model, cuts=["relu"])
    pipe.step(*batch())
    model.part.train()
    with pytest.raises(penstock.PlanError, match=r"part was in eval mode .* writes to a buffer"):
        pipe.step(*batch())


def test_a_failed_evaluation_leaves_the_flags():
    model = net()
    pipe = pipe_of(model, cuts=["start"])
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


class Awake(nn.BatchNorm1d):
    """Stays in train mode whatever it is told."""

    def train(self, mode=True):
        return super().train(True)


Awake.__module__ = "torch.nn.modules.made_up"  # a leaf of the trace


def test_evaluating_puts_modules_where_eval_puts_them():
    def made():
        model = quiet()
        model.first.norm = Awake(8, momentum=0.0)
        return model

    assert differences([nothing, nothing], made=made, cuts=CUTS) == []


def test_a_model_that_was_dropped_is_gone():
    model = net()
    pipe = pipe_of(model, cuts=["start"])
    gone = [weakref.ref(module) for module in (model, model.first)]
    model.epoch += 1
    pipe.step(*batch())
    del model
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    pipe.step(*batch())
    pipe.evaluate(batch()[0])


def test_a_stream_takes_the_flags_of_the_step():
    model = quiet()
    example = (torch.randn(3, 6),)
    profile = penstock.measure(penstock.trace(model, example), example, repeats=1)
    plan = penstock.partition(profile, cuts=["first_norm"], micro_batches=3, schedule="async_1f1b")
    pipe = penstock.Pipeline(model, plan, loss=cross_entropy, optimizer=OPTIMIZERS["sgd"])
    pipe.step(*batch())
    model.first.norm.eval()
    statistics = model.first.norm.get_buffer("running_mean")
    before = statistics.clone()
    pipe.step(*batch())
    assert same_bits(statistics, before)
    model.warmth = 2.0
    with pytest.raises(penstock.PlanError, match=r"warmth was 0\.5"):
        pipe.step(*batch())
