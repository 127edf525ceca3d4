"""The state of a pipeline under the plain model's names, gathered and loaded whatever the cut."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...compression.codec import decode, encode
from ...compression.errors import PlanError
from ...stages.planner.plan import Plan
from ...stages.stage.stage import Stage
from ...stages.tracing.graph import LayerGraph
from ...stages.tracing.layers import is_local
from ..ranks.world import World
from ..weights.kinds import is_plain, kind_of
from ..weights.state_checks import check_model, check_names, check_parts
from ..weights.update import Update
from .arguments import check_versions_of
from .ownership import Ownership


class State:
    """Parameters and buffers that this process holds, by their keys in the model's own state_dict.

    Args:    stages: those of this process.
             own: who owns which parameter."""

    def __init__(
        self,
        model: nn.Module,
        graph: LayerGraph,
        *,
        world: World,
        stages: Mapping[int, Stage],
        own: Ownership,
    ) -> None:
        self.world = world
        names = {id(p): name for name, p in model.named_parameters()}
        readers = _readers(model, graph, own.layers)
        held = {key for stage in stages.values() for key in stage.held}
        self.keys: list[str] = []
        self.shared: dict[str, str] = {}  # for every further name of a tensor its first one
        firsts: dict[int, str] = {}
        self.source: dict[str, int] = {}
        self.held: dict[str, torch.Tensor] = {}
        self.expected: dict[str, torch.Tensor] = {}  # on the meta device: of all ranks, without memory
        for key, tensor in model.state_dict(keep_vars=True).items():
            if not isinstance(tensor, torch.Tensor):
                raise PlanError(
                    f"a state is made of tensors, {key} of the model is not; keep it outside the model"
                )
            read = {own.stage_of[names[id(tensor)]]} if id(tensor) in names else readers.get(id(tensor), {0})
            self.keys.append(key)
            if (first := firsts.setdefault(id(tensor), key)) != key:
                self.shared[key] = first
            self.expected[key] = torch.empty_like(tensor, device="meta")
            self.source[key] = own.rank_of(min(read), 0)
            if read & set(stages) or id(tensor) in held:
                self.held[key] = tensor

    def gather(self, update: Update, steps: int) -> dict[str, Any]:
        """{"model", "optimizer", "optimizer_class", "scheduler", "scaler", "step"}: everything on rank 0,
        this process's part elsewhere; on the CPU, wherever the stages compute."""
        mine = [key for key in self.held if self.source[key] == self.world.rank]
        tensors = [self.held[key].detach() for key in mine]
        notes = {
            name: {part: _noted(name, items, tensors) for part, items in kept.items()}
            for name, kept in update.state().items()
        }
        said = self.world.all_gather_json(
            {
                "keys": mine,
                "optimizer": notes,
                "classes": sorted({type(made).__name__ for made in update.optimizers.values()}),
                "scheduler": update.scheduler_state(),
            }
        )
        frames = [encode(tensor.cpu(), codec="raw") for tensor in tensors]
        gathered = self.world.gather(frames)
        if gathered is None:
            said, gathered = [said[self.world.rank]], [frames]
        return _put_together(said, gathered, self.keys, steps) | {"scaler": update.scale.state()}

    def checked(self, update: Update, state: object, plan: Plan) -> Mapping[str, Any]:
        """The parts of a state that ``gather`` returned on rank 0; raises PlanError for whatever is wrong."""
        try:
            parts = check_parts(state)
            check_versions_of(parts, plan)
            check_model(parts["model"], self.expected, self.shared)
            update.check(parts)
        except RecursionError as error:
            raise PlanError(
                "a state ends somewhere, and this one holds itself; take one from state_dict"
            ) from error
        return parts

    def load(self, update: Update, parts: Mapping[str, Any]) -> int:
        """Copy ``checked`` parts, the same on all ranks, into this process's tensors; returns the steps done.

        Raises: PlanError, on every rank: they have something of other parameters than all ranks together."""
        names = self.world.all_gather_json([update.names[id(p)] for p in update.tensors()])
        check_names(parts["optimizer"], {name for some in names for name in some})
        update.load(parts["optimizer"], parts.get("scheduler"))
        update.scale.load(parts.get("scaler"))
        self._copy(parts["model"])
        return int(parts["step"])

    def _copy(self, model: Mapping[str, torch.Tensor]) -> None:
        """Into this process's tensors; a state that holds some of these is read before they are written."""
        live = {tensor.untyped_storage().data_ptr() for tensor in self.held.values()}
        sources = {key: model[key].detach() for key in self.held}
        for key, tensor in sources.items():
            if tensor.untyped_storage().data_ptr() in live:
                sources[key] = tensor.clone()
        with torch.no_grad():
            for key, tensor in self.held.items():
                tensor.copy_(sources[key])


def _noted(name: str, items: Mapping[str, Any], tensors: list[torch.Tensor]) -> dict[str, Any]:
    """What JSON can say of an optimizer's items: plain values, and which of ``tensors`` each other is."""
    notes: dict[str, Any] = {}
    for what, item in items.items():
        if isinstance(item, torch.Tensor):
            notes[what] = {"tensor": len(tensors)}
            tensors.append(item.detach())
        elif is_plain(item):
            notes[what] = {"plain": copy.deepcopy(item)}
        else:
            raise PlanError(
                f"a state holds tensors and plain values, and the optimizer keeps {what} of {name} as "
                f"{kind_of(item)}; train to the end with it, or take another optimizer"
            )
    return notes


def _readers(model: nn.Module, graph: LayerGraph, stage_of: Sequence[int]) -> dict[int, set[int]]:
    """For every buffer (by identity) the stages whose layers use it."""
    found: dict[int, set[int]] = {}
    for layer, stage in zip(graph.train.layers, stage_of, strict=True):
        used = (
            list(model.get_submodule(str(layer.node.target)).buffers())
            if layer.node.op == "call_module"
            else []
        )
        for node in layer.node.all_input_nodes:
            if is_local(node) and str(node.target) not in graph.train.constants:
                path, _, name = str(node.target).rpartition(".")
                used.append(getattr(model.get_submodule(path), name))
        for buffer in used:
            found.setdefault(id(buffer), set()).add(stage)
    return found


def _put_together(
    said: Sequence[Mapping[str, Any]],
    gathered: Sequence[Sequence[torch.Tensor]],
    keys: Sequence[str],
    steps: int,
) -> dict[str, Any]:
    """One state from what every rank said, and the frames of the tensors it said it of."""
    model: dict[str, Any] = {}
    scheduler = next((part["scheduler"] for part in said if part["scheduler"]), None)
    optimizer: dict[str, dict[str, Any]] = {}
    for part, frames in zip(said, gathered, strict=True):
        tensors = [decode(frame) for frame in frames]
        model |= dict(zip(part["keys"], tensors, strict=False))
        for name, kept in part["optimizer"].items():
            items = {
                what: {k: tensors[i["tensor"]] if "tensor" in i else i["plain"] for k, i in noted.items()}
                for what, noted in kept.items()
            }
            settings = {k: tuple(v) if isinstance(v, list) else v for k, v in items["group"].items()}
            optimizer[name] = {"state": items["state"], "group": settings}
    ordered = {key: model[key] for key in keys if key in model}
    classes = ", ".join(sorted({kind for part in said for kind in part["classes"]}))
    return {
        "model": ordered,
        "optimizer": optimizer,
        "optimizer_class": classes or None,
        "scheduler": scheduler,
        "step": steps,
    }
