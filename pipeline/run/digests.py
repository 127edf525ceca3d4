"""Digests of a training on record, and the first step at which two runs differ.

A line of ``digests.jsonl`` has the loss of a step, and by the model's own names what there is after it:
digests of each parameter or buffer, of its gradient, and of the optimizer's state of it. They are those of
the plain loop, so two runs that cut, schedule and pack in other ways have the same lines."""

from __future__ import annotations

import dataclasses
import operator
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
import yaml
from omegaconf.errors import OmegaConfBaseException

from ...compression.errors import ConfigError
from ...stages.safetensors_io import bytes_of
from ..runtime.report import Report
from .layer_tensors import LayerTensor, LayerTensors, in_order, paired, where_they_part
from .logs import JsonLog
from .metrics import read_lines
from .resume import flat, kind_of
from .run_folder import RunFolder

if TYPE_CHECKING:
    from ...stages.plan.plan import Plan
    from ..pipeline import Pipeline

NO_NUMBERS = ("nan", "inf", "-inf")  # losses, which metrics.jsonl has as null
KINDS = ("weights", "gradients", "optimizer state")
"""Kinds of the three digests of a name, in their order."""


def digest_of(item: Any) -> str:
    """64 bits (xxh3) of a tensor's elements, dtype, shape and strides, of what a mapping, a list or an object
    holds, or of another value as it is shown; a stride along one element does not count."""
    if isinstance(item, Mapping):
        parts = [f"{key!r} {digest_of(value)}" for key, value in item.items()]
        return xxhash.xxh3_64_hexdigest(repr(sorted(parts)).encode())
    if isinstance(item, list | tuple):
        return xxhash.xxh3_64_hexdigest(repr([*map(digest_of, item)]).encode())
    if not isinstance(item, torch.Tensor):
        has_address = type(item).__repr__ is object.__repr__ and not callable(item)
        shown = digest_of(vars(item)) if has_address and hasattr(item, "__dict__") else repr(item)
        return xxhash.xxh3_64_hexdigest(f"{type(item).__qualname__} {shown}".encode())
    layout: Any = item.layout
    dense = item if layout is torch.strided else item.to_dense()
    if dense is item:
        layout = [size > 1 and stride for size, stride in zip(item.shape, item.stride(), strict=True)]
    hashed = xxhash.xxh3_64(f"{item.dtype} {tuple(item.shape)} {layout}".encode())
    hashed.update(bytes_of(dense))
    return hashed.hexdigest()


def _digest_of_elements(tensor: torch.Tensor) -> str:
    """The same without strides, in which what crosses a cut may differ."""
    return digest_of(tensor.contiguous() if tensor.layout is torch.strided else tensor)


def states_of(pipe: Pipeline) -> dict[str, tuple[torch.Tensor, Mapping[str, Any] | None]]:
    """By name what the stages of this rank hold, each with the state that its optimizer has of it; None where
    it has no optimizer here: of replicas that divide the update, only the owner has one.

    The copy of a tied parameter of another stage is left out: it is that stage's of some step."""
    groups = [(one, group) for one in pipe.update.optimizers.values() for group in one.param_groups]
    states = {id(p): one.state.get(p, {}) for one, group in groups for p in group["params"]}
    own = {name for held in pipe.state.stages.values() for name in held}
    return {name: (t, states.get(id(t))) for name, t in pipe.state.held.items() if name in own}


def digests_of(pipe: Pipeline) -> dict[str, list[str | None]]:
    """By name what this rank holds: its digest, that of its gradient and of its optimizer's state; offloaded
    parameters come for it, those of a layer at a time."""
    found: dict[str, list[str | None]] = {}
    for has in pipe.update.turns(at_once=False):
        for name, (tensor, state) in states_of(pipe).items():
            if not has(id(tensor)):
                continue
            found[name] = [digest_of(tensor), None, None]
            if state is not None:
                found[name][1:] = [digest_of(tensor.grad), digest_of(state) if state else None]
    return found


def check_plan(plan: Plan) -> None:
    """Refuse digests of a training that has no moment at which all of it is there; raises ConfigError."""
    if plan.streams:
        raise ConfigError(
            f"digest.every= reads weights and gradients after a step, found weights={plan.weights}, where "
            "micro-batches of several steps are in flight; leave out either"
        )


