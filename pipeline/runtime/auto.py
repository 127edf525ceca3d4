"""``codec=auto`` and ``extra_in_flight=auto``: what makes the step shortest, found while it trains.

The first steps try codecs on the tensors that really travel (never step 0 alone: a zero-initialised head
makes all its gradients zero); that and the speed of the links are prices. The setting that they predict to be
best, codecs and micro-batches in flight, then runs against plain ones, step by step in turn, and the
measurement decides. Now and then all of it is repeated, since densities drift."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...compression.buffers import Pool
from ...compression.codec import encode
from ...compression.codec_cost import Cost, candidates, sample, trial
from ...compression.names import AUTO, check_name
from ...compression.zero_value import has_bitmap
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
WORTH = 0.97  # of the seconds of what runs: less is worth a change, or one more in flight


class Setting(NamedTuple):
    """What runs: the codec of every flow, and how many more are in flight than the schedule's own."""

    codecs: Choice
    extra: int = 0


Others = Callable[[int], StepMessages]
"""The messages of a step by how many more are in flight."""


def policy_named(
    codec: str,
    *,
    named: Named | None = None,
    extra: tuple[int, int] = (0, 0),
    world: World,
    deadline: float,
) -> Policy:
    """The policy for ``codec``, the name of one or "auto".

    Args:    named: what has, or begins with, another.
             extra: the fewest and the most micro-batches in flight beyond the schedule's own; 0 as the most
             is no more than the fewest.
    Raises:  CodecError: there is none of this name.
    """
    check_name(codec)
    if world.is_alone or not extra[1]:  # alone, nothing is on its way while others compute
        extra = extra[0], extra[0]
    if codec != AUTO and extra[0] == extra[1]:
        return Fixed(codec, named, extra=extra[0])
    return Auto(world, named, codec=codec, extra=extra, deadline=deadline)


