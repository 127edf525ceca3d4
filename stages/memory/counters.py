"""What a packer counted, as those show it who own one, or stand before who does."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .packer import SavedTensorPacker


class Counts(NamedTuple):
    """Those of what packs nothing; ``Counters`` says what they count."""

    bytes_raw: int = 0
    bytes_kept: int = 0
    num_packs: int = 0
    num_unpacks: int = 0
    exposed_seconds: float = 0.0


class Counters:
    """The counters of its ``_counts``."""

    _counts: SavedTensorPacker | Counters | Counts

    @property
    def bytes_raw(self) -> int:
        """Bytes of the storages that were to leave, each once: without parameters and small ones."""
        return self._counts.bytes_raw

    @property
    def bytes_kept(self) -> int:
        """Bytes that stayed: frames, what did not shrink or found no room, what was wanted before it left."""
        return self._counts.bytes_kept

    @property
    def num_packs(self) -> int:
        """Frames that were made here; those of the wire are not."""
        return self._counts.num_packs

    @property
    def num_unpacks(self) -> int:
        """Frames that were brought back, for the backwards so far."""
        return self._counts.num_unpacks

    @property
    def exposed_seconds(self) -> float:
        """Seconds for which backwards waited for what was not back yet."""
        return self._counts.exposed_seconds
