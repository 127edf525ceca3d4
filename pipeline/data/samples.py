"""Two splits of samples and what a model must know of them, and their batches, read in this process."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from ...compression.errors import ConfigError
from .batches import BatchIndex, BatchReader, IterableTable, Table, unreadable
from .options import check_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Facts of the data that a model needs."""

    num_classes: int  # targets are 0 .. num_classes - 1; 0 where the data do not give it
    input_shape: tuple[int, ...]  # of one sample: (channels, height, width) for images, (length,) for text
    vocabulary: str = ""  # the characters in the order of their numbers; empty where inputs are not text


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The train and the test split; one's own are any two map-style torch data sets."""

    train: Table
    test: Table | None  # None: nothing is tested, and no accuracy reported
    describe: Description
    notes: tuple[str, ...] = ()  # sentences for a person when a run begins

    def num_samples(self, split: Literal["train", "test"]) -> int:
        """Return the number of samples in a split."""
        return len(self.table(split))

    def num_batches(
        self, split: Literal["train", "test"], *, batch_size: int, drop_last: bool | None = None
    ) -> int:
        """Return the number of batches that ``batches`` yields; raises ConfigError where it yields none."""
        check_count(batch_size=batch_size)
        num_samples = self.num_samples(split)
        full, rest = divmod(num_samples, batch_size)
        num_batches = full if (split == "train" if drop_last is None else drop_last) else full + bool(rest)
        if num_batches == 0:
            raise ConfigError(
                f"batch_size={batch_size} leaves no batch of the {num_samples} {split} samples; "
                "lower batch_size or keep the last batch with data.drop_last=false"
            )
        return num_batches

    def batches(
        self,
        split: Literal["train", "test"],
        *,
        batch_size: int,
        epoch: int = 0,
        seed: int = 0,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        first: int = 0,
        skips: bool = False,
    ) -> Iterator[tuple[Any, Tensor]]:
        """Yield (inputs, targets) batch after batch.

        Args:
            shuffle, drop_last: None means yes for ``train`` and no for ``test``.
            first: Number of the batch to begin with; those before it are not read.
            skips: Leave out samples that cannot be read.

        Yields:
            Inputs (batch, *input_shape), float32 images or int64 text, of one's own also a tuple or a dict of
            tensors; targets int64, (batch,) or (batch, length).

        Raises:
            ConfigError: The split holds no batch of this size."""
        num_batches = self.num_batches(split, batch_size=batch_size, drop_last=drop_last)
        shuffled = (split,) * (split == "train" if shuffle is None else shuffle)
        tables = {split: self.table(split)}
        reader = BatchReader(tables=tables, batch_size=batch_size, seed=seed, shuffled=shuffled, skips=skips)
        for number in range(first, num_batches):
            read = reader[BatchIndex(split, epoch, number)]
            if read.batch is None:
                raise unreadable(read.broken, skips=skips)
            yield read.batch

    def table(self, split: str) -> Table:
        """Return the split of this name; raises ConfigError where there is none."""
        if split not in ("train", "test"):
            raise ConfigError(f"{split!r} is not a split; known are train, test")
        table = self.train if split == "train" else self.test
        if table is None:
            raise ConfigError("there are no samples to test on; return (train, test) from data._target_")
        return table


