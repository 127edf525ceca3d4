"""Proof of a trace: outputs, gradients and buffers of the model and of its record, compared bit for bit.

What recording cannot see is lost without a word; one comparison before training costs seconds, a wrong model
costs weeks. It runs on a copy of the model in which every weight is moved a little, and put back: what
tracing computed from a weight and baked in shows."""

import contextlib
import copy
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...compression.errors import PlanError
from ..meta_watch import tensors_in, watching
from ..seeds import generators_of, python_states
from ..torch_private import memory_id, version_of
from .aliases import memory_of
from .capture.call_spec import Call, fresh, other_data
from .meta_model import needs_values, without_values
from .object_snapshot import Facts, change, contents, tensors

Seen = dict[str, torch.Tensor | None]


def _move(weight: torch.Tensor) -> None:
    if weight.is_floating_point() and weight.itemsize > 1:  # torch does not compute with float8
        memory_of(weight).mul_(1.0625).add_(0.0078125)


class TraceCopy:
    """``root`` is the copy, as it will train: modules keep their own flags, unless all stand in eval mode.

    ``clean``: a run leaves nothing behind in it that ``restore`` does not put back. ``written``: the tensors
    that a run writes to, None where that is not known.
    ``unregistered``: paths of tensors that lie in the memory of a trained parameter under no name: they
    change with every update, so they are moved like a weight."""

    def __init__(self, model: nn.Module, unregistered: Sequence[str], *, evaluates: bool) -> None:
        try:
            self.root = copy.deepcopy(model)
        except Exception as error:
            raise PlanError(f"a model is traced on a copy, and this one cannot be copied: {error}") from error
        if evaluates or not self.root.training:
            self.root.train(not evaluates)
        self.clean, self.shifted = True, False
        self.written: Collection[str] | None = None
        ours, theirs = (tensors(root) if unregistered else {} for root in (self.root, model))
        named = (*model.named_parameters(), *model.named_buffers())
        copies = (*self.root.parameters(), *self.root.buffers())
        self.pairs = [(name, ours, original) for ours, (name, original) in zip(copies, named, strict=True)]
        self.pairs += [(name, ours[name], theirs[name]) for name in unregistered]

    def fresh_copy(self, *, shifted: bool = False) -> nn.Module:
        """A copy that has not run: this one, put back; or a copy of it, where a run leaves traces."""
        self.restore()
        if shifted:
            self.shift()
        return self.root if self.clean else copy.deepcopy(self.root)

    def shift(self) -> None:
        """Move every weight and buffer a little."""
        self.shifted = True
        with torch.no_grad():
            for _, ours, _ in self.pairs:
                _move(ours)

    def restore(self) -> None:
        """Give the copy the model's tensors back after a run, and no gradients."""
        with torch.no_grad():
            for name, ours, original in self.pairs:
                if not self.shifted and self.written is not None and name not in self.written:
                    continue
                if ours.shape != original.shape:
                    raise PlanError(
                        f"forward gives {name} another shape, {tuple(ours.shape)} instead of "
                        f"{tuple(original.shape)}; keep its shape, or run the model once on a batch before"
                    )
                same = ours.stride() == original.stride()
                (memory_of(ours) if same else ours).copy_(memory_of(original) if same else original)
        self.shifted = False
        self.root.zero_grad()


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Return whether shape, dtype and every bit agree (torch.equal takes -0.0 for 0.0), or both are None."""
    if a is None or b is None:
        return a is b
    if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
        return False
    if a.is_meta or b.is_meta:
        return a.is_meta and b.is_meta  # which have no bits
    a, b = (t.detach().to_dense() if t.layout != torch.strided else t for t in (a, b))
    a, b = (t.detach().resolve_conj().resolve_neg().contiguous() for t in (a, b))
    a, b = (t.as_strided((t.numel(),), (1,)).view(torch.uint8) for t in (a, b))  # one may have any stride
    wide = not (a.numel() % 8 or a.storage_offset() % 8 or b.storage_offset() % 8)  # seven times as fast
    return torch.equal(*(t.view(torch.int64) if wide else t for t in (a, b)))


def _refuse_changes(
    before: Facts, root: nn.Module, *, again: Callable[[], Any], harmless: Callable[[], bool]
) -> bool:
    """Refuse a forward that changed ``root`` beside registered buffers; return whether nothing was changed.

    ``again`` runs it once more: what only the first run changes may stay if it is ``harmless``."""
    after = contents(root, running=True)
    held = {name for name, _ in root.named_buffers() if name in before}  # may be other tensors now
    changed = next((p for p in before | after if p not in held and before.get(p) != after.get(p)), None)
    if changed is None:
        return True
    again()
    once = contents(root, running=True) == after
    weights = [path for path, fact in before.items() if issubclass(fact[0], nn.Parameter)]
    once = once and all(before[path] == after.get(path) for path in weights)
    if once and harmless():
        return False
    remedy = "return it from forward, write it into a registered buffer (copy_), or switch off what keeps it"
    if once:
        remedy = "only the first run does so: call the model once, under torch.no_grad(), before it is traced"
    raise PlanError(
        f"a forward may write to registered buffers alone, found that it changes {changed} "
        f"({change(before.get(changed), after.get(changed))}){_author(root, changed)}, which other stages, "
        f"other ranks and the loss do not see; {remedy}"
    )


def _author(root: nn.Module, path: str) -> str:
    """Class, file and line of the forward that a path belongs to, as far as they are known; torch's own
    modules write to nothing but their buffers, so it is that of the module around them."""
    modules = dict(root.named_modules())
    while path and (path not in modules or type(modules[path]).__module__.startswith("torch.nn.")):
        path = path.rpartition(".")[0]
    kind = type(modules[path])
    code = getattr(kind.forward, "__code__", None)
    return f" in forward of {kind.__name__} ({code.co_filename}:{code.co_firstlineno})" if code else ""


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Refuse a forward that draws random numbers while it is traced: they would be the same ever after."""
    before = python_states()
    try:
        yield
    finally:  # whatever else it is refused for follows from that
        if python_states() != before:
            raise PlanError(
                "forward draws random numbers from Python or NumPy, which would be the same ever after; draw "
                "them with torch, or in a function that is named in leaves="
            )


