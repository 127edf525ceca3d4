"""Two splits of samples and an order of batches that depends on nothing but (seed, epoch).

Every rank asks for the same batches and uses what it needs of them, so the order may not come from a
generator that anything else touches: a run would otherwise depend on how it is cut, and on whether it was
stopped. A data set that draws finds torch's generator seeded by (seed, epoch, batch), for the same reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import default_collate

from ...compression.errors import ConfigError
from ...stages.seeds import generators_of, seeded
from .options import check_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a model must know of the data.

    Attributes:
        num_classes: targets are 0 .. num_classes - 1; 0 where the data do not tell.
        input_shape: of one sample: (channels, height, width) for images, (length,) for text.
        vocabulary:  the characters in the order of their numbers; empty where inputs are not text.
    """

    num_classes: int
    input_shape: tuple[int, ...]
    vocabulary: str = ""


class SampleTable(Protocol):
    """One split: any map-style torch ``Dataset``; ``table[index]`` is (input, target)."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class BatchTable(Protocol):
    """One split that makes a whole batch at once, which is faster than collating single samples."""

    def __len__(self) -> int: ...
    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of the samples with these numbers (int64, one dimension)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The train and the test split; one's own are any two map-style torch data sets.

    Attributes:
        test:  None: nothing is tested, and no accuracy told.
        notes: what a person is told of them when a run begins, a sentence each.
    """

    train: SampleTable | BatchTable
    test: SampleTable | BatchTable | None
    describe: Description
    notes: tuple[str, ...] = ()

    def num_samples(self, split: Literal["train", "test"]) -> int:
        """Return how many samples the split holds."""
        return len(self._table(split))

    def num_batches(
        self, split: Literal["train", "test"], *, batch_size: int, drop_last: bool | None = None
    ) -> int:
        """Return how many batches ``batches`` yields with the same arguments.

        Raises: ConfigError: there would be none.
        """
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
    ) -> Iterator[tuple[Any, Tensor]]:
        """Yield (inputs, targets) batch after batch.

        Args:    shuffle, drop_last: None means yes for ``train`` and no for ``test``.
                 first: the number of the batch to begin with; those before it are not read.
        Yields:  inputs (batch, *input_shape), float32 images or int64 text, of one's own also a tuple or a
                 dict of tensors; targets int64, (batch,) or (batch, length).
        Raises:  ConfigError: the split holds no batch of this size.
        """
        num_batches = self.num_batches(split, batch_size=batch_size, drop_last=drop_last)
        table = self._table(split)
        shuffled = split == "train" if shuffle is None else shuffle
        order = _order(len(table), seed=seed, epoch=epoch) if shuffled else torch.arange(len(table))
        drawn = generators_of(())
        for number, indices in list(enumerate(order.split(batch_size)))[first:num_batches]:
            with seeded(_number(f"{seed}/{epoch}/{split}/{number}"), drawn):  # a data set may augment
                batch = _batch(table, indices)
            yield batch

    def _table(self, split: str) -> SampleTable | BatchTable:
        if split not in ("train", "test"):
            raise ConfigError(f"{split!r} is not a split; known are train, test")
        table = self.train if split == "train" else self.test
        if table is None:
            raise ConfigError("there are no samples to test on; return (train, test) from data._target_")
        return table


def _order(num_samples: int, *, seed: int, epoch: int) -> Tensor:
    """Return a permutation from a generator of its own."""
    source = torch.Generator().manual_seed(_number(f"{seed}/{epoch}/samples"))
    return torch.randperm(num_samples, generator=source)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _batch(table: SampleTable | BatchTable, indices: Tensor) -> tuple[Any, Tensor]:
    if isinstance(table, BatchTable):
        return table.batch(indices)
    inputs, targets = default_collate([table[index] for index in indices.tolist()])
    return inputs, targets
