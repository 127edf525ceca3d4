"""``penstock.offload``: what any PyTorch forward saves is kept packed, or in host memory, until its backward.

Stands in the place of ``torch.autograd.graph.save_on_cpu``; no pipeline and no graph is needed, so only what
bytes tell is used.
Source: claims A5-A10 of CN115016937A; Rhu et al., Compressing DMA Engine, HPCA 2018.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable
from types import TracebackType

from torch import Tensor, nn

from ...compression.errors import ConfigError, StageError
from ..units import parse_bytes, show_bytes
from .counts import Counts
from .held import Held
from .hooks import Hooks, Weights
from .keeper import STORES, Keeper
from .store import Fresh


class Offload(Counts):
    """One forward or several under saved-tensor hooks; entered by ``with``, counted meanwhile and after."""

    def __init__(self, keeper: Keeper, hooks: Hooks) -> None:
        """Made by ``offload``."""
        self._keeper, self._hooks = keeper, hooks
        self._block: contextlib.AbstractContextManager[None] | None = None

    def __enter__(self) -> Offload:
        """From here on, what autograd saves leaves; one block at a time."""
        if self._block is not None:
            raise StageError(
                "an offload is entered once at a time, found it entered; make another one inside"
            )
        self._block = self._hooks.entered()
        self._block.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait until all of it has left, and end the thread; raises what the thread raised."""
        assert self._block is not None, "a block is left after it was entered"
        block, self._block = self._block, None
        block.__exit__(kind, error, trace)
        self._keeper.close()
        if error is None:
            self._keeper.worker.check()

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
) -> Offload:
    """Keep what a forward saves for its backward packed, or in host memory; the gradients have the same bits.

    ``with penstock.offload() as saved: loss = model(x).sum()``, then ``loss.backward()`` as ever: also twice
    with retain_graph, and for gradients of gradients. Each storage leaves once, whatever views of it were
    saved; parameters, casts of them and small tensors stay. Packing runs in a thread of its own, and on a GPU
    on a stream of its own. What is written through ``.data`` after it was saved is seen by nobody, and only
    forwards in the thread that entered the block are meant.

    Args:    tier: "packed" leaves the frames where they were made, and what does not shrink as it is; "host"
             copies those of a GPU to pinned host memory, and is the same as "packed" on a CPU.
             codec: a name in ``penstock.CODECS``, or "auto": zeros and exponents, either where it pays.
             min_bytes: storages of fewer bytes stay.
             budget: the most bytes of frames at a time; what finds no room stays as it is. None: no limit.
             keep: a model whose parameters and buffers stay, or such tensors; those that ask for a gradient
             are known without it.
             ahead: how many storages are brought back before they are asked for.
    Raises:  ConfigError: no such tier, or no such ``keep`` or ``ahead``. PlanError: no size in bytes.
             CodecError: no such codec. StageError, in the backward: what was saved was written to since;
             torch's own check does not reach behind hooks.
    """
    if tier not in tuple(STORES):  # a tuple: what was given may have no hash
        raise ConfigError(f"tier is one of {', '.join(STORES)}, found {tier!r}; choose one of these")
    if not isinstance(ahead, int) or ahead < 0:
        raise ConfigError(f"ahead counts storages, from 0 on, found {ahead!r}; choose 0, 1, 2 ..")
    keeper = Keeper(
        STORES[tier](),
        codec=codec,
        pool=Fresh(),
        num_ahead=ahead,
        budget=None if budget is None else parse_bytes(budget, name="budget"),
    )
    hooks = Hooks(
        keeper,
        weights=Weights(_tensors(keep)),
        min_bytes=parse_bytes(min_bytes, name="min_bytes"),
        took=functools.partial(_took, keeper),
    )
    return Offload(keeper, hooks)


def _tensors(keep: object) -> list[Tensor]:
    """Parameters and buffers of a model, or the tensors that were given."""
    if isinstance(keep, nn.Module):
        return [*keep.parameters(), *keep.buffers()]
    if not isinstance(keep, Iterable):
        found = f"a {type(keep).__name__}"
        raise ConfigError(f"keep is a model or its tensors, found {found}; pass model, or model.parameters()")
    kept = list(keep)
    for other in kept:
        if not isinstance(other, Tensor):
            found = f"a {type(other).__name__} among them"
            raise ConfigError(f"keep is a model or its tensors, found {found}; pass the tensors alone")
    return kept


def _took(keeper: Keeper, held: Held) -> None:
    """Pack ``held`` in the thread, and forget its frame when the graph does."""
    weakref.finalize(held, keeper.store.drop, held.key).atexit = False
    keeper.worker.submit(functools.partial(_pack, keeper, weakref.ref(held)))


def _pack(keeper: Keeper, reference: weakref.ref[Held]) -> None:
    held = reference()
    if held is not None:
        keeper.pack(held)