def observe(run: Callable[..., Any], model: nn.Module, inputs: Sequence[torch.Tensor]) -> Seen:
    """Outputs, gradients, parameters and buffers of one forward and backward from a fixed random state.

    Raises: PlanError: the backward writes to a buffer."""
    for generator in generators_of(inputs):
        generator.manual_seed(0)
    model.zero_grad()
    outputs = tensors_in(run(*fresh(inputs)))
    seen: Seen = {f"output {i}": t.detach().clone() for i, t in enumerate(outputs)}
    # Without grad mode a view of a parameter still says that it requires a gradient.
    roots = [t for t in outputs if t.requires_grad and torch.is_grad_enabled()]
    weights = [torch.linspace(-1, 1, t.numel(), dtype=torch.float64).reshape(t.shape).to(t) for t in roots]
    versions = {name: version_of(b) for name, b in model.named_buffers()}
    if roots:
        torch.autograd.backward(roots, weights)
    for name, buffer in model.named_buffers():
        if versions.get(name, version_of(buffer)) != version_of(buffer):
            raise PlanError(
                f"the backward writes to buffer {name}, out of the order of micro-batches, as where a "
                "torch.utils.checkpoint has a batch norm in it; leave the checkpoint out (recompute=true "
                "computes stages again and writes once)"
            )
    seen |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    seen |= {f"parameter {name}": p.detach() for name, p in model.named_parameters()}
    seen |= {f"buffer {name}": b for name, b in model.named_buffers()}
    return seen


def refuse_difference(expected: Seen, found: Seen, *, mode: str) -> None:
    """Raise PlanError unless the trace has the model's outputs, gradients and buffers."""
    for name, tensor in expected.items():
        if not same_bits(tensor, found.get(name)):
            raise PlanError(
                f"the recorded run does not compute what the model computes in {mode} mode ({name} differs): "
                "forward depends on something that recording does not see (a global, a closure, a counter); "
                "name the module around it in leaves="
            )


