"""Forwards that run again keep nothing of what they saved; buffers, and what is refused."""

import logging
import weakref
from typing import Any

import pytest
import torch
from small_pipelines import pipeline_of, profile_of
from torch import Tensor, nn

import penstock
from penstock import StageError


class Mean(nn.Module):
    """Reads and writes a buffer, where torch counts no write."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(20))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.mean.clone()
        if self.training:
            self.mean.data.mul_(0.9).add_(x.detach().mean(0))
        return y + x


def trained(*layers: nn.Module, recompute: Any, schedule: str = "gpipe", steps: int = 2) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 20), *layers, nn.Linear(20, 10))
    x, y = torch.randn(6, 10), torch.randint(10, (6,))
    leaves, options = [type(layer) for layer in layers], {"schedule": schedule, "recompute": recompute}
    pipe = pipeline_of(model, stages=2, example=(x[:2],), leaves=leaves, **options)
    for _ in range(steps):
        pipe.step(x, y)
    return pipe.state_dict()["model"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_buffers_are_read_as_they_were_and_left_as_they_are(schedule):
    kept, again = (trained(Mean(), recompute=one, schedule=schedule) for one in (False, True))
    assert kept.keys() == again.keys()
    for name, tensor in kept.items():
        assert torch.equal(again[name], tensor), name
    assert kept["1.mean"].any()


LOG = logging.getLogger("exponentials")  # what a forward tells it is nobody's state


class Noting(nn.Module):
    """Tells of the results that it saves."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        LOG.info("%s", weakref.ref(y.untyped_storage()))
        return y * 2


class Counting(logging.Handler):
    """Counts how many of them are in memory at once."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []
        self.most = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.results += record.args or ()
        self.most = max(self.most, self.num_alive)

    @property
    def num_alive(self) -> int:
        return sum(one() is not None for one in self.results)


@pytest.mark.parametrize(("recompute", "most"), [(False, 3), (True, 1)])
def test_what_a_forward_saved_is_not_kept(recompute, most):
    handler = Counting()
    LOG.setLevel(logging.INFO)
    LOG.addHandler(handler)
    try:
        trained(Noting(), recompute=recompute, steps=1)
    finally:
        LOG.removeHandler(handler)
    assert handler.most == most
    assert handler.num_alive == 0


class Block(nn.Module):
    """Writes in place to what enters and to what it made, draws, and has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one, self.other = nn.BatchNorm1d(20), nn.Linear(20, 20), nn.Linear(20, 20)
        self.relu, self.dropout = nn.ReLU(inplace=True), nn.Dropout(0.3)
        self.scale = nn.Parameter(torch.ones(20))

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(self.norm(self.relu(x.mul_(1.5))))
        return x * self.scale + self.other(self.dropout(self.relu(y)))


PARTS: list[Any] = [True, ["1"], ["*"], ["2", "1"], ["1.one", "1.norm", "3"], ["0", "1", "2", "3", "4"]]


@pytest.mark.parametrize("weights_first", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_parts_that_run_again_change_no_bit(parts, schedule, weights_first):
    found = []
    for recompute in (False, parts):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 20), Block(), Block(), Block(), nn.Linear(20, 10))
        x, y = torch.randn(9, 10), torch.randint(10, (9,))
        options: dict[str, Any] = {"schedule": schedule, "weights_first": weights_first}
        pipe = pipeline_of(model, stages=2, example=(x[:3],), recompute=recompute, **options)
        losses = [pipe.step(x, y).loss for _ in range(3)]
        found.append((losses, pipe.state_dict()["model"]))
        pipe.close()
    (losses, kept), (others, again) = found
    assert losses == others
    for name, tensor in kept.items():
        assert torch.equal(again[name], tensor), name


class Counter(nn.Module):
    """Counts in a buffer that others read."""

    def __init__(self, count: Tensor) -> None:
        super().__init__()
        self.register_buffer("count", count)

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("count").add_(0.25)
        return x + 1


class Reader(nn.Module):
    """Reads that buffer, a part of a parameter, and two views of one memory, of which it writes to one."""

    def __init__(self, count: Tensor, scale: nn.Parameter) -> None:
        super().__init__()
        self.register_buffer("count", count)
        self.scale, self.one = scale, nn.Linear(20, 20)

    def forward(self, x: Tensor, part: Tensor, scale: Tensor) -> Tensor:
        x.add_(1)
        y = self.one(x) * scale * self.get_buffer("count").clone() + self.scale
        return (y + x * part.repeat(1, 2).sin()).tanh()


class Views(nn.Module):
    """Hands views of its parameter and of its values to other modules; a counter runs ahead or behind."""

    def __init__(self, *, ahead: bool) -> None:
        super().__init__()
        count, scale = torch.ones(20), nn.Parameter(torch.rand(20))
        self.first, self.last, self.scale, self.ahead = nn.Linear(10, 20), nn.Linear(20, 10), scale, ahead
        self.counter, self.use, self.again = Counter(count), Reader(count, scale), Reader(count, scale)

    def forward(self, x: Tensor) -> Tensor:
        h, scale = self.first(x) * 1, self.scale.view(1, 20)
        h = self.counter(h) if self.ahead else h
        h = self.use(h, h[:, :10], scale) * 1
        h = self.again(h, h[:, :10], scale)
        return self.last(h if self.ahead else self.counter(h))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("parts", [True, ["use"], ["again", "use"], ["*"]], ids=str)
