"""What a trace took from the model's modules, held against them as they are at every step.

A trace runs the forward of a container once: a flag or a number that it read there is part of the graph, and
hooks, children and a forward that come later are not. Layers call their modules, so what is set on those
counts at once. A changed flag (``model.layer1.eval()`` freezes the statistics of a block) is honoured where
no container's forward read it, and refused elsewhere."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...compression.errors import PlanError
from .layers import Traced, parts_of
from .proof import hooks_on_all_modules, is_itself
from .watch import Watch
from .watched import Watched

REMEDY = "set it back, or make the Pipeline anew and load its state_dict()"


class Flags:
    """Watches the modules of ``model``; those that the user drops are watched no longer.

    Args:    traces: the trace of each mode, "train" and "eval".
             roots: for each a copy of the model, set as it was when it was traced, on the meta device.
             stage_of: the stage of every layer of the train trace."""

    def __init__(
        self,
        model: nn.Module,
        *,
        traces: Mapping[str, Traced],
        roots: Mapping[str, nn.Module],
        stage_of: Sequence[int],
    ) -> None:
        self.layers_of: dict[int, set[str]] = {}
        called: set[int] = set()
        for mode, traced in traces.items():
            for layer in (layer for layer in traced.layers if layer.node.op == "call_module"):
                for module in model.get_submodule(str(layer.node.target)).modules():
                    called.add(id(module))
                    if mode == "train":
                        self.layers_of.setdefault(id(module), set()).add(layer.name)
        layers = [layer for traced in traces.values() for layer in traced.layers]
        paths = {str(layer.node.target) for layer in layers if layer.node.op == "call_module"}
        self.watch = Watch(model, paths, read=lambda path, name: (path, name) in self.reads)
        self.watched = [Watched(path, m, leaf=id(m) in called) for path, m in model.named_modules()]
        self.asleep = [module.training for module in roots["eval"].modules()]
        self.everywhere = hooks_on_all_modules()
        self.states, self.frozen = _on_several(model, traces["train"], stage_of)
        self.moved: frozenset[str] = frozenset()
        self.outside = [*traces["train"].outside, *traces["eval"].outside]
        evaluation = {read for read in traces["eval"].reads if read[1] != "training"}
        self.reads = traces["train"].reads | evaluation

    def check(self, mode: str) -> None:
        """Refuse what has changed since the trace and cannot be honoured; note in ``moved`` the names of the
        layers whose modules are set in another way than then.

        Args:    mode: "train" for a step; "eval": the training flags are going to be ``evaluating``.
        Raises:  PlanError: what was changed is part of the trace, or a cut relies on it."""
        alive = [(w, module) for w in self.watched if (module := w.module()) is not None]
        if changed := [(w, module) for w, module in alive if w.changed(module)]:
            for watched, module in changed:
                self._refuse(watched, module, mode)
            for watched, module in changed if mode == "train" else ():
                watched.see(module)
            moved = [w for w, m in alive if w.leaf and (w.differences(m) or w.rebuilt(m))]
            self.moved = frozenset(name for w in moved for name in self.layers_of.get(w.key, ()))
        if hooks_on_all_modules() != self.everywhere:
            raise PlanError(
                "a trace goes through containers, and a hook on all modules that was registered after "
                f"Pipeline(...) does not run there; {REMEDY}"
            )
        for name, reference in self.frozen.items():
            if (parameter := reference()) is not None and parameter.requires_grad:
                raise PlanError(
                    f"{name} was frozen when the model was traced, is used on several stages, and requires a "
                    f"gradient now; {REMEDY}"
                )
        self.watch.check()
        if other := next((read for read in self.outside if read.changed()), None):
            raise PlanError(
                f"forward goes on from {other.name}, which its code ({other.where}) read when the model was "
                f"traced, and that is another now; {REMEDY}"
            )

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """The block in which all modules stand as ``model.eval()`` puts them; then as they stood before."""
        pairs = zip(self.watched, self.asleep, strict=True)
        alive = [(module, flag) for w, flag in pairs if (module := w.module()) is not None]
        before = [module.training for module, _ in alive]
        try:
            for module, flag in alive:
                module.training = flag
            yield
        finally:
            for (module, _), flag in zip(alive, before, strict=True):
                module.training = flag

    def _refuse(self, watched: Watched, module: nn.Module, mode: str) -> None:
        """Refuse what cannot be honoured in a module that was changed."""
        where = watched.path or "the model"
        for name, (old, new) in watched.differences(module).items():
            if mode == "eval" and name == "training":
                continue
            if name != "forward" and (watched.path, name) in self.reads:
                raise PlanError(
                    f"{where}.{name} was {old!r} when the model was traced, which read it once, and is "
                    f"{_said(new)} now; {REMEDY}"
                )
        if not watched.leaf and watched.rebuilt(module):
            raise PlanError(
                f"the trace went through {where}, and its class, forward, hooks, children or own tensors, "
                f"which were changed after Pipeline(...), would not count; {REMEDY}"
            )
        if watched.proves and not is_itself(module):
            raise PlanError(
                f"a gradient may stay behind where {where} gives zeros, as it was a plain layer when it was "
                f"traced, and now it has a hook or a forward of its own; {REMEDY}"
            )
        if mode == "train" and watched.key in self.states and module.training and not watched.traced[0]:
            raise PlanError(
                f"{where} was in eval mode when the model was cut; in train mode it writes to a buffer that "
                f"several stages use; {REMEDY}"
            )


def _said(item: Any) -> str:
    return repr(item) if len(repr(item)) < 40 else f"another {type(item).__name__}"


def _on_several(
    model: nn.Module, traced: Traced, stage_of: Sequence[int]
) -> tuple[set[int], dict[str, weakref.ref[nn.Parameter]]]:
    """What several stages use: the modules in eval mode (their id) with such a buffer, the frozen parameters.

    A cut there would have been refused if they had been in train mode, or trained."""
    stages: dict[int, set[int]] = {}
    last = max(stage_of)
    readers = [*zip(((layer,) for layer in traced.layers), stage_of, strict=True), ((), last)]
    for layers, stage in readers:
        parts = parts_of(model, traced, layers, output=not layers)
        modules = parts.modules.values()
        held = [*parts.tensors.values(), *(t for m in modules for t in (*m.parameters(), *m.buffers()))]
        for tensor in held:
            stages.setdefault(tensor.untyped_storage()._cdata, set()).add(stage)

    def spread(tensor: torch.Tensor) -> bool:
        return len(stages.get(tensor.untyped_storage()._cdata, ())) > 1

    asleep = {id(m) for m in model.modules() if not m.training and any(map(spread, m.buffers(recurse=False)))}
    frozen = {n: weakref.ref(p) for n, p in model.named_parameters() if not p.requires_grad and spread(p)}
    return asleep, frozen
