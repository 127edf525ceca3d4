"""Agreement of ranks: those that were given different plans, weights, settings or batches would train some
other model, with nothing to be seen of it.

Facts are compared as one digest; only where digests differ do the ranks exchange the facts, and all of them
refuse with one sentence that names the first difference. A refusal of one rank in such a place travels the
same way, so that no rank waits for one that has left."""

import contextlib
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from ...compression.errors import Disagreement, PenstockError, PlanError, TransportError
from ...stages.plan.plan import Plan
from ..distributed.process_group import World
from .fingerprints import Fact, of_process

EVERY = 100  # batches between two that are compared
DECISIONS = (
    "device", "tier", "weights_tier", "parameters_tier", "staying_bytes", "prefetches", "recompute",
    "codecs", "gradient_codecs",
)  # of a stage  # fmt: skip


class Agreement:
    """Compares what the ranks of ``world`` were given; in a world of one there is nothing to compare."""

    def __init__(self, world: World) -> None:
        self.world = world

    @contextlib.contextmanager
    def all_or_none(self, at: str) -> Iterator[None]:
        """Do the block on every rank or on none: a refusal of one rank is raised on all, as Disagreement."""
        try:
            yield
        except (Disagreement, TransportError):
            raise
        except Exception as error:
            self.refuse(at, error)
            raise
        self.agree(at, list)

    def agree(self, at: str, told: Callable[[], Sequence[Fact]]) -> None:
        """Go on where all ranks, at this place ``at``, have the facts that ``told`` makes; raises
        Disagreement."""
        if self.world.size == 1:
            return
        facts = told()
        text = "\n".join(f"{fact.what}\0{fact.value}" for fact in facts)
        digest = hashlib.blake2b(text.encode(errors="replace"))
        if len(set(self.exchange(at, digest.hexdigest()))) == 1:
            return
        rows = self.world.all_gather_json([dataclasses.astuple(fact) for fact in facts], at=at)
        found = [[Fact(*item) for item in row] for row in rows]
        for kind in dict.fromkeys(["", *(fact.among for row in found for fact in row)]):
            ranks = [r for r, row in enumerate(found) if not kind or any(fact.among == kind for fact in row)]
            for places in zip_longest(*([fact for fact in found[r] if fact.among == kind] for r in ranks)):
                for rank, theirs in zip(ranks, places, strict=True):
                    if theirs != places[0]:
                        raise Disagreement(_difference(places[0], ranks[0], theirs, rank))

    def refuse(self, at: str, error: Exception) -> None:
        """Tell the other ranks, which are on their way here, why this one stops; its own error counts."""
        said = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(TransportError):
            self.exchange(at, None, refusal=said)

    def exchange(self, at: str, item: Any, *, refusal: str = "") -> list[Any]:
        """Everybody's ``item`` (anything JSON can say), by rank, if no rank refuses and all are at ``at``."""
        rows = self.world.all_gather_json([at, item, refusal], at=at)
        if refusal:
            return []
        if said := [f"rank {rank}: {text}" for rank, (_, _, text) in enumerate(rows) if text]:
            raise Disagreement("; ".join(said))
        for rank, (theirs, *_) in enumerate(rows):
            if theirs != rows[0][0]:
                raise Disagreement(
                    f"all ranks call a Pipeline alike: rank 0 is at {rows[0][0]}, rank {rank} at {theirs}; "
                    "make the same calls in the same order on every rank"
                )
        return [item for _, item, _ in rows]

    def agree_on_plan(self, plan: Plan | None) -> Plan:
        """Rank 0's plan, on every rank; raises Disagreement where that of another asks for something else.

        A rank may have none, or one that was asked for alike: measured seconds vary, and so do cuts."""
        if self.world.size == 1:
            if plan is None:
                raise PlanError(
                    "one process has no other rank to take a plan from, found plan=None; give it one: "
                    "penstock.partition(penstock.measure(penstock.trace(model, example), example), stages=2)"
                )
            return plan
        rows = self.exchange("its plan", None if plan is None else plan.to_json())
        if rows[0] is None:
            raise Disagreement(
                "rank 0 decides the plan of all ranks, found plan=None on rank 0; give rank 0 one from "
                "penstock.partition"
            )
        chosen, *others = [
            row if row is None else Plan.of_json(row, f"rank {r}") for r, row in enumerate(rows)
        ]
        assert chosen is not None
        for rank, theirs in enumerate(others, start=1):
            if theirs is not None and (found := _other_wish(chosen, theirs)):
                what, ours, other = found
                raise Disagreement(
                    f"all ranks train by one plan: {what} is {_short(ours)} on rank 0 and {_short(other)} on "
                    f"rank {rank}; plan with the same options on every rank, or give "
                    "plan=None on every rank but 0"
                )
        return dataclasses.replace(chosen, graph=plan.graph if plan else None)


