"""Which rank runs what: the stages of a plan and their ranks, asked here by all who want to know."""

import dataclasses
from collections.abc import Sequence
from typing import Self

from ...compression.errors import PlanError
from .dealing import place_of, shares_of_stage
from .plan_stage import PlanStage


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Stages on their ranks, of which several may be replicas of one stage."""

    stages: tuple[PlanStage, ...]

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each stage, for those who show it; who asks where something runs asks ``rank_of``."""
        return tuple(rank for stage in self.stages for rank in stage.ranks)

    @property
    def replicas(self) -> tuple[int, ...]:
        """How many ranks each stage has."""
        return tuple(len(stage.ranks) for stage in self.stages)

    @property
    def shares(self) -> tuple[tuple[int, ...], ...]:
        """By what weight the replicas of each stage take its micro-batches."""
        return tuple(stage.shares or (1,) * len(stage.ranks) for stage in self.stages)

    @property
    def num_ranks(self) -> int:
        """Number of processes the plan is made for."""
        return max(self.ranks) + 1

    @property
    def stages_of_rank(self) -> list[list[int]]:
        """The stages of each rank, as the schedules take them."""
        numbered = list(enumerate(self.stages))
        return [[s for s, stage in numbered if rank in stage.ranks] for rank in range(self.num_ranks)]

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """The rank that runs ``stage`` (-1: the last) for ``micro_batch``."""
        return self.stages[stage].ranks[self.place_of(stage, micro_batch)]

    def place_of(self, stage: int, micro_batch: int) -> int:
        """Which replica of ``stage`` runs it for ``micro_batch``, counted from 0."""
        one = self.stages[stage]
        return place_of(one.shares, micro_batch) if one.shares else micro_batch % len(one.ranks)

    def owner(self, stage: int) -> int:
        """The rank that answers for ``stage`` (-1: the last) whatever the shares: its first one."""
        return self.stages[stage].ranks[0]

    def with_shares(self, shares: Sequence[Sequence[int]]) -> Self:
        """The same with these shares of each stage; none where its replicas are to take as many.

        Raises:  PlanError: a stage cannot be dealt by them."""
        if len(shares) != self.num_stages:
            raise PlanError(
                f"every stage has its shares, found shares of {len(shares)} stages for {self.num_stages}; "
                "give those of each"
            )
        found = map(shares_of_stage, shares, range(self.num_stages), self.replicas)
        pairs = zip(self.stages, found, strict=True)
        return dataclasses.replace(
            self, stages=tuple(dataclasses.replace(stage, shares=own) for stage, own in pairs)
        )
