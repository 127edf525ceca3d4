"""A batch as micro-batches: fresh copies, near-equal sizes, and each one's share of the batch.

A view of a batch may be misaligned, and another alignment picks another kernel: so micro-batches are copied
into fresh memory, in the plain loop too."""

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy
import torch
from torch.autograd.graph import get_gradient_edge

from ...compression.errors import PlanError, StageError
from ...stages.device import CPU, KINDS, Device
from ...stages.split_inputs import Column
from ...stages.torch_private import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from ...stages.tracing.layers import casting

Weight = Callable[[Any], float] | Literal["summed"] | None
"""The number over which a loss is a mean, of targets; or that losses add up; or the number of samples."""


class MicroBatch(NamedTuple):
    """Inputs of a micro-batch: the model's inputs, targets, its share of the batch. It is number ``index`` of
    the batch of ``step``, which is number ``batch`` since the last drain."""

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
    weight: Weight,
    *,
    whole: Sequence[bool] = (),
    reads: Callable[[int], bool] = lambda micro_batch: True,
    first: Device | None = None,
    last: Device | None = None,
) -> list[MicroBatch]:
    """Split a batch into ``number`` micro-batches of near-equal size (fewer samples: one each), or into those
    of a ``Split``.

    ``weight(targets)`` says over how much the loss of a micro-batch is a mean; None: over its samples;
    "summed": losses add up to that of the batch.
    ``whole``: which of the inputs are constants, that every micro-batch gets all of.
    ``reads``: which micro-batches go through the first stage here, if that is here.
    ``first``, ``last``: where the stages are that read the inputs and the targets; None: not here."""
    leaves, spec = tree_flatten(targets)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    kept = list(whole) or [False] * len(inputs)
    several = [*(x for x, all_of in zip(inputs, kept, strict=True) if not all_of), *tensors]
    given = [part for x in inputs for part in ([x] if isinstance(x, torch.Tensor) else x)]
    _refuse_unsplit(leaves, (*given, *tensors), samples=_length(several[0]) or 0)
    if last is not None or callable(weight):
        _refuse_unread("targets", tensors)
    lengths = {_length(x) for x in several}
    if len(lengths) != 1 or not (length := lengths.pop()):
        found = ", ".join(sorted({str(tuple(x.shape)) for x in (*given, *tensors)}))
        raise PlanError(
            f"inputs and targets of a batch have the same number of samples, one or more, found {found}; "
            "what has no samples is traced as penstock.Constant(tensor)"
        )
    column = next((column for column in inputs if not isinstance(column, torch.Tensor)), None)
    if column is None:
        least, larger = divmod(length, min(number, length))
        sizes = [least + (i < larger) for i in range(min(number, length))]  # those of tensor_split
    else:
        sizes = [len(part) for part in column]
    if not all(sizes) or len(sizes) > number:
        raise PlanError(
            f"a Split has at most plan.micro_batches={number} micro-batches of a sample or more, found "
            f"{str(sizes)[1:-1]}; make the plan for as many"
        )
    number = len(sizes)
    split = [_parts(x, sizes, whole=all_of) for x, all_of in zip(inputs, kept, strict=True)]
    here = [first is not None and reads(i) for i in range(number)]
    _refuse_unread("inputs", (x[i] for x in split for i in range(number) if here[i]))
    split_targets = [
        leaf.split(sizes) if isinstance(leaf, torch.Tensor) else [leaf] * number for leaf in leaves
    ]
    parts = [tree_unflatten([_fresh(column[i]) for column in split_targets], spec) for i in range(number)]
    weights = [_weight(weight, parts[i]) if callable(weight) else sizes[i] for i in range(number)]
    total = sum(weights)
    if not total > 0:
        raise PlanError(
            f"the weights of a batch's micro-batches sum to more than zero, found {total}; see weight="
        )
    return [
        MicroBatch(
            inputs=tuple(_fresh(x[i], first if here[i] else None) for x in split),
            targets=tree_map_only(torch.Tensor, lambda t: _moved(t, last), parts[i]),
            share=1.0 if weight == "summed" else weights[i] / total,
            index=i,
        )
        for i in range(number)
    ]


def _length(column: Column) -> int | None:
    """Number of samples; None: dimensions are missing."""
    parts = [column] if isinstance(column, torch.Tensor) else column
    return sum(len(part) for part in parts) if all(part.dim() for part in parts) else None


def _parts(column: Column, sizes: Sequence[int], *, whole: bool) -> Sequence[torch.Tensor]:
    """Split into micro-batches; a column that was split already must be split alike."""
    if isinstance(column, torch.Tensor):
        return [column] * len(sizes) if whole else column.split(list(sizes))
    if (found := [len(part) for part in column]) != list(sizes):
        raise PlanError(
            f"all inputs of a Split have the same sizes, found {list(sizes)} and {found}; split them alike"
        )
    return column


def _refuse_unsplit(targets: Sequence[Any], tensors: Sequence[torch.Tensor], *, samples: int) -> None:
    """Refuse tensors that would go to every micro-batch as a whole, or cannot be split."""
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
    """Refuse tensors without memory where this rank reads them."""
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


