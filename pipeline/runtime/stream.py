"""The endless program of asynchronous training, handed out slice by slice (``schedules/endless.py``).

A step runs what happens before its batch would be followed by the next: all ranks end it together, with
micro-batches in flight, and no bubble appears."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...compression.errors import PlanError
from ...stages.plan.plan import Plan
from ...stages.plan.validation import STREAM
from ...stages.stage.value_routing import Route
from ...stages.tracing.dataflow import Probe
from ..schedules.async_1f1b import StreamState, between
from ..schedules.instruction import Op
from ..schedules.messages import (
    Message,
    MicroBatchMessages,
    StepMessages,
    micro_batch_messages,
    step_messages,
)
from ..schedules.verify import smallest_window
from .batches import MicroBatch
from .step_planner import Inputs, Step, Steps, pairs_of


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
        if rule and not rule.delay:
            _check_tied(records[0], routed[0])
        self._open_windows(routed)

    def feed(self, batches: Sequence[MicroBatch], *, step: int, extra: int = 0) -> Step:
        """The slice that a batch's micro-batches bring.

        Raises: PlanError: too few micro-batches for two versions of the weights, or a cut that would change
                the bits at their shapes.
        """
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
        programs = step.messages.programs
        over = [i.micro_batch for own in programs for i in own if i.stage == 0 and i.op is Op.B]
        for m in over:
            assert m is not None
            del self.live[m]

    def _slice(self, stop: int | None, *, first: int, step: int) -> Step:
        world, start, self.clock = self.steps.world, self.clock, stop or 0
        programs = [between(own, self.fed, start=start, stop=stop) for own in self.plan.stages_of_rank]
        everything = between(range(self.plan.num_stages), self.fed, start=start, stop=stop)
        made = step_messages(
            programs,
            {m: live.routes for m, live in self.live.items()},
            {m: live.messages for m, live in self.live.items()},
            window=self.window,
            first=first,
            continues=start > 0,
            pending_in=self.pending,
        )
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


def _check_tied(record: Probe, routes: Sequence[Route]) -> None:
    """A stage has the newest of its weights only: a copy that came with a micro-batch stays as it was."""
    sent = [record.values[number] for route in routes for number, _ in route.sends]
    if tied := next((value.name for value in sent if value.parameter), None):
        raise PlanError(
            f"weights=latest runs a backward with the newest weights, and {tied} is shared with a later "
            "stage, which has only what came with the micro-batch; take weights=stashed, or cut so that one "
            "stage has all its users"
        )
