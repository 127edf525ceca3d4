"""``codec=auto``: the first steps try every codec on the tensors that really travel; the shortest step wins.

Trials on samples (never of step 0 alone: a zero-initialised head makes all its gradients zero) and the speed
of the links give prices; the choice they predict then runs against plain frames and against zero_value, step
by step in turn, and the measurement decides. Now and then all of it is repeated, since densities drift."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from ...compression.choose import Cost, candidates, sample, trial
from ...compression.codec import encode
from ...compression.masked import has_bitmap
from ...compression.names import AUTO, check_name
from ...compression.pool import Pool
from ..ranks.links import measured_rates
from ..ranks.world import World
from ..schedules.messages import Flow, Message, StepMessages
from ..schedules.prices import MASKED, Choice, Prices, choose, predict
from ..schedules.span import Span
from .policy import Fixed, Named, Policy, Turn, wherever_masked

START = "zero_value"  # until there is a choice
TRIALS = (1, 2)  # steps in which codecs are tried first
EVERY = 100  # steps between later trials
ROUNDS = 3  # steps that each contender runs
HOPELESS = 1.5  # times the seconds that the best is predicted to take: not even tried
WORTH = 0.97  # of the seconds of what runs: less is worth a change


def policy_named(codec: str, *, named: Named | None = None, world: World, deadline: float) -> Policy:
    """The policy for ``codec``, the name of one or "auto"; ``named``: what has, or begins with, another.

    Raises: CodecError: there is none of this name.
    """
    check_name(codec)
    return Auto(world, named, deadline=deadline) if codec == AUTO else Fixed(codec, named)


class Auto:
    """The codec of every flow by measurement.

    Args:    named: what begins with another codec than ``START``, which is tried too, though it be lossy.
             deadline: seconds that a wait for another rank may take.
    """

    def __init__(self, world: World, named: Named | None = None, *, deadline: float) -> None:
        self.world, self.deadline, self.named = world, deadline, named or {}
        self.pool = Pool()
        self.number = 0
        self.chosen: Choice | None = None  # None: START for everything
        self.contenders: dict[str, Choice] = {}
        self.turns: tuple[Turn, ...] = ()
        self.rates: dict[tuple[int, int], float] | None = None
        self._forget()

    def _forget(self) -> None:
        self.costs: dict[Flow, dict[str, list[Cost]]] = defaultdict(lambda: defaultdict(list))
        self.work: dict[tuple[int, str], list[float]] = defaultdict(list)
        self.masks: dict[Message, torch.Tensor] = {}
        self.seconds: list[list[float]] = []

    @property
    def settled(self) -> bool:
        """Whether a choice has won."""
        return self.chosen is not None

    @property
    def trying(self) -> bool:
        """Whether this step tries codecs."""
        return self.number in TRIALS or (self.number > 0 and self.number % EVERY == 0)

    @property
    def running(self) -> Choice | None:
        """The choice of this step: contenders take turns."""
        return [*self.contenders.values()][self._turn] if self.contenders else self.chosen

    @property
    def _turn(self) -> int:
        return sum(map(len, self.seconds)) % len(self.contenders)

    def codec(self, flow: Flow) -> str:
        """That of the choice which runs."""
        return self._start(flow) if self.running is None else self.running.get(flow, self._start(flow))

    def observed(self, messages: StepMessages) -> int | None:
        """The first micro-batch in a step of trials."""
        return messages.first if self.trying else None

    def arriving(self, message: Message, item: torch.Tensor) -> None:
        """Keep the bitmap of a value's sample for the trial of its gradient."""
        if message.masked:
            self.masks[message] = encode(sample(item.detach()))

    def leaving(self, message: Message, item: torch.Tensor) -> None:
        """Try every codec on a sample."""
        part = sample(item.detach())
        mask = None if message.answers is None else self.masks.pop(message.answers, None)
        own = [self.named[message.flow[:3]]] if message.flow[:3] in self.named else []
        for codec in dict.fromkeys([*candidates(item.dtype), *own]):
            cost = trial(part, codec, self.pool, num_bytes=item.nbytes)
            self.costs[message.flow][codec].append(cost)
            if mask is not None and has_bitmap(codec):
                cost = trial(part, codec, self.pool, num_bytes=item.nbytes, mask=mask)
                self.costs[message.flow][MASKED + codec].append(cost)

    def end(self, messages: StepMessages, spans: Sequence[Span], seconds: float) -> None:
        """Note what the step took, and decide where that is due; every rank decides the same."""
        if self.trying:
            for span in spans:
                self.work[span.stage, span.op].append(span.end - span.start - span.waiting - span.packing)
            if self.number not in TRIALS[:-1]:
                self._contend(messages)
        elif self.contenders:
            self._note(seconds)
        self.number += 1

    def _contend(self, messages: StepMessages) -> None:
        """Put all ranks' prices together; what they predict runs against what is known to be safe."""
        prices = self._prices(messages)
        self._forget()
        start = {flow: self._start(flow) for flow in prices.costs}
        best = choose(messages, prices, start=self.chosen or start)
        named = {"as before": self.chosen} if self.chosen else {}
        named |= {"by price": best}
        named |= {} if self.chosen else {START: start, "raw": dict.fromkeys(start, "raw")}
        self.contenders, self.predictions = {}, []
        for name, choice in named.items():
            seconds = predict(messages, prices, choice)
            hopeless = seconds > HOPELESS * min([seconds, *self.predictions])
            if choice not in self.contenders.values() and not hopeless:
                self.contenders[name] = choice
                self.predictions.append(seconds)
        self.seconds = [[] for _ in self.contenders]

    def _note(self, seconds: float) -> None:
        """Note a contender's step; after the last, the first stays unless another is clearly faster."""
        self.seconds[self._turn].append(seconds)
        if sum(map(len, self.seconds)) < ROUNDS * len(self.contenders):
            return
        mine = [statistics.median(column) for column in self.seconds]
        medians = [max(column) for column in zip(*self.world.all_gather_json(mine), strict=True)]
        fastest = min(range(len(medians)), key=lambda i: medians[i] if i == 0 else medians[i] / WORTH)
        rows = zip(self.contenders, self.predictions, medians, strict=True)
        self.turns = tuple(
            Turn(name=name, predicted=predicted, measured=measured, stayed=i == fastest)
            for i, (name, predicted, measured) in enumerate(rows)
        )
        self.chosen, self.contenders = [*self.contenders.values()][fastest], {}

    def _prices(self, messages: StepMessages) -> Prices:
        """What all ranks measured, the same on each."""
        if self.rates is None:
            self.rates = self._rates(messages)
        mine = [[[*flow], _means(table)] for flow, table in self.costs.items()]
        work = [[*place, statistics.mean(seconds)] for place, seconds in self.work.items()]
        rows = self.world.all_gather_json([mine, work])
        costs = {Flow(*f): _costs(table) for row in rows for f, table in row[0]}
        seconds = {(stage, op): mean for row in rows for stage, op, mean in row[1]}
        return Prices(costs=costs, work=seconds, rates=self.rates, parallel=not self.world.is_alone)

    def _start(self, flow: Flow) -> str:
        return wherever_masked(self.named.get(flow[:3], START), flow)

    def _rates(self, messages: StepMessages) -> dict[tuple[int, int], float]:
        links = sorted(messages.channels)
        return {} if self.world.is_alone else measured_rates(self.world, links, deadline=self.deadline)


def _means(table: dict[str, list[Cost]]) -> dict[str, list[float]]:
    """Bytes on average, seconds at best."""
    return {
        codec: [
            statistics.mean(cost.num_bytes for cost in costs),
            min(cost.pack_seconds for cost in costs),
            min(cost.unpack_seconds for cost in costs),
        ]
        for codec, costs in table.items()
    }


def _costs(table: dict[str, Any]) -> dict[str, Cost]:
    return {codec: Cost(*cost) for codec, cost in table.items()}
