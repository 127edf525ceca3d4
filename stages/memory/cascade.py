"""Several stores as one: a frame goes to the first that has room; what does not fit a tier goes to the next.

Source: claims A5 and A6 of CN115016937A (offload memory); step S2 of the resource management of distributed
        deep learning (what the memory at hand does not hold goes to the next larger one)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from ...compression.pool import Frame, Pool
from .store import Store


class Cascade(Store):
    """``stores`` in the order in which they are asked."""

    def __init__(self, stores: Sequence[Store]) -> None:
        """Take stores that count in the same tiers."""
        super().__init__()
        self.stores, self.tiers = tuple(stores), stores[0].tiers
        self._at: dict[Hashable, Store] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the frames of all of them."""
        return sum(store.num_bytes for store in self.stores)

    def pool(self) -> Pool | None:
        """Buffers that suit the last one, the slowest."""
        return self.stores[-1].pool()

    def takes_away(self, device: torch.device) -> bool:
        """Whether any of them does."""
        return any(store.takes_away(device) for store in self.stores)

    def admit(self, key: Hashable, num_bytes: int) -> bool:
        """Set room aside in the first that has some."""
        return self._admit(self.stores, key, num_bytes)

    def admit_dense(self, key: Hashable, num_bytes: int, device: torch.device) -> bool:
        """Set room aside in the first that has some and takes frames away from ``device``."""
        return self._admit([store for store in self.stores if store.takes_away(device)], key, num_bytes)

    def _admit(self, stores: Sequence[Store], key: Hashable, num_bytes: int) -> bool:
        for store in stores:
            if (store is self.stores[-1] or store.fits(num_bytes)) and store.admit(key, num_bytes):
                self._at[key] = store
                return True
        return False

    def put(self, key: Hashable, frame: Frame) -> None:
        """Keep ``frame`` where it was admitted; one that nobody asked for goes to the last."""
        self._at.setdefault(key, self.stores[-1]).put(key, frame)

    def fetch(self, key: Hashable) -> None:
        """Begin to bring a frame."""
        if (store := self._at.get(key)) is not None:
            store.fetch(key)

    def get(self, key: Hashable) -> Frame:
        """Return the frame."""
        return self._at[key].get(key)

    def drop(self, key: Hashable) -> None:
        """Forget a frame."""
        if (store := self._at.pop(key, None)) is not None:
            store.drop(key)
