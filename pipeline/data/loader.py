"""Batches of a run in the order in which it will ask for them, loaded ahead by processes of their own.

One stream of batches serves a whole run, its tests included: processes start once, and go on loading the next
epoch while the last one is tested. ``Loader`` is the same for a loop of one's own."""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import add
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from ...compression.errors import ConfigError, TransportError
from ...stages.torch_private import ignore_worker_deaths
from .batches import BatchIndex, BatchReader, IterableTable, LoadedBatch, Table, unreadable
from .cache.policy import Times
from .cached import Counts
from .options import check_count
from .samples import is_split, table_of, unused

AHEAD = 2  # batches that each process loads ahead
MOST_WORKERS = 4  # processes that ``auto`` starts
TOLD = 3  # samples left out that are told one by one


def workers_of(asked: int | str, tables: Iterable[Table], *, cores: int) -> int:
    """Return the number of loading processes: for "auto" one for each spare core, none for samples in memory.

    A stream has one at most, since its order is known only there."""
    tables = list(tables)
    if asked == "auto":
        asked = 0 if all(in_memory(table) for table in tables) else max(1, min(MOST_WORKERS, cores))
    return min(1, int(asked)) if any(isinstance(table, IterableTable) for table in tables) else int(asked)


def in_memory(table: Table) -> bool:
    """True if reading is not worth a process."""
    return bool(getattr(table, "in_memory", False))


class WarmUp:
    """Times of the first epoch, of so many ``batches``, added up for the policies of a cache."""

    def __init__(self, *, batches: int, batch_size: int, workers: int) -> None:
        self._batches, self._batch_size, self._workers = batches, batch_size, workers
        self._last: float | None = None  # moment of the batch before, unless there was a test since
        self._trained = self._waited = self._reading = self._loading = 0.0
        self._loads, self.left = 0, batches

    def add(self, read: LoadedBatch, waited: float) -> None:
        """Add a batch, which was waited for so many seconds."""
        self._tick(waited)
        self.left -= 1
        self._waited += waited
        self._loading += read.counts.seconds
        self._loads += read.counts.loads
        self._reading += read.seconds

    def pause(self) -> None:
        """Leave out a test, which begins."""
        self._tick()
        self._last = None

    def _tick(self, waited: float = 0.0) -> None:
        now = time.perf_counter()
        self._trained += 0.0 if self._last is None else now - self._last - waited
        self._last = now

    def times(self) -> Times | None:
        """Return the measurements, now that the step of the last batch is done; None: nothing was read."""
        if not self._loads:
            return None
        if self._last is not None:
            self._tick()
        seen, sample = self._batches - self.left, self._loading / self._loads
        augmentation = max(0.0, self._reading - self._loading) / seen
        training = max(0.0, self._trained) / seen
        return Times(
            epoch=(self._trained + self._waited) * self._batches / seen,
            batch_io=sample * self._batch_size,
            sample_io=sample,
            augmentation=augmentation,
            training=training,
            # Each process reads while a batch is trained, but for what it takes to augment one.
            hidden=max(0.0, self._workers * training - augmentation),
        )


