"""Batches whose shapes lead a model through other numbers, or other layers: the plain loop's bits."""

import warnings

import pytest
import torch
from small_pipelines import differences, pipeline_of
from torch import nn

import penstock
from penstock.pipeline.runtime import step_planner
from penstock.stages.tracing.skeleton import Skeleton

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

MODELS = {
    "text": (Text, texts),
    "scan": (Scan, lambda: texts(samples=11)[:-1]),
    "pictures": (Patches, pictures),
}
HOW = {
    "every cut": {},
    "far": {"stages": 3, "tier": "disk", "parameters_tier": "disk", "optimizer": "adam"},
    "packed, weights first": {"stages": 2, "tier": "packed", "weights_first": True},
    "again": {"stages": 2, "recompute": True, "schedule": "gpipe", "clip": 0.5},
    "halves": {"stages": 2, "schedule": "zb_h1"},
}


@pytest.mark.parametrize(
    ("name", "how"), [(n, h) for n in MODELS for h in HOW if (n, h) != ("scan", "every cut")]
)
def test_batches_of_other_shapes_have_the_bits_of_the_plain_loop(name, how):
    make, data = MODELS[name]
    assert differences(make, data=data(), **HOW[how]) == []


def on_a_rank(name):
    make, data = MODELS[name]
    warnings.simplefilter("ignore")
    return differences(make, data=data(), stages=2, ranks=2, deadline=90)


@pytest.mark.ranks
@pytest.mark.parametrize("name", MODELS)
def test_ranks_record_what_none_of_them_holds(name, ranks):
    assert ranks.run(on_a_rank, name, ranks=2) == [[], []]


def test_a_run_goes_on_from_the_middle_of_the_stream():
    batches, wanted, found = texts(), [], []
    for stops in (False, True):
        torch.manual_seed(1)
        pipe = pipeline_of(Text(), example=(batches[0][0][:3],), stages=2)
        for step, (x, y) in enumerate(batches):
            if stops and step == 3:
                state, pipe = pipe.state_dict(), pipeline_of(Text(), example=(batches[1][0][:3],), stages=3)
                pipe.load_state_dict(state)
            (found if stops else wanted).append(pipe.step(x, y).loss)
    assert found == wanted


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


class Other(nn.Module):
    """Takes its two layers in another order when there are many places, or drops out then."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.words = kind, nn.Embedding(VOCABULARY, 6)
        self.one, self.two, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, VOCABULARY)

    def forward(self, ids):
        x, length = self.words(ids), ids.shape[1]
        if self.kind == "order" and length > 8:
            x = self.one(self.two(x).relu()).relu()
        else:
            x = self.two(self.one(x).relu()).relu()
        if self.kind == "random" and length > 8:
            x = nn.functional.dropout(x, 0.5)
        if self.kind == "wide" and length > 8:
            x = x.view(-1, 7)
        return self.head(x)


def test_what_only_other_shapes_read_is_held_against_what_it_was():
    class Scaled(Text):
        scale = 1.0

        def forward(self, ids):
            return super().forward(ids) * (self.scale if ids.shape[1] > 8 else 1)

    (x, y), (longer, long_targets), *_ = texts()
    for late in (False, True):
        model = Scaled()
        model.scale = 2.0
        pipe = pipeline_of(model, example=(x[:3],), stages=2)
        pipe.step(x, y)
        if late:
            pipe.step(longer, long_targets)
        model.scale = 3.0
        with pytest.raises(penstock.PlanError, match=r"scale was 2\.0 when the model was traced"):
            pipe.step(longer, long_targets)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("all", "reads cell in train mode, which it does not hold"),
        ("order", "no cut keeps the parts of the model on stages 1 and 2 apart"),
        ("random", "other layers of the model are random"),
        ("wide", "shape '\\[-1, 7\\]' is invalid"),
    ],
)
def test_what_cannot_be_cut_alike_is_refused_and_training_goes_on(kind, told):
    (x, y), (longer, long_targets), *_ = texts()
    model, cuts = (Scan(), None) if kind == "all" else (Other(kind), ["words", "one", "two"])
    pipe = pipeline_of(model, example=(x[:3],), cuts=cuts)
    pipe.step(x, y)
    with pytest.raises(penstock.PlanError, match=told):
        pipe.step(longer, long_targets)
    pipe.step(x, y)
