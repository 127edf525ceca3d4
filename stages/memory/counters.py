"""What a packer counted, as those show it who own one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .packer import SavedTensorPacker


class Counters:
    """The counters of its ``_packer``."""

    _packer: SavedTensorPacker

    @property
    def bytes_raw(self) -> int:
        """Bytes of the storages that were to leave, each once: without parameters and small ones."""
        return self._packer.bytes_raw

    @property
    def bytes_kept(self) -> int:
        """Bytes that stayed: frames, what did not shrink or found no room, what was wanted before it left."""
        return self._packer.bytes_kept

    @property
    def num_packs(self) -> int:
        """Frames that were made here; those of the wire are not."""
        return self._packer.num_packs

    @property
    def num_unpacks(self) -> int:
        """Frames that were brought back, for the backwards so far."""
        return self._packer.num_unpacks

    @property
    def exposed_seconds(self) -> float:
        """Seconds for which backwards waited for what was not back yet."""
        return self._packer.exposed_seconds
