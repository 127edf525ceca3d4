"""Plans of steps: the messages and the program of a step, for synchronous training and for a stream.

A step of asynchronous training is a slice of an endless program: it runs what happens before its batch would
be followed by the next. All ranks end it together, with micro-batches in flight, and no bubble appears."""

import base64
import dataclasses
import itertools
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from ...compression.errors import Disagreement, PlanError
from ...compression.frame import written_by
from ...stages.memory.prefetch import Pass
from ...stages.plan.plan import Plan
from ...stages.plan.validation import STREAM
from ...stages.stage.value_routing import Route, edges, follow, follow_cuts, routes, stage_of_layers
from ...stages.tracing.dataflow import Probe
from ...stages.tracing.guards import ModelGuards
from ...stages.tracing.layers import InputGuards, Layer, Traced, names_of, read_by_layer
from ...stages.tracing.shape_inference import Shapes, Skeleton
from ...stages.tracing.tracer import LayerGraph
from ..schedules.async_1f1b import StreamState, between
from ..schedules.instruction import Instruction, Op
from ..schedules.messages import (
    Message,
    MicroBatchMessages,
    StepMessages,
    micro_batch_messages,
    step_messages,
)
from ..schedules.replicated import as_one, schedule_of
from ..schedules.verify import smallest_window, verify
from .agreement import Agreement
from .batches import MicroBatch
from .fingerprints import of_layers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """This process's ``program`` with the messages of all ranks, and the micro-batches by number.

    ``number``: which step of the training it is. ``training``: else it is an evaluation. ``keeps_outputs``:
    whether what the model returns is asked for. ``observed``: the micro-batch whose tensors the policy of
    codecs looks at, or None."""

    number: int
    messages: StepMessages
    program: Sequence[Instruction]
    micro_batches: Mapping[int, MicroBatch]
    training: bool = True
    keeps_outputs: bool = False
    observed: int | None = None

    @property
    def passes(self) -> list[Pass]:
        """The program as the memory thread knows it."""
        return [Pass(stage, index, op in READS) for stage, op, index in self.program]


Inputs = Sequence[Sequence[torch.Tensor]]
Planned = tuple[StepMessages, list[Instruction]]
READS = (Op.B, Op.I, Op.W)  # what forwards saved
KEPT = 256  # plans of steps; texts of varying length would make ever more
MOST_RECORDED = 32  # runs of the model: shapes of inputs may lead it through other numbers
MOST_VARIANTS = 4  # of one shape: so may what is read of the inputs themselves, as a mask


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """The model as it runs on inputs of some shapes, by mode the stage of every layer, and what a run reads
    of its inputs."""

    shapes: Shapes
    stage_of: Mapping[str, Sequence[int]]
    guards: dict[str, InputGuards] = dataclasses.field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for mode, traced in self.shapes.traced.items():
            self.guards[mode] = InputGuards(traced, self.shapes.autocast)

    def layers(self, mode: str, stage: int) -> tuple[Traced, list[Layer]]:
        """The trace of a mode, and the layers of one stage in it."""
        traced = self.shapes.traced[mode]
        if mode not in self.stage_of:
            return traced, []
        pairs = zip(traced.layers, self.stage_of[mode], strict=True)
        return traced, [layer for layer, place in pairs if place == stage]

    def tied(self, mode: str, num_stages: int) -> list[set[str]]:
        """Names of the parameters that come to each stage from another one."""
        traced, record = self.shapes.traced[mode], self.shapes.real[mode]
        routed = routes(traced, record, self.stage_of[mode], num_stages=num_stages)
        return [{record.values[number].name for number in route.tied} for route in routed]


