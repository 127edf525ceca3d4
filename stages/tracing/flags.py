"""What a trace took from the model's modules, held against them as they are at every step.

A trace runs the forward of a container once: a flag or a number that it read there is part of the graph, and
hooks, children and a forward that come later are not. Layers call their modules, so what is set on those
counts at once. A changed flag (``model.layer1.eval()`` freezes the statistics of a block) is honoured where
no container's forward read it, and refused elsewhere."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from ...compression.errors import PlanError
from .attributes import read_in
from .capture.reads import ASKS
from .layers import Traced, parts_of
from .proof import hooks_on_all_modules
from .unsupported import refuse_autocast
from .watch import REMEDY, Watch


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
        calls = [
            (mode, layer)
            for mode in traces
            for layer in traces[mode].layers
            if layer.node.op == "call_module"
        ]
        for layer in (layer for mode, layer in calls if mode == "train"):
            for module in model.get_submodule(str(layer.node.target)).modules():
                self.layers_of.setdefault(id(module), set()).add(layer.name)
        evaluation = {read for read in traces["eval"].reads if read[1] != "training"}
        reads = traces["train"].reads | evaluation
        paths = {str(layer.node.target) for _, layer in calls}
        self.watch = Watch(model, paths, read=read_in(reads))
        self.asleep = [module.training for module in roots["eval"].modules()]
        self.everywhere, self.dtype = hooks_on_all_modules(), torch.get_default_dtype()
        self.trained = {
            name: (weakref.ref(parameter), parameter.requires_grad)
            for name, parameter in model.named_parameters()
            if ("", ASKS) in reads or (name, ASKS) in reads
        }
        self.states, self.frozen = _on_several(model, traces["train"], stage_of)
        self.moved: frozenset[str] = frozenset()
        read = (*traces["train"].outside, *traces["eval"].outside)
        self.outside = [*{(one.name, one.where, id(one.value)): one for one in read}.values()]

    def check(self, mode: str) -> None:
        """Refuse what has changed since the trace and cannot be honoured; note in ``moved`` the names of the
        layers whose modules are set in another way than then.

        Args:    mode: "train" for a step; "eval": the training flags are going to be ``evaluating``.
        Raises:  PlanError: what was changed is part of the trace, or a cut relies on it."""
        refuse_autocast()
        if (now := torch.get_default_dtype()) != self.dtype:
            raise PlanError(
                f"the default dtype was {self.dtype} when the model was traced, and forward may make tensors "
                f"of it; it is {now} now: torch.set_default_dtype({self.dtype}), or make the Pipeline anew"
            )
        if changed := self.watch.check(mode):
            seen = changed if mode == "train" else []
            for watched, module in seen:
                if (
                    watched.key in self.states
                    and module.training
                    and not watched.traced.get("training", True)
                ):
                    raise PlanError(
                        f"{watched.path or 'the model'} was in eval mode when the model was cut; in train "
                        f"mode it writes to a buffer that several stages use; {REMEDY}"
                    )
            for watched, module in seen:
                watched.see(module)
            moved = [w.key for w, module in self.watch.alive() if w.called and w.moved(module)]
            self.moved = frozenset(name for key in moved for name in self.layers_of.get(key, ()))
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
        for name, (reference, trained) in self.trained.items():
            if (parameter := reference()) is not None and parameter.requires_grad != trained:
                raise PlanError(
                    f"forward read whether {name} requires a gradient when the model was traced, and goes on "
                    f"from {trained}, which is {not trained} now; {REMEDY}"
                )
        if other := next((read for read in self.outside if read.changed()), None):
            raise PlanError(
                f"forward goes on from {other.name}, which its code ({other.where}) read when the model was "
                f"traced, and that is another now; {REMEDY}"
            )

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """The block in which all modules stand as ``model.eval()`` puts them; then as they stood before."""
        pairs = zip(self.watch.modules, self.asleep, strict=True)
        alive = [(module, flag) for w, flag in pairs if (module := w.module()) is not None]
        before = [module.training for module, _ in alive]
        try:
            for module, flag in alive:
                module.training = flag
            yield
        finally:
            for (module, _), flag in zip(alive, before, strict=True):
                module.training = flag


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
