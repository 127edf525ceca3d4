"""A batch as micro-batches: fresh copies, near-equal sizes, and each one's share of the batch.

A view of a batch may be misaligned, and another alignment picks another kernel: so micro-batches are copied
into fresh memory, in the plain loop too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ...compression.errors import PlanError
from ...stages.device import KINDS, Device
from ...stages.split_inputs import Column


class MicroBatch(NamedTuple):
    """What a micro-batch brings from outside: the model's inputs, targets, its share of the batch.

    It is number ``index`` of the batch of ``step``, which is number ``batch`` since the last drain."""

    inputs: tuple[torch.Tensor, ...]
    targets: Any
    share: float
    step: int = 0
    index: int = 0  # pyright: ignore[reportIncompatibleMethodOverride] (nobody looks for one in it)
    batch: int = 0


def micro_batches(
    inputs: Sequence[Column],
    targets: Any,
    number: int,
    weight: Callable[[Any], float] | None,
    *,
    whole: Sequence[bool] = (),
    reads: Callable[[int], bool] = lambda micro_batch: True,
    first: Device | None = None,
    last: Device | None = None,
) -> list[MicroBatch]:
    """Split a batch into ``number`` micro-batches of near-equal size (fewer samples: one each).

    ``weight(targets)`` says over how much the loss of a micro-batch is a mean; None: over its samples.
    ``whole``: which of the inputs are constants, that every micro-batch gets all of.
    ``reads``: which micro-batches go through the first stage here, if that is here.
    ``first``, ``last``: where the stages are that read the inputs and the targets; None: not here."""
    leaves, spec = tree_flatten(targets)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    kept = list(whole) or [False] * len(inputs)
    several = [*(x for x, all_of in zip(inputs, kept, strict=True) if not all_of), *tensors]
    given = [part for x in inputs for part in ([x] if isinstance(x, torch.Tensor) else x)]
    _refuse_unsplit(leaves, (*given, *tensors), samples=_length(several[0]) or 0)
    if last is not None or weight is not None:
        _refuse_unread("targets", tensors)
    lengths = {_length(x) for x in several}
    if len(lengths) != 1 or not (length := lengths.pop()):
        found = sorted({str(tuple(x.shape)) for x in (*given, *tensors)})
        raise PlanError(
            "inputs and targets of a batch have the same number of samples, one or more, found "
            f"{', '.join(found)}; what has no samples is traced as penstock.Constant(tensor)"
        )
    number = min(number, length)
    sizes = [length // number + (i < length % number) for i in range(number)]  # those of tensor_split
    split = [_parts(x, sizes, whole=all_of) for x, all_of in zip(inputs, kept, strict=True)]
    here = [first is not None and reads(i) for i in range(number)]
    _refuse_unread("inputs", (x[i] for x in split for i in range(number) if here[i]))
    split_targets = [
        leaf.tensor_split(number) if isinstance(leaf, torch.Tensor) else [leaf] * number for leaf in leaves
    ]
    parts = [tree_unflatten([_fresh(column[i]) for column in split_targets], spec) for i in range(number)]
    weights = [sizes[i] if weight is None else _weight(weight, parts[i]) for i in range(number)]
    total = sum(weights)
    if not total > 0:
        raise PlanError(
            f"the weights of a batch's micro-batches sum to more than zero, found {total}; see weight="
        )
    return [
        MicroBatch(
            inputs=tuple(_fresh(x[i], first if here[i] else None) for x in split),
            targets=tree_map_only(torch.Tensor, lambda t: _moved(t, last), parts[i]),
            share=weights[i] / total,
            index=i,
        )
        for i in range(number)
    ]


def _length(column: Column) -> int | None:
    """How many samples it has; None: dimensions are missing."""
    parts = [column] if isinstance(column, torch.Tensor) else column
    return sum(len(part) for part in parts) if all(part.dim() for part in parts) else None


def _parts(column: Column, sizes: Sequence[int], *, whole: bool) -> Sequence[torch.Tensor]:
    """Those of the micro-batches; what was split already must be split alike."""
    if isinstance(column, torch.Tensor):
        return [column] * len(sizes) if whole else column.tensor_split(len(sizes))
    if (found := [len(part) for part in column]) != list(sizes):
        raise PlanError(
            f"inputs that were split have the sizes of tensor_split, {_listed(sizes)} here, found "
            f"{_listed(found)}; split them by plan.micro_batches"
        )
    return column


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def _refuse_unsplit(targets: Sequence[Any], tensors: Sequence[torch.Tensor], *, samples: int) -> None:
    """Refuse what would go to every micro-batch as a whole, or cannot be split."""
    numbers = len(targets) == samples > 1 and all(isinstance(leaf, int | float) for leaf in targets)
    if numbers or any(isinstance(leaf, numpy.ndarray) for leaf in targets):
        raise PlanError(
            "targets are tensors, which are split like the inputs, found "
            f"{'a list of numbers' if numbers else 'an array'}; give torch.as_tensor(targets)"
        )
    for tensor in tensors:
        known = tensor.device.type in KINDS or tensor.is_meta
        if tensor.layout != torch.strided or tensor.is_nested or not known:
            kind = "nested" if tensor.is_nested else str(tensor.layout)
            raise PlanError(
                f"inputs and targets are dense tensors on the CPU or a GPU, found a {kind} one on "
                f"{tensor.device}; convert it first"
            )
        if tensor.requires_grad:
            raise PlanError(
                "a pipeline gives gradients of parameters, not of a batch, found inputs or targets that "
                "require one; give tensor.detach()"
            )


def _refuse_unread(what: str, tensors: Iterable[torch.Tensor]) -> None:
    """Refuse what has no memory where somebody reads it."""
    if any(tensor.is_meta for tensor in tensors):
        raise PlanError(
            f"the {what} of a batch are read on this rank, found some on the meta device; ask "
            f"pipe.reads_{what} before they are left out"
        )


def _weight(weight: Callable[[Any], float], targets: Any) -> float:
    found = weight(targets)
    if not isinstance(found, int | float) and not (isinstance(found, torch.Tensor) and found.numel() == 1):
        raise PlanError(f"weight says of targets over how much the loss is a mean, a number, found {found!r}")
    found = found.cpu() if isinstance(found, torch.Tensor) else found
    return found  # pyright: ignore[reportReturnType] (a tensor of one element counts as a number)


def joined(parts: Sequence[Any]) -> Any:
    """The outputs of micro-batches as those of one batch: every tensor along dimension 0; None of none."""
    if not parts:
        return None
    leaves, spec = tree_flatten(parts[0])
    columns = zip(*(tree_flatten(part)[0] for part in parts), strict=True)
    whole = [torch.cat(c) if isinstance(c[0], torch.Tensor) and c[0].dim() else c[0] for c in columns]
    return tree_unflatten(whole if leaves else leaves, spec)


def _fresh(item: Any, device: Device | None = None) -> Any:
    """A tensor in memory of its own, on ``device`` if there is one."""
    if not isinstance(item, torch.Tensor):
        return item
    return item.clone() if device is None or item.device == device.torch else _moved(item, device)


def _moved(tensor: torch.Tensor, device: Device | None) -> torch.Tensor:
    """``tensor`` on ``device``, laid out as its clone; a GPU fetches it from pinned memory by itself."""
    if device is None or tensor.device == device.torch:
        return tensor
    if not tensor.is_cpu:
        return tensor.to(device.torch)
    like = torch.empty_like(tensor, device="meta")
    pinned = device.pinned(tensor.nbytes).view(tensor.dtype).as_strided(like.shape, like.stride())
    return pinned.copy_(tensor).to(device.torch, non_blocking=True)
