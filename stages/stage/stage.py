"""Stage: the layers between two cuts; forward and backward of a micro-batch, without changing a bit.

What keeps the bits: random layers are seeded one by one; received tensors enter as neither leaf nor view,
and their gradient is taken raw; a value that goes on to later stages brings its gradient back as one more
root of this stage's own backward, so autograd adds in its own order.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...compression.errors import StageError
from ..device import Device
from ..memory.activations import KeepOnDevice, ParameterFilter, SavedActivations
from ..memory.parameter_offload import OffloadedParameters
from ..memory.prefetch import MemoryThread
from ..memory.stores import Store
from ..tracing.dataflow import Value
from ..tracing.layers import Layer, Parts, Traced, casting, parts_of, parts_within, run_output
from ..weight_versions.versions import WeightVersions
from .nan_check import Guard, Watch
from .recompute import Forward, RecomputedActivations, sections
from .run_layers import NO_LAYERS, Observer, enter, walk
from .split_backward import Root, Split, run, run_weights_first
from .value_routing import Route


@dataclasses.dataclass(slots=True, eq=False)
class Running:
    """A micro-batch between its forward and its backward; values are known by number."""

    asks: Sequence[int]  # received values that asked for a gradient when traced; some may be frozen since
    roots: dict[int, GradientEdge] = dataclasses.field(default_factory=dict)  # of what it sent
    gradients: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)  # of what it received
    loss: torch.Tensor | None = None
    split: Split | None = None  # between the halves of its backward
    watch: Watch | None = None  # with a guard

    def begins(self, gradients: Mapping[int, torch.Tensor | None]) -> list[Root]:
        """Roots of its backward: at its loss, and at what it sent of which a gradient came back."""
        roots: list[Root] = [] if self.loss is None else [(self.loss, None)]
        return roots + [(edge, g) for n, edge in self.roots.items() if (g := gradients[n]) is not None]

    def ends(self) -> dict[int, torch.Tensor | None]:
        """The gradients of what it received."""
        return {number: self.gradients.pop(number, None) for number in self.asks}


_NOTHING = contextlib.nullcontext()
KEPT = 64  # routes for other shapes, whose parts and sections are known
LEAST_SAVED = 1 << 14  # bytes of a saved tensor from which on packing it is worth a call


def _parts_of(known: Parts, route: Route, *, device: torch.device, output: bool) -> Parts:
    """Return the parts of the layers of a ``route`` for another shape, all of which are ``known``."""
    parts = parts_within(known, route.traced, [visit.layer for visit in route.visits], output=output)
    return parts.on(device, route.traced.recorded)


class Stage:
    """The layers of one stage with their parts of the model; knows nothing of ranks, frames or schedules."""

    def __init__(
        self, index: int, *, model: nn.Module, train: tuple[Traced, Sequence[Layer]],
        evaluation: tuple[Traced, Sequence[Layer]], last: bool, autocast: torch.dtype | None = None,
        store: Store | None = None, memory: MemoryThread | None = None, codec: str = "raw",
        weights: WeightVersions | None = None, weights_first: bool = False,
        recompute: bool | Sequence[str] = False, mirror: OffloadedParameters | None = None,
        written: Collection[str] = (), device: Device | None = None, guard: Guard | None = None,
    ) -> None:  # fmt: skip
        """``store`` keeps saved tensors until their backward, packed with ``codec``; ``memory`` moves them.

        ``weights``: which version of its parameters a micro-batch sees. ``weights_first``: a layer's weights
        come before its feature map in ``backward``. ``mirror``: has the parameters while no layer reads them.
        ``recompute``: all layers run again for a backward, or those of these parts; ``written``: names of
        buffers to which forwards of the model write. ``guard``: looks for NaN."""
        self.index, self.last = index, last
        self.traced = {"train": train[0], "eval": evaluation[0]}
        self.device = device or Device()
        self.parts = {
            mode: parts_of(model, *run, output=last).on(self.device.torch, run[0].recorded)
            for mode, run in (("train", train), ("eval", evaluation))
        }
        self.other_parts = functools.lru_cache(KEPT)(
            functools.partial(_parts_of, device=self.device.torch, output=last)
        )
        self.generators = self.device.generators
        self.moved = NO_LAYERS
        named = self.parts["train"].named_tensors()
        self.frozen = {name: t for name, t in named if isinstance(t, nn.Parameter) and not t.requires_grad}
        self.anchor = torch.zeros((), requires_grad=True, device=self.device.torch)
        self.autocast = autocast
        self.guard: Any = guard  # or what has a ``watch`` as it, which may return None
        self.weights_first, self.recompute = weights_first, recompute
        self.running: dict[int, Running] = {}
        self.weights = weights or WeightVersions()
        self.mirror = mirror
        self.sums_in_place = True  # gradients of micro-batches; else somebody takes those of each
        self.stores = store is not None or bool(recompute)  # somebody else has what its forwards save
        tensors = [tensor for parts in self.parts.values() for _, tensor in parts.named_tensors()]
        parameters = ParameterFilter(tensors, mirror)
        self.saved: KeepOnDevice = KeepOnDevice(None if mirror is None else parameters)
        self.again: RecomputedActivations | None = None
        self.sections = functools.lru_cache(KEPT)(functools.partial(sections, recompute=recompute))
        self.parameter_observers = () if mirror is None else (mirror.layer_done,)
        self.observers: tuple[Observer, ...] = self.parameter_observers
        if store is not None:
            self.saved = SavedActivations(
                store,
                parameters=parameters,
                codec=codec,
                min_bytes=LEAST_SAVED,
                modules=self.parts["train"].modules,
                stage=index,
                thread=memory,
            )
            self.observers = self.saved.layer_done, *self.observers
        elif recompute:
            named = model.named_buffers(remove_duplicate=False)
            buffers = [buffer for name, buffer in named if name in written]
            self.again = self.saved = RecomputedActivations(parameters, buffers, ahead=recompute is True)
            self.observers = self.again.layer_done, *self.observers
        self.plain = type(self.weights) is WeightVersions and type(self.saved) is KeepOnDevice
        self.plain &= mirror is None and autocast is None and not self.device.is_gpu

    @property
    def held(self) -> set[int]:
        """The identities of all parameters and buffers that the layers name, in both modes."""
        return {id(tensor) for parts in self.parts.values() for _, tensor in parts.named_tensors()}

    def stop(self) -> None:
        """Forget every micro-batch between forward and backward."""
        for micro_batch in self.running:
            self._drop(micro_batch)
        self.running.clear()
        self.weights.drained()

    def close(self) -> None:
        """End the threads; the model keeps the parameters that it has."""
        self.saved.close()
        if self.mirror is not None:
            self.mirror.close()

    @property
    def exposed_seconds(self) -> float:
        """Seconds for which walks waited for what was not back yet, parameters too."""
        waited = 0.0 if self.mirror is None else self.mirror.frames.exposed_seconds
        return self.saved.counts.exposed_seconds + waited

    def forward(
        self,
        micro_batch: int,
        received: Mapping[int, Any],
        *,
        route: Route,
        seed: Callable[[str], int],
        batch: int = 0,
    ) -> tuple[dict[int, Any], Any]:
        """Run the layers on ``received``; returns the values to send, and the outputs on the last stage."""
        running = self.running[micro_batch] = Running(route.asks)
        parts = self._parts_for("train", route)
        how: Any = {"route": route, "seed": seed, "generators": self.generators, "moved": self.moved}
        values = enter(received, route, self.anchor, running.gradients)
        tied = [values[number] for number in route.tied]
        if self.again is not None:
            self.again.begin(micro_batch, self._forward(values, parts, route, seed))
        with _NOTHING if self.plain else self._inside(micro_batch, batch, tied):
            running.watch = None if self.guard is None else self.guard.watch(received, route)
            env = walk(values, parts, observers=self.observers, watch=running.watch, **how)
            sent = {}
            for number, _ in route.sends:
                item, known = values[number], route.record.values[number]
                sent[number] = item
                if known.parameter and self.weights.moves:
                    # behind the forward another version may be in its place, or its memory gone
                    sent[number] = item.detach().clone().requires_grad_(item.requires_grad)
                if isinstance(item, torch.Tensor) and item.requires_grad:
                    if not known.requires_grad:
                        self._refuse(known)
                    running.roots[number] = get_gradient_edge(item)
        return sent, self._output(route, env, parts)

    def _output(self, route: Route, env: Mapping[Any, Any], parts: Parts) -> Any:
        return run_output(route.traced, env, parts, samples=route.record.samples) if self.last else None

    def _forward(
        self, values: Mapping[int, Any], parts: Parts, route: Route, seed: Callable[[str], int]
    ) -> Forward:
        """Return what a forward needs for layers of it to run again, the same way."""
        how: Any = {"seed": seed, "generators": self.generators, "moved": self.moved}

        def run(entered: dict[int, Any], section: Route) -> None:
            with self.device.current(), casting(self.autocast, self.device.torch):
                values = enter(entered, section, self.anchor, {})  # whose graph is nobody's
                walk(values, parts, route=section, observers=self.parameter_observers, **how)

        return Forward(values, self.sections(route, parts), run)

    def _refuse(self, value: Value) -> NoReturn:
        """Refuse to send a value that asks for a gradient, and did not when traced."""
        unfrozen = [name for name, parameter in self.frozen.items() if parameter.requires_grad]
        why = "it must detach always, or never, or not be cut behind"
        if unfrozen:
            why = f"{', '.join(unfrozen)} unfrozen; make the Pipeline anew and load its state_dict()"
        raise StageError(
            f"layer {value.name} returned a tensor that requires a gradient, and when it was traced it "
            f"did not: {why}"
        )

    def _parts_for(self, mode: str, route: Route) -> Parts:
        known = self.parts[mode]
        return known if route.traced is self.traced[mode] else self.other_parts(known, route)

    @contextlib.contextmanager
    def _inside(self, micro_batch: int, batch: int, tied: Sequence[torch.Tensor]) -> Iterator[None]:
        with (
            self.device.current(),
            self.weights.forward(micro_batch, batch),
            casting(self.autocast, self.device.torch),
            self.saved.forward(micro_batch, tied),
        ):
            yield

    def fetch(self, micro_batch: int | None) -> None:
        """Ahead of ``backward``: begin to bring back the parameters that it reads first."""
        if micro_batch in self.running:
            if self.mirror is not None:
                self.mirror.prefetch(len(self.mirror.turns) - 1, step=-1)
            self.weights.fetch(micro_batch)

    def set_loss(self, micro_batch: int, weighted_loss: torch.Tensor) -> None:
        """On the last stage: begin the backward of ``micro_batch`` at its loss times its share."""
        running = self.running[micro_batch]
        if running.gradients:
            raise StageError(
                "a backward ran inside the forward or the loss, and its gradients end at this stage; leave "
                "backward to the pipeline"
            )
        running.loss = weighted_loss

    def backward(
        self, micro_batch: int, gradients: Mapping[int, torch.Tensor | None]
    ) -> dict[int, torch.Tensor | None]:
        """From the gradients of the values that ``micro_batch`` sent to those of the values it received."""
        running = self.running.pop(micro_batch)
        with self._going_back(micro_batch, ends=True):
            self.saved.ready(micro_batch)
            roots = running.begins(gradients)
            run_weights_first(roots, self.anchor) if self.weights_first else run(roots)
        return running.ends()

    def backward_inputs(
        self, micro_batch: int, gradients: Mapping[int, torch.Tensor | None]
    ) -> dict[int, torch.Tensor | None]:
        """The first half of ``backward``, which returns the same; ``backward_weights`` is the second. Where
        no gradient of what was received is asked for, it only keeps ``gradients``."""
        running = self.running[micro_batch]
        with self._going_back(micro_batch, ends=False):
            running.split = Split(running.begins(gradients))
            if running.asks:
                self.saved.ready(micro_batch)
                others = [other.split for other in self.running.values() if other.split is not None]
                waiting = others[:-1] if self.sums_in_place else []
                running.split.inputs(self.anchor, release=not self.stores, waiting=waiting)
        running.loss, running.roots = None, {}
        self.saved.halfway(micro_batch)
        return running.ends()

    def backward_weights(self, micro_batch: int) -> None:
        """The second half: the gradients of the weights that the first left, and the end of both."""
        running = self.running.pop(micro_batch)
        assert running.split is not None
        with self._going_back(micro_batch, ends=True):
            if not running.asks:
                self.saved.ready(micro_batch)
            running.split.weights()

    @contextlib.contextmanager
    def _going_back(self, micro_batch: int, *, ends: bool) -> Iterator[None]:
        try:
            with self.weights.backward(micro_batch):
                yield
        except StageError as error:
            raise StageError(str(error)) from error
        except Exception as error:
            raise StageError(f"backward: {type(error).__name__}: {error}") from error
        finally:
            if ends:
                self._drop(micro_batch)
                self.weights.done(micro_batch)

    def _drop(self, micro_batch: int) -> None:
        self.saved.drop(micro_batch)
        if self.mirror is not None:
            self.mirror.settle()

    def evaluate(self, received: Mapping[int, Any], *, route: Route) -> tuple[dict[int, Any], Any]:
        """The layers in eval mode without autograd: the values to send, the outputs on the last stage."""
        values = dict(received)
        with torch.no_grad(), self.device.current(), casting(self.autocast, self.device.torch):
            parts = self._parts_for("eval", route)
            env = walk(values, parts, route=route, observers=self.parameter_observers, seed=None)
            outputs = self._output(route, env, parts)
        return {number: values[number] for number, _ in route.sends}, outputs