def record_digests(
    pipe: Pipeline, log: JsonLog, *, every: int, tell: Callable[[str], None], layers: bool = False,
    world: JsonLog | None = None,
) -> Callable[[Report], None]:  # fmt: skip
    """Return what writes a line after each ``every``-th step, with ``layers`` also the digests of what layers
    returned, and once into ``world`` the host of each rank, its stages and the names that it holds;
    collective."""

    def is_due() -> bool:
        return (pipe.num_steps + 1) % every == 0

    returned: LayerTensors | None = None
    if layers:
        how: Any = {"keep": _digest_of_elements, "wanted": is_due, "every_gradient": False}
        returned = LayerTensors(pipe.stages.values(), "", **how)

    def gathered(mine: Any) -> list[Any]:
        return [mine] if pipe.world.is_alone else pipe.world.all_gather_json(mine, at="the digests of a step")

    def see(report: Report) -> None:
        nonlocal world
        if (report.step + 1) % every:
            return
        rows = gathered(digests_of(pipe))
        if world is not None:
            hosts = gathered({"host": socket.gethostname(), "stages": [*pipe.stages]})
            ranks = [{**host, "names": [*row]} for host, row in zip(hosts, rows, strict=True)]
            world.append({"step": report.step, "ranks": ranks})
            world = None
        values: dict[str, list[str | None]] = {}
        for rank, row in enumerate(rows):
            for name, digests in row.items():
                known = values.setdefault(name, digests)
                pairs = [*zip(known, digests, strict=True)]
                for kind, (one, other) in zip(KINDS, pairs, strict=True):
                    if None not in (one, other) and one != other:
                        tell(f"step {report.step}: replicas part: {kind} of {name} on rank {rank}")
                values[name] = [one or other for one, other in pairs]
        loss = None if report.loss is None else float(report.loss).hex()
        ordered = {name: values[name] for name in (*pipe.state.keys, *values) if name in values}
        line: dict[str, Any] = {"step": report.step, "loss": loss, "values": ordered}
        if returned is not None:
            rows = gathered([dataclasses.astuple(one) for one in returned.found])
            returned.found.clear()
            every_row = [row for some in rows for row in some]
            line["layers"] = [*map(dataclasses.astuple, _layers_of(every_row))]
        log.append(line)

    return see


def _layers_of(rows: Sequence[Sequence[Any]]) -> list[LayerTensor]:
    return in_order(LayerTensor(*row) for row in rows)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Of two runs the first step on record that differs, and the last one before it, None if there is none;
    by kind the names that differ there, in the model's order; the losses if they differ; where layers are on
    record, the first whose output or gradient differs, and how. Without ``has_values`` only the losses were
    compared."""

    step: int
    same: int | None
    names: Mapping[str, list[str]]
    losses: tuple[str, str] | None
    layer: tuple[LayerTensor, str] | None = None
    has_values: bool = True

    def __str__(self) -> str:
        if not self.has_values:
            losses = " and ".join(self.losses or ())
            return f"step {self.step}: the loss differs, {losses}; no digests are on record there"
        before = "no earlier one is on record" if self.same is None else f"step {self.same} is the same"
        lines = [f"step {self.step} is the first that differs; {before}"]
        lines += ["  the loss: {} and {}".format(*self.losses)] if self.losses else []
        return "\n".join([*lines, *(f"  {kind}" for kind in self.kinds), f"  {self.reason}"])

    @property
    def kinds(self) -> list[str]:
        """Of each kind that differs how many names do, and which."""
        ends = {kind: dict.fromkeys((names[0], names[-1])) for kind, names in self.names.items()}
        return [f"{kind}: {len(self.names[kind])} differ, {' to '.join(some)}" for kind, some in ends.items()]

    @property
    def follows(self) -> bool:
        """True if the step before it is the same, or there is none."""
        return self.same == (self.step - 1 if self.step else None)

    @property
    def reason(self) -> str:
        """Place in a step at which the runs part, by what comes first in it: forward, backward, update."""
        if not self.follows:
            return f"not every step up to {self.step} is on record"
        if self.layer:
            return f"{self.layer[0]} {self.layer[1]}"
        if self.losses:
            return "the forward differs, or its batch: " + (
                "the weights before it were the same" if self.step else "no weights before it are on record"
            )
        if gradients := self.names.get("gradients"):
            return f"the backward parts, or its targets: the gradient of {gradients[-1]} came first"
        return "the update parts: its gradients were the same"


def computed_by(folder: Path, difference: Difference) -> str:
    """Name the ranks that ran the first layer, or hold the first parameter, that differs, with their stages
    and hosts; "" where no layers are on record and the forward differs or a clip makes all gradients others,
    or where nothing is on record."""
    path = RunFolder(path=folder).world
    lines = [line for line in read_lines(path) if line["step"] <= difference.step] if path.is_file() else []
    ranks = [*enumerate(lines[-1]["ranks"])] if lines else []
    order = (*KINDS[1:], KINDS[0])
    kind, name = next(((k, difference.names[k][-1]) for k in order if k in difference.names), ("", ""))
    if difference.layer:
        layer = difference.layer[0]
        name = f"layer {layer.layer}"
        ranks = [(rank, one) for rank, one in ranks if layer.stage in one["stages"]]
    elif difference.losses or (
        kind == "gradients" and RunFolder(path=folder).read_config().clip.norm is not None
    ):
        return ""
    else:
        ranks = [(rank, one) for rank, one in ranks if name in one["names"]]
    who = " and ".join(
        f"rank {rank} (stage {', '.join(map(str, one['stages']))}) on {one['host']}" for rank, one in ranks
    )
    return who and f"{name} was computed by {who}, from what another stage sent if there is one"


def first_difference(one: Path, other: Path) -> tuple[Difference | None, int]:
    """Compare the digests of two runs; return also how many steps both have on record.

    Raises:  ConfigError: a run has none, or no step of the other's, or is of another model."""
    found = [recorded(folder) for folder in (one, other)]
    common = found[0].keys() & found[1].keys()
    if not common:
        raise ConfigError(f"{one} and {other} have no step in common on record; train with digest.every=1")
    return first_of(*found), len(common)


