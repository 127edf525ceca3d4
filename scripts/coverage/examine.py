"""One network: recorded, measured, cut in three, and a step of training held against the plain loop.

A network is used as people use one: no choice of layers, no help. What fails is told in the words that a
person would read. The plain loop runs the eager model, its random calls seeded one by one as a pipeline seeds
its layers. It shares no code with the recorder: calls are numbered as they come, and a first run shows which
of them draw."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import resource
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from language import Batch, Inputs, Network, given, masked
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from penstock.compression.errors import PenstockError, PlanError
from penstock.pipeline.partition.partition import partition
from penstock.pipeline.pipeline import Pipeline
from penstock.stages.device import CPU
from penstock.stages.profiling.measure import measure
from penstock.stages.profiling.network_profile import Profile
from penstock.stages.seeds import layer_seed
from penstock.stages.torch_private import paused
from penstock.stages.tracing.capture.recorder import Patches, kinds_that_are_called, overridden
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


class Drawing(TorchFunctionMode):
    """Numbers the calls of a run that are not inside another; ``layers`` are the modules that are one call.

    ``drew`` are the numbers of those that drew. Those in ``seeds`` (number of a call -> seed) are seeded."""

    def __init__(self, layers: Collection[nn.Module], seeds: Mapping[int, int]) -> None:
        super().__init__()
        self.layers, self.seeds = layers, seeds
        self.count, self.inside = 0, 0
        self.drew: list[int] = []
        self.patches = Patches(self._patches())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call of torch."""
        return self.one(lambda: func(*args, **(kwargs or {})))

    def one(self, run: Callable[[], Any]) -> Any:
        """Run one call, whatever it calls itself."""
        if self.inside:
            return run()
        number, self.count, self.inside = self.count, self.count + 1, 1
        try:
            with self.patches.on(off=True), paused(self):
                if number in self.seeds:
                    with torch.random.fork_rng(devices=()):
                        torch.manual_seed(self.seeds[number])
                        return run()
                before, result = torch.get_rng_state(), run()
                if not torch.equal(before, torch.get_rng_state()):
                    self.drew.append(number)
                return result
        finally:
            self.inside = 0

    def run(self, model: nn.Module, batch: Batch) -> Any:
        """Outputs of the model."""
        inputs = given(batch)
        with self.patches.on(), self:
            return outputs_of(model, inputs)

    def _patches(self) -> Iterator[tuple[Any, str, Any]]:
        for kind in kinds_that_are_called():
            yield kind, "__call__", self._called(kind.__call__)
        apply = torch.autograd.Function.__dict__["apply"]
        one = classmethod(lambda kind, *a, **k: self.one(lambda: apply.__get__(None, kind)(*a, **k)))
        yield torch.autograd.Function, "apply", one
        yield torch.overrides, "has_torch_function", overridden

    def _called(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            run = functools.partial(call, module, *args, **kwargs)
            return self.one(run) if module in self.layers else run()

        return called


def outputs_of(model: nn.Module, inputs: Inputs) -> Any:
    """Outputs of the model on what ``given`` returned."""
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def takes(model: nn.Module, batch: Batch) -> bool:
    """True if a copy of the model runs on such a batch: not all take any length, or a mask."""
    try:
        outputs_of(copy.deepcopy(model), given(batch))
    except Exception:
        return False
    return True


def drawing_calls(
    model: nn.Module, batch: Batch, layers: Collection[str], names: Sequence[str]
) -> dict[int, str]:
    """The numbers of the calls that draw, each with the name of its layer (``names``, in running order), by a
    run of ``model``."""
    drawing = Drawing({model.get_submodule(path) for path in layers}, {})
    drawing.run(model, batch)
    assert len(drawing.drew) == len(names), f"{len(drawing.drew)} calls draw, {len(names)} layers do"
    return dict(zip(drawing.drew, names, strict=True))


class MicroBatch(NamedTuple):
    """Inputs and targets, the modules that are one call, and the calls that draw with the names of layers."""

    batch: Batch
    targets: torch.Tensor
    layers: Collection[str]
    draws: Mapping[int, str]


def plain_step(
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    *,
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    step: int,
    cast: torch.autocast,
) -> list[torch.Tensor]:
    """One step of the plain loop over micro-batches, forward and loss under ``cast``; returns the losses."""
    optimizer.zero_grad()
    total, losses = sum(len(one.targets) for one in micro_batches), []
    for index, (batch, targets, layers, draws) in enumerate(micro_batches):
        seeds = {number: layer_seed(0, step, index, name) for number, name in draws.items()}
        drawing = Drawing({model.get_submodule(path) for path in layers}, seeds)
        with cast:
            value = loss(drawing.run(model, batch), targets)
        (value * (len(targets) / total)).backward()
        losses.append(value.detach())
    optimizer.step()
    return losses
