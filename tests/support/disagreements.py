"""Two ranks that are given different things: what each does, and the sentence that both say."""

import dataclasses
import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import penstock


class Net(nn.Module):
    """A module, functions with numbers of their own, a buffer and a tensor that is none."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.norm, self.drop, self.slope = nn.BatchNorm1d(8), nn.Dropout(0.1), 0.1
        self.shift = torch.zeros(8)

    def forward(self, x):
        y = F.leaky_relu(self.norm(self.a(x)), self.slope)
        return self.c(self.drop(self.b(y)) + self.shift)


def built(seed=0):
    torch.manual_seed(seed)
    return Net()


def sgd(named):
    return torch.optim.SGD(named, lr=0.1, momentum=0.9)


def by_name(decay):
    def make(named):
        groups = [
            {"params": [p for name, p in named if ("bias" in name) == bias], "weight_decay": amount}
            for bias, amount in ((True, 0.0), (False, decay))
        ]
        return torch.optim.AdamW(groups)

    return make


def stepped(gamma):
    return lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=gamma)


def batches(steps, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(9, 6, generator=generator), torch.randint(3, (9,), generator=generator))
        for _ in range(steps)
    ]


@functools.cache
def profile_of(rank=0):
    """On rank 1 the last layers are slow, so that the planner cuts elsewhere."""
    model, example = built(), (batches(1)[0][0][:3].clone(),)
    profile = penstock.measure(penstock.trace(model, example), example, repeats=1)
    seconds = [1.0 + 99 * (number >= 4 if rank else number < 2) for number in range(len(profile.layers))]
    layers = [
        dataclasses.replace(one, forward_seconds=s) for one, s in zip(profile.layers, seconds, strict=True)
    ]
    return dataclasses.replace(profile, layers=tuple(layers))


def plan_of(rank=0, **asked):
    asked = asked or {"cuts": ["norm"]}
    return penstock.partition(profile_of(rank), **{"micro_batches": 3, **asked})


def pipeline(plan, *, model=None, **changes):
    settings = {"loss": F.cross_entropy, "optimizer": sgd, "deadline": 20, **changes}
    return penstock.Pipeline(built() if model is None else model, plan, **settings)


def halved(model):
    with torch.no_grad():
        model.b.bias[3] *= 1.0000001


def transposed(model):
    model.b.weight.data = model.b.weight.detach().t().contiguous().t()


def fails_on_one_stage(named):
    if named[-1][0] == "c.bias" and named[0][0] != "a.weight":
        raise RuntimeError("c.weight is not for me")
    return sgd(named)


def gelu_loss(outputs, targets):
    return F.cross_entropy(outputs, targets)


def none():
    return pipeline(plan_of())


def asking(**asked):
    return lambda: pipeline(plan_of(dist.get_rank(), **asked))


def giving(**changes):
    return lambda: pipeline(plan_of(), **changes)


def changing(change):
    def make():
        model = built()
        change(model)
        return pipeline(plan_of(), model=model)

    return make


def setting(what, here, elsewhere):
    """Make a pipeline while something of torch is set so here, and as ever elsewhere."""

    def make():
        what(here)
        try:
            return pipeline(plan_of())
        finally:
            what(elsewhere)

    return make


def edited(**changes):
    return lambda: pipeline(dataclasses.replace(plan_of(), **changes))


def of_an_old_file():
    return pipeline(dataclasses.replace(plan_of(0, stages=2), asked=None))


# What rank 1 does where rank 0 does as usual, and what both then say.
OF_ONE = {
    "micro_batches": (edited(micro_batches=4), "micro_batches is 3 on rank 0 and 4 on rank 1"),
    "a plan for another model": (edited(fingerprint="00"), "the fingerprint of the model is "),
    "schedule": (edited(schedule="gpipe"), "schedule is 1f1b on rank 0 and gpipe on rank 1"),
    "one weight, the least bit": (changing(halved), "the checksum of the parameter b.bias is"),
    "a buffer": (changing(lambda m: m.norm.running_mean.add_(1)), "checksum of the buffer norm.running_mean"),
    "a tensor that is no buffer": (changing(lambda m: m.shift.add_(1)), "the tensor shift in train mode"),
    "another layer": (changing(lambda m: setattr(m, "b", nn.Identity())), "the module b is Linear in train"),
    "one more module": (
        changing(lambda m: setattr(m, "c2", nn.Linear(8, 3))),
        "has the parameter a.weight where rank 1 has the module c2",
    ),
    "a part in eval mode": (
        changing(lambda m: m.drop.eval()),
        "module drop is Dropout in train mode on rank",
    ),
    "all in eval mode": (changing(lambda m: m.eval()), "the module itself is Net in train mode on rank 0"),
    "a frozen parameter": (changing(lambda m: m.b.weight.requires_grad_(False)), "the parameter b.weight is"),
    "strides": (changing(transposed), "with strides (8, 1), trained on rank 0"),
    "a dtype": (changing(lambda m: m.double()), "the parameter a.weight is torch.float32"),
    "dropout": (changing(lambda m: setattr(m.drop, "p", 0.2)), "the layer drop in train mode is drop"),
    "a number in forward": (
        changing(lambda m: setattr(m, "slope", 0.2)),
        "the layer leaky_relu in train mode",
    ),
    "lr": (giving(optimizer=lambda n: torch.optim.SGD(n, lr=0.2)), "optimizer, lr of its group 0"),
    "an optimizer": (giving(optimizer=lambda n: torch.optim.Adam(n)), "the argument optimizer is SGD"),
    "a scheduler": (giving(scheduler=stepped(0.5)), "the argument scheduler is None on rank 0"),
    "clip_scope": (giving(clip_scope="stage"), "clip_scope is 'global' on rank 0 and 'stage'"),
    "seed": (giving(seed=1), "the argument seed is 0 on rank 0 and 1 on rank 1"),
    "autocast": (giving(autocast=torch.bfloat16), "autocast is None on rank 0 and torch.bfloat16"),
    "weight": (giving(weight=len), "weight is None on rank 0 and len on rank 1"),
    "loss": (giving(loss=gelu_loss), "loss is cross_entropy on rank 0 and gelu_loss on rank 1"),
    "threads": (
        setting(torch.set_num_threads, 2, 1),
        "the number of threads of torch is 1 on rank 0 and 2 on rank 1",
    ),
    "no gradients on one": (setting(torch.set_grad_enabled, False, True), "switched off here"),
    "a clip that none takes": (giving(clip=-1.0), "clip is a largest norm above 0, found -1.0"),
}
# What rank 0 does, what rank 1 does, and what both then say.
CASES = {name: (none, way, said) for name, (way, said) in OF_ONE.items()} | {
    "cuts": (asking(cuts=["norm"]), asking(cuts=["b"]), "cuts=[norm] on rank 0 and cuts=[b] on rank 1"),
    "cuts left to the planner": (asking(cuts=["norm"]), asking(stages=2), "[norm] on rank 0 and stages=2"),
    "an old file": (of_an_old_file, asking(stages=2), "the cut is cuts=["),
    "no plan on rank 0": (lambda: pipeline(None), none, "found plan=None on rank 0"),
    "a group by name": (
        giving(optimizer=by_name(0.1)),
        giving(optimizer=by_name(0.2)),
        "optimizer, weight_decay of its group 1 is 0.1 on rank 0 and 0.2 on rank 1",
    ),
    "gamma": (giving(scheduler=stepped(0.5)), giving(scheduler=stepped(0.7)), "gamma: 0.7"),
    "clip": (giving(clip=1.0), giving(clip=2.0), "the argument clip is 1.0 on rank 0 and 2.0 on rank 1"),
    "scaler": (giving(scaler=2.0), giving(scaler=torch.amp.GradScaler("cpu")), "scaler is 2.0"),
    "determinism": (
        setting(torch.use_deterministic_algorithms, False, True),
        none,
        "the deterministic-algorithms flag is False on rank 0 and True on rank 1",
    ),
    "an optimizer that fails on one stage": (
        giving(optimizer=fails_on_one_stage),
        giving(optimizer=fails_on_one_stage),
        "RuntimeError: c.weight is not for me",
    ),
}