def run_eager(
    eager: nn.Module, root: nn.Module, call: Call, inputs: tuple[torch.Tensor, ...]
) -> tuple[set[str], bool]:
    """Run ``eager``, a copy of ``root``; return the buffers and frozen parameters that a forward writes to,
    and whether it leaves nothing else behind.

    Raises: PlanError: it does not run, or changes the model beside these every time."""
    original = dict(root.named_parameters())
    parameters = [(name, p, memory_id(p)) for name, p in eager.named_parameters()]
    # a write that leaves the bits of this example as they are may change others
    held = (*eager.named_parameters(), *eager.named_buffers())
    versions = [(name, tensor, version_of(tensor)) for name, tensor in held]
    buffers, cold = dict(eager.named_buffers()), dict(root.named_buffers())
    before, watch = contents(eager, running=True), watching()
    run: Callable[..., Any] = lambda *x: call.run(eager, x)  # noqa: E731
    try:
        observe(run, eager, inputs)
    except PlanError:
        raise
    except Exception as error:
        if watch and needs_values(error):
            raise without_values(eager, error) from error
        if not torch.is_grad_enabled() and "require grad" in str(error):
            raise PlanError(
                f"in eval mode a model runs under torch.no_grad(), found that it takes a gradient there: "
                f"{_where_raised(eager, error)}{error}; take it under torch.enable_grad()"
            ) from error
        shapes = ", ".join(str(tuple(x.shape)) for x in inputs)
        raise PlanError(
            f"the model does not run on inputs of shape {shapes}: {_where_raised(eager, error)}{error}; "
            "give it an example (in a run: data) of the shape that it takes"
        ) from error
    moved = {name for name, p, place in parameters if memory_id(p) != place}
    filled = {name for name, p, _ in parameters if not same_bits(p, original[name])}
    filled |= {name for name, _, place in parameters if watch and place in watch.writes}
    counted = {name for name, tensor, version in versions if version_of(tensor) != version}
    filled |= counted & original.keys()
    refuse_written(eager, moved, filled)
    # Without values nobody can tell what the first run made from the first batch.
    harmless: Callable[[], bool] = lambda: not watch and _is_alike_warm(eager, root, call, inputs)  # noqa: E731
    clean = _refuse_changes(before, eager, again=lambda: observe(run, eager, inputs), harmless=harmless)
    now = {name: buffer for name, buffer in eager.named_buffers() if name in buffers}
    replaced = {name for name, buffer in now.items() if buffer is not buffers[name]}
    written = {name for name, buffer in now.items() if not same_bits(buffer, cold[name])}
    if watch:
        written |= {name for name, b in buffers.items() if memory_id(b) in watch.writes}
    return replaced | written | filled | (counted & now.keys()), clean and not replaced


def _where_raised(root: nn.Module, error: BaseException) -> str:
    """The path and class of the innermost module whose forward raised, as the start of a sentence."""
    paths, found = {module: path for path, module in root.named_modules()}, ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if isinstance(module := frame.f_locals.get("self"), nn.Module) and paths.get(module):
            kind = repr(module)
            found = f"in {paths[module]} ({kind if len(kind) < 60 else type(module).__name__}): "
    return found


def refuse_written(root: nn.Module, moved: Collection[str], filled: Collection[str]) -> None:
    """Raise PlanError for a forward that gives a parameter other memory, or writes to one that is trained."""
    for name, parameter in root.named_parameters():
        if name in moved or (name in filled and parameter.requires_grad):
            raise PlanError(
                "a forward may write to buffers, and in place to parameters with requires_grad=False, found "
                f"that it writes to {name}{_author(root, name)}; write to one of these, or between steps"
            )


def _is_alike_warm(warm: nn.Module, root: nn.Module, call: Call, inputs: tuple[torch.Tensor, ...]) -> bool:
    """Return whether ``warm``, which has run and is written to, computes what a copy of ``root`` computes."""
    cold, other = copy.deepcopy(root), other_data(call, inputs)
    if not warm.training:
        warm.train().eval()
    theirs, ours = dict(warm.named_buffers()), dict(cold.named_buffers())
    if list(theirs) != list(ours) or any(theirs[name].shape != ours[name].shape for name in ours):
        return False
    with torch.no_grad():
        for name, buffer in ours.items():
            theirs[name].copy_(buffer)
        for parameter in (*warm.parameters(), *cold.parameters()):
            _move(parameter)
    found = [observe(lambda *x, m=model: call.run(m, x), model, other) for model in (warm, cold)]
    return list(found[0]) == list(found[1]) and all(map(same_bits, *(seen.values() for seen in found)))
