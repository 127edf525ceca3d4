"""Running statistics of batch norms where replicas see some micro-batches each: with the bits of one.

In training a batch norm reads nothing of its running statistics, so each forward writes into others, with a
factor of 1: what is then there is the mean and the variance that the kernel adds. At the update all replicas
tell each other theirs, and each adds them in ascending order of micro-batches. How a kernel rounds that sum
is known for some, tried on random inputs of every shape, and refused where it is none of these."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ...compression.errors import StageError
from ...stages.stage.stage import Stage
from ...stages.tracing.leaf_modules import is_compiled
from ..distributed.process_group import ReplicaGroup

T = TypeVar("T")

_OF_SHAPE = ("__get__", "__len__", "size", "dim", "numel", "stride", "is_floating_point", "is_complex")


class Unread(TorchFunctionMode):
    """The block in which nobody may use ``buffers`` (name by identity); norms that run have others then.

    Raises: StageError: somebody does."""

    def __init__(self, buffers: Mapping[int, str]) -> None:
        super().__init__()
        self.buffers = buffers

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        named = (self.buffers.get(id(item)) for item in tree_leaves((args, kwargs)))
        if (name := next(filter(None, named), "")) and not _only_shape(func, found):
            raise StageError(
                "replicas add running statistics at the update, and only a module of torch.nn that is called "
                f"may read or write them, found a layer that uses {name} by itself; leave it to the module, "
                "or take one rank for its stage"
            )
        return found


def unwatched(function: Callable[..., T]) -> Callable[..., T]:
    """A function during which no such block counts."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> T:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run


def _only_shape(func: Any, found: object) -> bool:
    """True if an answer depends only on a tensor's shape, dtype and device."""
    return not isinstance(found, torch.Tensor) and getattr(func, "__name__", "") in _OF_SHAPE


BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
TRIED = 512  # sums that a formula is tried on, at least

Formula = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def _single(before: torch.Tensor, new: torch.Tensor, factor: float) -> torch.Tensor:
    """All in the dtype of the statistics."""
    weight = torch.tensor(factor, dtype=before.dtype)
    return weight * new + (1 - weight) * before


def _wider(before: torch.Tensor, new: torch.Tensor, factor: float) -> torch.Tensor:
    """The new one, and the sum, in float64: so torch's kernel for the CPU adds a variance of float32."""
    weight = torch.tensor(factor, dtype=before.dtype)
    return (weight.double() * new.double() + ((1 - weight) * before).double()).to(before.dtype)


FORMULAS: Sequence[Formula] = (_single, _wider)


