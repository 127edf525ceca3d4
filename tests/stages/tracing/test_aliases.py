"""Two tensors in one memory: on one stage the bits of the plain loop, never on two; slices are no sharing."""

import copy
import functools

import pytest
import torch
from cases import OPTIMIZERS
from small_pipelines import allowed, built, differences, model_of, nothing, profile_of
from torch import nn
from torch.nn import functional as F

import penstock
from penstock.stages.tracing.aliases import overlapping


def plain(self, x):
    return self.c(torch.relu(self.d(torch.relu(self.b(self.a(x))))))


def of_weight(make):
    """The weight of one layer is made of that of another."""
    return lambda model: setattr(model.d, "weight", make(model.b.weight))


def buffer_of_weight(model):
    model.register_buffer("row", model.b.weight.data[0])


def plain_of_weight(model):
    """An attribute that nothing registers."""
    model.row = model.b.weight.data[0]


def one_storage(model):
    """Parameters are slices of one flat storage, two of them columns of one matrix."""
    matrix = torch.randn(8, 16)
    model.b.weight.data, model.d.weight.data = matrix[:, :8], matrix[:, 8:]
    rest = [*model.a.parameters(), *model.c.parameters()]
    model.flat = torch.cat([p.data.reshape(-1) for p in rest])
    for p, part in zip(rest, model.flat.split([p.numel() for p in rest]), strict=True):
        p.data = part.view(p.shape)


def frozen_twice(model):
    """Nobody writes to what both read."""
    model.b.weight.requires_grad_(False)
    model.d.weight = nn.Parameter(model.b.weight.data, requires_grad=False)


def adds_row(self, x):
    return self.c(torch.relu(self.d(torch.relu(self.b(self.a(x))))) + self.row)


def adds_row_twice(self, x):
    return self.c(torch.relu(self.d(torch.relu(self.b(self.a(x))))) + self.row * 2)


def base(change, forward=plain):
    """Return a factory of four layers to which ``change`` was made."""

    def make():
        model = model_of(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 8), d=nn.Linear(8, 8), c=nn.Linear(8, 3))
        change(model)
        return model

    return make


FOREACH = functools.partial(torch.optim.Adam, lr=1e-2, foreach=True, weight_decay=0.1)
FUSED = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)
ONE_MEMORY = base(lambda model: setattr(model.d.weight, "data", model.b.weight.data))
BUFFER = base(buffer_of_weight, adds_row)
KEPT = {  # and the layers from the first to the last that stay on one stage
    "one memory": (ONE_MEMORY, "b d"),
    "turned": (base(of_weight(lambda w: nn.Parameter(w.t()))), "b d"),
    "through NumPy": (base(of_weight(lambda w: nn.Parameter(torch.from_numpy(w.detach().numpy())))), "b d"),
    # one that reads what the other trains
    "a frozen alias": (base(of_weight(lambda w: nn.Parameter(w.data, requires_grad=False))), "b d"),
    "a buffer": (BUFFER, "b add"),
    "a plain tensor": (base(plain_of_weight, adds_row), "b add"),
    "computed of one": (base(plain_of_weight, adds_row_twice), "b mul"),
    "one storage": (base(one_storage), "a a"),
    "frozen twice": (base(frozen_twice), "a a"),
}


@pytest.mark.parametrize("optimizer", ["sgd", FOREACH, FUSED], ids=["sgd", "foreach", "fused"])
@pytest.mark.parametrize("kind", KEPT)
def test_what_shares_memory_on_one_stage_trains_as_the_plain_loop(kind, optimizer):
    assert differences(KEPT[kind][0], [nothing] * 3, optimizer=optimizer, clip=0.5) == []


@pytest.mark.parametrize("kind", KEPT)
def test_no_cut_parts_what_shares_memory(kind):
    make, ends = KEPT[kind]
    profile = profile_of(built(make))
    names, (first, last) = [layer.name for layer in profile.layers], ends.split()
    parting = names[names.index(first) : names.index(last)]
    assert allowed(profile) == [name for name in names[:-1] if name not in parting]
    for name in parting:
        with pytest.raises(penstock.PlanError, match=r"cannot be cut behind .*share memory"):
            penstock.partition(profile, cuts=[name])


def on_ranks():
    kinds = ONE_MEMORY, BUFFER, base(one_storage)
    return [differences(kind, [nothing] * 3, cuts=["a"], ranks=2, clip=0.5) for kind in kinds]