class Auto:
    """The codec of every flow, and the micro-batches in flight, by measurement.

    Args:    named: what begins with another codec than ``START``, which is tried too, though it be lossy.
             codec: if not "auto", that of all which is not named: only what is in flight is looked for.
             extra: the fewest and the most micro-batches in flight beyond the schedule's own.
             deadline: seconds that a wait for another rank may take.
    """

    def __init__(
        self,
        world: World,
        named: Named | None = None,
        *,
        codec: str = AUTO,
        extra: tuple[int, int] = (0, 0),
        deadline: float,
    ) -> None:
        self.world, self.deadline, self.named = world, deadline, named or {}
        self.searches, self.start = codec == AUTO, START if codec == AUTO else codec
        self.extras = range(extra[0], extra[1] + 1)
        self.pool = Pool()
        self.number = 0
        self.chosen: Setting | None = None  # None: the start, for everything
        self.contenders: dict[str, Setting] = {}
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
        """Whether a setting has won."""
        return self.chosen is not None

    @property
    def trying(self) -> bool:
        """Whether this step tries codecs."""
        return self.number in TRIALS or (self.number > 0 and self.number % EVERY == 0)

    @property
    def running(self) -> Setting | None:
        """The setting of this step: contenders take turns."""
        return [*self.contenders.values()][self._turn] if self.contenders else self.chosen

    @property
    def _turn(self) -> int:
        return sum(map(len, self.seconds)) % len(self.contenders)

    @property
    def extra(self) -> int:
        """That of the setting which runs."""
        return self.extras[0] if self.running is None else self.running.extra

    def codec(self, flow: Flow) -> str:
        """That of the setting which runs."""
        return self._start(flow) if self.running is None else self.running.codecs.get(flow, self._start(flow))

    def observed(self, messages: StepMessages) -> int | None:
        """The first micro-batch in a step of trials."""
        return messages.first if self.trying else None

    def arriving(self, message: Message, item: torch.Tensor) -> None:
        """Keep the bitmap of a value's sample for the trial of its gradient."""
        if message.masked:
            self.masks[message] = encode(sample(item.detach()))

    def leaving(self, message: Message, item: torch.Tensor) -> None:
        """Try on a sample every codec that may be chosen."""
        part = sample(item.detach())
        mask = None if message.answers is None else self.masks.pop(message.answers, None)
        own = self.named.get(message.flow[:3], self.start)
        for codec in dict.fromkeys(
            [*(candidates(item.dtype, on_gpu=item.is_cuda) if self.searches else ()), own]
        ):
            cost = trial(part, codec, self.pool, num_bytes=item.nbytes)
            self.costs[message.flow][codec].append(cost)
            if mask is not None and has_bitmap(codec):
                cost = trial(part, codec, self.pool, num_bytes=item.nbytes, mask=mask)
                self.costs[message.flow][MASKED + codec].append(cost)

    def end(self, others: Others, spans: Sequence[Span], seconds: float) -> None:
        """Note what the step took, and decide where that is due; every rank decides the same."""
        if self.trying:
            for span in spans:
                self.work[span.stage, span.op].append(span.end - span.start - span.waiting - span.packing)
            if self.number not in TRIALS[:-1]:
                self._contend(others)
        elif self.contenders:
            self._note(seconds)
        self.number += 1

    def _contend(self, others: Others) -> None:
        """Put all ranks' prices together; what they predict runs against what is known to be safe."""
        prices = self._prices(others(self.extras[0]))
        self._forget()
        start = Setting({flow: self._start(flow) for flow in prices.costs}, self.extras[0])
        best = self._best(others, prices, start=(self.chosen or start).codecs)
        named = {"as before": self.chosen} if self.chosen else {}
        named |= {"by price": best}
        if not self.chosen:
            named |= {"as planned": start, "raw": start._replace(codecs=dict.fromkeys(start.codecs, "raw"))}
        self.contenders, self.predictions = {}, []
        for name, setting in named.items():
            seconds = predict(others(setting.extra), prices, setting.codecs)
            hopeless = seconds > HOPELESS * min([seconds, *self.predictions])
            allowed = self.searches or setting.codecs == start.codecs
            if allowed and setting not in self.contenders.values() and not hopeless:
                self.contenders[name] = setting
                self.predictions.append(seconds)
        self.seconds = [[] for _ in self.contenders]

    def _best(self, others: Others, prices: Prices, *, start: Choice) -> Setting:
        """What is predicted to be best; packing, and one more in flight, must be ``WORTH`` its price."""
        found: list[tuple[float, Setting]] = []
        plain: Choice = dict.fromkeys(start, "raw")
        for extra in self.extras:
            messages = others(extra)
            for codecs in [plain, choose(messages, prices, start=start)] if self.searches else [start]:
                seconds = predict(messages, prices, codecs)
                if not found or seconds < WORTH * found[-1][0]:
                    found.append((seconds, Setting(codecs, extra)))
        return found[-1][1]

    def _note(self, seconds: float) -> None:
        """Note a contender's step; after the last, the first stays unless another is clearly faster: each of
        its steps than each of the first's, as neighbours on a machine slow single steps."""
        self.seconds[self._turn].append(seconds)
        if sum(map(len, self.seconds)) < ROUNDS * len(self.contenders):
            return
        of_ranks = self.world.all_gather_json(self.seconds, at="the choice of codecs")
        runs = [[max(step) for step in zip(*rows, strict=True)] for rows in zip(*of_ranks, strict=True)]
        medians = [*map(statistics.median, runs)]
        clear = [i for i, run in enumerate(runs) if i == 0 or max(run) < WORTH * min(runs[0])]
        fastest = min(clear, key=medians.__getitem__)
        rows = zip(self.contenders.items(), self.predictions, medians, strict=True)
        self.turns = tuple(
            Turn(name=name, extra=setting.extra, predicted=predicted, measured=measured, stayed=i == fastest)
            for i, ((name, setting), predicted, measured) in enumerate(rows)
        )
        self.chosen, self.contenders = [*self.contenders.values()][fastest], {}

    def _prices(self, messages: StepMessages) -> Prices:
        """What all ranks measured, the same on each."""
        if self.rates is None:
            self.rates = self._rates(messages)
        mine = [[[*flow], _means(table)] for flow, table in self.costs.items()]
        work = [[*place, statistics.mean(seconds)] for place, seconds in self.work.items()]
        rows = self.world.all_gather_json([mine, work], at="the choice of codecs")
        costs = {Flow(*f): _costs(table) for row in rows for f, table in row[0]}
        seconds = {(stage, op): mean for row in rows for stage, op, mean in row[1]}
        return Prices(costs=costs, work=seconds, rates=self.rates, parallel=not self.world.is_alone)

    def _start(self, flow: Flow) -> str:
        return wherever_masked(self.named.get(flow[:3], self.start), flow)

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