class BatchLoader:
    """``take`` the batches that ``places`` name, in that order.

    It counts the seconds that were ``waited``, and the ``broken`` samples that were left out."""

    def __init__(
        self,
        reading: BatchReader,
        places: Iterable[BatchIndex],
        *,
        workers: int = 0,
        pinned: bool = False,
        start: str | None = None,
        deadline: float = 60.0,
        warm_up: WarmUp | None = None,
        tell: Callable[[str], None] = print,
    ) -> None:
        """Begin to load.

        Args:
            places: May be iterated twice.
            workers: Processes that load; 0: the caller loads. ``start``: as multiprocessing begins them.
            pinned: Batches lie in memory that a GPU fetches from by itself.
            deadline: A process that has stopped is ended within half of so many seconds.
            warm_up: Gets the times of the first epoch, for the caches.
            tell: Gets a text for samples that are left out, and for caches that are gone."""
        self.workers, self.waited, self.broken, self.counts = workers, 0.0, 0, Counts()
        self.times: Times | None = None
        self._tell, self._expected, self._said = tell, iter(places), False
        self._caches = [through.cache for through in reading.through.values()]
        self._warm_up, self._epoch, self._skips = warm_up, None, reading.skips
        ahead = {"prefetch_factor": AHEAD, "multiprocessing_context": start} if workers else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are more processes than cores: so it was asked
            loads = DataLoader(
                reading,  # pyright: ignore[reportArgumentType]  (asked by places, and of no length)
                batch_size=None,
                sampler=places,
                num_workers=workers,
                collate_fn=_as_it_is,  # pyright: ignore[reportArgumentType]
                pin_memory=pinned,
                worker_init_fn=_begin,
                generator=torch.Generator(),  # else a seed for the processes is drawn from everybody's
                **ahead,
            )
            self._batches: Iterator[LoadedBatch] = iter(loads)
        # A process that died is reported where a batch is asked for: torch's handler of SIGCHLD raises
        # wherever this process happens to be, in a step as well.
        with contextlib.suppress(AttributeError):  # one without processes, or of another torch
            ignore_worker_deaths(self._batches)
        self._stopped, self._closed = "", threading.Event()
        if workers:
            threading.Thread(target=self._watch, args=(deadline / 4,), daemon=True).start()

    def take(self, place: BatchIndex) -> tuple[Any, Any]:
        """Return the next batch, that of ``place``; raises TransportError where its process ended."""
        assert next(self._expected) == place, f"{place} is not next"
        began = time.perf_counter()
        try:
            read = next(self._batches)
        except (RuntimeError, OSError, EOFError) as error:  # deaths are told in many ways
            if self._stopped:
                raise TransportError(f"{self._stopped}; see who stops it, and resume") from error
            raise TransportError(
                f"a process that loads samples was lost ({' '.join(str(error).split())}); if nobody killed "
                "it, memory ran out: lower data.workers, 0 loads without processes"
            ) from error
        waited = time.perf_counter() - began
        self.waited, self.counts = self.waited + waited, Counts._make(map(add, self.counts, read.counts))
        if self._warm_up is not None:
            self._measure(self._warm_up, place, read, waited)
        if read.notes and not self._said:  # once, of however many processes
            self._said = True
            self._tell(read.notes[0])
        if read.batch is None:
            raise unreadable(read.broken, skips=self._skips)
        for one in read.broken:
            self.broken += 1
            if self.broken <= TOLD:
                self._tell(f"left out: {one}" + "; others are only counted" * (self.broken == TOLD))
        return read.batch

    @property
    def figures(self) -> dict[str, Any]:
        """Return the loader's figures for a run's summary."""
        figures: dict[str, Any] = {"workers": self.workers, "waited_seconds": self.waited}
        figures["left_out"] = self.broken
        if self._caches:
            times = {} if self.times is None else {"times": dataclasses.asdict(self.times)}
            figures["cache"] = self.counts._asdict() | times
        return figures

    def _measure(self, warm_up: WarmUp, place: BatchIndex, read: LoadedBatch, waited: float) -> None:
        """Add to the first epoch of this run; with the first batch behind it, report to the caches."""
        if place.split == "train" and self._epoch in (None, place.epoch):
            self._epoch = place.epoch
            warm_up.add(read, waited)
            return
        if place.split == "test" and warm_up.left > 0:
            warm_up.pause()
            return
        self._warm_up, self.times = None, warm_up.times()
        if self.times is not None:
            for cache in self._caches:
                cache.measured(self.times)

    def _watch(self, seconds: float) -> None:
        """End a process that has stopped: a rank that reads from it waits without a limit of time."""
        before: set[int] = set()
        while not self._closed.wait(seconds):
            now = {one.pid for one in getattr(self._batches, "_workers", ()) if _has_stopped(one.pid)}
            for pid in before & now:
                what = f"process {pid}, which loads samples, had stopped"
                self._stopped = f"{what}, and was ended after {seconds:g} s"
                os.kill(pid, signal.SIGKILL)
            before = now

    def close(self) -> None:
        """End the processes, and the connections to caches."""
        self._closed.set()
        for cache in self._caches:
            cache.close()
        self._batches = iter(())  # torch ends them with the iterator of which nobody knows


def _begin(_: int) -> None:
    """Start a process that loads: signals are for its parent, and it ends with that, killed or not.

    torch's own watch waits for another parent, which a process of a fork server never gets."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    if (parent := multiprocessing.parent_process()) is not None:

        def end() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=end, name="penstock-orphan", daemon=True).start()


def _has_stopped(pid: int) -> bool:
    """True if a signal stopped a process (Linux only)."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T")
    return False


def _as_it_is(read: LoadedBatch) -> LoadedBatch:
    return read


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
        ConfigError: The data set cannot be trained on, or has no batch."""

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
        check_count(0, seed=seed, workers=workers)
        if not is_split(dataset):
            raise ConfigError(
                f"penstock.Loader takes a data set, found a {type(dataset).__name__}; give one such as "
                "torch.utils.data.TensorDataset(inputs, targets)"
            )
        table = table_of(dataset, origin="penstock.Loader got", name="train", labelled=labelled)
        self.epoch = self.batch = 0
        if note := unused(dataset, batch_size):
            warnings.warn(note, stacklevel=2)
        tables = {"train": table}
        self._reader = BatchReader(tables=tables, batch_size=batch_size, seed=seed, skips=skip_broken)
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
        """Return the place of the loop, for the notes of a checkpoint."""
        return {"epoch": self.epoch, "batch": self.batch, **self._same}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batch that was the last one taken.

        Raises:
            ConfigError: It was another number of samples, batch size, seed or drop_last."""
        for name, ours in self._same.items():
            if state.get(name) != ours:
                raise ConfigError(
                    f"a Loader goes on with the same batches, found {name}={ours}, and the state is of "
                    f"{name}={state.get(name)}; make it as before, or begin anew"
                )
        self.epoch, self.batch = int(state["epoch"]), int(state["batch"])