@pytest.mark.slow
def test_ranks_train_what_shares_memory_on_one_of_them(ranks):
    assert ranks.run(on_ranks, ranks=2) == [[[], [], []]] * 2


def test_a_buffer_that_nobody_reads_holds_its_weight_with_the_first_layer():
    assert allowed(profile_of(base(buffer_of_weight)())) == ["b", "relu", "d", "relu_1"]


def test_a_plan_for_the_model_before_its_tensors_shared_memory_is_refused():
    plan = penstock.partition(profile_of(built(base(nothing))), cuts=["relu"])
    with pytest.raises(penstock.PlanError, match=r"b\.weight and d\.weight share memory"):
        penstock.Pipeline(built(ONE_MEMORY), plan, loss=F.cross_entropy, optimizer=OPTIMIZERS["sgd"])


def test_versions_of_what_shares_memory_are_refused():
    profile = profile_of(built(BUFFER))
    plan = penstock.partition(profile, cuts=["a"], schedule="async_1f1b", weights="stashed")
    with pytest.raises(penstock.PlanError, match=r"versions of the weights need .* row shares that of"):
        penstock.Pipeline(built(BUFFER), plan, loss=F.cross_entropy, optimizer=OPTIMIZERS["sgd"])


def test_a_forward_that_writes_into_a_weight_through_a_buffer_is_refused():
    def statistics(model):
        model.norm = nn.BatchNorm1d(8)
        model.norm.running_mean = model.b.bias.data

    make = base(statistics, lambda self, x: self.c(self.norm(self.b(self.a(x)))))
    with pytest.raises(penstock.PlanError, match=r"writes to norm\.running_mean, .* the parameter b\.bias"):
        profile_of(make())


@pytest.mark.parametrize(
    "read", [lambda self: self.rows[0], lambda self: self.rows[0] * 2, lambda self: self.rows[0][:3].sum()]
)
def test_a_weight_that_a_trace_would_bake_in_through_another_tensor_is_refused(read):
    def rows(model):
        model.row, model.rows = model.b.weight.data[0], [model.b.weight.data[1]]

    make = base(rows, lambda self, x: self.c(self.d(self.b(self.a(x))) + read(self)))
    with pytest.raises(penstock.PlanError, match=r"recorded run does not compute"):
        profile_of(make())


def test_buffers_whose_elements_repeat_are_read_like_others():
    def repeats(model):
        model.register_buffer("wide", torch.randn(1, 8).expand(8, 8))
        model.register_buffer("windows", torch.randn(15).unfold(0, 8, 1))

    def forward(self, x):
        return self.c(F.linear(F.linear(self.b(self.a(x)), self.wide), self.windows))

    assert differences(base(repeats, forward), cuts=["a"], clip=0.5) == []


def test_overlap_is_told_by_bytes():
    flat, matrix = torch.randn(100), torch.randn(6, 8)
    cases = [
        ({"a": flat[:50], "b": flat[50:]}, []),
        ({"a": flat[:50], "b": flat[50:], "c": flat[40:60]}, [("a", "b", "c")]),
        ({"a": matrix[:, :3], "b": matrix[:, 3:]}, []),
        ({"a": matrix[:, :3], "b": matrix[:, 3:], "c": matrix[:, 2:4]}, [("a", "b", "c")]),
        ({"b": matrix, "a": matrix.t()}, [("b", "a")]),
        ({"a": flat[::2], "b": flat[1::2], "c": flat[98:99]}, [("a", "c")]),
        ({"a": flat[:0], "b": flat[:9], "c": torch.ones(1).expand(5)}, []),
        ({"a": flat.view(torch.uint8)[399:], "b": flat[99:]}, [("a", "b")]),
        ({"a": torch.empty(3, device="meta"), "b": torch.empty(3, device="meta")}, []),
        ({"a": (meta := torch.empty(8, device="meta"))[:5], "b": meta[4:], "c": meta[:0]}, [("a", "b")]),
        (  # two dtypes in one memory
            {
                "a": (flat := torch.empty(64, dtype=torch.uint8, device="meta"))[:8].view(torch.float32),
                "b": flat[8:16].view(torch.bfloat16),
                "c": flat[:2],
            },
            [("a", "c")],
        ),
    ]
    for named, expected in cases:
        assert overlapping(named) == expected
        assert overlapping(copy.copy(named)) == expected