def test_parts_see_memory_that_others_write_to_as_it_was(parts, ahead, schedule):
    found = []
    for recompute in (False, parts):
        torch.manual_seed(0)
        x, y = torch.randn(9, 10), torch.randint(10, (9,))
        options: dict[str, Any] = {"schedule": schedule, "recompute": recompute, "stages": 1}
        pipe = pipeline_of(Views(ahead=ahead), example=(x[:3],), **options)
        losses = [pipe.step(x, y).loss for _ in range(3)]
        found.append((losses, pipe.state_dict()["model"]))
    (losses, kept), (others, again) = found
    assert losses == others
    assert [name for name, tensor in kept.items() if not torch.equal(again[name], tensor)] == []


def test_a_write_to_what_entered_that_nobody_saw_is_refused():
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 1, x.exp()

    class Use(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return pair[0], pair[0] * pair[1]

    def loss(outputs: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
        outputs[0].detach().mul_(0)
        return outputs[1].square().mean()

    x = torch.randn(6, 10)
    model = nn.Sequential(nn.Linear(10, 20), Pair(), Use())
    options: dict[str, Any] = {"recompute": ["2"], "stages": 1, "loss": loss, "leaves": [Pair, Use]}
    pipe = pipeline_of(model, example=(x[:2],), **options)
    with pytest.raises(StageError, match="must not be written to before its backward"):
        pipe.step(x, torch.zeros(6))


@pytest.mark.parametrize(("parts", "most"), [(False, 6), (["1", "2"], 1), (["*"], 1), (["1"], 3), (["0"], 6)])
def test_one_part_is_there_at_a_time(parts, most):
    model, x = nn.Sequential(nn.Linear(10, 20), Noting(), Noting(), nn.Linear(20, 10)), torch.randn(6, 10)
    pipe = pipeline_of(model, stages=1, example=(x[:2],), leaves=[Noting], schedule="gpipe", recompute=parts)
    handler = Counting()
    LOG.setLevel(logging.INFO)
    LOG.addHandler(handler)
    try:
        pipe.step(x, torch.randint(10, (6,)))
    finally:
        LOG.removeHandler(handler)
    assert handler.most == most
    assert handler.num_alive == 0


def test_parts_count_in_the_memory_of_a_plan_and_travel_with_it(tmp_path):
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()) for _ in range(6)]
    profile = profile_of(nn.Sequential(*blocks), (torch.randn(256, 64),))
    options: Any = {"cuts": ["2.3"], "micro_batches": 8, "schedule": "gpipe"}
    asked = (False, ["0", "1"], ["*"], True)
    kept, some, parts, again = (penstock.partition(profile, **options, recompute=one) for one in asked)
    assert [stage.recompute for stage in some.stages] == [("0", "1"), False]
    for index in (0, 1):
        sizes = [plan.stages[index].memory_bytes for plan in (kept, some, parts)]
        assert sizes == sorted(sizes, reverse=True)
    value, weights = 256 * 64 * 4, 3 * parts.stages[0].num_parameters * 4
    # what the first part saves with its input, and what enters three of them
    assert parts.stages[0].memory_bytes == weights + (3 + 8 * 3) * value
    assert again.stages[0].memory_bytes == weights + (1 + 3 * 2 + 8) * value
    parts.save(tmp_path / "plan.json")
    assert penstock.Plan.load(tmp_path / "plan.json") == parts
    assert "0, 1 run again" in str(some)
    assert kept.stages[0].backward_seconds < parts.stages[0].backward_seconds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute": ["layer9"]}, "recompute names paths of modules, found 'layer9'; the layers run from"),
        ({"recompute": "0"}, r"found '0'; write \['0'\]"),
        ({"recompute": ["0"], "parameters_tier": "disk"}, r"recompute=\['0'\] and the tier disk"),
        ({"recompute": []}, "one module at least, found"),
        ({"recompute": ["0"], "tier": "packed"}, "nothing for a tier to keep"),
    ],
    ids=str,
)
def test_parts_that_cannot_run_again_are_refused(options, message):
    profile = profile_of(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), (torch.randn(4, 8),))
    with pytest.raises(penstock.PlanError, match=message):
        penstock.partition(profile, stages=2, micro_batches=2, **options)


class Fickle(nn.Module):
    """Does something else now and then, by a file that nobody compares."""

    def forward(self, x: Tensor) -> Tensor:
        with open("calls", "a+") as file:
            file.write("x")
            number = file.tell()
        return x.exp() if number < 30 or number % 2 else x.sin().exp()


def test_a_forward_that_does_something_else_the_second_time_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StageError, match=r"must do what it did, found that it saved .*recompute=false"):
        trained(Fickle(), recompute=True, steps=8)


def test_it_is_for_stages_of_a_plan_and_counts_in_their_memory():
    profile = profile_of(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), (torch.randn(64, 64),))
    options = {"cuts": ["3"], "micro_batches": 8, "schedule": "gpipe"}
    kept, again = (penstock.partition(profile, **options, recompute=one) for one in (False, True))
    assert [stage.recompute for stage in again.stages] == [True, True]
    for one, other in zip(kept.stages, again.stages, strict=True):
        assert other.memory_bytes < one.memory_bytes
    value = 64 * 64 * 4
    assert again.stages[1].memory_bytes == 3 * again.stages[1].num_parameters * 4 + (8 + 4) * value
    assert "forwards run again" in str(again)
    assert "forwards run again" not in str(kept)
