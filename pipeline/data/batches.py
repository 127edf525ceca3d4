"""One batch of a run, read by its place in the order: the same bytes in whatever process, by one thread.

The order belongs to (seed, epoch), and what a sample draws (a crop, a mix of two) to the batch, so that a run
does not depend on how it is cut, on how many processes load for it, and on whether it was stopped."""

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from operator import sub
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from ...compression.errors import ConfigError, PenstockError
from ...stages.split_inputs import Split
from ...stages.torch_private import tree_leaves
from .cached import CacheReader, Counts
from .random_draws import drawing, order_of

Table = Any
"""A split of samples, any map-style torch data set: ``table[index]`` is (input, target).

More methods say how it may be read: ``batch(indices)`` makes a batch at once, which is faster than collating
samples; ``in_memory``: reading is not worth a process; ``path(index)`` names a sample's file for people."""


@runtime_checkable
class PartTable(Protocol):
    """One whose inputs and targets are read by themselves, and whose samples all have one shape."""

    def __len__(self) -> int: ...
    def inputs_of(self, indices: Tensor) -> Tensor:
        """Return the inputs of the samples with these numbers (int64, one dimension)."""
        ...

    def targets_of(self, indices: Tensor) -> Tensor:
        """Return their targets."""
        ...

    def form(self, number: int) -> tuple[Tensor, Tensor]:
        """Return a batch of so many samples without memory, on the meta device."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class IterableTable:
    """One split: an iterable data set, which alone knows the order of its samples."""

    dataset: Any
    collate: Callable[[list[Any]], tuple[Any, Any]]

    def __len__(self) -> int:
        return len(self.dataset)

    def stream(self, epoch: int) -> Iterator[Any]:
        """Begin an epoch anew, by ``set_epoch`` where the data set has that."""
        if set_epoch := getattr(self.dataset, "set_epoch", None):
            set_epoch(epoch)
        return iter(self.dataset)


class BatchIndex(NamedTuple):
    """A batch of a run: batch ``number`` of the ``split`` in this epoch."""

    split: str
    epoch: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Parts of a batch that a rank computes with; the rest may come without memory, on the meta device."""

    inputs: bool = True
    targets: bool = True
    split: tuple[bool, ...] = ()  # where inputs come as a ``Split``: by micro-batch, True if they are read
    test: bool = True  # inputs of a test


class BrokenSample(NamedTuple):
    """A sample that could not be read, and what its table raised."""

    split: str
    sample: int
    path: str
    reason: str
    traceback: str

    def __str__(self) -> str:
        where = f" ({self.path})" if self.path and self.path not in self.reason else ""
        return f"{self.split} sample {self.sample}{where} cannot be read: {self.reason}"


class LoadedBatch(NamedTuple):
    """A batch (None: nothing of it can be read), what was left out of it, and the seconds it took; what
    came through a cache, and what the cache has to say to people."""

    batch: tuple[Any, Any] | None
    broken: tuple[BrokenSample, ...]
    seconds: float
    counts: Counts = Counts()
    notes: tuple[str, ...] = ()


