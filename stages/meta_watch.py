"""Chance and writes of a run that autograd does not count.

On the meta device torch's dispatch says which calls would draw or write (``MetaWatch``); in a real run the
bytes of a memory tell it (``Contents``): a write through ``.data`` or NumPy, or by a kernel that gives no
version. A later layer that writes to what is saved changes a gradient; on another stage it would not."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .device import CPU
from .torch_private import TorchDispatchMode, dispatch_mode, memory_id, schema_of, tree_leaves, tree_map_only

META = torch.device("meta")
_STATISTICS = slice(3, 5)  # running mean and variance among the arguments of a batch norm
_TRAINING = 5
_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")  # whose schemas name no write


class MetaWatch(TorchDispatchMode):
    """Notes storages that are written to (``writes``); asked like a generator, its state counts the draws."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = 0
        self.writes: list[int] = []
        self._kept: list[torch.UntypedStorage] = []  # else a storage that is gone gives its number to another

    def get_state(self) -> torch.Tensor:
        """Number of draws."""
        return torch.tensor([self.draws], device=CPU)

    def set_state(self, state: torch.Tensor) -> None:
        """Do nothing: what was drawn stays drawn."""

    def manual_seed(self, seed: int) -> None:
        """Nothing follows from a seed here."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.draws += torch.Tag.nondeterministic_seeded in func.tags
        self._writes(written_by(func, args, kwargs))
        if schema_of(func).name.partition("::")[2] in _NORMS and args[_TRAINING]:
            self._writes(args[_STATISTICS])
        if {tensor.is_meta for tensor in tensors_in((args, kwargs))} == {True, False}:
            to_meta = lambda tensor: tensor.to(META)  # noqa: E731 (a tensor of a file has values)
            args = tree_map_only(torch.Tensor, to_meta, args)
            kwargs = {name: tree_map_only(torch.Tensor, to_meta, given) for name, given in kwargs.items()}
        return func(*args, **kwargs)

    def _writes(self, given: Any) -> None:
        for tensor in tensors_in(given):
            if tensor.is_meta:
                self._kept.append(tensor.untyped_storage())
                self.writes.append(memory_id(tensor))


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation writes to, as its schema says."""
    taken = schema_of(func).arguments
    pairs = [*zip(taken, args, strict=False), *((a, kwargs[a.name]) for a in taken if a.name in kwargs)]
    return [t for a, value in pairs if a.alias_info and a.alias_info.is_write for t in tensors_in(value)]


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors among what a call is given."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def watching() -> MetaWatch | None:
    """The one that looks on now, if any."""
    mode = dispatch_mode()
    return mode if isinstance(mode, MetaWatch) else None


class Contents:
    """Copy of the memory of some tensors; of those on the meta device a ``MetaWatch`` knows the writes."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._watch = watching()
        self._mark = 0 if self._watch is None else len(self._watch.writes)
        plain = (t.untyped_storage() for t in tensors if t.layout is torch.strided and not t.is_nested)
        storages = {memory_id(storage): storage for storage in plain if storage.nbytes()}
        self._sizes = [(key, storage, storage.nbytes()) for key, storage in storages.items()]
        self._kept = {k: (s, s.clone()) for k, s in storages.items() if s.device != META}

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        """The storages that were copied."""
        return [now for now, _ in self._kept.values()]

    def changed(self) -> set[int]:
        """The storages that hold other bytes by now; one that was freed or made longer has no others."""
        on_meta = set() if self._watch is None else set(self._watch.writes[self._mark :])
        return on_meta | {key for key, (now, then) in self._kept.items() if not _same(now, then)}

    def resized(self) -> set[int]:
        """The storages that were freed or made longer."""
        return {key for key, storage, size in self._sizes if storage.nbytes() != size}


def _same(now: torch.UntypedStorage, then: torch.UntypedStorage) -> bool:
    if now.nbytes() != then.nbytes():
        return True
    words, rest = divmod(then.nbytes(), 8)

    def rows(dtype: torch.dtype, start: int, size: int) -> Iterator[torch.Tensor]:
        for storage in (now, then):
            yield torch.empty(0, dtype=dtype, device=storage.device).set_(storage, start, (size,), (1,))

    return torch.equal(*rows(torch.int64, 0, words)) and torch.equal(*rows(torch.uint8, words * 8, rest))
