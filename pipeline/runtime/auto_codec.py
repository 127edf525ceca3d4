"""Policies for the codec of each flow and the micro-batches in flight: one setting, or a search.

steps 1, 2      every codec is tried on samples of what travels: seconds and bytes of each flow
then            the choice with the shortest predicted step runs in turns against the plan's and "raw"
3 turns each    the fastest stays; every hundredth step the search begins anew"""

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import torch

from ...compression.buffers import Pool
from ...compression.codec import encode
from ...compression.codec_cost import Cost, candidates, sample, trial
from ...compression.names import AUTO, check_name
from ...compression.zero_value import has_bitmap
from ..distributed.process_group import World
from ..distributed.transport import measured_rates
from ..schedules.instruction import Flow, Instruction, Span
from ..schedules.messages import Message, StepMessages
from ..schedules.simulate import step_seconds

Others = Callable[[int], StepMessages]  # the messages of a step by how many more are in flight
Named = Mapping[tuple[str, str, int], str]  # a plan's: by value, way and stage, as a flow begins
NONE: Named = {}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A setting that ran for some steps: seconds of a step, predicted and measured, and whether it stayed."""

    name: str
    extra: int
    predicted: float
    measured: float
    stayed: bool


def wherever_masked(codec: str, flow: Flow) -> str:
    """``codec``, behind ``MASKED`` for a gradient if it can use a bitmap."""
    return codec if flow.way == "F" or not has_bitmap(codec) else MASKED + codec


FREE = Cost(0.0, 0.0, 0.0)
MASKED = "masked+"  # before a codec: on the words at the set bits of the value's bitmap alone
LIGHTER = 0.01  # what a second of packing weighs where it lengthens no step: the fans, the neighbours

Choice = Mapping[Flow, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Measurements: the cost of every codec on every flow, seconds of every stage's F, B and U without
    packing, bytes per second between ranks (none: no link), and whether the ranks run at the same time."""

    costs: Mapping[Flow, Mapping[str, Cost]]
    work: Mapping[tuple[int, str], float]
    rates: Mapping[tuple[int, int], float]
    parallel: bool = True

    def cost(self, flow: Flow, choice: Choice) -> Cost:
        """Return the cost of a flow under ``choice``; a gradient has a bitmap only if its value has one."""
        codec = choice.get(flow, "raw")
        if codec.startswith(MASKED) and not has_bitmap(choice.get(flow.downstream, "raw")):
            codec = codec.removeprefix(MASKED)
        return self.costs.get(flow, {}).get(codec, FREE)


def predict(messages: StepMessages, prices: Prices, choice: Choice) -> float:
    """Seconds of a step in which every flow uses the codec of ``choice``."""

    def cost(message: Message) -> Cost:
        while message.forwarded is not None:
            message = message.forwarded
        return prices.cost(message.flow, choice)

    def work(instruction: Instruction) -> float:
        seconds = prices.work.get((instruction.stage, instruction.op.value), 0.0)
        seconds += sum(cost(message).unpack_seconds for message in messages.receives.get(instruction, ()))
        packed = [m for m in messages.sends.get(instruction, ()) if m.forwarded is None]
        return seconds + sum(cost(message).pack_seconds for message in packed)

    def transfer(message: Message) -> float:
        rate = prices.rates.get(message.ranks)
        return cost(message).num_bytes / rate if rate else 0.0

    if not prices.parallel:
        return sum(work(instruction) for program in messages.programs for instruction in program)
    return step_seconds(messages, work=work, transfer=transfer)


def choose(messages: StepMessages, prices: Prices, *, start: Choice) -> dict[Flow, str]:
    """The choice whose predicted step is shortest, value by value from the largest on, from ``start``; with
    its gradient, which may reuse the bitmap of the value."""

    def burden(choice: Choice) -> float:
        costs = [prices.cost(flow, choice) for flow in prices.costs]
        return predict(messages, prices, choice) + LIGHTER * sum(map(_seconds, costs))

    best = {flow: start.get(flow, "raw") for flow in prices.costs}
    least = burden(best)
    values = [flow for flow in prices.costs if flow.way == "F"]
    for flow in sorted(values, key=lambda flow: -prices.costs[flow]["raw"].num_bytes):
        gradient = Flow(flow.value, "B", flow.target, flow.source)
        ways = [flow, gradient] if gradient in prices.costs else [flow]
        for codecs in product(*(_worth_trying(way, prices) for way in ways)):
            other = best | dict(zip(ways, codecs, strict=True))
            if (seconds := burden(other)) < least:
                best, least = other, seconds
    return best


def _worth_trying(flow: Flow, prices: Prices) -> list[str]:
    """Codecs of a flow without those that another one (with a bitmap only if they need one too) beats in
    bytes and in seconds at once."""
    table = prices.costs[flow]
    return [
        codec
        for codec, cost in table.items()
        if not any(
            other.num_bytes <= cost.num_bytes and _seconds(other) < _seconds(cost)
            for name, other in table.items()
            if codec.startswith(MASKED) or not name.startswith(MASKED)
        )
    ]


def _seconds(cost: Cost) -> float:
    return cost.pack_seconds + cost.unpack_seconds


