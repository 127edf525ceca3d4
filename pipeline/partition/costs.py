"""Cost of a run of layers in seconds, memory and bytes, from sums made once per profile."""

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from ...compression.names import AUTO
from ...stages.memory.byte_budget import PREFETCH_LAYERS
from ...stages.plan.cluster import Cluster
from ...stages.plan.memory_model import NEIGHBOURS, Copies
from ...stages.plan.plan_stage import PlanStage
from ...stages.profiling.network_profile import LayerProfile, Profile, ValueProfile, sizes_of
from ...stages.tracing.layers import part_of
from .split import TOLERANCE, Span

BESIDE = 8  # one part in so many of a budget is for the layer that runs, what waits to be written
Placed = tuple[tuple[int, int], int, int]
"""Positions of a stage, its place in ``copies``, its rank."""
PICOSECONDS = 10**12  # times are compared as integers: rounding of sums would decide between equals


def with_margin(num_bytes: int) -> int:
    """The budget that a prediction needs: predictions hold to 5 % (law L4)."""
    return -(-num_bytes * (100 + TOLERANCE) // 100)


class Sent(NamedTuple):
    """A tensor on a link: its codec, bytes, seconds on the link, seconds to pack and to unpack."""

    codec: str
    num_bytes: float
    on_link: float = 0.0
    packing: float = 0.0
    is_tried: bool = False


def sent(costs: Mapping[str, tuple[float, ...]], num_bytes: int, *, codec: str, rate: float | None) -> Sent:
    """Return how a tensor passes a link of so many bits per second soonest; by ``codec``, unless it is
    "auto"; as it is where nobody tried."""
    if not rate:
        return Sent("raw", num_bytes)
    known = [(name, cost) for name, cost in costs.items() if codec in (AUTO, name)]
    if not known:
        return Sent("raw", num_bytes, 8 * num_bytes / rate)
    found = [Sent(name, size, 8 * size / rate, a + b, is_tried=True) for name, (size, a, b) in known]
    return min(found, key=lambda one: round((one.on_link + one.packing) * PICOSECONDS))


class Costs:
    """Costs of the layers from one position to another; position p is in front of layer p.

    ``copies`` says how often each rank holds what its layers take, ``rate`` is the bits per second of a link,
    ``budget`` the bytes that a rank may use; ``recompute``: what runs again for a backward;
    ``prefetches``: parameters in a tier come ahead of the layer that reads them; ``cluster``: ranks that
    differ, in the place of ``rate`` and ``budget``, which then is the largest of theirs;
    ``replicas``: ranks that share the micro-batches of each stage, empty: one each; ``updates``: seconds of
    an update for each byte of trained parameters, which a rank takes once in so many micro-batches
    (``each``), and its replicas together if ``sharded``; ``codec``: that of what passes a link, or "auto":
    the fastest there."""

    def __init__(
        self,
        profile: Profile,
        *,
        copies: Sequence[Copies],
        rate: float | None,
        budget: int | None,
        recompute: bool | Sequence[str] = False,
        prefetches: bool = True,
        replicas: Sequence[int] = (),
        cluster: Cluster | None = None,
        updates: float = 0.0,
        each: int = 1,
        sharded: bool = False,
        codec: str = AUTO,
    ) -> None:
        self.updates, self.sharded, self.codec = updates, sharded, codec
        self.speeds = cluster.speeds if cluster else ()
        self.budgets: Sequence[int | None] = cluster.memory if cluster else ()
        budget = self.most or budget
        self.profile, self.copies, self.rate, self.budget = profile, copies, rate, budget
        self.recompute, self.prefetches, self.replicas = recompute, prefetches, replicas
        layers = profile.layers
        self.parts = [part_of(layer.module, recompute) for layer in layers]
        self.backwards = [
            layer.backward_seconds + (part is not None) * layer.forward_seconds
            for layer, part in zip(layers, self.parts, strict=True)
        ]
        pairs = zip(layers, self.backwards, strict=True)
        self.times = _sums(round((layer.forward_seconds + back) * PICOSECONDS) for layer, back in pairs)
        self.update_times = _sums(round(_trained(x) * updates / each * PICOSECONDS) for x in layers)
        self.forward_bytes = _over_cuts(len(layers), profile.values)
        sizes = [sizes_of([layer]) for layer in layers]
        self.largest = Largest([size.pop("largest") for size in sizes])
        saved = [layer.saved_bytes for layer in layers]
        self.near: Neighbours | Largest = Neighbours(saved, PREFETCH_LAYERS + 1)
        # Bytes that enter a part of the model that runs again, or what comes behind one.
        self.entering = [0] * (len(layers) + 1)
        if recompute and recompute is not True:
            self.near = Largest(self._of_parts(saved))
            for number, (before, part) in enumerate(itertools.pairwise(self.parts), 1):
                self.entering[number] = self.forward_bytes[number] * (before != part)
            for number, size in enumerate(sizes):
                size["packed"] = self.entering[number] + saved[number] * (self.parts[number] is None)
        parameters = [layer.parameter_bytes for layer in layers]
        self.with_parameters = _sums(map(bool, parameters))
        self.neighbours = Neighbours([size for size in parameters if size], NEIGHBOURS)
        self.sizes = {what: _sums(size[what] for size in sizes) for what in ("parameters", "saved", "packed")}
        self.passing = _over_cuts(len(layers), [value for value in profile.values if not value.is_parameter])
        trained = [value for value in profile.values if value.requires_grad]
        self.backward_bytes = _over_cuts(len(layers), trained)
        self.cut_weights = self._cut_weights()
        crossed = [range(*_crossed(value, len(layers))) for value in profile.values]
        self.passing_at = [[i for i, own in enumerate(crossed) if p in own] for p in range(len(layers) + 1)]
        self.rates = [*cluster.links] if cluster else []
        self.rates += [None if cluster else rate] * (len(copies) - len(self.rates))
        sending = {one: self._sending(one) for one in dict.fromkeys(self.rates)}
        self.sending = [sending[one] for one in self.rates]
        self.link_times = [self._over_link(sending[one], "on_link", max) for one in self.rates]
        # Both ends of a link take half of the packing and unpacking of what passes it.
        self.packing = [[n // 2 for n in self._over_link(sending[one], "packing", sum)] for one in self.rates]

    def _sending(self, rate: float | None) -> tuple[list[Sent], list[Sent]]:
        """Return how each value is sent over a link, and how its gradient is."""
        how: Any = {"codec": self.codec, "rate": rate}
        values = self.profile.values
        forward = [sent(value.costs, value.num_bytes, **how) for value in values]
        return forward, [sent(v.gradient_costs, v.num_bytes * v.requires_grad, **how) for v in values]

    def _over_link(
        self, ways: Sequence[Sequence[Sent]], what: str, both: Callable[[tuple[int, int]], int]
    ) -> list[int]:
        """Picoseconds for a micro-batch at each position, of both directions: on a link they go at once."""
        length, values = len(self.profile.layers), self.profile.values
        times = ([round(getattr(one, what) * PICOSECONDS) for one in way] for way in ways)
        return [*map(both, zip(*(_over_cuts(length, values, some) for some in times), strict=True))]

    def _sends(self, start: int, end: int, place: int) -> dict[str, Any]:
        """Return of a stage its codecs, and what of its cut is known in frames."""
        values = self.profile.values
        passing = self.passing_at[start], self.passing_at[end]
        found: dict[str, Any] = {"codecs": {}, "gradient_codecs": {}}
        names = {"forward": "codecs", "backward": "gradient_codecs"}
        for number, (way, codecs) in enumerate(names.items()):
            behind = [self.sending[place][number][i] for i in passing[1]]
            if behind and all(one.is_tried or not one.num_bytes for one in behind):
                found[f"packed_{way}"] = round(sum(one.num_bytes for one in behind))
                found[f"packing_{way}"] = sum(one.packing for one in behind)
            sender = place - number  # gradients go up the link before the stage
            if self.codec != AUTO or (number and not start):
                continue
            for i in passing[1 - number]:
                one, value = self.sending[sender][number][i], values[i]
                packs = (
                    any(start <= user < end for user in value.users) if number else value.producer >= start
                )
                if one.is_tried and packs:
                    found[codecs][value.name] = one.codec
        return found

    @property
    def most(self) -> int:
        """The largest budget of a cluster."""
        return max(filter(None, self.budgets), default=0)

    def _needed(self, num_bytes: int, rank: int) -> int:
        """The budget with its margin, scaled to the largest one: twice as much for a rank of half."""
        if not self.budgets:
            return with_margin(num_bytes)
        own = self.budgets[rank]
        return 0 if own is None else -(-with_margin(num_bytes) * self.most // own)

    def _of_parts(self, saved: Sequence[int]) -> list[int]:
        """Of each layer, what its part saves that runs again; 0 where it runs once."""
        found = []
        for part, run in itertools.groupby(zip(self.parts, saved, strict=True), lambda one: one[0]):
            sizes = [size for _, size in run]
            found += [sum(sizes) * (part is not None)] * len(sizes)
        return found

    def _cut_weights(self) -> list[int]:
        """Return a tie-breaker for each position, for cuts of equal cost: the bytes that pass both ways,
        among equals those of values that are not zero, then whether the next cut passes the same values: a
        ReLU that makes its zeros in place is only then before it."""
        layers, values = self.profile.layers, self.profile.values
        filled = [round(value.num_bytes * (1 - value.zero_fraction)) for value in values]
        not_zero = _over_cuts(len(layers), values, filled)
        spans = [_crossed(value, len(layers)) for value in values]
        changes = {place for span in spans if span[0] < span[1] for place in span}  # the others pass nothing
        passing = zip(self.forward_bytes, self.backward_bytes, not_zero, strict=True)
        return [
            (((forward + backward) << 64) + nonzero << 16) + (behind not in changes)
            for behind, (forward, backward, nonzero) in enumerate(passing, 1)
        ]

    def memory(
        self,
        start: int,
        end: int,
        rank: int,
        copies: Sequence[Copies] = (),
        *,
        staying: int = 0,
        enters: bool = True,
        saves: bool = True,
    ) -> int:
        """Predicted bytes on a rank beside frames; ``copies``: in the place of its own; ``staying``: bytes of
        parameters that stay where the others leave; ``enters``: with what enters it; ``saves``: with what
        micro-batches leave for their backwards."""
        sizes = {what: sums[end] - sums[start] for what, sums in self.sizes.items()}
        sizes |= {"largest": self.largest.of(start, end), "near": self.near.of(start, end)}
        enters &= self.recompute is True or sizes["near"] > 0  # else no part of these layers runs again
        sizes["entered"] = enters * self.forward_bytes[start]
        sizes["packed"] -= self.entering[start]  # it enters the stage
        if not saves:
            sizes |= dict.fromkeys(("saved", "packed", "near", "entered"), 0)
        if self.prefetches:
            sizes["neighbours"] = self.neighbours.of(self.with_parameters[start], self.with_parameters[end])
        return (copies or self.copies)[rank].of(**sizes, staying=staying)

    def frames(self, spans: Sequence[Placed], copies: Sequence[Copies] = ()) -> list[int]:
        """Of every stage about the most bytes of its frames; a value counts at every cut that it crosses."""
        copies, found = copies or self.copies, [0] * len(spans)
        pairs = itertools.pairwise(spans)
        for stage, (((_, end), place, rank), (_, next_place, next_rank)) in enumerate(pairs):
            size = self.passing[end]
            if rank == next_rank:
                found[stage] += copies[place].frames(inside=size)
            else:
                after, before = self._replicas_of(next_place), self._replicas_of(place)
                found[stage] += copies[place].frames(leaving=size, replicas=after)
                found[stage + 1] += copies[next_place].frames(entering=size, replicas=before)
        return found

    def _replicas_of(self, place: int) -> int:
        return self.replicas[place] if 0 <= place < len(self.replicas) else 1

    def required(self, start: int, end: int, rank: int) -> int:
        """The budget that a rank needs for its layers, and for the frames that other ranks send and take."""
        there, needed = self.copies[rank], self.memory(start, end, rank)
        if start:
            needed += there.frames(entering=self.passing[start], replicas=self._replicas_of(rank - 1))
        if end < len(self.profile.layers):
            needed += there.frames(leaving=self.passing[end], replicas=self._replicas_of(rank + 1))
        return self._needed(needed, rank)

    def least_required(self, start: int, end: int, rank: int) -> int:
        """Bytes that a longer part never needs fewer of: all but what depends on its ends."""
        return self._needed(self.memory(start, end, rank, enters=False), rank)

    def staying(self, spans: Sequence[Placed], copies: Sequence[Copies]) -> list[int]:
        """Of every stage, bytes of parameters that may stay, where the others leave: all else goes first.

        Where saved tensors leave as well half of the room is for them: they stay as long as there is any."""
        room = {}
        for rank in {rank for *_, rank in spans}:
            budget = (self.budgets[rank] if self.budgets else self.budget) or 0
            room[rank] = budget * 100 // (100 + TOLERANCE) - budget // BESIDE
        for ((start, end), place, rank), frames in zip(spans, self.frames(spans, copies), strict=True):
            room[rank] -= self.memory(start, end, place, copies) + frames
        found = []
        for (start, end), place, rank in spans:
            there, sums = copies[place], self.sizes["parameters"]
            stays = 0
            if there.staying and room[rank] > 0:
                fits = room[rank] / there.staying / (2 if there.near else 1)
                stays = min(math.floor(fits), sums[end] - sums[start])
            room[rank] -= math.ceil(stays * there.staying)
            found.append(stays)
        return found

    def fit(self, spans: Sequence[Placed], copies: Sequence[Copies] = ()) -> bool:
        """Return whether ranks that hold so many ``copies`` keep to the budget."""
        return self.budget is None or self.needed(spans, copies) <= self.budget

    def needed(self, spans: Sequence[Placed], copies: Sequence[Copies] = ()) -> int:
        """The least budget that the same ranks ``fit``."""
        used = Counter[int]()
        for ((start, end), place, rank), frames in zip(spans, self.frames(spans, copies), strict=True):
            used[rank] += self.memory(start, end, place, copies) + frames
        return max(self._needed(num_bytes, rank) for rank, num_bytes in used.items())

    def needed_with_frames(self, ends: Sequence[int], spans: Sequence[Placed]) -> int:
        """The least budget of ranks with these ``ends``, with the frames between their own stages."""
        used = Counter({rank: self.memory(*span, rank) for rank, span in enumerate(itertools.pairwise(ends))})
        for (*_, rank), frames in zip(spans, self.frames(spans), strict=True):
            used[rank] += frames
        return max(self._needed(num_bytes, rank) for rank, num_bytes in used.items())

    def of_rank(self, start: int, end: int, rank: int) -> float:
        """Picoseconds per micro-batch; math.inf where the layers and frames do not fit the budget."""
        seconds = self._of_rank(start, end, rank, self.required)
        ends = self.packing[rank][end] + (self.packing[rank - 1][start] if rank else 0)
        return seconds + -(-ends // (self.replicas[rank] if self.replicas else 1))

    def least_of_rank(self, start: int, end: int, rank: int) -> float:
        """The same with what never falls where a part grows."""
        return self._of_rank(start, end, rank, self.least_required)

    def _of_rank(self, start: int, end: int, rank: int, required: Span) -> float:
        if self.budget is not None and required(start, end, rank) > self.budget:
            return math.inf
        return self._time(start, end, rank, self.replicas[rank] if self.replicas else 1)

    def _time(self, start: int, end: int, rank: int, replicas: int = 1) -> int:
        seconds = -(-(self.times[end] - self.times[start]) // replicas)
        update = self.update_times[end] - self.update_times[start]
        seconds += -(-update // (replicas if self.sharded else 1))
        return round(seconds / self.speeds[rank]) if self.speeds else seconds

    def of_stage(self, rank_ends: Sequence[int], *, timed: bool = True) -> Span:
        """Picoseconds per micro-batch of a stage, 0 if not ``timed``; math.inf where it would lie on two
        ranks."""

        def span(start: int, end: int, stage: int) -> float:
            behind = bisect.bisect_right(rank_ends, start)
            return math.inf if rank_ends[behind] < end else timed * self._time(start, end, behind - 1)

        return span

    def stage(
        self, start: int, end: int, rank: int, *, staying: int = 0, frames: int = 0, **decided: Any
    ) -> PlanStage:
        """The stage made of these layers, with its predictions and what was decided for it."""
        layers = self.profile.layers[start:end]
        speed = self.speeds[rank] if self.speeds else 1.0
        parameters = tuple(dict.fromkeys(name for layer in layers for name in layer.parameters))
        again = self.recompute
        if not isinstance(again, bool):
            here = [one for one in again if any(part_of(x.module, [one]) for x in layers)]
            again, packed = tuple(here) or False, self.sizes["packed"]
            decided["kept_bytes"] = packed[end] - packed[start] - self.entering[start]
        return PlanStage(
            layers=tuple(layer.name for layer in layers),
            parameters=parameters,
            num_parameters=sum(layer.num_parameters for layer in layers),
            forward_seconds=sum(layer.forward_seconds for layer in layers) / speed,
            backward_seconds=sum(self.backwards[start:end]) / speed,
            update_seconds=self.updates * sum(map(_trained, layers)) / speed,
            memory_bytes=self.memory(start, end, rank, staying=staying),
            weight_bytes=self.memory(start, end, rank, staying=staying, saves=False),
            frame_bytes=frames,
            staying_bytes=staying,
            saved_bytes=sum(layer.saved_bytes for layer in layers),
            near_bytes=self.near.of(start, end),
            bytes_forward=self.forward_bytes[end],
            bytes_backward=self.backward_bytes[end],
            recompute=again,
            prefetches=self.prefetches,
            **self._sends(start, end, rank),
            **decided,
        )


class Largest:
    """The largest of any run of numbers, from those of all runs of 1, 2, 4, .. of them."""

    def __init__(self, numbers: list[int]) -> None:
        self._runs = [numbers]
        while (half := 1 << (len(self._runs) - 1)) * 2 <= len(numbers):
            last = self._runs[-1]
            self._runs.append([max(pair) for pair in zip(last, last[half:], strict=False)])

    def of(self, start: int, end: int) -> int:
        """The largest from ``start`` on and in front of ``end``, 0 of none."""
        if start == end:
            return 0
        level = (end - start).bit_length() - 1
        return max(self._runs[level][start], self._runs[level][end - (1 << level)])


class Neighbours:
    """The most that so many numbers have together which follow each other in a run of numbers."""

    def __init__(self, numbers: Sequence[int], length: int) -> None:
        self._sums, self._length = _sums(numbers), length
        self._largest = Largest([b - a for a, b in zip(self._sums, self._sums[length:], strict=False)])

    def of(self, start: int, end: int) -> int:
        """From ``start`` on and in front of ``end``; of fewer than so many, all."""
        if end - start <= self._length:
            return self._sums[end] - self._sums[start]
        return self._largest.of(start, end - self._length + 1)


def _trained(layer: LayerProfile) -> int:
    return layer.parameter_bytes if layer.trained_bytes is None else layer.trained_bytes


def _sums(amounts: Iterable[int]) -> list[int]:
    return [0, *accumulate(amounts)]


def _over_cuts(
    num_layers: int, values: Sequence[ValueProfile], amounts: Sequence[int] | None = None
) -> list[int]:
    """Bytes that pass each position, or ``amounts``: of the values made before it and used after it."""
    changes = [0] * (num_layers + 2)
    for value, amount in zip(values, amounts or [value.num_bytes for value in values], strict=True):
        first, behind = _crossed(value, num_layers)
        if behind > first:
            changes[first] += amount
            changes[behind] -= amount
    return list(accumulate(changes))[: num_layers + 1]


def _crossed(value: ValueProfile, num_layers: int) -> tuple[int, int]:
    return value.producer + 1, min(max(value.users, default=0), num_layers - 1) + 1
