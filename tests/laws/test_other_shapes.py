"""Batches whose shapes lead a model through other numbers, or other layers: the plain loop's bits."""

import functools
import itertools
import warnings
from typing import Any

import pytest
import torch
from cases import OPTIMIZERS
from small_pipelines import built, differences, model_of, pipeline_of, profile_of
from torch import nn
from torch.nn import functional as F
from zoo import cross_entropy

import penstock
from penstock.pipeline.runtime import step_planner
from penstock.stages.tracing import shape_inference
from penstock.stages.tracing.shape_inference import Skeleton

VOCABULARY = 31


class Block(nn.Module):
    """Attention as people write it: numbers of the sequence go through Python."""

    def __init__(self, width=8, heads=2, dropout=0.0):
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )

    def forward(self, x):
        samples, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(samples, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = (q @ k.transpose(-1, -2)).masked_fill(later, float("-inf")).softmax(-1)
        return x + self.dropout(self.out((weights @ v).transpose(1, 2).reshape(samples, length, width)))


class Text(nn.Module):
    def __init__(self, most=64, width=8, **options):
        super().__init__()
        self.register_buffer("places", torch.arange(most), persistent=False)
        self.words, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(most, width)
        self.blocks = nn.Sequential(*(Block(width, **options) for _ in range(2)))
        self.head = nn.Linear(width, VOCABULARY)
        self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(
            self.blocks(self.words(ids) + self.positions(self.get_buffer("places")[: ids.shape[1]]))
        )


class Scan(nn.Module):
    """A layer for each place of the sequence: their names move with its length."""

    def __init__(self, width=6):
        super().__init__()
        self.words, self.cell = nn.Embedding(VOCABULARY, width), nn.Linear(2 * width, width)
        self.norm, self.head = nn.BatchNorm1d(width), nn.Linear(width, VOCABULARY)

    def forward(self, ids):
        x = self.words(ids)
        state, states = torch.zeros_like(x[:, 0]), []
        for place in range(ids.shape[1]):
            state = self.cell(torch.cat([x[:, place], state], 1)).tanh()
            states.append(state)
        return self.head(self.norm(torch.stack(states, 2)).transpose(1, 2))


class Patches(nn.Module):
    """Pictures of other sizes, whose last batch may have a micro-batch of one sample."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Linear(16, 5)

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        samples, channels, height, width = x.shape
        x = x.reshape(samples, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
        return self.last(x.reshape(samples, height * width // 4, -1)).mean(1)


def texts(lengths=(8, 12, 8, 5, 12, 3), samples=9):
    generator = torch.Generator().manual_seed(3)
    sizes = [(samples, length) for length in lengths] + [(4, lengths[1])]  # 2, 1, 1
    return [(x, x.clone()) for x in (torch.randint(VOCABULARY, size, generator=generator) for size in sizes)]


def pictures(sizes=((8, 8), (12, 12), (8, 4), (8, 8))):
    generator = torch.Generator().manual_seed(3)
    numbers = [9] * (len(sizes) - 1) + [4]
    inputs = [torch.randn(n, 3, *size, generator=generator) for n, size in zip(numbers, sizes, strict=True)]
    return [(x, torch.randint(5, (len(x),), generator=generator)) for x in inputs]


pytestmark = pytest.mark.filterwarnings("ignore:the model was recorded anew:UserWarning")

MODELS: dict[str, Any] = {
    "text": (Text, texts, {}),
    "scan": (Scan, lambda: texts(samples=11)[:-1], {"cuts": ["words", "stack"]}),
    "pictures": (Patches, pictures, {}),
}
HOW = {
    "every cut": {},
    "far": {"stages": 3, "tier": "disk", "parameters_tier": "disk", "optimizer": "adam"},
    "packed, halves": {"stages": 2, "tier": "packed", "weights_first": True, "schedule": "zb_h1"},
}


@pytest.mark.parametrize(("name", "how"), [(n, h) for n in MODELS for h in HOW if (n, h) != ("scan", "far")])
def test_batches_of_other_shapes_have_the_bits_of_the_plain_loop(name, how, monkeypatch):
    monkeypatch.setattr(shape_inference, "SMALL", 0)  # else such small models keep their values
    make, data, cuts = MODELS[name]
    settings = {name: value for name, value in HOW[how].items() if not cuts or name != "stages"}
    assert differences(make, data=data(), **settings, **cuts) == []


class Halves(nn.Module):
    """A model that ``torch.fx`` can follow, so that the plain loop knows its random layers by name."""

    def __init__(self):
        super().__init__()
        self.words, self.dropout = nn.Embedding(VOCABULARY, 6), nn.Dropout(0.5)
        self.head, self.other = nn.Linear(12, VOCABULARY), nn.Dropout(0.25)

    def forward(self, ids):
        x = self.dropout(self.words(ids))
        return self.head(self.other(x.reshape(x.shape[0], x.shape[1] // 2, 12)))


def test_random_layers_draw_by_their_names_at_every_length():
    data = [(x, x[:, ::2].clone()) for x, _ in texts((8, 12, 8, 6))]
    assert differences(Halves, data=data, random=("dropout", "other"), stages=3) == []


def test_a_shape_is_recorded_once_until_too_many_came(monkeypatch):
    recorded, graph = [], Skeleton.graph

    def seen(self, call, inputs, *more, **options):
        recorded.append(tuple(inputs[0].shape))
        return graph(self, call, inputs, *more, **options)

    monkeypatch.setattr(Skeleton, "graph", seen)
    monkeypatch.setattr(step_planner, "MOST_RECORDED", 3)
    (x, y), *_ = texts()
    pipe = pipeline_of(Text(), example=(x[:3],), stages=2)
    for length in (8, 6, 8, 6, 5, 8, 4, 5):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            before = len(recorded)
            pipe.step(x[:, :length], y[:, :length])
        assert [f"of the shape 3x{length}, in" in str(one.message) for one in told] == [True] * (
            len(recorded) - before
        )
    assert recorded == [(3, 6), (3, 5), (3, 4)]
    pipe.steps.known.clear()
    pipe.step(x[:, :6], y[:, :6])
    assert recorded[3:] == [(3, 6)]
    assert len(pipe.steps.recorded) == 3


def test_what_is_read_of_the_inputs_has_a_record_each_until_too_many_came():
    def scaled_by_the_least(self, x):
        times = 1 + int(x.min())
        return self.head(self.one(x.sub_(9.5)).relu()) * times

    def batch_from(*least):
        x = torch.arange(54).view(9, 6) % 6 / 7 + torch.tensor(least).repeat_interleave(3)[:, None]
        return x, torch.arange(9) % 5

    make = lambda: model_of(scaled_by_the_least, one=nn.Linear(6, 4), head=nn.Linear(4, 5))  # noqa: E731
    some = (0, 0, 0), (1, 0, 1), (2, 3, 0), (3, 1, 2)
    assert differences(make, data=[batch_from(*least) for least in some], stages=2) == []
    first = batch_from(0, 0, 0)[0]
    pipe = pipeline_of(built(make), example=(first[:3],), stages=2)
    assert torch.equal(first, batch_from(0, 0, 0)[0])
    for least in (*some, *some):
        pipe.step(*batch_from(*least))
    with pytest.raises(penstock.PlanError, match=r"at most 4 records.*guard_int"):
        pipe.step(*batch_from(0, 1, 4))
    pipe.step(*batch_from(1, 0, 1))


def kind_of(forward, width=8, **more):
    """A model of three layers and an embedding; ``forward`` is told whether there are many places."""

    def run(self, ids):
        return forward(self, self.words(ids), ids.shape[1] > 8)

    words, head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
    one, two = nn.Linear(width, width), nn.Linear(width, width)
    model = model_of(run, words=words, one=one, two=two, head=head)
    for name, part in more.items():
        model.register_buffer(name, part) if type(part) is torch.Tensor else setattr(model, name, part)
    return model


def in_order(m, x, many):
    x = m.one(m.two(x).relu()) if many else m.two(m.one(x).relu())
    return m.head(x.relu())


def tied_at_first(m, x, many):
    return m.head(m.one(m.two(x if many else m.one(x)).relu()))


def tied_later(m, x, many):
    x = m.two(F.linear(F.linear(x, m.weight), m.weight)).relu()
    return m.head(F.linear(x, m.weight) if many else x)


def writes(m, x, many):
    if many:
        m.seen.add_(0.5)
    return m.head(m.two(x + m.seen).relu())


def reads(m, x, many):
    return m.head(m.two(x).relu()) * (m.scale if many else 1)


REFUSED = {
    "every cut of a scan": (Scan, None, "reads cell in train mode, which it does not hold"),
    "order": (lambda: kind_of(in_order), ["words", "one", "two"], "no cut keeps the parts of the model"),
    "random": (
        lambda: kind_of(lambda m, x, many: m.head(F.dropout(m.two(x), 0.5) if many else m.two(x))),
        ["two"],
        "other layers of the model are random",
    ),
    "size": (
        lambda: kind_of(lambda m, x, many: m.head(m.two(x.view(-1, 7) if many else x))),
        ["two"],
        r"shape '\[-1, 7\]' is invalid",
    ),
    "tied at first": (
        lambda: kind_of(tied_at_first),
        ["two"],
        "shares other parameters with other stages; pad to one shape, or name the part in leaves=$",
    ),
    "tied later": (
        lambda: kind_of(tied_later, weight=nn.Parameter(torch.eye(8))),
        ["two"],
        "shares other parameters with other stages",
    ),
    "written": (lambda: kind_of(writes, seen=torch.ones(())), ["two"], "a forward writes to seen"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_cut_alike_is_refused_and_training_goes_on(kind):
    make, cuts, told = REFUSED[kind]
    (x, y), (longer, long_targets), *_ = texts()
    pipe = pipeline_of(make(), example=(x[:3],), cuts=cuts)
    pipe.step(x, y)
    for _ in range(2):
        with pytest.raises(penstock.PlanError, match=told):
            pipe.step(longer, long_targets)
    pipe.step(x, y)


def test_what_only_other_shapes_read_is_held_against_what_it_was():
    (x, y), (longer, long_targets), *_ = texts()
    for late in (False, True):
        model = kind_of(reads, scale=2.0)
        pipe = pipeline_of(model, example=(x[:3],), cuts=["two"])
        pipe.step(x, y)
        if late:
            pipe.step(longer, long_targets)
        vars(model)["scale"] = 3.0
        with pytest.raises(penstock.PlanError, match=r"scale was 2\.0 when the model was traced"):
            pipe.step(longer, long_targets)
        vars(model)["scale"] = 2.0
        pipe.step(longer, long_targets)


def test_parameters_in_a_tier_come_by_the_names_of_layers():
    told = "comes? by the names of layers"
    with pytest.raises(penstock.PlanError, match=told):
        differences(functools.partial(Scan, 64), data=texts(), cuts=["words"], parameters_tier="disk")


def test_ranks_that_record_something_else_say_so():
    def rank(world):
        pipe = penstock.Pipeline(
            models[world.rank],
            plan if world.rank == 0 else None,
            loss=cross_entropy,
            optimizer=OPTIMIZERS["sgd"],
            world=world,
        )
        pipe.step(x, y)
        with pytest.raises(penstock.PlanError, match=r"the layer mul in train mode"):
            pipe.step(longer, long_targets)

    (x, y), (longer, long_targets), *_ = texts()
    models = [built(lambda scale=scale: kind_of(reads, scale=scale)) for scale in (2.0, 3.0)]
    profile = profile_of(built(lambda: kind_of(reads, scale=2.0)), (x[:3],))
    plan = penstock.partition(profile, cuts=["two"], micro_batches=3)
    penstock.in_threads(rank, ranks=2, deadline=60)


def test_outputs_of_several_lengths_are_a_list_and_what_an_eval_reads_is_no_flag_of_training():
    (x, _), (longer, _), *_ = texts()
    dropped = lambda m, h, _: m.head(F.dropout(m.two(h.view(*h.shape)), 0.1, m.training))  # noqa: E731
    model = kind_of(dropped)
    pipe = pipeline_of(model, example=(x[:3],), cuts=["two"], loss=lambda out, _: out.square().mean())
    parts = penstock.Split((x[:3], longer[:3], x[3:6]))
    found = pipe.step(parts, torch.zeros(9), outputs=True).outputs
    assert [len(part[0]) for part in found] == [8, 12, 8]
    model.eval()
    assert pipe.evaluate(longer[:, :5]).shape[1] == 5


def test_several_examples_make_a_plan_for_the_longest_and_are_recorded_before_the_first_step(monkeypatch):
    recorded, graph = [], Skeleton.graph

    def seen(self, call, inputs, *more, **options):
        recorded.append(tuple(inputs[0].shape))
        return graph(self, call, inputs, *more, **options)

    def rank(world):
        pipe = penstock.Pipeline(
            models[world.rank], plan if world.rank == 0 else None, loss=cross_entropy,
            optimizer=OPTIMIZERS["sgd"], world=world,
        )  # fmt: skip
        before = len(pipe.steps.recorded)
        for batch in texts()[:2] * 2:
            pipe.step(*batch)
        assert (before, len(pipe.steps.recorded)) == (3, 3)
        return pipe.state_dict()["model"]

    monkeypatch.setattr(Skeleton, "graph", seen)
    examples = [(torch.randint(VOCABULARY, (3, length)),) for length in (5, 12, 8)]
    graphs, models = [], [built(Text) for _ in range(3)]
    for model in models[::2]:
        graphs.append(penstock.trace(model, examples))
    plan = penstock.partition(penstock.measure(graphs[0], examples, repeats=1), stages=2, micro_batches=3)
    assert plan.input_shapes == ((3, 12),)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = penstock.in_threads(rank, ranks=2, deadline=60)
    assert sorted(recorded) == [(3, 5)] * 2 + [(3, 8)] * 2
    assert not [one for one in told if "recorded anew" in str(one.message)]
    pipe = penstock.Pipeline.of(
        models[2], examples, stages=2, micro_batches=3, loss=cross_entropy, optimizer=OPTIMIZERS["sgd"]
    )
    assert len(recorded) == 6
    for batch in texts()[:2] * 2:
        pipe.step(*batch)
    alone = pipe.state_dict()["model"]
    assert set().union(*found) == alone.keys()
    for name, tensor in itertools.chain(*(one.items() for one in found)):
        assert torch.equal(alone[name], tensor), name


@pytest.mark.parametrize(
    ("examples", "told"),
    [
        ([], "holds one micro-batch at least"),
        (
            [(torch.zeros(3, 4, dtype=torch.int64),), {"ids": torch.zeros(3, 5, dtype=torch.int64)}],
            "one call",
        ),
        ([torch.zeros(3, 4, dtype=torch.int64)], r"found a Tensor; wrap it: \(x,\)"),
    ],
    ids=["none", "another call", "not wrapped"],
)
def test_examples_that_are_no_several_are_refused(examples, told):
    with pytest.raises(penstock.PlanError, match=told):
        penstock.trace(Text(), examples)