LABELS = ("labels", "label")  # the targets of a sample that is a dict, as Hugging Face's
TESTS = ("validation", "val", "test")  # a mapping's first one is tested on; the last often has no targets
WORKS = (
    "return torch.utils.data.TensorDataset(inputs, targets)",
    "return train_dataset, test_dataset",
    "return torch.utils.data.DataLoader(dataset, collate_fn=mine)",
    "return train_loader, test_loader",
    'return {"train": train_dataset, "test": test_dataset}',
    "return penstock.pipeline.data.Samples(train=.., test=.., describe=..)",
)
"""What a function of one's own may end with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MapTable:
    """One split: a map-style data set, whose samples are put together as its owner says."""

    dataset: Any
    collate: Callable[[list[Any]], tuple[Any, Any]]

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        """Return inputs and targets of the samples with these numbers."""
        numbers = indices.tolist()
        if several := getattr(self.dataset, "__getitems__", None):  # as torch's own loader asks
            return self.collate(several(numbers))
        return self.collate([self.dataset[index] for index in numbers])

    @property
    def in_memory(self) -> bool:
        """True if the samples are tensors in memory."""
        return isinstance(self.dataset, TensorDataset)

    def path(self, index: int) -> str:
        """Return the file of a sample, where its data set tells it as torchvision's do; else ""."""
        listed = getattr(self.dataset, "samples", None)
        known = isinstance(listed, Sequence) and index < len(listed) and isinstance(listed[index], tuple)
        return str(listed[index][0]) if known and listed else ""


def samples_of(
    made: object, *, target: str, batch_size: int | None, skips: bool = False, labelled: bool = False
) -> Samples:
    """Return what ``target`` returned as ``Samples``; raises ConfigError where nothing can be trained on it.

    ``labelled``: inputs by name have the labels among them."""
    if isinstance(made, Samples):
        return made
    passed_by: list[str] = []
    if isinstance(made, Mapping) and "train" in made:
        splits = ["train", *[name for name in TESTS if name in made][:1]]
        parts, passed_by = [made[name] for name in splits], [str(name) for name in made if name not in splits]
    else:
        parts = list(made) if isinstance(made, tuple | list) and len(made) == 2 else [made]
    if not all(map(is_split, parts)):
        raise ConfigError(
            f"data._target_={target} returns {_shown(made)}; what works is one of: {'; '.join(WORKS)}"
        )
    tables = [
        table_of(part, origin=f"data._target_={target} returns", name=name, labelled=labelled)
        for name, part in zip(("train", "test"), parts, strict=False)
    ]
    notes = [note] if (note := unused(parts[0], batch_size)) else []
    if passed_by:
        notes.append(f"data._target_={target} also returns {', '.join(passed_by)}, which nothing reads")
    if len(parts) == 1:
        notes.append(
            f"data._target_={target} returns nothing to test on, so no accuracy is told; return (train, test)"
        )
    return Samples(
        train=tables[0],
        test=tables[1] if len(tables) > 1 else None,
        describe=_described(tables[0], skips=skips),
        notes=tuple(notes),
    )


def pair(batch: Any, *, labelled: bool = False) -> tuple[Any, Any]:
    """Return inputs and targets of a batch, a pair or a mapping with "labels" or "label"; or refuse it.

    ``labelled``: of a mapping, the inputs keep the targets among them."""
    if isinstance(batch, Mapping) and (found := next((name for name in LABELS if name in batch), None)):
        return {name: value for name, value in batch.items() if labelled or name != found}, batch[found]
    if isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, targets = batch
        return tuple(inputs) if isinstance(inputs, list) else inputs, targets
    found = f"the keys {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else _shown(batch)
    raise ConfigError(
        "a sample is (input, target), ((input, input), target), or a dict of tensors with "
        f'"{LABELS[0]}", found {found}; return such ones, or give a DataLoader a collate_fn that does'
    )


def is_split(part: object) -> bool:
    """True if it is a loader, or a data set."""
    return isinstance(part, DataLoader | Dataset) or (
        not isinstance(part, type | str | bytes | tuple | list | Mapping | Tensor)
        and hasattr(part, "__len__")
        and hasattr(part, "__getitem__")
        and not hasattr(part, "dtype")  # an array is no data set
    )


