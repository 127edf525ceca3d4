"""What a pipeline does with a step that was planned: run it, tell of it, and share out the next one."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

from ...compression.errors import PenstockError
from ...stages.planner.plan import Plan
from ..schedules.shares import Shares
from .assembly import Assembly
from .batches import joined
from .gather import gather_reports
from .loss import total_loss
from .report import Report
from .sharing import NONE, Seconds, Sharing, check_asked, sharing_of
from .step import Step


class Running(Assembly):
    """The parts of a pipeline while they run.

    Attributes: asked: a number told to all ranks with the next report."""

    sharing: Sharing
    asked = 0

    @property
    def is_last(self) -> bool:
        """Whether this process holds the last stage (its first replica), where losses and outputs are."""
        return self.world.is_alone or self.plan.owner(-1) == self.rank

    def reads(self, micro_batch: int) -> bool:
        """Whether this process reads the inputs of a micro-batch of the next step: runs its first stage."""
        return self.world.is_alone or self.plan.rank_of(0, micro_batch) == self.rank

    def reads_tests(self, _: int = 0) -> bool:
        """Whether it reads what is evaluated, which one replica of the first stage does."""
        return self.world.is_alone or self.plan.owner(0) == self.rank

    def share_by(self, asked: str | None) -> None:
        """Share out the steps as ``asked`` on rank 0, from the next one on; collective.

        Raises:  PlanError: it means nothing, or suits another plan."""
        with self.agreement.together("sharing out micro-batches"):
            check_asked(asked)
            (asked, *_) = self.agreement.exchange("its shares", asked)
            self.sharing = sharing_of(asked, self.plan, alone=self.world.is_alone)
        self.begin_shares()

    def begin_shares(self, kept: Shares = (), seconds: Seconds = NONE) -> None:
        """Begin with the step that is next; ``kept``, ``seconds``: those of a checkpoint that was loaded."""
        self._take(self.sharing.begin(self.plan, self.num_steps, kept, seconds))

    def next_shares(self, report: Report, number: int) -> None:
        """Take up the shares of the next step, behind one of ``number`` micro-batches, which is reported."""
        self._take(self.sharing.after(self.plan, self.num_steps, number=number, seconds=report.worked))

    def _take(self, plan: Plan) -> None:
        if plan is not self.plan:
            self.plan = self.steps.plan = self.replicas.plan = plan

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """The block in which a step trains: one that breaks off behind the begin of its update leaves weights
        of two steps, so that only a state that is loaded goes on."""
        before = self.update.begun
        try:
            yield
        except BaseException as error:
            if self.update.begun != before:
                self.engine.failures.over = (
                    f"the update of step {self.num_steps} was broken off by {type(error).__name__}, so "
                    "weights are of two steps; load a checkpoint or a state_dict of before"
                )
            raise

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """The block in which a checked state is taken over: one that breaks off leaves parts of two."""
        failures = self.engine.failures
        before, failures.over = (
            failures.over,
            "a load was broken off, so parts are of two states; load it again",
        )
        try:
            yield
            failures.over = ""
            self.guards.loaded()
        except PenstockError:  # refused ahead of the first byte
            failures.over = before
            raise

    def _run(self, step: Step, *, num_samples: int, began: float, outputs: bool) -> Report:
        """Run a step, or what drains a stream; put together the loss, and what each stage did."""
        engine = self.engine
        try:
            with self.world.device.current():
                engine.step(dataclasses.replace(step, keeps_outputs=outputs))
        except BaseException:
            self.feed.restart()  # what was in flight is lost
            self.usage.restart()
            raise
        self.feed.ran(step)
        reports = self.usage.fill(engine.meter.reports, engine.meter.spans, rank=self.rank)
        losses = self.replicas.losses(engine.losses)
        shares = {index: step.micro_batches[index].share for index in losses}
        mine = total_loss(losses, shares, mean=self.plan.streams) if self.is_last else 0.0
        told = gather_reports(self.world, mine, reports, ranks=self.ranks_of_stages, asked=self.asked)
        return Report(
            step=self.num_steps,
            seconds=time.perf_counter() - began,
            num_samples=num_samples,
            outputs=joined(list(engine.outputs.values())),
            **told,
        )
