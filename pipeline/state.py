"""The state of a pipeline under the plain model's names, gathered and loaded whatever the cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..compression.codec import decode, encode
from ..compression.errors import PlanError
from ..stages.graph import LayerGraph
from ..stages.layers import is_local
from ..stages.stage import Stage
from . import group
from .ownership import Ownership
from .update import Update


class State:
    """Parameters and buffers that this process holds, by their keys in the model's own state_dict.

    Args:    stages: those of this process.
             own: who owns which parameter."""

    def __init__(
        self,
        model: nn.Module,
        graph: LayerGraph,
        *,
        stages: Mapping[int, Stage],
        own: Ownership,
    ) -> None:
        names = {id(p): name for name, p in model.named_parameters()}
        readers = _readers(model, graph, own.layers)
        held = {key for stage in stages.values() for key in stage.held}
        self.keys: list[str] = []
        self.source: dict[str, int] = {}
        self.held: dict[str, torch.Tensor] = {}
        for key, tensor in model.state_dict(keep_vars=True).items():
            if not isinstance(tensor, torch.Tensor):
                raise PlanError(
                    f"a state is made of tensors, {key} of the model is not; keep it outside the model"
                )
            read = {own.stage_of[names[id(tensor)]]} if id(tensor) in names else readers.get(id(tensor), {0})
            self.keys.append(key)
            self.source[key] = own.rank_of[min(read)]
            if read & set(stages) or id(tensor) in held:
                self.held[key] = tensor

    def gather(self, update: Update, steps: int) -> dict[str, Any]:
        """{"model", "optimizer", "scheduler", "scaler", "step"}: everything on rank 0, this process's part
        elsewhere."""
        mine = [key for key in self.held if self.source[key] == group.rank()]
        optimizer = update.state()
        tensors = [self.held[key].detach() for key in mine]
        notes: dict[str, Any] = {}
        for name, kept in optimizer.items():
            notes[name] = {"group": kept["group"], "state": {}}
            for what, item in kept["state"].items():
                if isinstance(item, torch.Tensor):
                    notes[name]["state"][what] = {"tensor": len(tensors)}
                    tensors.append(item)
                else:
                    notes[name]["state"][what] = {"plain": item}
        said = group.gather_json({"keys": mine, "optimizer": notes, "scheduler": update.scheduler_state()})
        frames = [encode(tensor, codec="raw") for tensor in tensors]
        gathered = group.gather_tensors(frames)
        if gathered is None:
            said, gathered = [said[group.rank()]], [frames]
        return _put_together(said, gathered, self.keys, steps) | {"scaler": update.scale.state()}

    def load(self, update: Update, state: Mapping[str, Any]) -> int:
        """Copy what ``gather`` returned on rank 0 into this process's tensors; returns the steps done."""
        if not {"model", "optimizer", "step"} <= set(state):
            raise PlanError(
                "a state has the keys model, optimizer and step, found "
                f"{', '.join(map(str, state)) or 'none'}; take one from state_dict"
            )
        model = state["model"]
        if strange := sorted(set(self.keys) ^ set(model)):
            raise PlanError(f"a state belongs to the model it was taken from; {strange[0]} is not in both")
        with torch.no_grad():
            for key, tensor in self.held.items():
                if model[key].shape != tensor.shape:
                    raise PlanError(
                        f"{key} of the model has shape {tuple(tensor.shape)}, the state "
                        f"{tuple(model[key].shape)}"
                    )
                tensor.copy_(model[key])
        update.load(state["optimizer"], state.get("scheduler"))
        update.scale.load(state.get("scaler"))
        return int(state["step"])


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
            state = {
                w: tensors[i["tensor"]] if "tensor" in i else i["plain"] for w, i in kept["state"].items()
            }
            settings = {k: tuple(v) if isinstance(v, list) else v for k, v in kept["group"].items()}
            optimizer[name] = {"state": state, "group": settings}
    ordered = {key: model[key] for key in keys if key in model}
    return {"model": ordered, "optimizer": optimizer, "scheduler": scheduler, "step": steps}