def batch_norms(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Those of ``modules`` whose running statistics are known to be only written by a forward in training."""
    return {
        name: module
        for name, module in modules.items()
        if isinstance(module, _BatchNorm)
        and not isinstance(module, nn.SyncBatchNorm)
        and type(module).forward is _BatchNorm.forward
    }


def inside(stage: Stage) -> set[str]:
    """The batch norms of a stage that are part of a larger layer, in which nobody looks; a compiled one would
    be compiled with who looks."""
    tops = stage.parts["train"].modules
    plain = [path for path, top in tops.items() if not any(map(is_compiled, top.modules()))]
    return {name for path in plain for name in norms_of(stage) if name.startswith(f"{path}.")}


def norms_of(stage: Stage) -> dict[str, Any]:
    """The batch norms that the layers of a stage run, by their names in the model."""
    tops = stage.parts["train"].modules.items()
    return batch_norms(
        {f"{path}.{name}".rstrip("."): one for path, top in tops for name, one in top.named_modules()}
    )


class RunningStatistics:
    """Those of the batch norms of one stage, by the names of the modules in the model."""

    def __init__(self, norms: Mapping[str, Any], *, inside: Collection[str] = ()) -> None:
        """``inside``: those that are part of a larger layer."""
        self.inside = inside
        self.norms = {name: norm for name, norm in norms.items() if norm.running_mean is not None}
        self.known: dict[tuple[object, ...], int] = {}
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self.seen: dict[int, dict[str, torch.Tensor]] = {}

    @contextlib.contextmanager
    def forward(self, micro_batch: int) -> Iterator[None]:
        """The block in which the layers of the stage run forward for ``micro_batch``."""
        self.seen[micro_batch] = seen = {}
        handles, own = [], dict[str, tuple[Any, ...]]()

        @unwatched
        def before(name: str, norm: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not norm.training:
                return
            code = self._formula(name, norm, *args, **kwargs)
            own[name] = (norm.momentum, *(getattr(norm, key) for key in BUFFERS), code)
            norm.momentum = 1.0
            for key in BUFFERS:
                norm._buffers[key] = torch.zeros_like(norm._buffers[key])  # setattr takes ten times as long

        def restore(name: str, norm: Any) -> None:
            norm.momentum, *buffers, _ = own.pop(name)
            for key, buffer in zip(BUFFERS, buffers, strict=True):
                norm._buffers[key] = buffer

        @unwatched
        def after(name: str, norm: Any, *_: object) -> None:
            if name not in own:
                return
            code = torch.tensor([float(own[name][-1])], dtype=torch.float64)
            found = torch.cat([code, *(x.double().cpu() for x in (norm.running_mean, norm.running_var))])
            restore(name, norm)
            if name in seen:
                raise StageError(
                    f"with replicas a batch norm runs once in a forward, and {name} ran twice; take one rank "
                    "for its stage"
                )
            seen[name] = found

        for name, norm in self.norms.items():
            first = functools.partial(before, name)
            handles.append(norm.register_forward_pre_hook(first, with_kwargs=True))
            handles.append(norm.register_forward_hook(functools.partial(after, name)))
        try:
            with self._unread() if self.inside else contextlib.nullcontext():
                yield
        finally:
            for name in [*own]:
                restore(name, self.norms[name])
            for handle in handles:
                handle.remove()

    def _unread(self) -> Unread:
        norms = {name: norm for name, norm in self.norms.items() if norm.training}
        return Unread({id(getattr(norm, k)): f"{name}.{k}" for name, norm in norms.items() for k in BUFFERS})

    def exchange(self, group: ReplicaGroup, holders: Sequence[int]) -> None:
        """Add what all replicas saw of the micro-batches of a step, in ascending order.

        Args:    holders: the place of the replica that had each of them."""
        if not self.norms:
            return
        sizes = {name: 1 + 2 * norm.running_mean.numel() for name, norm in self.norms.items()}
        lines = [holders[:micro_batch].count(holder) for micro_batch, holder in enumerate(holders)]
        mine = torch.zeros(1 + max(lines, default=0), sum(sizes.values()), dtype=torch.float64)
        for micro_batch, seen in self.seen.items():
            parts = [seen.get(name, torch.zeros(size, dtype=torch.float64)) for name, size in sizes.items()]
            mine[lines[micro_batch]] = torch.cat(parts)
        rows = group.all_gather(mine, at="the running statistics")
        for holder, line in zip(holders, lines, strict=True):
            _add([*zip(self.norms.values(), rows[holder][line].split([*sizes.values()]), strict=True)])

    def _formula(self, name: str, norm: Any, input: torch.Tensor) -> int:
        """Counted from 1, how the sums of ``norm`` are rounded: the formula of the mean, then the other.

        Raises: StageError: by none that is known."""
        x = input  # as torch names it, for who calls by name
        key = name, x.shape, x.stride(), x.dtype, norm.momentum
        if key in self.known:
            return self.known[key]
        generator = torch.Generator().manual_seed(0)
        factor = 1 / 3 if norm.momentum is None else norm.momentum
        like, given = norm.running_mean, (norm.weight, norm.bias, True)

        def run(mean: torch.Tensor, var: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
            F.batch_norm(drawn, mean, var, *given, factor, norm.eps)
            return mean, var

        fits = [[True] * len(FORMULAS) for _ in range(2)]
        room = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        memory = torch.empty(max(0, room), dtype=x.dtype, device=x.device)
        drawn = memory.as_strided(x.shape, x.stride())  # of elements that are one, too
        with torch.no_grad():
            for _ in range(max(4, math.ceil(TRIED / like.numel()))):
                memory.copy_(torch.randn(len(memory), generator=generator) + 0.5)
                new = run(torch.zeros_like(like), torch.zeros_like(like), 1.0)
                times = torch.rand(like.shape, generator=generator).to(like) + 0.5
                old = [one * times for one in new]  # alike, or few roundings would differ
                found = run(old[0].clone(), old[1].clone(), factor)
                for which in range(2):
                    for place, formula in enumerate(FORMULAS):
                        expected = formula(old[which].cpu(), new[which].cpu(), factor)
                        fits[which][place] &= torch.equal(expected, found[which].cpu())
        if not all(map(any, fits)):
            raise StageError(
                f"replicas add the running statistics of a batch norm as one process does, and how {name} "
                f"adds them for an input of strides {x.stride()} and {x.dtype} is not known; take one rank "
                "for its stage"
            )
        code = self.known[key] = 1 + len(FORMULAS) * fits[0].index(True) + fits[1].index(True)
        return code


def _add(told: Sequence[tuple[Any, torch.Tensor]]) -> None:
    """Add one micro-batch: for each norm its code, mean and variance.

    Those that are added alike go together; of several in one memory the second goes in a second turn."""
    alike: dict[tuple[int, int, float, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    turns = Counter[int]()
    for (norm, seen), code in zip(told, torch.stack([seen[0] for _, seen in told]).tolist(), strict=True):
        if not code:
            continue  # it did not run
        norm.num_batches_tracked.add_(1)
        factor = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
        buffers, news = (norm.running_mean, norm.running_var), seen[1:].chunk(2)
        for buffer, new, which in zip(buffers, news, divmod(int(code) - 1, len(FORMULAS)), strict=True):
            turns[memory := buffer.untyped_storage().data_ptr()] += 1
            alike.setdefault((turns[memory], which, factor, buffer.dtype), []).append((buffer, new))
    for (_, which, factor, dtype), pairs in sorted(alike.items(), key=lambda one: one[0][0]):
        before = torch.cat([buffer.cpu() for buffer, _ in pairs])
        sums = FORMULAS[which](before, torch.cat([new for _, new in pairs]).to(dtype), factor)
        for (buffer, _), part in zip(pairs, sums.split([new.numel() for _, new in pairs]), strict=True):
            buffer.copy_(part)