def table_of(part: Any, *, origin: str, name: str, labelled: bool) -> MapTable | IterableTable:
    """Return the table of a data set or a loader, or refuse it in a sentence that begins with ``origin``."""
    dataset: Any = part.dataset if isinstance(part, DataLoader) else part
    try:
        len(dataset)
    except (TypeError, NotImplementedError):
        raise ConfigError(
            f"{origin} {_shown(dataset)} to {name}, which does not tell how many "
            "samples an epoch has, and a run must know its steps; give its class __len__, or return a "
            "map-style Dataset, with __len__ and __getitem__"
        ) from None
    put = default_collate
    if isinstance(part, DataLoader) and (part.batch_size is not None or part.batch_sampler is not None):
        put = part.collate_fn  # of a loader that does not batch it is a function of single samples
    paired = functools.partial(_paired, put, labelled)  # which travels to the processes that load
    streams = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    table = (IterableTable if streams else MapTable)(dataset=dataset, collate=paired)
    if not len(table):
        raise ConfigError(f"{origin} no samples to {name}; check where it looks")
    return table


def _paired(put: Callable[[list[Any]], Any], labelled: bool, samples: list[Any]) -> tuple[Any, Any]:
    return pair(put(samples), labelled=labelled)


def unused(part: object, batch_size: int | None) -> str:
    """Describe the unused settings of a loader in a sentence, or ""."""
    if not isinstance(part, DataLoader):
        return ""
    notes = []
    if batch_size is not None and part.batch_size != batch_size:
        own = f"batch_size={part.batch_size}" if part.batch_size else type(part.batch_sampler).__name__
        notes.append(f"the DataLoader's {own} gives way to batch_size={batch_size}, an option of the run")
    if type(part.sampler) not in (SequentialSampler, RandomSampler):
        notes.append(
            f"the DataLoader's {type(part.sampler).__name__} is not asked: the order of samples comes from "
            "the seed and the epoch, so that it is the same on every rank"
        )
    return "; ".join(notes)


def _described(table: MapTable | IterableTable, *, skips: bool) -> Description:
    """By the first sample that can be read; only if ``skips`` may that be another than the first."""
    reader = BatchReader(tables={"train": table}, batch_size=1, seed=0, shuffled=(), skips=skips)
    read = first = reader[BatchIndex("train", 0, 0)]
    for number in range(1, len(table) if skips and isinstance(table, MapTable) else 1):
        if read.batch is not None:
            break
        read = reader[BatchIndex("train", 0, number)]
    if read.batch is None:
        raise unreadable(first.broken, skips=skips)
    inputs, _ = read.batch
    tensor = inputs[0] if isinstance(inputs, tuple) else inputs
    if isinstance(tensor, Mapping):
        tensor = next(iter(tensor.values()), None)
    shape = tuple(tensor.shape[1:]) if isinstance(tensor, Tensor) else ()
    return Description(num_classes=_num_classes(table.dataset), input_shape=shape)


def _num_classes(dataset: Any) -> int:
    """From ``classes``, or from targets in memory; 0: unknown."""
    if isinstance(dataset, Subset):
        return _num_classes(dataset.dataset)
    if isinstance(classes := getattr(dataset, "classes", None), Sequence):
        return len(classes)
    if isinstance(features := getattr(dataset, "features", None), Mapping):  # of Hugging Face's
        for name in LABELS:
            if isinstance(number := getattr(features.get(name), "num_classes", None), int):
                return number
    in_memory = dataset.tensors[-1] if isinstance(dataset, TensorDataset) else None
    for targets in (in_memory, getattr(dataset, "targets", None), getattr(dataset, LABELS[0], None)):
        if isinstance(targets, Tensor | Sequence) and len(targets):
            numbers = torch.as_tensor(targets)
            whole = not (numbers.is_floating_point() or numbers.is_complex())
            return int(numbers.max()) + 1 if whole else 0
    return 0


def _shown(made: object) -> str:
    if isinstance(made, tuple | list):
        few = ", ".join(type(part).__name__ for part in made[:4])
        return f"a {type(made).__name__} of {len(made)} ({few}{', ..' if len(made) > 4 else ''})"
    kind = type(made).__name__
    return "None" if made is None else f"{'an' if kind[0] in 'AEIO' else 'a'} {kind}"
