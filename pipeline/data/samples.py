"""Two splits of samples and what a model must know of them, and their batches, read in this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from ...compression.errors import ConfigError
from .options import check_count
from .reading import Place, Reading, Table, unreadable


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Facts of the data that a model needs.

    Attributes:
        num_classes: targets are 0 .. num_classes - 1; 0 where the data do not give it.
        input_shape: of one sample: (channels, height, width) for images, (length,) for text.
        vocabulary: the characters in the order of their numbers; empty where inputs are not text.
    """

    num_classes: int
    input_shape: tuple[int, ...]
    vocabulary: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The train and the test split; one's own are any two map-style torch data sets.

    Attributes:
        test:  None: nothing is tested, and no accuracy told.
        notes: what a person is told of them when a run begins, a sentence each.
    """

    train: Table
    test: Table | None
    describe: Description
    notes: tuple[str, ...] = ()

    def num_samples(self, split: Literal["train", "test"]) -> int:
        """Return how many samples the split holds."""
        return len(self.table(split))

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
        skips: bool = False,
    ) -> Iterator[tuple[Any, Tensor]]:
        """Yield (inputs, targets) batch after batch.

        Args:    shuffle, drop_last: None means yes for ``train`` and no for ``test``.
                 first: the number of the batch to begin with; those before it are not read.
                 skips: samples that cannot be read are left out.
        Yields:  inputs (batch, *input_shape), float32 images or int64 text, of one's own also a tuple or a
                 dict of tensors; targets int64, (batch,) or (batch, length).
        Raises:  ConfigError: the split holds no batch of this size.
        """
        num_batches = self.num_batches(split, batch_size=batch_size, drop_last=drop_last)
        shuffled = split == "train" if shuffle is None else shuffle
        tables = {split: self.table(split)}
        options: Any = {"seed": seed, "shuffled": (split,) * shuffled, "skips": skips}
        reading = Reading(tables=tables, batch_size=batch_size, **options)
        for number in range(first, num_batches):
            read = reading[Place(split, epoch, number)]
            if read.batch is None:
                raise unreadable(read.broken, skips=skips)
            yield read.batch

    def table(self, split: str) -> Table:
        """Return the split of this name.

        Raises: ConfigError: there is none."""
        if split not in ("train", "test"):
            raise ConfigError(f"{split!r} is not a split; known are train, test")
        table = self.train if split == "train" else self.test
        if table is None:
            raise ConfigError("there are no samples to test on; return (train, test) from data._target_")
        return table
