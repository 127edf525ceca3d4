"""Running statistics of batch norms where each replica sees some of the micro-batches.

In training a batch norm reads nothing of its running statistics. So each forward writes into zeros, with a
factor of 1, and leaves there the mean and the variance of its micro-batch. At the update all replicas get
those of all micro-batches, and each adds them to the buffers in ascending order, as one process would."""

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ...compression.errors import StageError
from ...stages.device import is_gpu
from ...stages.stage.stage import Stage
from ...stages.torch_private import BatchNorm, buffers_of, tree_leaves, without_torch_functions
from ...stages.tracing.model_checks import is_compiled
from ..distributed.process_group import ReplicaGroup

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_OF_SHAPE = ("__get__", "__len__", "size", "dim", "numel", "stride", "is_floating_point", "is_complex")
_AT = "the running statistics"


class Unread(TorchFunctionMode):
    """The block in which nobody may use ``buffers`` (name by identity); norms that run have others then."""

    def __init__(self, buffers: Mapping[int, str]) -> None:
        super().__init__()
        self.buffers = buffers

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        only_shape = getattr(func, "__name__", "") in _OF_SHAPE and not isinstance(result, torch.Tensor)
        names = [self.buffers[id(x)] for x in tree_leaves((args, kwargs)) if id(x) in self.buffers]
        if names and not only_shape:
            raise StageError(
                "replicas add running statistics at the update, and only a module of torch.nn that is called "
                f"may read or write them, found a layer that uses {names[0]} by itself; leave it to the "
                "module, or take one rank for its stage"
            )
        return result


def batch_norms(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Those of ``modules`` whose running statistics are known to be only written by a forward in training."""
    return {
        name: module
        for name, module in modules.items()
        if isinstance(module, BatchNorm)
        and not isinstance(module, nn.SyncBatchNorm)
        and type(module).forward is BatchNorm.forward
    }


def norms_of(stage: Stage) -> tuple[dict[str, Any], set[str]]:
    """The batch norms that the layers of a stage run, by name, and the names of those in a larger layer; but
    for a compiled one, which would be compiled together with ``Unread``."""
    norms, inside = dict[str, Any](), set[str]()
    for path, top in stage.parts["train"].modules.items():
        of_layer = batch_norms({f"{path}.{name}".rstrip("."): one for name, one in top.named_modules()})
        norms |= of_layer
        if not any(map(is_compiled, top.modules())):
            inside |= of_layer.keys() - {path}
    return norms, inside


class RunningStatistics:
    """Those of the batch norms of one stage by name; ``inside``: norms that are part of a larger layer, in
    which somebody else may read the buffers; ``exact``: refuse a norm whose kernel rounds by an unknown
    rule."""

    def __init__(
        self, norms: Mapping[str, Any], inside: Collection[str] = (), *, exact: bool = False
    ) -> None:
        self.norms = {name: norm for name, norm in norms.items() if norm.running_mean is not None}
        self.inside, self.exact = inside, exact
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self.seen: dict[int, dict[str, torch.Tensor]] = {}

    @contextlib.contextmanager
    def forward(self, micro_batch: int) -> Iterator[None]:
        """The block in which the layers of the stage run forward for ``micro_batch``."""
        self.seen[micro_batch] = seen = {}
        replaced: dict[str, tuple[Any, dict[str, Any], float]] = {}

        def before(name: str, norm: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not norm.training:
                return
            if name in seen:
                raise StageError(
                    f"with replicas a batch norm runs once in a forward, and {name} ran twice; take one rank "
                    "for its stage"
                )
            (x,) = (*args, *kwargs.values())
            with without_torch_functions():
                if self.exact:
                    _check_rounding(name, norm, x)
                kind = 1.0 + (x.dtype == norm.running_var.dtype)
                replaced[name] = norm.momentum, {key: buffers_of(norm)[key] for key in BUFFERS}, kind
                norm.momentum = 1.0  # setattr of buffers takes ten times as long as update
                buffers_of(norm).update({key: torch.zeros_like(buffers_of(norm)[key]) for key in BUFFERS})

        def restore(name: str) -> float:
            norm = self.norms[name]
            norm.momentum, buffers, kind = replaced.pop(name)
            buffers_of(norm).update(buffers)
            return kind

        def after(name: str, norm: Any, *_: object) -> None:
            if name not in replaced:
                return
            with without_torch_functions():
                parts = [x.double().cpu() for x in (norm.running_mean, norm.running_var)]
                seen[name] = torch.cat([torch.tensor([restore(name)], dtype=torch.float64), *parts])

        handles = []
        for name, norm in self.norms.items():
            first = functools.partial(before, name)
            handles.append(norm.register_forward_pre_hook(first, with_kwargs=True))
            handles.append(norm.register_forward_hook(functools.partial(after, name)))
        try:
            watch = contextlib.nullcontext()
            if self.inside:
                used = {name: norm for name, norm in self.norms.items() if norm.training}
                watch = Unread(
                    {id(getattr(n, k)): f"{name}.{k}" for name, n in used.items() for k in BUFFERS}
                )
            with watch:
                yield
        finally:
            for name in [*replaced]:
                restore(name)
            for handle in handles:
                handle.remove()

    def exchange(self, group: ReplicaGroup, num_micro_batches: int) -> None:
        """Add what all replicas saw of the micro-batches of a step, in ascending order; collective."""
        if not self.norms:
            return
        sizes = [1 + 2 * norm.running_mean.numel() for norm in self.norms.values()]
        shape = num_micro_batches, sum(sizes)
        rows = torch.full(shape, -0.0, dtype=torch.float64)  # which adds nothing to any bits
        for micro_batch, seen in self.seen.items():
            for name, part in zip(self.norms, rows[micro_batch].split(sizes), strict=True):
                if name in seen:
                    part.copy_(seen[name])
        group.finish(group.begin_to_add_up(rows, at=_AT), rows, at=_AT)
        for row in rows:
            for norm, part in zip(self.norms.values(), row.split(sizes), strict=True):
                if kind := float(part[0]):  # 0 of one that did not run
                    norm.num_batches_tracked.add_(1)
                    factor = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
                    mean, variance = part[1:].chunk(2)
                    add(norm.running_mean, mean, factor)
                    add(norm.running_var, variance, factor, in_double=kind == 2.0)


def add(buffer: torch.Tensor, new: torch.Tensor, factor: float, *, in_double: bool = False) -> None:
    """Make ``buffer`` the weighted mean of itself and ``new``, rounded as torch's kernels for the CPU round;
    ``in_double``: sum up in float64, as a variance is whose input has the dtype of the statistics."""
    before, weight = buffer.cpu(), torch.tensor(factor, dtype=buffer.dtype)
    new, rest = new.to(buffer.dtype), (1 - weight) * before
    if in_double:
        weight, new, rest = weight.double(), new.double(), rest.double()
    buffer.copy_(weight * new + rest)


def _check_rounding(name: str, norm: Any, x: torch.Tensor) -> None:
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    dense = x.is_contiguous() or x.is_contiguous(memory_format=layouts.get(x.dim(), torch.contiguous_format))
    dtypes = {norm.running_mean.dtype, norm.running_var.dtype}
    if is_gpu(x.device) or not dense or not dtypes <= {torch.float32, torch.float64, torch.bfloat16}:
        raise StageError(
            "exact replicas add the running statistics of a batch norm as one process does, and how "
            f"{name} adds them for an input of strides {x.stride()} and {x.dtype} on {x.device} is not "
            "known; take exact=False, or one rank for its stage"
        )