START = "zero_value"  # until there is a choice
TRIALS = (1, 2)  # steps in which codecs are tried first
EVERY = 100  # steps between later trials
ROUNDS = 3  # steps that each contender runs
HOPELESS = 1.5  # times the seconds that the best is predicted to take: not even tried
WORTH = 0.97  # of the seconds of what runs: less is worth a change, or one more in flight


class Setting(NamedTuple):
    """Setting of a step: the codec of every flow, and the number in flight beyond the schedule's."""

    codecs: Choice
    extra: int = 0


class Policy:
    """The codec of every flow, and the micro-batches in flight: one setting, or found by measurement.

    Attributes: turns: the last choices that ran against each other; none where there was nothing to choose.

    Args:    named: what begins with another codec than ``START``, which is tried too, though it be lossy.
             codec: if not "auto", that of all which is not named: only what is in flight is looked for.
             extra: the fewest and the most micro-batches in flight beyond the schedule's own; most 0: the
               fewest, as in a world of one rank.

    Raises:  CodecError: there is no such codec."""

    def __init__(
        self, world: World, named: Named = NONE, *, codec: str = AUTO, extra: tuple[int, int] = (0, 0),
        deadline: float,
    ) -> None:  # fmt: skip
        check_name(codec)
        if world.is_alone or not extra[1]:  # alone, nothing is on its way while others compute
            extra = extra[0], extra[0]
        self.world, self.deadline, self.named = world, deadline, named
        self.searches, self.start = codec == AUTO, START if codec == AUTO else codec
        self.extras = range(extra[0], extra[1] + 1)
        self.decides = self.searches or len(self.extras) > 1
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
        """True if a setting has won, or there is only one."""
        return self.chosen is not None or not self.decides

    @property
    def trying(self) -> bool:
        """True if this step tries codecs."""
        due = self.number in TRIALS or (self.number > 0 and self.number % EVERY == 0)
        return due and self.decides

    @property
    def _turn(self) -> int:
        return sum(map(len, self.seconds)) % len(self.contenders)

    @property
    def running(self) -> Setting | None:
        """The setting of this step: contenders take turns."""
        return [*self.contenders.values()][self._turn] if self.contenders else self.chosen

    @property
    def extra(self) -> int:
        """Micro-batches in flight in the next step beyond the schedule's own."""
        return self.extras[0] if self.running is None else self.running.extra

    def codec(self, flow: Flow) -> str:
        """The codec for the frames of ``flow``, behind ``MASKED`` if they are to use a bitmap."""
        start, running = wherever_masked(self.named.get(flow[:3], self.start), flow), self.running
        return start if running is None else running.codecs.get(flow, start)

    def observed(self, messages: StepMessages) -> int | None:
        """The micro-batch whose tensors ``arriving`` and ``leaving`` are to see, in a step of trials."""
        return messages.first if self.trying else None

    def arriving(self, message: Message, item: torch.Tensor) -> None:
        """Keep the bitmap of a value's sample for the trial of its gradient."""
        if message.masked:
            self.masks[message] = encode(sample(item.detach()))

    def leaving(self, message: Message, item: torch.Tensor) -> None:
        """Try on a sample every codec that may be chosen."""
        part = sample(item.detach())
        mask = None if message.answers is None else self.masks.pop(message.answers, None)
        tried = candidates(item.dtype, on_gpu=item.is_cuda) if self.searches else ()
        costs, size = self.costs[message.flow], item.nbytes
        for codec in dict.fromkeys([*tried, self.named.get(message.flow[:3], self.start)]):
            costs[codec].append(trial(part, codec, self.pool, num_bytes=size))
            if mask is not None and has_bitmap(codec):
                costs[MASKED + codec].append(trial(part, codec, self.pool, num_bytes=size, mask=mask))

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
        """Put all ranks' prices together, and let the predicted setting run against the known safe one."""
        prices = self._prices(others(self.extras[0]))
        self._forget()
        planned = {f: wherever_masked(self.named.get(f[:3], self.start), f) for f in prices.costs}
        start = Setting(planned, self.extras[0])
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
        """Predict the best setting; packing, and one more in flight, must be ``WORTH`` its price."""
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
        """Gather the measurements of all ranks, the same on each."""
        if self.rates is None:
            links = sorted(messages.channels)
            alone = self.world.is_alone
            self.rates = {} if alone else measured_rates(self.world, links, deadline=self.deadline)
        mine = [[[*flow], _means(table)] for flow, table in self.costs.items()]
        work = [[*place, statistics.mean(seconds)] for place, seconds in self.work.items()]
        rows = self.world.all_gather_json([mine, work], at="the choice of codecs")
        costs = {
            Flow(*f): {c: Cost(*cost) for c, cost in table.items()} for row in rows for f, table in row[0]
        }
        seconds = {(stage, op): mean for row in rows for stage, op, mean in row[1]}
        return Prices(costs=costs, work=seconds, rates=self.rates, parallel=not self.world.is_alone)


def _means(table: dict[str, list[Cost]]) -> dict[str, list[float]]:
    """Bytes on average, seconds at best."""
    columns = {codec: zip(*costs, strict=True) for codec, costs in table.items()}
    return {
        c: [statistics.mean(sizes), min(pack), min(unpack)] for c, (sizes, pack, unpack) in columns.items()
    }
