"""Writes that autograd does not count: through ``.data``, NumPy, or a kernel that says nothing.

What a layer saved for its backward is what its memory holds by then, so a later layer that writes there
changes a gradient; on another stage it would write to another memory. Only the bytes tell.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..meta_watch import watching
from ..torch_private import memory_id


class Contents:
    """Copy of the memory of some tensors; those on the meta device hold nothing, and of these a
    ``MetaWatch`` knows the writes."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy it, each storage once."""
        self._watch = watching()
        self._mark = 0 if self._watch is None else len(self._watch.writes)
        plain = (t for t in tensors if t.layout is torch.strided and not (t.is_meta or t.is_nested))
        storages = {memory_id(storage): storage for t in plain if (storage := t.untyped_storage()).nbytes()}
        self._kept = {key: (storage, storage.clone()) for key, storage in storages.items()}

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        """The storages that were copied."""
        return [now for now, _ in self._kept.values()]

    def changed(self) -> set[int]:
        """The storages that hold other bytes by now; one that was freed or made longer has no others."""
        on_meta = set() if self._watch is None else set(self._watch.writes[self._mark :])
        return on_meta | {key for key, (now, then) in self._kept.items() if not _same(now, then)}


def _same(now: torch.UntypedStorage, then: torch.UntypedStorage) -> bool:
    if now.nbytes() != then.nbytes():
        return True
    words, rest = divmod(then.nbytes(), 8)
    same = torch.equal(_row(now, torch.int64, words), _row(then, torch.int64, words))
    tails = (_row(storage, torch.uint8, rest, start=words * 8) for storage in (now, then))
    return same and torch.equal(*tails)


def _row(storage: torch.UntypedStorage, dtype: torch.dtype, size: int, *, start: int = 0) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, start, (size,), (1,))
