"""``penstock.Loader``: the batches of a data set for a loop of one's own, which goes on within an epoch."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from ...compression.errors import ConfigError
from .batches import BatchIndex, BatchReader
from .loader import BatchLoader, workers_of
from .options import check_count
from .samples import is_split, table_of, unused


class Loader:
    """Shuffled batches of a data set: ``for inputs, targets in loader`` is what is left of an epoch.

    The order, and what a sample draws, belong to the seed, the epoch and the batch, as in ``penstock train``.
    They are the same on every rank, with any number of processes, and in a loop that was stopped and goes on.

    Args:
        dataset: A torch Dataset of (input, target) with a length, a DataLoader, whose ``collate_fn`` puts
            samples together, or a data set of Hugging Face.
        batch_size: Samples of a batch.
        seed: Decides the order, and what samples draw.
        drop_last: Leave out the last batch of an epoch where it is smaller.
        workers: Processes that load ahead; 0: none.
        skip_broken: Leave out samples that cannot be read, instead of an error.
        labelled: Of samples that are dicts, the labels stay among the inputs, too.

    Attributes:
        epoch: Epochs that are behind it.
        batch: Batches of this epoch that were taken.

    Raises:
        ConfigError: The data set cannot be trained on, or has no batch.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        seed: int = 0,
        *,
        drop_last: bool = True,
        workers: int = 0,
        skip_broken: bool = False,
        labelled: bool = False,
    ) -> None:
        check_count(batch_size=batch_size)
        if not is_split(dataset):
            raise ConfigError(
                f"penstock.Loader takes a data set, found a {type(dataset).__name__}; give one such as "
                "torch.utils.data.TensorDataset(inputs, targets)"
            )
        table = table_of(dataset, origin="penstock.Loader got", name="train", labelled=labelled)
        self.epoch = self.batch = 0
        if note := unused(dataset, batch_size):
            warnings.warn(note, stacklevel=2)
        reader: Any = {"batch_size": batch_size, "seed": seed, "skips": skip_broken}
        self._reader = BatchReader(tables={"train": table}, **reader)
        self._workers = workers_of(workers, [table], cores=workers)
        self._length = len(table) // batch_size if drop_last else -(-len(table) // batch_size)
        if not self._length:
            raise ConfigError(
                f"batch_size={batch_size} leaves no batch of {len(table)} samples; lower it, or keep the "
                "last batch by drop_last=False"
            )
        self._same = {"samples": len(table), "batch_size": batch_size, "seed": seed, "drop_last": drop_last}

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self._length

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        places = [BatchIndex("train", self.epoch, number) for number in range(self.batch, self._length)]
        with contextlib.closing(BatchLoader(self._reader, places, workers=self._workers)) as loads:
            for place in places:
                batch = loads.take(place)
                self.batch += 1
                yield batch
        self.epoch, self.batch = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop is, for the notes of a checkpoint."""
        return {"epoch": self.epoch, "batch": self.batch, **self._same}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batch that was the last one taken.

        Raises:
            ConfigError: It was another number of samples, batch size, seed or drop_last.
        """
        for name, ours in self._same.items():
            if state.get(name) != ours:
                raise ConfigError(
                    f"a Loader goes on with the same batches, found {name}={ours}, and the state is of "
                    f"{name}={state.get(name)}; make it as before, or begin anew"
                )
        self.epoch, self.batch = int(state["epoch"]), int(state["batch"])
