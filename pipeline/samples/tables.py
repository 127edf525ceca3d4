"""What a split of samples may be: a table that is asked by number, whole batches at once where it can.

A table says by what it has how it may be asked: ``batch`` makes a batch at once; ``inputs_of``,
``targets_of`` and ``form`` let a rank read only what it computes with; ``at_hand`` says that reading is not
worth a process of its own; ``path`` names the file of a sample, for people; ``stream`` has samples in an
order of its own only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.utils.data import default_collate


class SampleTable(Protocol):
    """One split: any map-style torch ``Dataset``; ``table[index]`` is (input, target)."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class BatchTable(Protocol):
    """One split that makes a whole batch at once, which is faster than collating single samples."""

    def __len__(self) -> int: ...
    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        """Return the inputs and targets of the samples with these numbers (int64, one dimension)."""
        ...


@runtime_checkable
class PartTable(BatchTable, Protocol):
    """One whose inputs and targets are read apart, and whose samples all have one shape."""

    def inputs_of(self, indices: Tensor) -> Tensor:
        """Return the inputs of ``batch``."""
        ...

    def targets_of(self, indices: Tensor) -> Tensor:
        """Return the targets of ``batch``."""
        ...

    def form(self, number: int) -> tuple[Tensor, Tensor]:
        """Return a batch of so many samples without memory, on the meta device."""
        ...


@runtime_checkable
class StreamTable(Protocol):
    """One whose samples come in an order that nobody else knows; ``len`` says how many in an epoch."""

    def __len__(self) -> int: ...
    def stream(self, epoch: int) -> Iterator[Any]:
        """Begin an epoch anew; yields single samples."""
        ...

    def collate(self, samples: list[Any]) -> tuple[Any, Any]:
        """Return the inputs and targets of a batch of them."""
        ...


Table = SampleTable | BatchTable | StreamTable


def batch_of(table: SampleTable | BatchTable, indices: Tensor) -> tuple[Any, Any]:
    """Return inputs and targets of the samples with these numbers."""
    if isinstance(table, BatchTable):
        return table.batch(indices)
    inputs, targets = default_collate([table[index] for index in indices.tolist()])
    return inputs, targets
