"""Two tensors in one memory: on one stage the bits of the plain loop, never on two; slices are no sharing."""

import copy

import pytest
import torch
from cases import OPTIMIZERS
from reference import plain_loop, same_bits
from torch import nn
from torch.nn import functional as F

import penstock
from penstock.stages.tracing.aliases import overlapping


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.d, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.c(torch.relu(self.d(torch.relu(self.b(self.a(x))))))


class OneMemory(Base):
    def __init__(self):
        super().__init__()
        self.d.weight.data = self.b.weight.data


class Turned(Base):
    def __init__(self):
        super().__init__()
        self.d.weight = nn.Parameter(self.b.weight.t())


class ThroughNumPy(Base):
    def __init__(self):
        super().__init__()
        self.d.weight = nn.Parameter(torch.from_numpy(self.b.weight.detach().numpy()))


class FrozenAlias(Base):
    """Reads what the other trains."""

    def __init__(self):
        super().__init__()
        self.d.weight = nn.Parameter(self.b.weight.data, requires_grad=False)


class BufferOfWeight(Base):
    row: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("row", self.b.weight.data[0])

    def forward(self, x):
        return self.c(torch.relu(self.d(torch.relu(self.b(self.a(x))))) + self.row)


class PlainOfWeight(BufferOfWeight):
    """An attribute that nothing registers."""

    def __init__(self):
        super().__init__()
        del self.row
        self.row = self.b.weight.data[0]


class TwiceOfWeight(PlainOfWeight):
    """Computed in forward from what follows a weight."""

    def forward(self, x):
        return self.c(torch.relu(self.d(torch.relu(self.b(self.a(x))))) + self.row * 2)


class OneStorage(Base):
    """Parameters are slices of one flat storage, two of them columns of one matrix."""

    def __init__(self):
        super().__init__()
        matrix = torch.randn(8, 16)
        self.b.weight.data, self.d.weight.data = matrix[:, :8], matrix[:, 8:]
        rest = [*self.a.parameters(), *self.c.parameters()]
        self.flat = torch.cat([p.data.reshape(-1) for p in rest])
        for p, part in zip(rest, self.flat.split([p.numel() for p in rest]), strict=True):
            p.data = part.view(p.shape)


class FrozenTwice(Base):
    """Nobody writes to what both read."""

    def __init__(self):
        super().__init__()
        self.b.weight.requires_grad_(False)
        self.d.weight = nn.Parameter(self.b.weight.data, requires_grad=False)


OPTIMIZED = {
    **OPTIMIZERS,
    "foreach": lambda named: torch.optim.Adam(named, lr=1e-2, foreach=True, weight_decay=0.1),
    "fused": lambda named: torch.optim.AdamW(named, lr=1e-2, fused=True),
}
KEPT = {OneMemory: "b d", Turned: "b d", ThroughNumPy: "b d", FrozenAlias: "b d"}
KEPT |= {
    BufferOfWeight: "b add",
    PlainOfWeight: "b add",
    TwiceOfWeight: "b mul",
    OneStorage: "",
    FrozenTwice: "",
}


def built(kind):
    torch.manual_seed(0)
    return kind()


def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(9, 6, generator=generator), torch.randint(3, (9,), generator=generator))
        for _ in range(3)
    ]


def profile_of(kind):
    example = (batches()[0][0][:3].clone(),)
    return penstock.measure(penstock.trace(built(kind), example), example, repeats=1)


def allowed(profile):
    return [layer.name for i, layer in enumerate(profile.layers[:-1]) if i not in profile.refused]


def differences(kind, plan, optimizer):
    """Names of what a pipeline and the plain loop do not share after every step; the state on rank 0."""
    settings = {"loss": F.cross_entropy, "optimizer": OPTIMIZED[optimizer], "clip": 0.5}
    model, plain = built(kind), built(kind)
    pipe, found = penstock.Pipeline(model, plan, deadline=20, **settings), []
    loop = plain_loop(plain, batches(), micro_batches=3, **settings)
    for (x, y), expected in zip(batches(), loop, strict=True):
        found += [] if pipe.step(x, y).loss == expected["loss"] else ["loss"]
        state = pipe.state_dict()["model"]
        if pipe.rank == 0:
            found += [name for name, t in plain.state_dict().items() if not same_bits(t, state[name])]
    with torch.no_grad():
        outputs, expected = pipe.evaluate(batches()[0][0]), plain.eval()(batches()[0][0])
    return found + ([] if not pipe.is_last or same_bits(outputs, expected) else ["outputs"])


