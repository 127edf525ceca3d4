"""What the first epoch of a job shows of its times, for a cache that shares its space by them.

Source: steps S11 and S12 of CN114968588A (epoch, reading a batch and a sample, augmentation, training)."""

from __future__ import annotations

import time

from .cache.policy import Times
from .reading import Read


class WarmUp:
    """Add up the batches of an epoch as they are taken.

    Args:    batches: of a whole epoch; batch_size: in samples; workers: processes that load ahead."""

    def __init__(self, *, batches: int, batch_size: int, workers: int) -> None:
        self._batches, self._batch_size, self._workers = batches, batch_size, workers
        self._began: float | None = None
        self._reading = self._loading = self._waited = 0.0
        self._loads = self._seen = 0

    def add(self, read: Read, waited: float) -> None:
        """A batch was taken, for which somebody waited so many seconds."""
        if self._began is None:
            self._began = time.perf_counter() - waited
        self._seen += 1
        self._waited += waited
        self._loading += read.counts.seconds
        self._loads += read.counts.loads
        self._reading += read.seconds

    def times(self) -> Times | None:
        """What was measured, now that the step behind the last batch is done; None: nothing was read.

        Reading hides behind the training of as many batches as there are processes, less what they take to
        augment one; without processes nothing hides."""
        if self._began is None or not self._loads:
            return None
        whole = time.perf_counter() - self._began
        sample = self._loading / self._loads
        augmentation = max(0.0, self._reading - self._loading) / self._seen
        training = max(0.0, whole - self._waited) / self._seen
        return Times(
            epoch=whole * self._batches / self._seen,
            batch_io=sample * self._batch_size,
            sample_io=sample,
            augmentation=augmentation,
            training=training,
            hidden=max(0.0, self._workers * training - augmentation),
        )
