"""People's data: data sets, loaders, pairs of them; unused settings are named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from penstock import ConfigError
from penstock.conf.schema import TrainConfig
from penstock.pipeline.data import Description, Samples
from penstock.pipeline.data.samples import WORKS, samples_of
from penstock.pipeline.run import build
from penstock.pipeline.run.planning import first_batch


def given(made: object, batch_size: int | None = None) -> Samples:
    return samples_of(made, target="my.data", batch_size=batch_size)


def table(rows: int = 10) -> TensorDataset:
    return TensorDataset(torch.arange(rows).float().view(rows, 1), torch.arange(rows) % 3)


def first(samples: Samples, split: Any = "train") -> Any:
    return next(samples.batches(split, batch_size=4, shuffle=False))


def test_a_pair_trains_and_is_tested():
    for made in ((table(), table(6)), [table(), table(6)], (DataLoader(table()), DataLoader(table(6)))):
        samples = given(made)
        assert given(samples) is samples
        assert (samples.num_samples("train"), samples.num_samples("test")) == (10, 6)
        assert samples.describe == Description(num_classes=3, input_shape=(1,))
        assert samples.notes == ()
        inputs, targets = first(samples, "test")
        assert (inputs.tolist(), targets.tolist()) == ([[0.0], [1.0], [2.0], [3.0]], [0, 1, 2, 0])


def test_one_data_set_trains_and_says_that_nothing_is_tested():
    samples = given(table())
    assert samples.test is None
    assert "data._target_=my.data returns nothing to test on" in samples.notes[0]
    with pytest.raises(ConfigError, match="no samples to test on"):
        samples.num_samples("test")


def test_of_a_loader_the_collate_fn_is_kept():
    def doubled(items: list[Any]) -> Any:
        inputs, targets = zip(*items, strict=True)
        return 2 * torch.stack(inputs), torch.stack(targets)

    inputs, _ = first(given(DataLoader(table(), collate_fn=doubled, batch_size=4)))
    assert inputs.flatten().tolist() == [0.0, 2.0, 4.0, 6.0]
    inputs, _ = first(given(DataLoader(table(), batch_size=None)))  # which does not batch itself
    assert inputs.shape == (4, 1)


def test_what_of_a_loader_is_not_used_is_said():
    loader = DataLoader(table(), batch_size=5, shuffle=True)
    weighted = DataLoader(table(), sampler=torch.utils.data.WeightedRandomSampler([1.0] * 10, 10))
    assert given((loader, loader), 5).notes == ()
    for train, batch_size, note in (
        (loader, 20, "batch_size=5 gives way to batch_size=20"),
        (weighted, 1, "WeightedRandomSampler is not asked"),
    ):
        (found,) = given((train, loader), batch_size).notes
        assert note in found


class Items(Dataset[Any]):
    """A data set without a list of its targets."""

    def __init__(self, item: Callable[[int], Any]) -> None:
        self.item = item

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


def test_inputs_may_be_a_tuple_or_a_dict_and_targets_be_called_label():
    inputs, targets = first(given(Items(lambda i: ((torch.ones(2) * i, torch.zeros(3)), i))))
    assert [tuple(x.shape) for x in inputs] == [(4, 2), (4, 3)]
    assert isinstance(inputs, tuple)
    assert targets.tolist() == [0, 1, 2, 3]
    for name in ("labels", "label"):
        inputs, targets = first(given(Items(lambda i, name=name: {"x": torch.ones(2) * i, name: i})))
        assert (list(inputs), targets.tolist()) == (["x"], [0, 1, 2, 3])
        assert inputs["x"].shape == (4, 2)
    inputs, targets = first(given(Items(lambda i: {"label": i, "labels": -i})))  # the one that it always was
    assert (inputs["label"].tolist(), targets.tolist()) == ([0, 1, 2, 3], [0, -1, -2, -3])


def test_the_number_of_classes_is_what_the_data_tell():
    listed = Items(lambda i: (torch.ones(1), i % 2))
    assert given(listed).describe.num_classes == 0
    listed.targets = [0, 1, 4]  # type: ignore[attr-defined]
    assert given(listed).describe.num_classes == 5
    listed.classes = ["cat", "dog"]  # type: ignore[attr-defined]
    assert given(Subset(listed, [0, 1])).describe.num_classes == 2
    assert given(TensorDataset(torch.ones(2, 1), torch.ones(2))).describe.num_classes == 0


def test_a_model_that_asks_for_classes_nobody_told_is_refused():
    unknown = Description(num_classes=0, input_shape=(1,))
    for options, told in (
        ({"_target_": "penstock.pipeline.models.mlp"}, "give it an attribute `classes`"),
        ({"_target_": f"{__name__}.Asks"}, "add model.num_classes=NUMBER"),
    ):
        with pytest.raises(ConfigError, match="asks for the number of classes") as refused:
            build.model(options, describe=unknown, seed=0)
        assert told in str(refused.value)
    options = {"_target_": f"{__name__}.Asks", "num_classes": 4}
    assert build.model(options, describe=unknown, seed=0).out_features == 4
    build.model({"_target_": "torch.nn.Identity"}, describe=unknown, seed=0)


class Asks(nn.Linear):
    def __init__(self, num_classes: int) -> None:
        super().__init__(1, num_classes)


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(table())


class Counted(Streamed):
    def __len__(self) -> int:
        return 10


class Unwilling(Streamed):
    def __len__(self) -> int:
        raise NotImplementedError


def test_what_does_not_tell_its_length_is_refused():
    late = Streamed()
    late.__len__ = lambda: 10  # pyright: ignore[reportAttributeAccessIssue]  (Python asks the class)
    for made in (Streamed(), DataLoader(Streamed()), (table(), Streamed()), late, Unwilling()):
        with pytest.raises(ConfigError, match=r"to (train|test), .* how many .*give its class __len__"):
            given(made)


@pytest.mark.parametrize(
    ("more", "tested"), [((), None), (("test",), 6), (("test", "validation", "extra"), 7), (("val",), 8)]
)
def test_splits_by_name_train_and_are_tested(more, tested):
    rows = {"train": 10, "test": 6, "validation": 7, "val": 8, "extra": 9}
    samples = given({name: table(rows[name]) for name in (*more, "train")})
    assert samples.num_samples("train") == 10
    assert (None if samples.test is None else samples.num_samples("test")) == tested
    if len(more) > 1:
        assert samples.notes == ("data._target_=my.data also returns test, extra, which nothing reads",)


def test_a_stream_keeps_its_order_in_every_epoch_and_from_any_batch_on():
    samples = given((Counted(), Counted()))
    inputs, targets = table().tensors
    for split in ("train", "test"):
        for epoch in (0, 1):
            found = list(samples.batches(split, batch_size=4, epoch=epoch, drop_last=False))
            assert torch.equal(torch.cat([batch for batch, _ in found]), inputs[:10])
            assert torch.equal(torch.cat([batch for _, batch in found]), targets[:10])
    (late,) = samples.batches("train", batch_size=4, first=1)
    assert torch.equal(late[0], inputs[4:8])


def test_a_stream_that_ends_ahead_of_its_length_is_named():
    class Short(Counted):
        def __len__(self) -> int:
            return 1000

    with pytest.raises(ConfigError, match="its stream ended ahead of it, though its length is 1000"):
        list(given(Short()).batches("train", batch_size=20))


REFUSED = [
    (None, "returns None; what works"),
    ({"rows": table()}, "returns a dict"),
    ((torch.ones(2), torch.ones(2)), "returns a tuple of 2 (Tensor, Tensor)"),
    ((table(), table(), table()), "returns a tuple of 3 (TensorDataset, TensorDataset, TensorDataset)"),
    (torch.ones(2).numpy(), "returns a ndarray"),
    (TensorDataset, "returns a type"),
    (TensorDataset(torch.ones(0, 1)), "returns no samples to train"),
    (Items(lambda i: (torch.ones(1), torch.ones(1), 0)), "a sample is (input, target)"),
    (Items(lambda i: {"x": torch.ones(1)}), "found the keys x"),
    (Items(lambda i: torch.ones(1)), '"labels", found a Tensor'),
]


@pytest.mark.parametrize(("made", "found"), REFUSED)
def test_anything_else_is_refused_with_what_works(made, found):
    with pytest.raises(ConfigError) as refused:
        given(made)
    assert found in str(refused.value)
    if "tuple of" in found:
        assert all(line in str(refused.value) for line in WORKS)


def test_the_example_is_what_the_model_takes():
    config = TrainConfig(batch_size=4, micro_batches=2)
    named = given(Items(lambda i: {"y": torch.zeros(1), "x": torch.ones(3), "labels": i}))
    example: Any = first_batch(config, named)[0]
    assert {name: tuple(x.shape) for name, x in example.items()} == {"y": (2, 1), "x": (2, 3)}
    paired = given(Items(lambda i: ((torch.ones(3), torch.zeros(1)), i)))
    both: Any = first_batch(config, paired)[0]
    assert [tuple(x.shape) for x in both] == [(2, 3), (2, 1)]