class Steps:
    """The steps of a plan over a traced model; ``mode`` is "train" or "eval" throughout."""

    def __init__(self, plan: Plan, graph: LayerGraph, model: nn.Module, agreement: Agreement) -> None:
        self.plan, self.world, self.agreement, self.written = plan, agreement.world, agreement, graph.written
        self.codecs = written_by(plan.codec).union(*map(written_by, plan.named_codecs.values()))
        self.shapes, self.skeleton, self.example = Shapes(graph), Skeleton(model), graph.example_inputs
        self.others, self.tells, self.written_in_eval = graph.others, True, graph.written_in_eval
        stage_of = stage_of_layers(graph.train, plan.cuts)
        self.stage_of = {"train": stage_of}
        self.refusal = ""
        try:
            self.stage_of["eval"] = follow(graph, stage_of, num_stages=plan.num_stages)
        except PlanError as error:  # training does not need it
            self.refusal = str(error)
        # The first, then those of other shapes, what was used last at the end.
        self.recorded = [Recorded(self.shapes, self.stage_of)]
        self.guards: ModelGuards | None = None
        self.known: dict[object, Planned] = {}
        self.runs: dict[object, list[Recorded]] = {}  # those that take a micro-batch, by its shapes
        self.routes: dict[int, tuple[Probe, tuple[Route, ...]]] = {}

    def model_guards(self, model: nn.Module) -> ModelGuards:
        """Return guards on what these traces took from the modules of ``model``, checked at every step."""
        traces, roots = self.shapes.traced, self.shapes.roots
        self.guards = ModelGuards(model, traces=traces, roots=roots, stage_of=self.stage_of["train"])
        return self.guards

    def record_others(self) -> None:
        """Record the model at the other examples that it was traced with, those of rank 0; collective."""
        looks = [[(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in one] for one in self.others]
        looks = self.agreement.exchange("the other examples", looks)[0]
        batches: Sequence[Sequence[torch.Tensor]] = self.others
        if self.world.rank:  # rank 0 says what is read of them
            batches = [
                [torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape, dtype in one]
                for one in looks
            ]
        self.tells = False
        for batch in batches:
            self.runs_of("train", [batch])
        self.tells = True

    def layers(self, mode: str, stage: int) -> tuple[Traced, list[Layer]]:
        """The first trace of a mode, and the layers of one stage in it."""
        return self.recorded[0].layers(mode, stage)

    def step(
        self, mode: str, inputs: Inputs, *, extra: int = 0, runs: Sequence[Recorded] | None = None
    ) -> Planned:
        """The messages of a step over micro-batches of these inputs, and this process's program.

        Args:   extra: how many more are in flight in training than the schedule's own; runs: those that the
                micro-batches take; None: they are chosen here.
        Raises: PlanError: a cut would change the bits at these shapes. ScheduleError: it would deadlock."""
        if mode not in self.stage_of:
            raise PlanError(self.refusal)
        runs = runs or self.runs_of(mode, inputs)
        shapes = tuple((run, *map(_shape, batch)) for run, batch in zip(runs, inputs, strict=True))
        key = mode, extra, self.plan.shares, shapes
        if key not in self.known:
            if len(self.known) == KEPT:
                del self.known[next(iter(self.known))]
            self.known[key] = self._plan(mode, inputs, runs, extra)
        return self.known[key]

    def routed(
        self, mode: str, inputs: Inputs, runs: Sequence[Recorded] | None = None
    ) -> tuple[list[Probe], list[tuple[Route, ...]]]:
        """For every micro-batch what is known of its values, and the routes; raises what ``step`` does."""
        runs = runs or self.runs_of(mode, inputs)
        records = [run.shapes.probe(mode, batch) for run, batch in zip(runs, inputs, strict=True)]
        for run, record in zip(runs, records, strict=True):
            if id(record) in self.routes:
                continue
            if len(self.routes) == KEPT:
                self.routes = {id(one): self.routes[id(one)] for one in records if id(one) in self.routes}
            traced, stage_of = run.shapes.traced[mode], run.stage_of[mode]
            for number, (here, following) in enumerate(pairwise(stage_of)):
                if here != following and (reason := record.refused.get(number)):
                    name = traced.layers[number].name
                    raise PlanError(f"the model must not be cut behind layer {name}: {reason}; cut elsewhere")
            made = routes(traced, record, stage_of, num_stages=self.plan.num_stages)
            self.routes[id(record)] = record, made  # the record too: an id is one only while it lives
        return records, [self.routes[id(record)][1] for record in records]

    def runs_of(self, mode: str, inputs: Inputs) -> list[Recorded]:
        """The run of the model that each micro-batch takes: by its shapes, and where a run reads something of
        its inputs, by that; the model is recorded anew for a micro-batch that takes none. Collective then."""
        found = [self._variants(mode, batch) for batch in inputs]
        while True:
            places = self._places(mode, inputs, found)
            runs = [variants[place] for variants, place in zip(found, places, strict=True)]
            if -1 not in places:
                break
            self._add_variant(mode, inputs, found, places.index(-1))
        self.recorded[1:] = sorted(self.recorded[1:], key=lambda run: run in runs)  # behind all others
        return runs

    def _variants(self, mode: str, batch: Sequence[torch.Tensor]) -> list[Recorded]:
        """The runs that take a micro-batch of such shapes, a new one if none does."""
        key = mode, tuple(map(_shape, batch))
        if not self.runs.get(key):
            if len(self.runs) == KEPT:
                del self.runs[next(iter(self.runs))]
            found, refused = list[Recorded](), None
            for one in self.recorded:
                try:
                    one.shapes.probe(mode, batch)
                    found.append(one)
                except PlanError as error:
                    refused = refused or error
                if found and not found[0].guards[mode]:
                    break
            if not found:
                assert refused is not None
                found = [self._record(batch, refused)]
            self.runs[key] = found
        return self.runs[key]

    def _places(self, mode: str, inputs: Inputs, found: Sequence[list[Recorded]]) -> list[int]:
        """For every micro-batch the place of the first of its runs whose guards hold, -1 if none does; told
        by the ranks that have the inputs."""
        if not any(run.guards[mode] for runs in found for run in runs):
            return [0] * len(found)
        mine: list[int | None] = []
        for batch, runs in zip(inputs, found, strict=True):
            holds = (place for place, run in enumerate(runs) if not run.guards[mode].refusal(batch))
            mine.append(None if any(x.is_meta for x in batch) else next(holds, -1))
        rows = self.agreement.exchange("what is read of inputs", mine)
        return [next((p for p in column if p is not None), 0) for column in zip(*rows, strict=True)]

    def _add_variant(self, mode: str, inputs: Inputs, found: Sequence[list[Recorded]], number: int) -> None:
        """Record the model on the inputs of one micro-batch, whose rank gives them to all; collective."""
        batch, runs = inputs[number], found[number]
        values: Sequence[torch.Tensor] | None = None if any(x.is_meta for x in batch) else batch
        mine = values and (runs[-1].guards[mode].refusal(values), [*map(_text, values)])
        rows = self.agreement.exchange("inputs to record", mine)
        refused, texts = next(filter(None, rows))
        if len(runs) >= MOST_VARIANTS:
            rule = f"a shape has at most {MOST_VARIANTS} records, by what forward reads of its inputs"
            raise PlanError(f"{rule}, found one more: {refused}")
        given = [_of_text(text, x) for text, x in zip(texts, batch, strict=True)]
        runs.append(self._record(batch, PlanError(refused), given))

    def _record(
        self, batch: Sequence[torch.Tensor], refused: PlanError, values: Sequence[torch.Tensor] | None = None
    ) -> Recorded:
        """Record the model for such a micro-batch, which all that is recorded ``refused``; collective.

        Args:   values: inputs to record it on; None: those of the example, over and over."""
        first, stages, began = self.shapes, self.plan.num_stages, time.perf_counter()
        ours = first.traced["train"]
        with self.agreement.all_or_none("recording another shape"):
            try:
                graph = self.skeleton.graph(
                    ours.call, batch, values or self.example, autocast=first.autocast, leaves=self.plan.leaves
                )
                train = follow_cuts(ours, self.stage_of["train"], graph, num_stages=stages)
                stage_of = {"train": train}
                if "eval" in self.stage_of:
                    stage_of["eval"] = follow(graph, train, num_stages=stages)
                found = Recorded(Shapes(graph), stage_of)
                self._check_alike(found, graph)
                self.agreement.agree("the layers at another shape", lambda: of_layers(graph))
                assert self.guards is not None, "made with the engine"
                self.guards.extend(found.shapes.traced)
            except Disagreement:
                raise
            except PlanError as error:
                if str(error).startswith("the model does not run"):
                    why, _, _ = str(error).partition("; give it an example")
                    raise PlanError(f"{why}; pad or cut the batch to a shape that it takes") from None
                remedy = "" if "; " in str(error) else "; pad to one shape, or name the part in leaves="
                raise PlanError(f"{refused}; recorded with it, {error}{remedy}") from error
        others = [x.shape[1:] for x in batch] != [x.shape[1:] for x in self.example]
        if self.world.rank == 0 and self.tells and (others or values):
            sizes = ", ".join("x".join(map(str, x.shape)) for x in batch)
            what = "other values in micro-batches" if values else "micro-batches"
            warnings.warn(
                f"the model was recorded anew for {what} of the shape {sizes}, in "
                f"{time.perf_counter() - began:.1f} s; shapes that come again are known",
                stacklevel=2,
            )
        if len(self.recorded) == MOST_RECORDED:
            del self.recorded[1]
            self.runs = {}
        self.recorded.append(found)
        return found

    def _check_alike(self, other: Recorded, graph: LayerGraph) -> None:
        """Refuse a run that needs more than the stages were made for; raises PlanError."""
        first, plan = self.recorded[0], self.plan
        if graph.train_probe.seeded != first.shapes.real["train"].seeded:
            raise PlanError("other layers of the model are random")
        if written := graph.written - self.written:
            raise PlanError(f"a forward writes to {min(written)}")
        for mode, stage in itertools.product(self.stage_of, range(plan.num_stages)):
            known, needed = (
                {*itertools.chain(*names_of(*one.layers(mode, stage), output=stage == plan.num_stages - 1))}
                for one in (first, other)
            )
            if missing := needed - known - {*other.shapes.traced[mode].constants}:
                raise PlanError(f"stage {stage} reads {min(missing)} in {mode} mode, which it does not hold")
            if plan.stages[stage].parameters_tier != "device":
                here, there = (read_by_layer(one.layers(mode, stage)[1]) for one in (first, other))
                if moved := [name for name, read in there.items() if read and here.get(name) != read]:
                    raise PlanError(
                        f"layer {moved[0]} reads other parameters, which come by the names of layers; leave "
                        "parameters on the device"
                    )
        for mode in self.stage_of:
            here, there = (one.tied(mode, plan.num_stages) for one in (first, other))
            if changed := [n for n, (a, b) in enumerate(zip(here, there, strict=True)) if a != b]:
                raise PlanError(f"stage {changed[0]} shares other parameters with other stages")

    def _plan(self, mode: str, inputs: Inputs, runs: Sequence[Recorded], extra: int) -> Planned:
        _, routed = self.routed(mode, inputs, runs)
        pairs = pairs_of(routed)
        if mode == "train":
            programs, order, window = self._training(len(inputs), pairs, extra)
        else:
            order, window = [Instruction(s, Op.F, 0) for s in range(self.plan.num_stages)], 2
            ranks = range(self.plan.num_ranks)
            programs = [[i for i in order if self.plan.owner(i.stage) == rank] for rank in ranks]
        rank_of = self.plan.rank_of if mode == "train" else lambda stage, micro_batch: self.plan.owner(stage)
        firsts: dict[tuple[int, int], int] = {}  # of each replica, with which its tied parameters come
        for index, stage in itertools.product(range(len(inputs)), range(self.plan.num_stages)):
            firsts.setdefault((stage, self.plan.place_of(stage, index)), index)
        settings = {"rank_of": rank_of, "codecs": self.codecs}
        messages = {
            index: micro_batch_messages(index, route, **settings, tied=index in firsts.values())
            for index, route in enumerate(routed)
        }
        made = step_messages(programs, dict(enumerate(routed)), messages, window=window)
        return made, order if self.world.is_alone else programs[self.world.rank]

    def _training(
        self, number: int, pairs: list[tuple[int, int]], extra: int
    ) -> tuple[list[list[Instruction]], list[Instruction], int]:
        """Programs per rank, their order in one process, the receives to post ahead; U ends them."""
        stages, settings = self.plan.stages_of_rank, {"num_micro_batches": number, "edges": pairs}
        several = max(self.plan.replicas) > 1
        rank_of = self.plan.rank_of if several else None
        programs = schedule_of(self.plan)(stages, number, extra_in_flight=extra)
        window = smallest_window(programs, **settings, rank_of=rank_of)
        order = verify(programs, **settings, window=window, rank_of=rank_of)
        if several and self.world.is_alone:
            whole = as_one(self.plan, number, extra_in_flight=extra)
            order = verify(whole, **settings, window=smallest_window(whole, **settings))
        updates = [[Instruction(s, Op.U) for s in own] for own in stages]
        programs = [[*program, *update] for program, update in zip(programs, updates, strict=True)]
        once = dict.fromkeys(itertools.chain(*updates))  # replicas are one in one process
        return programs, [*order, *once], window


def _shape(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _text(tensor: torch.Tensor) -> str:
    """The elements of a tensor, for JSON."""
    return base64.b64encode(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()).decode()


def _of_text(text: str, like: torch.Tensor) -> torch.Tensor:
    """The tensor of the shape and dtype of ``like`` with these elements."""
    data = bytearray(base64.b64decode(text))
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(like.dtype).view(like.shape)


class SynchronousFeed:
    """Steps that begin and end with nothing in flight; a ``StreamFeed`` is asked the same where some is, and
    drained."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.runs: list[Recorded] = []  # of the last batch, whose inputs a forward may have written to

    def restart(self) -> None:
        """Nothing to forget."""

    def rehearse(self, inputs: Inputs) -> None:
        """Refuse now what a batch of these micro-batches would be refused for."""
        plan = self.steps.plan
        for extra in sorted({plan.extra_in_flight, plan.most_extra_in_flight}):
            self.steps.step("train", inputs, extra=extra)

    def feed(self, batches: Sequence[MicroBatch], *, step: int, extra: int = 0) -> Step:
        """The step that trains on these micro-batches; raises what ``Steps.step`` does."""
        inputs = [batch.inputs for batch in batches]
        self.runs = self.steps.runs_of("train", inputs)
        messages, program = self.steps.step("train", inputs, extra=extra, runs=self.runs)
        live = {batch.index: batch._replace(step=step) for batch in batches}
        return Step(number=step, messages=messages, program=program, micro_batches=live)

    def ran(self, step: Step) -> None:
        """The step has run, and all of it is done."""

    def messages(self, step: Step, extra: int) -> StepMessages:
        """Those of ``step`` with so many more in flight than the schedule's own."""
        inputs = [batch.inputs for batch in step.micro_batches.values()]
        return self.steps.step("train", inputs, extra=extra, runs=self.runs)[0]


def pairs_of(routed: Iterable[tuple[Route, ...]]) -> list[tuple[int, int]]:
    """The (source, target) pairs of stages that some value of some micro-batch travels over."""
    distinct = {id(route): route for route in routed}
    return sorted({pair for route in distinct.values() for pair in edges(route)})


class Live(NamedTuple):
    """A micro-batch that not all stages are done with."""

    batch: MicroBatch
    routes: tuple[Route, ...]
    messages: MicroBatchMessages


class StreamFeed:
    """The slices of a plan's endless program, with the messages of each; micro-batches live until the first
    stage is done with them."""

    def __init__(self, plan: Plan, steps: Steps) -> None:
        self.plan, self.steps = plan, steps
        self.window = 2
        self.pairs: list[tuple[int, int]] = []
        self.restart()

    def restart(self) -> None:
        """Forget what is in flight: nothing is any more, or a step failed."""
        self.fed = StreamState(num_stages=self.plan.num_stages, each=self.plan.schedule == STREAM)
        self.clock = self.num_batches = 0
        self.live: dict[int, Live] = {}
        self.pending: frozenset[Message] = frozenset()  # what is sent and not received

    @property
    def in_flight(self) -> bool:
        """True if there is anything to drain."""
        return self.fed.number > 0

    def rehearse(self, inputs: Inputs) -> None:
        """Refuse now what a batch of these micro-batches would be refused for."""
        self._check(len(inputs))
        records, routed = self.steps.routed("train", inputs)
        rule = self.plan.policy.rule
        if rule and not rule.delay:  # a copy that came with a micro-batch would stay as it was
            sent = [records[0].values[number] for route in routed[0] for number, _ in route.sends]
            if tied := next((value.name for value in sent if value.parameter), None):
                raise PlanError(
                    f"weights=latest runs a backward with the newest weights, and {tied} is shared with a "
                    "later stage, which has only what came with the micro-batch; take weights=stashed, or "
                    "cut so that one stage has all its users"
                )
        self._open_windows(routed)

    def feed(self, batches: Sequence[MicroBatch], *, step: int, extra: int = 0) -> Step:
        """The slice that a batch's micro-batches bring; raises what ``Steps.step`` does."""
        self._check(len(batches))
        _, routed = self.steps.routed("train", [batch.inputs for batch in batches])
        self._open_windows(routed)
        first = self.fed.number
        for m, (batch, route) in enumerate(zip(batches, routed, strict=True), start=first):
            share = 1.0 if self.fed.each else batch.share
            told = batch._replace(share=share, step=step, batch=self.num_batches)
            messages = micro_batch_messages(m, route, rank_of=self.plan.rank_of, codecs=self.steps.codecs)
            self.live[m] = Live(told, route, messages)
        self.fed = self.fed.followed(len(batches), clock=self.clock)
        self.num_batches += 1
        return self._slice(2 * self.fed.number, first=first, step=step)

    def drain(self, *, step: int) -> Step:
        """The slice that ends everything in flight."""
        return self._slice(None, first=min(self.live, default=self.fed.number), step=step)

    def messages(self, step: Step, extra: int) -> StepMessages:
        """Those of ``step``: its number in flight decides who reads which weights."""
        return step.messages

    def ran(self, step: Step) -> None:
        """The slice has run: forget what it finished."""
        self.pending = step.messages.pending_out
        instructions = itertools.chain(*step.messages.programs)
        for over in [i.micro_batch for i in instructions if i.stage == 0 and i.op is Op.B]:
            assert over is not None
            del self.live[over]

    def _slice(self, stop: int | None, *, first: int, step: int) -> Step:
        world, start, self.clock = self.steps.world, self.clock, stop or 0
        programs = [between(own, self.fed, start=start, stop=stop) for own in self.plan.stages_of_rank]
        everything = between(range(self.plan.num_stages), self.fed, start=start, stop=stop)
        made = step_messages(
            programs,
            {m: live.routes for m, live in self.live.items()},
            {m: live.messages for m, live in self.live.items()},
            window=self.window, first=first, continues=start > 0, pending_in=self.pending,
        )  # fmt: skip
        program = everything if world.is_alone else programs[world.rank]
        live = {m: live.batch for m, live in self.live.items()}
        return Step(number=step, messages=made, program=program, micro_batches=live)

    def _check(self, number: int) -> None:
        if not self.fed.each and number < self.plan.num_stages:
            raise PlanError(
                f"weights={self.plan.weights} takes at least as many micro-batches in a batch as there are "
                f"stages, found {number} for {self.plan.num_stages}; make batches larger, or drop the last "
                "of an epoch"
            )

    def _open_windows(self, routed: Sequence[tuple[Route, ...]]) -> None:
        """Post as many receives ahead as the whole program needs over these routes."""
        pairs = pairs_of(routed)
        if set(pairs) <= set(self.pairs):
            return
        self.pairs = sorted({*self.pairs, *pairs})
        number = 2 * self.plan.num_stages + 2  # more micro-batches only repeat what these do
        fed = StreamState(num_stages=self.plan.num_stages, each=self.fed.each, ends=(number,))
        programs = [between(own, fed) for own in self.plan.stages_of_rank]
        self.window = smallest_window(
            programs, num_micro_batches=number, edges=self.pairs, asynchronous=self.fed.each
        )
