"""``penstock.offload``: what any PyTorch forward saves is kept packed, or elsewhere, until its backward.

Stands in the place of ``torch.autograd.graph.save_on_cpu``; no pipeline and no graph is needed, so only what
bytes tell is used.
Source: Rhu et al., Compressing DMA Engine, HPCA 2018.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...compression.errors import ConfigError, StageError
from ..units import parse_bytes, show_bytes
from .activations import ParameterFilter, SavedTensorHooks
from .packer import SavedTensorPacker
from .saved_storage import SavedStorage
from .stores import StoreOptions, UnpooledBuffers, open_store


class Offload:
    """One forward or several under saved-tensor hooks; entered by ``with``, counted meanwhile and after.

    ``counts`` are those of ``SavedCounts``, each of them an attribute of this too."""

    bytes_raw = property(operator.attrgetter("counts.bytes_raw"))
    bytes_kept = property(operator.attrgetter("counts.bytes_kept"))
    num_packs = property(operator.attrgetter("counts.num_packs"))
    num_unpacks = property(operator.attrgetter("counts.num_unpacks"))
    exposed_seconds = property(operator.attrgetter("counts.exposed_seconds"))

    def __init__(self, packer: SavedTensorPacker, hooks: SavedTensorHooks) -> None:
        self._packer, self._hooks, self.counts = packer, hooks, packer.counts
        self._block: contextlib.AbstractContextManager[None] | None = None

    def __enter__(self) -> Offload:
        if self._block is not None:
            raise StageError(
                "an offload is entered once at a time, found it entered; make another one inside"
            )
        self._block = self._hooks.entered()
        self._block.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        assert self._block is not None, "a block is left after it was entered"
        block, self._block = self._block, None
        block.__exit__(kind, error, trace)
        self._packer.close()
        if error is None:
            self._packer.check()

    def __str__(self) -> str:
        if not self.bytes_raw:
            return "offload: nothing has left yet; run a forward inside its block"
        times = f" ({self.bytes_raw / self.bytes_kept:.2f}x)" if self.bytes_kept else ""
        kept = f"{show_bytes(self.bytes_raw)} saved, kept as {show_bytes(self.bytes_kept)}{times}"
        return f"offload: {kept}, {self.num_packs} packed, {self.num_unpacks} brought back"

    def __repr__(self) -> str:
        return f"<{self}>"


def offload(
    tier: str = "packed",
    *,
    codec: str = "auto",
    min_bytes: int | str = "64KiB",
    budget: int | str | None = None,
    keep: nn.Module | Iterable[Tensor] = (),
    ahead: int = 2,
    path: str | Path | None = None,
) -> Offload:
    """Keep what a forward saves for its backward packed, in host memory or on disk; the same bits.

    ``with penstock.offload() as saved: loss = model(x).sum()``, then ``loss.backward()`` as ever: also twice
    with retain_graph, and for gradients of gradients. Each storage leaves once, whatever views of it were
    saved; parameters, casts of them and small tensors stay. Packing and the store have a thread each, and a
    GPU a stream beside. What is written through ``.data`` after it was saved is seen by nobody, and
    only forwards in the thread that entered the block are meant.

    Args:
        tier: "packed" leaves the frames where they were made, and what does not shrink as it is; "host"
            copies those of a GPU to pinned host memory, and is the same as "packed" on a CPU; "disk" writes
            them to a file that has no name, so that nothing of it stays.
        codec: A name in ``penstock.CODECS``, or "auto": zeros and exponents, either where it pays.
        min_bytes: Storages of fewer bytes stay.
        budget: The most bytes of frames at a time; what finds no room stays as it is. None: no limit.
        path: The folder of the file of "disk"; None: the one for temporary files.
        keep: A model whose parameters and buffers stay, or such tensors; those that ask for a gradient are
            known without it.
        ahead: How many storages are brought back before they are asked for.

    Raises:
        ConfigError: No such tier, folder, ``keep`` or ``ahead``.
        PlanError: No size in bytes.
        CodecError: No such codec.
        StageError, in the backward: What was saved was written to since; torch's own check does not reach
            behind hooks.
    """
    limit = None if budget is None else parse_bytes(budget, name="budget")
    store = open_store(tier, StoreOptions(path=None if path is None else Path(path), budget=limit))
    if not isinstance(ahead, int) or ahead < 0:
        raise ConfigError(f"ahead counts storages, from 0 on, found {ahead!r}; choose 0, 1, 2 ..")
    packer = SavedTensorPacker(store, codec=codec, pool=store.pool() or UnpooledBuffers(), num_ahead=ahead)
    least, took = parse_bytes(min_bytes, name="min_bytes"), functools.partial(_took, packer)
    parameters = ParameterFilter(_tensors(keep))
    return Offload(packer, SavedTensorHooks(packer, parameters, min_bytes=least, took=took))


def _tensors(keep: object) -> list[Tensor]:
    if isinstance(keep, nn.Module):
        return [*keep.parameters(), *keep.buffers()]
    kept: list[Any] = list(keep) if isinstance(keep, Iterable) else [keep]
    for other in kept:
        if not isinstance(other, Tensor):
            found = f"a {type(other).__name__}{' among them' if isinstance(keep, Iterable) else ''}"
            raise ConfigError(f"keep is a model or its tensors, found {found}; pass model, or its tensors")
    return kept


def _took(packer: SavedTensorPacker, storage: SavedStorage) -> None:
    """Pack ``storage`` in the packing thread, and forget its frame when the graph does."""
    weakref.finalize(storage, packer.store.drop, storage.key).atexit = False
    storage.transition("evicting")
    packer.queue(storage)