@pytest.mark.parametrize("optimizer", ["sgd", "foreach", "fused"])
@pytest.mark.parametrize("kind", KEPT)
def test_what_shares_memory_on_one_stage_trains_as_the_plain_loop(kind, optimizer):
    profile = profile_of(kind)
    plan = penstock.partition(profile, cuts=allowed(profile), micro_batches=3)
    assert differences(kind, plan, optimizer) == []


@pytest.mark.parametrize("kind", KEPT)
def test_no_cut_parts_what_shares_memory(kind):
    profile = profile_of(kind)
    names = [layer.name for layer in profile.layers]
    first, last = KEPT[kind].split() or ("a", "a")
    parting = names[names.index(first) : names.index(last)]
    assert allowed(profile) == [name for name in names[:-1] if name not in parting]
    for name in parting:
        with pytest.raises(penstock.PlanError, match=r"cannot be cut behind .*share memory"):
            penstock.partition(profile, cuts=[name])


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [OneMemory, BufferOfWeight, OneStorage])
def test_ranks_train_what_shares_memory_on_one_of_them(kind, ranks):
    plan = penstock.partition(profile_of(kind), cuts=["a"], micro_batches=3)
    assert ranks.run(differences, kind, plan, "sgd", ranks=2) == [[], []]


def test_a_buffer_that_nobody_reads_holds_its_weight_with_the_first_layer():
    class Unread(BufferOfWeight):
        forward = Base.forward

    assert allowed(profile_of(Unread)) == ["b", "relu", "d", "relu_1"]


def test_a_plan_for_the_model_before_its_tensors_shared_memory_is_refused():
    plan = penstock.partition(profile_of(Base), cuts=["relu"])
    with pytest.raises(penstock.PlanError, match=r"b\.weight and d\.weight share memory"):
        penstock.Pipeline(built(OneMemory), plan, loss=F.cross_entropy, optimizer=OPTIMIZERS["sgd"])


def test_versions_of_what_shares_memory_are_refused():
    profile = profile_of(BufferOfWeight)
    plan = penstock.partition(profile, cuts=["a"], schedule="async_1f1b", weights="stashed")
    with pytest.raises(penstock.PlanError, match=r"versions of the weights need .* row shares that of"):
        penstock.Pipeline(built(BufferOfWeight), plan, loss=F.cross_entropy, optimizer=OPTIMIZERS["sgd"])


def test_a_forward_that_writes_into_a_weight_through_a_buffer_is_refused():
    class Statistics(Base):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(8)
            self.norm.running_mean = self.b.bias.data

        def forward(self, x):
            return self.c(self.norm(self.b(self.a(x))))

    with pytest.raises(penstock.PlanError, match=r"writes to norm\.running_mean, .* the parameter b\.bias"):
        profile_of(Statistics)


@pytest.mark.parametrize(
    "read", [lambda self: self.rows[0], lambda self: self.rows[0] * 2, lambda self: self.rows[0][:3].sum()]
)
def test_a_weight_that_a_trace_would_bake_in_through_another_tensor_is_refused(read):
    class Baked(Base):
        def __init__(self):
            super().__init__()
            self.row = self.b.weight.data[0]
            self.rows = [self.b.weight.data[1]]

        def forward(self, x):
            return self.c(self.d(self.b(self.a(x))) + read(self))

    with pytest.raises(penstock.PlanError, match=r"recorded run does not compute"):
        profile_of(Baked)


def test_buffers_whose_elements_repeat_are_read_like_others():
    class Repeats(Base):
        wide: torch.Tensor
        windows: torch.Tensor

        def __init__(self):
            super().__init__()
            self.register_buffer("wide", torch.randn(1, 8).expand(8, 8))
            self.register_buffer("windows", torch.randn(15).unfold(0, 8, 1))

        def forward(self, x):
            return self.c(F.linear(F.linear(self.b(self.a(x)), self.wide), self.windows))

    profile = profile_of(Repeats)
    assert differences(Repeats, penstock.partition(profile, cuts=["a"], micro_batches=3), "sgd") == []


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
    ]
    for named, expected in cases:
        assert overlapping(named) == expected
        assert overlapping(copy.copy(named)) == expected
