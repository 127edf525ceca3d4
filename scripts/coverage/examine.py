"""One network: recorded, measured, cut in three, and a step of training held against the plain loop.

A network is used as people use one: no choice of layers, no help. What fails is told in the words that a
person would read."""

from __future__ import annotations

import contextlib
import copy
import itertools
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from eager import MicroBatch, drawing_calls, plain_step, takes
from network import Batch, Network, given, masked
from torch import nn
from torch.utils._pytree import tree_leaves

from penstock.compression.errors import PenstockError, PlanError
from penstock.pipeline.partition.partition import partition
from penstock.pipeline.pipeline import Pipeline
from penstock.stages.device import CPU
from penstock.stages.profiling.measure import measure
from penstock.stages.profiling.network_profile import Profile
from penstock.stages.tracing.tracer import trace
from penstock.stages.tracing.verify import same_bits

SAMPLES = 2  # of a micro-batch, and as many micro-batches
STAGES = 3
Row = dict[str, Any]


def examine(network: Network, *, autocast: torch.dtype | None = None) -> Row:
    """Try ``network``; the row says what came of it: ``result`` is same, different or refused.

    Args: autocast: the dtype that both the pipeline and the plain loop cast to, None for no cast."""
    torch.manual_seed(0)
    model = network.make().train()
    row: Row = {"name": network.full_name, "parameters": sum(p.numel() for p in model.parameters())}
    _train(row, model, {"": network.batch(SAMPLES * SAMPLES)}, autocast=autocast)
    row["megabytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return row


def examine_lengths(network: Network) -> Row:
    """Try ``network`` with a second length and with masks; ``result`` is empty where the plain model takes
    neither.

    Masks are further inputs, so they have a Pipeline of their own, which meets one without padding first."""
    torch.manual_seed(0)
    model = network.make().train()
    whole, second = (network.batch(SAMPLES * SAMPLES, second=second) for second in (False, True))
    lengths = {"first": whole, "second length": second}
    masks = {
        f"{name} with {kind}": masked(batch, padded=kind == "padding")
        for name, batch in lengths.items()
        for kind in ("a mask", "padding")
    }
    rows: list[Row] = []
    for batches in (lengths, masks if masked(whole, padded=False).keys() - whole else {}):
        taken = {
            name: batch for name, batch in batches.items() if all(takes(model, x) for x in _parts(batch))
        }
        if len(taken) > 1:
            rows.append({"tried": list(taken)})
            _train(rows[-1], copy.deepcopy(model), taken)
    results = {row["result"] for row in rows}
    return {
        "result": next((one for one in ("different", "refused", "same") if one in results), ""),
        "why": "; ".join(row["why"] for row in rows if row["why"]),
        "tried": [name for row in rows for name in row["tried"]],
    }


def _train(
    row: Row, model: nn.Module, batches: Mapping[str, Batch], *, autocast: torch.dtype | None = None
) -> None:
    """Cut ``model`` in three by the first of ``batches`` and train a step with each; ``row`` gets the
    result."""
    different: list[str] = []
    refused: list[str] = []
    try:
        trial = Trial(model, next(iter(batches.values())), row=row, autocast=autocast)
        for name, batch in batches.items():
            label = f"{name}: " if name else ""
            begun = False
            try:
                different = [label + one for one in trial.differences(batch)[:3]]
            except PenstockError as error:
                refused.append(f"{label}{error}")
                begun = not isinstance(error, PlanError)
            if different or begun:  # so nothing that follows is comparable
                break
    except PenstockError as error:
        refused.append(str(error))
    result = "different" if different else "refused" if refused else "same"
    row |= {"result": result, "why": "; ".join(different or refused)}


def _parts(batch: Batch) -> list[Batch]:
    """The micro-batches of a batch."""
    parts = {name: x.tensor_split(SAMPLES) for name, x in batch.items()}
    return [{name: parts[name][i].clone() for name in parts} for i in range(SAMPLES)]


class Trial:
    """A Pipeline in three stages over ``model``, and the plain loop over a copy of it.

    Args: batch: the first one, by whose first micro-batch it is cut; row: gets the facts."""

    def __init__(self, model: nn.Module, batch: Batch, *, row: Row, autocast: torch.dtype | None) -> None:
        self.model, example = model, _parts(batch)[0]
        self.cast = torch.autocast(CPU.type, autocast, enabled=autocast is not None, cache_enabled=False)
        with _timing(row, "trace_seconds"):
            graph = trace(model, given(example), autocast=autocast)
        row |= {
            "layers": len(graph.train.layers),
            "leaves": dict(getattr(graph.train, "leaves", {})),
            "guards": sum("expect" in layer.node.meta for layer in graph.train.layers),
            "random": len(graph.train_probe.random),
            "fixed": graph.train.fixed,
        }
        with _timing(row, "measure_seconds"):
            profile = measure(graph, given(example), repeats=1)
        row["cuts"] = len(profile.layers) - 1 - len(profile.refused)
        plan = partition(profile, cuts=even_cuts(profile) or None, micro_batches=SAMPLES, codec="zero_value")
        row["stages"] = plan.num_stages
        if total := row.get("parameters"):  # shares of the largest stage, and layer, which no cut divides
            stage, layer = (max(x.num_parameters for x in parts) for parts in (plan.stages, profile.layers))
            row |= {"largest_stage": round(stage / total, 3), "largest_layer": round(layer / total, 3)}
        self.plain = copy.deepcopy(model)
        self.optimizer = _sgd(list(self.plain.named_parameters()))
        with _timing(row, "pipeline_seconds"):
            self.pipe = Pipeline(model, plan, loss=mean_square, optimizer=_sgd, autocast=autocast)

    def differences(self, batch: Batch) -> list[str]:
        """Differences from the plain loop after one more step of both."""
        step, targets = self.pipe.num_steps, torch.linspace(-1, 1, SAMPLES * SAMPLES)
        self.pipe.step(given(batch), targets)
        settings: Any = {"loss": mean_square, "optimizer": self.optimizer, "step": step, "cast": self.cast}
        losses = plain_step(self.plain, list(self._micro_batches(batch, targets)), **settings)
        ours = self.pipe.engine.losses
        both: dict[str, Any] = {f"loss {i}": (loss, ours[i]) for i, loss in enumerate(losses)}
        theirs, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        for name, parameter in self.plain.named_parameters():
            both |= {f"gradient {name}": (parameter.grad, theirs[name].grad), name: (parameter, theirs[name])}
        both |= {name: (buffer, buffers[name]) for name, buffer in self.plain.named_buffers()}
        others = {name: (a, b) for name, (a, b) in both.items() if a is not b}
        return [name for name, (a, b) in others.items() if a is None or b is None or not same_bits(a, b)]

    def _micro_batches(self, batch: Batch, targets: torch.Tensor) -> Iterator[MicroBatch]:
        """Those of a batch, each with the random layers of the record that the pipeline has of it."""
        parts = _parts(batch)
        records = self.pipe.steps.runs_of("train", [self.pipe.call.tensors(given(part)) for part in parts])
        for part, record, y in zip(parts, records, targets.tensor_split(SAMPLES), strict=True):
            layers, random = record.shapes.traced["train"].layers, record.shapes.real["train"].random
            ordered = [layer.name for layer in layers if layer.name in random]
            modules = {str(layer.node.target) for layer in layers if layer.node.op == "call_module"}
            with self.cast:
                draws = drawing_calls(copy.deepcopy(self.plain), part, modules, ordered)
            yield MicroBatch(part, y, modules, draws)


@contextlib.contextmanager
def _timing(row: Row, name: str) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    row[name] = round(time.perf_counter() - begun, 2)


def even_cuts(profile: Profile) -> list[str]:
    """The two allowed cuts that leave the fewest parameters in the largest of three stages."""
    names = [layer.name for layer in profile.layers]
    ends = list(itertools.accumulate(layer.num_parameters for layer in profile.layers))
    allowed = [cut for cut in range(len(names) - 1) if cut not in profile.refused]
    best = min(
        itertools.combinations(allowed, min(STAGES - 1, len(allowed))),
        key=lambda cuts: max(b - a for a, b in itertools.pairwise([0, *(ends[c] for c in cuts), ends[-1]])),
    )
    return [names[cut] for cut in best]


def mean_square(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """The model's own loss where it gives one, else a mean over all numbers in its outputs."""
    own = outputs.get("loss") if isinstance(outputs, dict) else None
    if own is not None:
        return own * (1 + targets.mean())
    found = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    return sum((t.abs().float() - targets.mean()).square().mean() for t in found)  # type: ignore[return-value]


def _sgd(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.05, momentum=0.9)