def joined(parts: Sequence[Any], samples: Sequence[int]) -> Any:
    """The outputs of micro-batches of so many ``samples`` as those of one batch; None of none.

    What has no row for each sample is stacked, one of each micro-batch. Where sizes differ, or other values
    than tensors do, it is a list of the outputs."""
    if not parts:
        return None
    whole, spec = [], tree_flatten(parts[0])[1]
    for column in zip(*map(tree_leaves, parts), strict=True):
        if not isinstance(column[0], torch.Tensor):
            alike = all(repr(one) == repr(column[0]) for one in column)
        else:
            rows = all(t.dim() and len(t) == size for t, size in zip(column, samples, strict=True))
            alike = len({tensor.shape[rows:] for tensor in column}) == 1
            column = (torch.cat(column) if rows else torch.stack(column),) if alike else column
        if not alike:
            return list(parts)
        whole.append(column[0])
    return tree_unflatten(whole, spec)


def _fresh(item: Any, device: Device | None = None) -> Any:
    """Copy into private memory, on ``device`` if there is one."""
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


def _shown(item: Any) -> str:
    """Describe tensors by shape and dtype, whole numbers with their range; others by their class."""
    if isinstance(item, tuple | list):
        return f"({', '.join(map(_shown, item))})"
    if not isinstance(item, torch.Tensor):
        return type(item).__name__
    text = f"{tuple(item.shape)} {str(item.dtype).removeprefix('torch.')}"
    with contextlib.suppress(Exception):  # some kinds know no least element, and a GPU may have failed
        if item.numel() and not (item.is_floating_point() or item.is_complex()):
            return f"{text} from {int(item.min())} to {int(item.max())}"
    return text


@dataclasses.dataclass(slots=True, eq=False)
class Criterion:
    """The loss, and what is checked of it; ``parameters``, held weakly, it reads through the outputs
    alone."""

    loss: Callable[[Any, Any], torch.Tensor]
    autocast: torch.dtype | None
    parameters: Container[object]

    def __call__(self, outputs: Any, targets: Any) -> torch.Tensor:
        """Return the loss, from which a backward can begin; raises StageError."""
        device = CPU if self.autocast is None else next((t.device for t in tensors_of(outputs)), CPU)
        try:
            with casting(self.autocast, device):
                loss = self.loss(outputs, targets)
        except StageError:
            raise
        except Exception as error:
            given = f"it was given outputs: {_shown(outputs)}, targets: {_shown(targets)}"
            reason = f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"
            raise StageError(
                f"the loss: {reason}; {given}; give it what it takes, or another loss"
            ) from error
        if not isinstance(loss, torch.Tensor) or loss.dim():
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise StageError(
                f"the loss is one number, a mean over its micro-batch, as a 0-dim tensor; found {found}"
            )
        if not loss.is_floating_point():
            raise StageError(f"the loss is a floating-point number, found one of {loss.dtype}; convert it")
        if not loss.requires_grad:
            raise StageError(
                "the loss depends on trained parameters, found one that was detached or has none; leave out "
                "no_grad() and detach() on the way to it"
            )
        return loss

    def check_reads(self, loss: torch.Tensor, outputs: Any) -> None:
        """Refuse a loss that reaches a parameter except through the outputs, and warn of others that it has;
        raises StageError."""
        seen = {get_gradient_edge(t).node for t in tensors_of(outputs) if t.requires_grad}
        ahead = [get_gradient_edge(loss).node]
        while ahead:
            node = ahead.pop()
            if node in seen:
                continue
            seen.add(node)
            own = getattr(node, "variable", None)
            if own is not None and own is not loss and own not in self.parameters:
                warnings.warn(
                    f"the loss has a parameter of its own, of shape {tuple(own.shape)}, which no optimizer "
                    "of the pipeline updates; make it part of the model, and return it from forward",
                    stacklevel=2,
                )
            elif own in self.parameters:
                raise StageError(
                    "the loss reads a parameter of the model, which may be on another stage; return it from "
                    "forward"
                )
            ahead += [following for following, _ in node.next_functions if following is not None]


def tensors_of(outputs: Any) -> Iterator[torch.Tensor]:
    """The tensors of what the model returns, in the fields of dataclasses too."""
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_of([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])


def tokens_of(batches: Iterable[MicroBatch]) -> int | None:
    """Elements of the first input of int32 or int64 of shape (samples, length); None where there is none."""
    ids = [
        next((x for x in batch.inputs if x.dim() == 2 and x.dtype in (torch.int32, torch.int64)), None)
        for batch in batches
    ]
    return None if any(x is None for x in ids) else sum(x.numel() for x in ids if x is not None)


def total_loss(losses: Mapping[int, torch.Tensor], shares: Mapping[int, float], *, mean: bool) -> float:
    """The sum of share x loss over micro-batches, ascending, in the loss's dtype, at least float32; ``mean``:
    divided by the sum of the shares, as those that finished in a step of a stream need not be a batch."""
    if not losses:
        return math.nan
    some = next(iter(losses.values()))
    dtype = torch.promote_types(some.dtype, torch.float32)
    total = torch.zeros((), dtype=dtype, device=some.device)  # summed where they are: a GPU is asked once
    for index, loss in losses.items():
        total += (loss if loss.dtype is dtype else loss.to(dtype)) * shares[index]
    return float(total) / (sum(shares.values()) if mean else 1)
