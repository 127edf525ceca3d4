"""What a keeper counted, for those who own one."""

from __future__ import annotations

from .keeper import Keeper


class Counts:
    """Passes on the counters of its ``_keeper``."""

    _keeper: Keeper

    @property
    def bytes_raw(self) -> int:
        """Bytes of the storages that were to leave, each once: without parameters and small ones."""
        return self._keeper.bytes_raw

    @property
    def bytes_kept(self) -> int:
        """Bytes that stayed: frames, what did not shrink or found no room, what was wanted before it left."""
        return self._keeper.bytes_kept

    @property
    def num_packs(self) -> int:
        """Frames that were made here; those of the wire are not."""
        return self._keeper.num_packs

    @property
    def num_unpacks(self) -> int:
        """Frames that were brought back, for the backwards so far."""
        return self._keeper.num_unpacks
