"""The state of a pipeline under the plain model's names, gathered and loaded whatever the cut."""

import contextlib
import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...compression.codec import decode, encode
from ...compression.errors import PlanError
from ...stages.plan.plan import Plan
from ...stages.stage.stage import Stage
from ...stages.tracing.layers import is_local
from ...stages.tracing.tracer import LayerGraph
from ..distributed.process_group import World
from ..optimizer.state_checks import check_model, check_names, check_parts, is_plain, kind_of
from ..optimizer.update import Has, Update
from .arguments import check_versions_of
from .ownership import Ownership


class State:
    """Parameters and buffers that this process holds, by their keys in the model's own state_dict.

    Attributes: hidden: keys of buffers that the state_dict leaves out; forward may write to them too.
                readers: for every buffer (by identity) the stages whose layers use it.
                stages: by stage of this process its parameters, and the buffers that its layers name."""

    def __init__(
        self, model: nn.Module, graph: LayerGraph, *, world: World, stages: Mapping[int, Stage],
        own: Ownership,
    ) -> None:  # fmt: skip
        self.world = world
        names = {id(p): name for name, p in model.named_parameters()}
        self.readers = readers_of_buffers(model, graph, own.layers)
        held = {key for stage in stages.values() for key in stage.held}
        self.shared: dict[str, str] = {}  # for every further name of a tensor its first one
        firsts: dict[int, str] = {}
        self.source: dict[str, int] = {}
        self.held: dict[str, torch.Tensor] = {}
        self.expected: dict[str, torch.Tensor] = {}  # on the meta device: of all ranks, without memory
        listed = model.state_dict(keep_vars=True)
        self.keys = list(listed)
        buffers = model.named_buffers(remove_duplicate=False)
        self.hidden = {key for key, _ in buffers} - set(listed)
        for key, tensor in [*listed.items(), *((key, model.get_buffer(key)) for key in sorted(self.hidden))]:
            if not isinstance(tensor, torch.Tensor):
                rule = f"a state is made of tensors, {key} of the model is not"
                raise PlanError(f"{rule}; keep it outside the model")
            readers = self.readers.get(id(tensor), {0})
            read = {own.stage_of[names[id(tensor)]]} if id(tensor) in names else readers
            if (first := firsts.setdefault(id(tensor), key)) != key:
                self.shared[key] = first
            self.expected[key] = torch.empty_like(tensor, device="meta")
            self.source[key] = own.owner(min(read))
            if read & set(stages) or id(tensor) in held:
                self.held[key] = tensor
        self.stages = {
            stage: {
                key: tensor
                for key, tensor in self.held.items()
                if id(tensor) in one.held and own.stage_of.get(names.get(id(tensor), ""), stage) == stage
            }
            for stage, one in stages.items()
        }

    def part(self, update: Update, *, hidden: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return this process's part of the state: JSON values, and its tensors by the names that this uses,
        offloaded ones without elements; ``hidden``: also those that the model's state_dict leaves out."""
        mine = [key for key in self.held if self.source[key] == self.world.rank]
        mine = [key for key in mine if hidden or key not in self.hidden]
        keys = {key: f"model/{self.shared.get(key, key)}" for key in mine}  # a tied tensor is there once
        tensors = {name: self.held[key] for key, name in keys.items()}
        notes = {
            name: {part: _noted(name, part, items, tensors) for part, items in kept.items()}
            for name, kept in update.state().items()
            if update.owner[name] == self.world.rank  # of replicas the first
        }
        said = {
            "keys": keys,
            "hidden": [key for key in mine if key in self.hidden],
            "optimizer": notes,
            "classes": sorted({type(made).__name__ for made in update.optimizers.values()}),
            "scheduler": update.scheduler_state(),
        }
        return said, tensors

    def wanted(self, update: Update) -> tuple[set[str], set[str]]:
        """The keys of the model, and the parameters of its optimizers, that this process would load."""
        return set(self.held), {update.names[id(parameter)] for parameter in update.tensors()}

    def gather(self, update: Update, steps: int) -> dict[str, Any]:
        """{"model", "optimizer", "optimizer_class", "scheduler", "scaler", "step"}: everything on rank 0,
        this process's part elsewhere; on the CPU, wherever the stages compute."""
        with update.resident():
            said, tensors = self.part(update, hidden=False)
            frames = [encode(tensor.detach().cpu(), codec="raw") for tensor in tensors.values()]
        rows = self.world.all_gather_json([said, list(tensors)], at="the state")
        gathered = self.world.gather(frames, at="the state")
        if gathered is None:
            rows, gathered = [rows[self.world.rank]], [frames]
        parts = [
            (said, {name: decode(frame) for name, frame in zip(names, some, strict=True)})
            for (said, names), some in zip(rows, gathered, strict=True)
        ]
        return put_together(parts, self.keys, steps) | {"scaler": update.scale.state()}

    def checked(
        self, update: Update, state: object, plan: Plan, *, keys: Collection[str] | None = None
    ) -> Mapping[str, Any]:
        """The parts of a state that ``gather`` returned on rank 0; raises PlanError. With ``keys``, those of
        the whole model, the state has only what is ``wanted`` here."""
        try:
            parts = check_parts(state)
            check_versions_of(parts, plan)
            check_names("model", *((parts["model"], self.keys) if keys is None else (keys, self.expected)))
            mine = {key: self.expected[key] for key in (self.keys if keys is None else self.held)}
            check_model(parts["model"], mine, {k: v for k, v in self.shared.items() if k in mine})
            with update.resident() if keys is None else contextlib.nullcontext():  # a person's may be these
                update.check(parts)
        except RecursionError as error:
            rule = "a state ends somewhere, and this one holds itself; take one from state_dict"
            raise PlanError(rule) from error
        return parts

    def load(self, update: Update, parts: Mapping[str, Any], *, names: Collection[str] | None = None) -> int:
        """Copy ``checked`` parts, the same on all ranks, into this process's tensors; returns the steps done.

        With ``names``, those of all optimizers, the parts have only what is ``wanted`` here."""
        ours = self.world.all_gather_json([update.names[id(p)] for p in update.tensors()])
        theirs = parts["optimizer"] if names is None else names
        check_names("optimizer", theirs, {name for some in ours for name in some})
        for has in update.turns(at_once=names is None):
            update.load_kept(parts["optimizer"], has=has)
            self._copy(parts["model"], has=has)
        if update.scheduler is not None:
            update.scheduler.load(parts.get("scheduler"))
        update.scale.load(parts.get("scaler"))
        return int(parts["step"])

    def _copy(self, model: Mapping[str, torch.Tensor], *, has: Has) -> None:
        """Copy into those tensors that it ``has``; a state that holds some of them is read before they are
        written."""
        live = {tensor.untyped_storage().data_ptr() for tensor in self.held.values()}
        sources = {key: model[key].detach() for key, t in self.held.items() if key in model and has(id(t))}
        for key, tensor in sources.items():
            if tensor.untyped_storage().data_ptr() in live:
                sources[key] = tensor.clone()
        with torch.no_grad():
            for key, source in sources.items():
                _once(self.held[key]).copy_(_once(source, like=self.held[key]))


def _once(tensor: torch.Tensor, *, like: torch.Tensor | None = None) -> torch.Tensor:
    """``tensor`` without what ``like`` (itself) repeats: torch writes to no element twice."""
    for dim, step in enumerate((tensor if like is None else like).stride()):
        if step == 0:
            tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    return tensor


def _noted(
    name: str, part: str, items: Mapping[str, Any], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """JSON values of a part of an optimizer's state of a parameter: plain values, and the names of tensors,
    which are added to ``tensors``."""
    notes: dict[str, Any] = {}
    for what, item in items.items():
        if isinstance(item, torch.Tensor):
            notes[what] = {"tensor": f"optimizer/{name}/{part}/{what}"}
            tensors[notes[what]["tensor"]] = item
        elif is_plain(item):
            notes[what] = {"plain": copy.deepcopy(item)}
        else:
            raise PlanError(
                f"a state holds tensors and plain values, and the optimizer keeps {what} of {name} as "
                f"{kind_of(item)}; train to the end with it, or take another optimizer"
            )
    return notes


def readers_of_buffers(model: nn.Module, graph: LayerGraph, stage_of: Sequence[int]) -> dict[int, set[int]]:
    """For every buffer (by identity) the stages whose layers use it."""
    found: dict[int, set[int]] = {}
    for layer, stage in zip(graph.train.layers, stage_of, strict=True):
        used: list[torch.Tensor] = []
        if layer.node.op == "call_module":
            used += model.get_submodule(str(layer.node.target)).buffers()
        for node in layer.node.all_input_nodes:
            if is_local(node) and str(node.target) not in graph.train.constants:
                path, _, name = str(node.target).rpartition(".")
                used.append(getattr(model.get_submodule(path), name))
        for buffer in used:
            found.setdefault(id(buffer), set()).add(stage)
    return found


def put_together(
    parts: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], keys: Sequence[str], steps: int
) -> dict[str, Any]:
    """One state from what every rank said, and the tensors that it said it of."""
    model, optimizer = dict[str, Any](), dict[str, dict[str, Any]]()
    for said, tensors in parts:
        model |= {key: tensors[name] for key, name in said["keys"].items()}
        for name, kept in said["optimizer"].items():
            items = {
                what: {k: tensors[i["tensor"]] if "tensor" in i else i["plain"] for k, i in noted.items()}
                for what, noted in kept.items()
            }
            settings = {k: tuple(v) if isinstance(v, list) else v for k, v in items["group"].items()}
            optimizer[name] = {"state": items["state"], "group": settings}
    classes = ", ".join(sorted({kind for said, _ in parts for kind in said["classes"]}))
    return {
        "model": {key: model[key] for key in keys if key in model},
        "optimizer": optimizer,
        "optimizer_class": classes or None,
        "scheduler": next((said["scheduler"] for said, _ in parts if said["scheduler"]), None),
        "step": steps,
    }


def chosen(
    said: Mapping[str, Any], keys: Collection[str], names: Collection[str]
) -> tuple[dict[str, Any], set[str]]:
    """Of what a rank said only these keys of the model and parameters; and the tensors that this uses."""
    optimizer = {name: kept for name, kept in said["optimizer"].items() if name in names}
    mine = {key: name for key, name in said["keys"].items() if key in keys}
    items = [item for kept in optimizer.values() for noted in kept.values() for item in noted.values()]
    used = {*mine.values(), *(item["tensor"] for item in items if "tensor" in item)}
    return {**said, "keys": mine, "optimizer": optimizer}, used
