"""One network: recorded, measured, cut in three, and a step of training held against the plain loop.

A network is used as people use one: no choice of layers, no help. What fails is told in the words that a
person would read."""

from __future__ import annotations

import contextlib
import copy
import itertools
import resource
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from eager import drawing_calls, plain_step
from network import Batch, Network, given
from torch import nn
from torch.utils._pytree import tree_leaves

from penstock.compression.errors import PenstockError
from penstock.pipeline.partition.partition import partition
from penstock.pipeline.pipeline import Pipeline
from penstock.stages.device import CPU
from penstock.stages.plan.plan import Plan
from penstock.stages.profiling.measure import measure
from penstock.stages.profiling.network_profile import Profile
from penstock.stages.tracing.tracer import LayerGraph, trace
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
    try:
        _examine(row, network, model, autocast)
    except PenstockError as error:
        row |= {"result": "refused", "why": str(error)}
    row["megabytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return row


def _examine(row: Row, network: Network, model: nn.Module, autocast: torch.dtype | None) -> None:
    parts = {name: x.tensor_split(SAMPLES) for name, x in network.batch(SAMPLES * SAMPLES).items()}
    micro_batches = [{name: parts[name][i].clone() for name in parts} for i in range(SAMPLES)]
    with _timing(row, "trace_seconds"):
        graph = trace(model, given(micro_batches[0]), autocast=autocast)
    row |= {
        "layers": len(graph.train.layers),
        "leaves": dict(getattr(graph.train, "leaves", {})),
        "guards": sum("expect" in layer.node.meta for layer in graph.train.layers),
        "random": len(graph.train_probe.random),
        "fixed": graph.train.fixed,
    }
    with _timing(row, "measure_seconds"):
        profile = measure(graph, given(micro_batches[0]), repeats=1)
    row["cuts"] = len(profile.layers) - 1 - len(profile.refused)
    plan = partition(profile, cuts=even_cuts(profile) or None, micro_batches=SAMPLES, codec="zero_value")
    row["stages"] = plan.num_stages
    if total := row["parameters"]:  # shares of the largest stage, and layer, which no cut divides
        stage, layer = (max(one.num_parameters for one in parts) for parts in (plan.stages, profile.layers))
        row |= {"largest_stage": round(stage / total, 3), "largest_layer": round(layer / total, 3)}
    differences = _differences(row, model, graph, plan, micro_batches, network.batch(SAMPLES * SAMPLES))
    row |= {"result": "different" if differences else "same", "why": "; ".join(differences[:3])}


@contextlib.contextmanager
def _timing(row: Row, name: str) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    row[name] = round(time.perf_counter() - begun, 2)


def _differences(
    row: Row, model: nn.Module, graph: LayerGraph, plan: Plan, micro_batches: Sequence[Batch], whole: Batch
) -> list[str]:
    """Differences from the plain loop after one step in three stages."""
    layers, targets = graph.train.layers, torch.linspace(-1, 1, SAMPLES * SAMPLES)
    ordered = [layer.name for layer in layers if layer.name in graph.train_probe.random]
    modules = {str(layer.node.target) for layer in layers if layer.node.op == "call_module"}
    cast = torch.autocast(CPU.type, graph.autocast, enabled=graph.autocast is not None, cache_enabled=False)
    with cast:
        draws = drawing_calls(copy.deepcopy(model), micro_batches[0], modules, ordered)
    plain = copy.deepcopy(model)
    with _timing(row, "pipeline_seconds"):
        pipe = Pipeline(model, plan, loss=mean_square, optimizer=_sgd, autocast=graph.autocast)
    pipe.step(given(whole), targets)
    pairs = list(zip(micro_batches, targets.tensor_split(SAMPLES), strict=True))
    how: Any = {"layers": modules, "draws": draws, "cast": cast, "loss": mean_square}
    losses = plain_step(plain, pairs, optimizer=_sgd(list(plain.named_parameters())), **how)
    both: dict[str, Any] = {f"loss {i}": (loss, pipe.engine.losses[i]) for i, loss in enumerate(losses)}
    theirs, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for name, parameter in plain.named_parameters():
        both |= {f"gradient {name}": (parameter.grad, theirs[name].grad), name: (parameter, theirs[name])}
    both |= {name: (buffer, buffers[name]) for name, buffer in plain.named_buffers()}
    others = {name: (a, b) for name, (a, b) in both.items() if a is not b}
    return [name for name, (a, b) in others.items() if a is None or b is None or not same_bits(a, b)]


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