def _difference(ours: Fact | None, first: int, theirs: Fact | None, rank: int) -> str:
    """Describe the difference of ranks ``first`` and ``rank``: two values of one thing, or two things."""
    if ours and theirs and ours.what == theirs.what:
        values = f"{_short(ours.value)} on rank {first} and {_short(theirs.value)} on rank {rank}"
        found = f"{ours.what} is {values}"
    else:
        parts = [f"has {fact.what}" if fact else "has no more" for fact in (ours, theirs)]
        found = f"rank {first} {parts[0]} where rank {rank} {parts[1]}"
    known = ours or theirs
    assert known is not None, "places that differ are not both empty"
    return f"all ranks train one model alike: {found}; {known.remedy}"


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:197]}..."


def _other_wish(ours: Plan, theirs: Plan) -> tuple[str, str, str] | None:
    """First decision that differs between two plans and does not depend on measurements, with both values."""
    searched = ("stages", "asked", "signature")  # an example of other data has other integers
    names = [field.name for field in dataclasses.fields(Plan) if field.name not in searched]
    for name in (*names, *DECISIONS):
        of = Plan.of_stages if name in DECISIONS else getattr
        if of(ours, name) != of(theirs, name):
            what = "the fingerprint of the model" if name == "fingerprint" else name
            return what, str(of(ours, name)), str(of(theirs, name))
    a, b = ([plan.ranks, *(stage.layers for stage in plan.stages)] for plan in (ours, theirs))
    if a == b or (ours.asked and ours.asked == theirs.asked):
        return None
    if ours.asked and theirs.asked:
        return "what partition was asked for", str(ours.asked), str(theirs.asked)
    said = [f"cuts=[{','.join(plan.cuts)}] ranks={list(plan.ranks)}" for plan in (ours, theirs)]
    return "the cut", said[0], said[1]


class SameBatches:
    """Compares the first batch of a kind across ranks, and every hundredth; ``stop`` makes what is raised
    when this rank refuses another one: the others find out in the middle of it."""

    def __init__(self, agreement: Agreement, stop: Callable[[str, Exception], Exception]) -> None:
        self.agreement, self.stop, self.every = agreement, stop, EVERY
        self.several = agreement.world.size > 1
        self.counts: Counter[str] = Counter()
        self.due = False

    @contextlib.contextmanager
    def batch(self, kind: str, number: int) -> Iterator[None]:
        """Get a batch of ``kind`` ready inside, and ``compare`` it."""
        self.at = f"{kind} {number}"
        self.due = self.several and self.counts[kind] % self.every == 0
        try:
            yield
        except (Disagreement, TransportError):
            raise
        except Exception as error:
            if self.due:
                self.agreement.refuse(self.at, error)
            elif self.several:
                raise self.stop(f"the batch of {self.at}", error) from error
            raise
        self.counts[kind] += 1

    def compare(self, told: Callable[[], Sequence[Fact]]) -> None:
        """Compare the facts that ``told`` makes, and those of the process, if it is time for it."""
        if self.due:
            self.due = False
            place = self.agreement.world.device.torch
            self.agreement.agree(self.at, lambda: [*of_process(place), *told()])