@dataclass(kw_only=True)
class BatchReader:
    """Reads batches by ``BatchIndex``, in this process or, as a copy, in those that load ahead."""

    tables: dict[str, Table]  # by split
    batch_size: int
    seed: int
    shuffled: tuple[str, ...] = ("train",)  # the splits whose order is drawn
    needs: Needs = Needs()
    skips: bool = False  # leave samples that cannot be read out of their batch
    through: dict[str, CacheReader] = field(default_factory=dict)  # brings samples of a split through a cache
    epochs: int | None = None  # of the run, for the cache
    used: int | None = None  # samples of an epoch that the run uses, for the cache; None: all
    _orders: dict[tuple[str, int], Tensor] = field(default_factory=dict, repr=False)
    _streams: dict[str, tuple[int, int, Iterator[Any]]] = field(default_factory=dict, repr=False)

    def __getitem__(self, place: BatchIndex) -> LoadedBatch:
        began, split = time.perf_counter(), place.split
        table, through, before = self.tables[split], self.through.get(split), Counts()
        if through is not None:
            before, last = through.counts, self.epochs is not None and place.epoch + 1 >= self.epochs
            through.begin(
                place.epoch, lambda epoch: self.order(split, epoch)[: self.used].tolist(), last=last
            )
        if isinstance(table, IterableTable):
            batch, broken = self._next(table, place)
        else:
            batch, broken = self._read(table, self.order(split, place.epoch), place)
        if get_worker_info() is not None and (reason := _stuck(batch)):
            batch, broken = None, (_broken(TypeError(reason), table, place, 0),)
        counts = before if through is None else Counts._make(map(sub, through.counts, before))
        notes = () if through is None else through.take_notes()
        return LoadedBatch(batch, broken, time.perf_counter() - began, counts, notes)

    def order(self, split: str, epoch: int) -> Tensor:
        """Return the samples of an epoch in their order, int64."""
        drawn, number = split in self.shuffled, len(self.tables[split])
        key = split, epoch if drawn else 0
        if key not in self._orders:
            for old in [one for one in self._orders if one[0] == split][:-1]:  # an epoch, and the next one
                del self._orders[old]
            new = order_of(number, seed=self.seed, epoch=epoch) if drawn else torch.arange(number)
            self._orders[key] = new
        return self._orders[key]

    def _read(
        self, table: Table, order: Tensor, place: BatchIndex
    ) -> tuple[tuple[Any, Any] | None, tuple[BrokenSample, ...]]:
        indices, broken = order.split(self.batch_size)[place.number], dict[int, BrokenSample]()
        try:
            return self._parts(table, indices, place), ()
        except Exception as error:
            whole = _broken(error, table, place, int(indices[0]))
        shapes = dict[int, tuple[tuple[int, ...], ...]]()
        for index in indices.tolist():
            try:
                leaves = tree_leaves(self._parts(table, torch.tensor([index]), place))
                shapes[index] = tuple(tuple(x.shape[1:]) for x in leaves if isinstance(x, Tensor))
            except Exception as error:
                broken[index] = _broken(error, table, place, index)
        usual, number = next(iter(Counter(shapes.values()).most_common(1)), ((), 0))
        for index, found in shapes.items():
            if found != usual and 2 * number > len(shapes):
                reason = f"its shapes are {found}, and those of most of its batch {usual}; pad or crop it"
                broken[index] = _broken(ConfigError(reason), table, place, index)
        if not broken:  # each by itself can be read: it is their batch that cannot be made
            return None, (whole,)
        left, batch = [index for index in indices.tolist() if index not in broken], None
        if self.skips and left:
            try:
                batch = self._parts(table, torch.tensor(left), place)
            except Exception:
                return None, (*broken.values(), whole)
        return batch, tuple(broken.values())

    def _parts(self, table: Table, indices: Tensor, place: BatchIndex) -> tuple[Any, Any]:
        needs = self.needs
        with drawing(*place, seed=self.seed):
            if not isinstance(table, PartTable):
                if hasattr(table, "batch"):
                    return table.batch(indices)
                inputs, targets = default_collate([table[index] for index in indices.tolist()])
                return inputs, targets
            if needs == Needs():
                return table.inputs_of(indices), table.targets_of(indices)
            inputs, targets = table.form(len(indices))
            if place.split == "train" and needs.split:
                parts = indices.tensor_split(min(len(needs.split), len(indices)))
                read = zip(parts, needs.split, strict=False)
                inputs = Split(tuple(table.inputs_of(i) if own else table.form(len(i))[0] for i, own in read))
            elif needs.inputs and (needs.test or place.split == "train"):
                inputs = table.inputs_of(indices)
            return inputs, table.targets_of(indices) if needs.targets else targets

    def _next(
        self, table: IterableTable, place: BatchIndex
    ) -> tuple[tuple[Any, Any] | None, tuple[BrokenSample, ...]]:
        """The next batch of a stream; one that lies further on, after those before it were read."""
        epoch, number, samples = self._streams.pop(place.split, (-1, 0, iter(())))
        batch = None
        try:
            if epoch != place.epoch or number > place.number:
                with drawing(*place._replace(number=0), seed=self.seed):
                    number, samples = 0, table.stream(place.epoch)
            for here in range(number, place.number + 1):
                with drawing(*place._replace(number=here), seed=self.seed):
                    items = list(islice(samples, self.batch_size))
                    batch = table.collate(items) if here == place.number and items else None
            if batch is None:
                raise ValueError(f"its stream ended ahead of it, though its length is {len(table)}")
        except Exception as error:
            return None, (_broken(error, table, place, place.number * self.batch_size),)
        self._streams[place.split] = place.epoch, place.number + 1, samples
        return batch, ()


def _stuck(batch: Any) -> str:
    """Describe an item of a batch that cannot leave this process, for which torch would wait without end."""
    for leaf in tree_leaves(batch):
        if not isinstance(leaf, Tensor | int | float | str | bytes | None):
            try:
                ForkingPickler.dumps(leaf)
            except Exception as error:
                kind = type(leaf).__name__
                return f"a {kind} cannot leave the process that loads it ({error}); take data.workers=0"
    return ""


def unreadable(broken: Sequence[BrokenSample], *, skips: bool) -> ConfigError:
    """Return the error of a broken sample that may not be left out, or (``skips``) not without its batch."""
    first, more = broken[0], f" ({len(broken) - 1} more of its batch)" if len(broken) > 1 else ""
    skip = "; mend or remove it, or leave such samples out by data.skip_broken=true"
    remedy = ", and its batch cannot be had without; mend or remove it" if skips else skip
    error = ConfigError(f"{first}{more}{remedy}")
    error.add_note(first.traceback)
    return error


def _broken(error: Exception, table: Table, place: BatchIndex, index: int) -> BrokenSample:
    reason = " ".join(str(error).split())
    if not isinstance(error, PenstockError):
        reason = f"{type(error).__name__}: {reason}"
    path, lines = getattr(table, "path", None), "".join(traceback.format_exception(error))
    return BrokenSample(place.split, index, str(path(index)) if path else "", reason, lines)
