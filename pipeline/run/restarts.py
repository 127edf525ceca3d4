"""Ranks that were killed, lost or hang are started again, and the run goes on from its last checkpoint.

A rank's own error would come again, so it ends the run at once. A rank that is lost again at once may have no
place any more: where the user allows it (``min_ranks=``), the run goes on with one rank less. A replica of a
stage can be done without at once (``replicas.shrink=true``), on the same cuts."""

from __future__ import annotations

from collections.abc import Callable

from ...compression.errors import PenstockError
from ...conf.schema import AGAIN, TrainConfig
from ...stages.plan.plan import Plan
from ..distributed.failure import Lost
from ..schedules.replicated import without
from . import console
from .logs import JsonLog
from .resume import resolve
from .run_folder import RunFolder, step_of


def persist(
    config: TrainConfig,
    plan: Plan,
    folder: RunFolder,
    start: Callable[[TrainConfig, Plan], None],
    *,
    replan: Callable[[TrainConfig], Plan],
) -> None:
    """Run the ranks by ``start``, and where some are lost, again: ``config.max_restarts`` times at most, and
    as often as a lost replica may be done without.

    Args:   config: ``resume``, ``ranks`` and ``replicas`` become those of the last start.
            replan: makes the plan for other ranks, and keeps it in ``folder``.
    """
    before, lost_before, restart = config.resume, None, 0
    while True:
        steps = _num_steps(folder)
        try:
            return start(config, plan)
        except Lost as lost:
            if config.replicas.shrink and (fewer := without(plan, lost.rank)):
                plan = fewer
                config.ranks, config.stages = plan.num_ranks, plan.num_stages
                config.replicas.count = list(plan.replicas)
                if isinstance(config.replicas.shares, list):
                    config.replicas.shares = [share for own in plan.shares for share in own]
                folder.save(config, plan)
                where = _go_back(config, folder, before)
                console.warn(f"{lost}; {where}, without it: replicas.count={config.replicas.count}")
                continue
            restart += 1
            if restart > config.max_restarts:
                raise
            at_once = lost.rank == lost_before is not None and _num_steps(folder) <= steps + 1
            lost_before = lost.rank
            where = _go_back(config, folder, before)
            sentence = f"{lost}; restart {restart} of {config.max_restarts} {where}"
            if at_once and config.ranks > (config.min_ranks or config.ranks):
                config.ranks -= 1
                try:
                    plan = replan(config)
                    sentence += f", with ranks={config.ranks}"
                except PenstockError as error:
                    config.ranks += 1
                    sentence += f", with all ranks ({error})"
            console.warn(sentence)


def _go_back(config: TrainConfig, folder: RunFolder, before: str | None) -> str:
    """Let the run go on from its last checkpoint, or begin as it did ``before``; return which, as a text."""
    config.resume = AGAIN
    step = 0
    if resolve(config, folder, console.warn, threads=config.threads):
        step = step_of(folder.whole_checkpoints()[0])
        where = f"goes on behind step {step}"
    else:
        config.resume = before
        where = f"begins as the run did, with {before}" if before else "begins anew: there is no checkpoint"
    with JsonLog(folder.metrics, tell=console.warn, first=step):  # cut off what is done again
        return where


def _num_steps(folder: RunFolder) -> int:
    return folder.metrics.read_bytes().count(b"\n") if folder.metrics.exists() else 0