def first_of(
    one: Mapping[int, Any], other: Mapping[int, Any], *, same: int | None = None
) -> Difference | None:
    """Return the first difference of lines by their step; ``same``: a step before them that is the same.

    Raises:  ConfigError: they are of different models."""
    for step in sorted(one.keys() & other.keys()):
        ours, theirs = one[step], other[step]
        has_values = bool(ours["values"] and theirs["values"])
        if has_values and (odd := ours["values"].keys() ^ theirs["values"].keys()):
            raise ConfigError(f"the digests are of different models: one alone has {min(odd)}")
        pairs = [(name, a, theirs["values"][name]) for name, a in ours["values"].items() if has_values]
        differ = {kind: [name for name, a, b in pairs if a[n] != b[n]] for n, kind in enumerate(KINDS)}
        names = {kind: found for kind, found in differ.items() if found}
        a, b = (loss and float.fromhex(loss) for loss in (ours["loss"], theirs["loss"]))
        both = [ours["loss"], theirs["loss"]]
        both = both if has_values else [None if one in NO_NUMBERS else one for one in both]
        losses = None if both[0] == both[1] else (str(a), str(b))
        layers = paired(*(_layers_of(line.get("layers", ())) for line in (ours, theirs)))
        layer = where_they_part(layers or (), operator.eq)
        if names or losses or layer:
            more: Any = {"layer": layer, "has_values": has_values}
            return Difference(step=step, same=same, names=names, losses=losses, **more)
        same = step
    return None


def recorded(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of a run by their step; ConfigError if there are none."""
    path = RunFolder(path=folder).digests
    lines = read_lines(path) if path.is_file() else []
    if not lines:
        if not RunFolder(path=folder).config.is_file():
            raise ConfigError(f"{folder} has no config.yaml, so it is no folder of a run; name one")
        raise ConfigError(f"{folder} has no {path.name}, or an empty one; train with digest.every=10")
    for line in lines:
        values = line.get("values")
        rows = values.values() if isinstance(values, dict) and "loss" in line else [None]
        if not all(isinstance(row, list) and len(row) == len(KINDS) for row in rows):
            raise ConfigError(
                f"{path} is damaged: step {line['step']} has no digests; take it from the run again"
            )
    return {line["step"]: line for line in lines}


def options_that_differ(one: Path, other: Path) -> Iterator[tuple[str, str]]:
    """Yield options in which two runs differ, as KEY=A and B, each with what it does to bits."""
    folders = [RunFolder(path=folder) for folder in (one, other)]
    if not all(folder.config.is_file() for folder in folders):
        return
    try:
        config, theirs_config = (folder.read_config() for folder in folders)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        yield f"config.yaml is damaged ({str(error).splitlines()[0]})", "options are not compared"
        return
    ours, theirs = (dict(flat(dataclasses.asdict(each))) for each in (config, theirs_config))
    says = {"free": "changes no bit", "said": "changes bits by its nature", "refused": "is another training"}
    for key in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(key), theirs.get(key)
        if a != b:
            held = key.partition(".")[0] in ("versions", "settings")
            yield f"{key}={a} and {b}", "may change bits" if held else says[kind_of(key, config, a, b)]
