"""capture(model, call, example) -> Captured: the graph of what a model does, from a few real eager runs.

The first run gives the nodes. Two more, on other data and at other sizes, show which numbers follow the size
of the micro-batch. Where one goes another way, runs that differ in one thing alone show what the way depends
on: the smallest module around a place that depends on data is taken as one layer, whatever it does inside."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from ....compression.errors import PlanError
from ...torch_private import TreeSpec
from .call_spec import Call, fresh, other_data, resized
from .dynamic_shapes import Different, moving, moving_as, pairs_of, refuse_data
from .nodes import Unrecordable, follow_inputs, path_of, where_of
from .reads import CodeReads, Guard
from .recorder import Applied, Recorder, applying, flattened

_MOST_LEAVES = 64
_MOST_DRAWS = 4  # of other data
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_OF_BLOCKS = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Facts of a recorded run beside its nodes.

    ``spec`` puts the model's outputs together from the flat list that the graph returns. ``constants``:
    tensors from outside the run, by name. ``fixed``: why the run holds for the example's number of samples
    only, "" where it holds for any; ``sizes``: numbers of samples at which the model was seen to go this way;
    ``again`` records a copy of the model anew, with the same leaves; ``leaves``: what is one layer beside the
    modules of torch.nn, and why; ``dropped``: outputs that are left out; ``reads``: what the run read outside
    of its layers (``Reads.found``); ``guards``: what its code read of files and functions around it."""

    spec: TreeSpec
    constants: Mapping[str, torch.Tensor]
    sizes: tuple[int, ...]
    fixed: str
    leaves: Mapping[str, str]
    dropped: tuple[str, ...]
    again: Callable[..., fx.Graph]
    reads: frozenset[tuple[str, str]]
    guards: tuple[Guard, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Captured(Recording):
    """A recorded graph: placeholders, nodes in running order, an output node with the flat list of results.

    ``moving`` has for nodes whose numbers follow the size of the micro-batch what they become; ``seed``: of
    the other data that the run was held against, 0 where it goes the way of a known one."""

    graph: fx.Graph
    moving: Mapping[fx.Node, Any]
    seed: int


def capture(
    model: nn.Module,
    call: Call,
    example: Sequence[torch.Tensor],
    *,
    copies: Callable[..., nn.Module],
    leaf: Callable[[str, nn.Module], bool],
    functions: Collection[Callable[..., Any]] = (),
    written: Collection[str] = (),
    known: Recording | None = None,
    nodes: Sequence[fx.Node] = (),
) -> Captured:
    """Record ``model`` on ``example``.

    Args:    copies: gives a fresh copy of the model for each run, in the mode to record, with moved weights
             if ``shifted``.
             leaf: whether a module is one layer by somebody's choice; ``functions``: those that are.
             written: the buffers that a forward changes.
             known: a record that was held to other data and sizes, with its ``nodes``, whose numbers are
             rules; a run that goes their way is not.
    Raises:  PlanError: a run cannot be repeated, and no module around the place can be one layer."""
    runs = _Runs(call, leaf, functions, written)
    samples, moves, fixed = call.samples_of(example), dict[fx.Node, Any](), ""
    others: dict[int, fx.Graph] = {}
    applied = applying()  # an eager run has imported by now what the model imports in a forward
    # 1. until two runs on other data and weights are the same calls, one module more as one layer each time
    while True:
        model_copy, code_reads = copies(), CodeReads(model)
        recorder = runs.recorder(model_copy, notes=True, applied=applied)
        try:
            with code_reads.watching(lambda recorder=recorder: recorder.quiet):
                spec, dropped = _recorded(recorder, model_copy, call, fresh(example))
            constants = recorder.constants or (known and known.constants)
            if known is not None and not constants and not _counts(recorder.graph):
                with contextlib.suppress(Different):
                    moves, fixed = moving_as(nodes, recorder.graph, samples), known.fixed
                    break
            if not runs.chosen and not _counts(recorder.graph):
                others, moves = runs.on_other_data_and_sizes(recorder.graph, copies, example, applied)
            if not others:
                runs.hold_to_other_data(recorder, copies, example, applied)
            break
        except (Different, Unrecordable) as failure:
            path = _around(model, failure)
            if not path or len(runs.chosen) == _MOST_LEAVES or path in runs.chosen:
                raise _unrepeatable(model, failure) from None
            runs.chosen[path] = failure.what
            if not isinstance(kind := model.get_submodule(path), _CONTAINERS):
                runs.kinds[type(kind)] = path
    # 2. numbers that follow the size of the micro-batch
    sizes = _other_sizes(samples)
    try:
        if runs.seed and not others:
            for size in sizes:
                others[size] = runs.again(copies(), resized(call, example, size), applied=applied)
            moves = moving(recorder.graph, others, samples)
    except Different as difference:
        fixed = f"with another number of samples than {samples}, {difference.what}"
    except Exception as error:
        size = sizes[len(others)]
        fixed = f"the model does not run on {size} samples: {type(error).__name__}: {error}"
    alike = {path: type(module) for path, module in model.named_modules() if type(module) in runs.kinds}
    return Captured(
        graph=recorder.graph,
        spec=spec,
        constants=recorder.constants,
        moving=moves,
        seed=runs.seed,
        sizes=(samples,) if fixed else (samples, *others),
        fixed=fixed,
        leaves={path: f"like {runs.kinds[kind]}" for path, kind in alike.items()} | runs.chosen,
        dropped=dropped,
        again=runs.again,
        reads=frozenset(recorder.reads.found),
        guards=code_reads.guards(),
    )


@dataclasses.dataclass(slots=True)
class _Runs:
    """State that the runs of one model share, and a graph keeps for later runs: no model stands in here.

    ``chosen``: modules that became one layer because of what they do, by path, and why; ``kinds``: classes,
    all of whose modules then are like the one at a path; ``seed``: of the other data."""

    call: Call
    leaf: Callable[[str, nn.Module], bool]
    functions: Collection[Callable[..., Any]]
    written: Collection[str]
    chosen: dict[str, str] = dataclasses.field(default_factory=dict)
    kinds: dict[type, str] = dataclasses.field(default_factory=dict)
    seed: int = 0

    def is_leaf(self, path: str, module: nn.Module) -> bool:
        return path in self.chosen or type(module) in self.kinds or self.leaf(path, module)

    def recorder(self, model_copy: nn.Module, **options: Any) -> Recorder:
        return Recorder(model_copy, self.is_leaf, self.functions, written=self.written, **options)

    def again(self, model_copy: nn.Module, inputs: Sequence[torch.Tensor], **options: Any) -> fx.Graph:
        recorder = self.recorder(model_copy, **options)
        _recorded(recorder, model_copy, self.call, inputs)
        return recorder.graph

    def on_other_data_and_sizes(
        self,
        graph: fx.Graph,
        copies: Callable[..., nn.Module],
        example: Sequence[torch.Tensor],
        applied: Applied,
    ) -> tuple[dict[int, fx.Graph], dict[fx.Node, Any]]:
        """Runs at other sizes on other data, the first with other weights; which numbers move with the size.

        Both are empty unless all go the way of ``graph``: then runs that differ in one thing tell what it
        depends on."""
        samples, found = self.call.samples_of(example), dict[int, fx.Graph]()
        with contextlib.suppress(Exception):
            for seed, size in enumerate(_other_sizes(samples), 1):
                data = resized(self.call, other_data(self.call, example, seed=seed), size)
                found[size] = self.again(copies(shifted=size == samples + 1), data, applied=applied)
                pairs_of(graph, found[size])
            moves = moving(graph, found, samples, results=True)
            self.seed = 2  # which was not tried with one sample more
            return found, moves
        return {}, {}

    def hold_to_other_data(
        self,
        recorder: Recorder,
        copies: Callable[..., nn.Module],
        example: Sequence[torch.Tensor],
        applied: Applied,
    ) -> None:
        """Raise Different if a run depends on data or weights, of data with which guards of inputs hold."""
        alone = follow_inputs(recorder.graph.nodes, recorder.constants)
        self.seed = 0
        for seed in range(1, _MOST_DRAWS + 1):
            data = other_data(self.call, example, seed=seed)
            other = self.again(copies(shifted=True), data, applied=applied)
            last = seed == _MOST_DRAWS and not self.seed
            if last or not _reads_something_else(recorder.graph, other, alone):
                refuse_data(recorder.graph, other, self.call.samples_of(example))
                self.seed = self.seed or seed
                if not _counts(recorder.graph):
                    return


def _other_sizes(samples: int) -> tuple[int, int]:
    return samples + 1, 2 * samples + 1


def _counts(graph: fx.Graph) -> bool:
    """Return whether there is a shape that follows from values: two runs may have the same by chance."""
    return any("counts" in node.meta for node in graph.nodes)


def _reads_something_else(graph: fx.Graph, other: fx.Graph, alone: Collection[fx.Node]) -> bool:
    """Return whether a guard among the nodes ``alone`` is the first difference of two runs."""
    for node, its in zip(graph.nodes, other.nodes, strict=False):
        if node.name != its.name:
            return False
        if node in alone and node.meta.get("expect") != its.meta.get("expect"):
            return True
    return False


def _recorded(
    recorder: Recorder, model_copy: nn.Module, call: Call, inputs: Sequence[torch.Tensor]
) -> tuple[TreeSpec, tuple[str, ...]]:
    for name, tensor in zip(call.names, inputs, strict=True):
        recorder.input(name, tensor)
    with recorder.recording():
        result = call.run(model_copy, inputs)
    recorder.write_back(model_copy)
    leaves, spec, dropped = flattened(result)
    recorder.graph.output(tuple(recorder.named(leaves)))
    return spec, dropped


def default_leaf(module: nn.Module) -> bool:
    """Modules of torch.nn are one layer each; containers, and what is a list of blocks, are not."""
    is_of_torch = type(module).__module__.startswith("torch.nn")
    return is_of_torch and not isinstance(module, (*_CONTAINERS, *_OF_BLOCKS))


def _around(model: nn.Module, failure: Different | Unrecordable) -> str:
    """The path of the smallest module around what failed, "" for the model itself."""
    if isinstance(failure, Unrecordable):
        return failure.path
    nodes = (failure.node, failure.other or failure.node)
    # A layer as a whole is not smaller for being one.
    paths = [path_of(node).split(".")[: -1 if node.op == "call_module" else None] for node in nodes]
    pairs = zip(*paths, strict=False)
    common = [ours for ours, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    while common and isinstance(model.get_submodule(".".join(common)), nn.ModuleList | nn.ModuleDict):
        common.pop()  # nobody calls these
    return ".".join(common)


def _unrepeatable(model: nn.Module, failure: Different | Unrecordable) -> PlanError:
    if isinstance(failure, Unrecordable):
        found, where = failure.what, f" ({failure.where})" if failure.where else ""
    else:
        found, where = f"it goes another way with other data: {failure.what}", where_of(failure.node)
    return PlanError(
        f"forward of {type(model).__name__} itself must be the same calls every time, found that "
        f"{found}{where}; put that part into a module of its own, which then is one layer; where the code "
        "is not yours, in a subclass that overrides the method"
    )
