"""Programs of stages that may have replicas: a rank runs the micro-batches that are dealt to it.

The schedule is asked for one rank in place of replicas, whose program is dealt over them: what is left of a
legal order is a legal order. With so many times more in flight as its smallest share goes into all of them,
every replica has as many as a rank alone would have.

Source: Narayanan et al., PipeDream, SOSP 2019, section 3.2 (round robin over the replicas of a stage)."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise, zip_longest

from ...compression.errors import PlanError, ScheduleError
from ...stages.plan.plan import Plan
from ...stages.plan.plan_stage import place_of
from ...stages.plan.validation import check_replicated
from ...stages.weight_versions.policies import STREAM, rule_named
from . import Schedule, schedule_named
from .async_1f1b import StreamState, between
from .building_blocks import layout
from .instruction import Instruction, Op, Programs

DEEPENED = ("1f1b", "zb_h1")  # take more in flight than their own; gpipe has all there are

# 1f1b, replicas 2 and 1        rank 0   F0 F2 B0 .. B2         of stage 0
#                               rank 1   F1 .. F3 B1 .. B3      of stage 0
#                               rank 2   .. F0 B0 F1 B1 F2 B2 F3 B3


def schedule_of(plan: Plan) -> Schedule:
    """The schedule of ``plan``, which knows the replicas of its stages."""
    schedule = schedule_named(plan.schedule, plan.program)
    ranks, deepens = [stage.ranks for stage in plan.stages], plan.schedule in DEEPENED
    return replicated(schedule, ranks, shares=plan.shares, deepens=deepens)


def check_divided(found: str, *, schedule: str, weights: str) -> None:
    """Refuse to choose the replicas of stages of which a rank runs several; raises PlanError."""
    check_replicated(found, schedule=schedule, weights=weights)
    if layout(schedule) != "neighbours":
        raise PlanError(
            f"{found} divides ranks over stages that each have ranks to themselves, found "
            f"schedule={schedule}; give a number of replicas, or take schedule=1f1b"
        )


def dealt(replicas: Sequence[int]) -> list[range]:
    """The ranks of stages that have so many replicas each, in their order; anybody may ask for many."""
    return [range(*ends) for ends in pairwise(accumulate(replicas, initial=0))]


def without(plan: Plan, rank: int | None) -> Plan | None:
    """``plan`` without the replica that is ``rank``, else as it was; None where its stage has no other."""
    if rank not in plan.ranks or (rank,) in (stage.ranks for stage in plan.stages):
        return None
    stages = []
    for stage, weights in zip(plan.stages, plan.shares, strict=True):
        kept = [(one, weight) for one, weight in zip(stage.ranks, weights, strict=True) if one != rank]
        shares = tuple(weight for _, weight in kept) if len({weight for _, weight in kept}) > 1 else ()
        ranks = tuple(one - (one > rank) for one, _ in kept)
        stages.append(dataclasses.replace(stage, ranks=ranks, shares=shares))
    return dataclasses.replace(plan, stages=tuple(stages))


def replicated(
    schedule: Schedule,
    ranks: Sequence[Sequence[int]],
    *,
    deepens: bool,
    shares: Sequence[tuple[int, ...]] = (),
) -> Schedule:
    """``schedule`` for stages that run on these ``ranks``, each the same ones or others, in these ``shares``
    (none: all alike); ``deepens``: it takes micro-batches in flight beyond its own."""
    if max(map(len, ranks)) == 1:
        return schedule
    weights = [own or (1,) * len(some) for own, some in zip_longest(shares, ranks, fillvalue=())]
    most = max(math.ceil(sum(own) / min(filter(None, own))) for own in weights)

    def programs(
        stages_of_rank: Sequence[Sequence[int]], num_micro_batches: int, *, extra_in_flight: int = 0
    ) -> list[list[Instruction]]:
        extra = most * (1 + extra_in_flight) - 1 if deepens else extra_in_flight
        found: list[list[Instruction]] = [[] for _ in stages_of_rank]
        for program in schedule(_groups(ranks), num_micro_batches, extra_in_flight=extra):
            for instruction in program:
                place = place_of(weights[instruction.stage], instruction.micro_batch or 0)
                found[ranks[instruction.stage][place]].append(instruction)
        return found

    return programs


def as_one(plan: Plan, num_micro_batches: int, *, extra_in_flight: int) -> list[list[Instruction]]:
    """The programs in one process, which has one copy of each stage: its replicas are one there, and take
    micro-batches in ascending order."""
    groups = _groups([stage.ranks for stage in plan.stages])
    return schedule_named(plan.schedule, plan.program)(
        groups, num_micro_batches, extra_in_flight=extra_in_flight
    )


def _groups(ranks: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the stages of one rank of each set of replicas, in the order of their first stages."""
    found: dict[tuple[int, ...], list[int]] = {}
    for stage, own in enumerate(ranks):
        found.setdefault(tuple(own), []).append(stage)
    return [*found.values()]


MOST_EXTRA = 2  # micro-batches: more hide nothing that these do not
Layout = Sequence[Sequence[int]]  # the stages of each rank


def step_programs(plan: Plan, *, extra_in_flight: int | None = None) -> Programs:
    """The programs of one step; raises ScheduleError where the schedule does not suit the plan.

    Args:   extra_in_flight: micro-batches beyond the schedule's own; None: those that a plan begins with."""
    extra = plan.extra_in_flight if extra_in_flight is None else extra_in_flight
    return schedule_of(plan)(plan.stages_of_rank, plan.micro_batches, extra_in_flight=extra)


def endless_programs(
    layout: Layout, schedule: str, micro_batches: int, *, more: int = 2, extra_in_flight: int = 0
) -> Programs:
    """The programs of a stream from an empty pipeline to an empty one: ``more`` batches than fill it. What is
    in flight decides who reads which weights, so that nothing ``extra`` is."""
    num_stages = sum(map(len, layout))
    ends = [micro_batches * (i + 1) for i in range(filling(num_stages, micro_batches) + more)]
    fed = StreamState(num_stages=num_stages, each=schedule == STREAM, ends=tuple(ends))
    return [between(own, fed) for own in layout]


def most_extra(make: Callable[..., Programs], fits: Callable[[Programs], bool]) -> int:
    """Return the number of extra micro-batches in flight: the most that the schedule takes, ``fits`` allows
    and that change something, at most ``MOST_EXTRA``; ``make(extra_in_flight=)``: its programs."""
    before = make(extra_in_flight=0)
    for extra in range(1, MOST_EXTRA + 1):
        try:
            programs = make(extra_in_flight=extra)
        except ScheduleError:  # its order is fixed
            return extra - 1
        if programs == before or not fits(programs):
            return extra - 1
        before = programs
    return MOST_EXTRA


def predicted_bytes(plan: Plan, live: Sequence[int]) -> list[int]:
    """Bytes of every stage when ``live`` micro-batches were in flight, of which ``plan`` counts those that it
    begins with; what more of them saved is taken to be there as it is."""
    more = [0] * plan.num_stages
    if plan.most_extra_in_flight > plan.extra_in_flight:
        counted = live_micro_batches(step_programs(plan))
        more = [max(0, flew - known) for flew, known in zip(live, counted, strict=True)]
    kept = [stage.kept_bytes if stage.recompute else stage.saved_bytes for stage in plan.stages]
    return [s.memory_bytes + n * size for n, s, size in zip(more, plan.stages, kept, strict=True)]


def filling(num_stages: int, micro_batches: int) -> int:
    """Batches that fill a pipeline."""
    return math.ceil(2 * num_stages / micro_batches)


def waiting(programs: Programs, *, weights: str, micro_batches: int) -> list[tuple[int, int]]:
    """For every stage the most micro-batches in flight, and the most old versions of its weights."""
    versions = live_versions(programs, weights=weights, micro_batches=micro_batches)
    return [(live, kept - 1) for live, kept in zip(live_micro_batches(programs), versions, strict=True)]


def stages_of(programs: Programs) -> dict[int, list[Instruction]]:
    """The instructions of every stage, in the order of its rank's program; stages ascending."""
    found: dict[int, list[Instruction]] = {}
    for program in programs:
        for instruction in program:
            found.setdefault(instruction.stage, []).append(instruction)
    return dict(sorted(found.items()))


def live_micro_batches(programs: Programs) -> tuple[int, ...]:
    """The most micro-batches at once whose F is done, and B (or W) is not, for every stage."""
    most: dict[int, int] = {}
    for program in programs:  # a stage may have replicas: then those of the fullest one
        for stage, own in stages_of([program]).items():
            most[stage] = max(most.get(stage, 0), *_live(own))
    return tuple(most[stage] for stage in sorted(most))


def most_held(programs: Programs, held: Callable[[int, int], int]) -> tuple[int, ...]:
    """The most bytes on every rank at once, if a stage has ``held(stage, number of live micro-batches)``."""
    return tuple(max(_live(program, held)) for program in programs)


def _live(
    program: Sequence[Instruction], held: Callable[[int, int], int] = lambda stage, number: number
) -> Iterator[int]:
    """Yield the number live at the start (something may have begun before) and after every instruction."""
    begun = {(i.stage, i.micro_batch) for i in program if i.op is Op.F}
    ended = {(i.stage, i.micro_batch) for i in program if i.op in (Op.B, Op.W)}
    live = Counter(dict.fromkeys((i.stage for i in program), 0))
    live.update(stage for stage, _ in ended - begun)
    total = sum(held(*item) for item in live.items())
    yield total
    for instruction in program:
        if change := (instruction.op is Op.F) - (instruction.op in (Op.B, Op.W)):
            stage = instruction.stage
            total -= held(stage, live[stage])
            live[stage] += change
            total += held(stage, live[stage])
        yield total


def live_versions(
    programs: Programs, *, weights: str = "stashed", micro_batches: int | None = None
) -> tuple[int, ...]:
    """The most versions of its weights that a stage keeps at once, the newest among them.

    A version is kept from the update that made it to the last backward that needs it. ``micro_batches`` are
    those of one update where a batch makes one. Programs start at a drain."""
    stages, rule, found = stages_of(programs), rule_named(weights), []
    for stage, program in stages.items():
        newest, updates = dict[int, int](), 0  # version that a micro-batch goes forward with
        for instruction in program:
            updates += instruction.op is Op.U
            if instruction.op is Op.F and instruction.micro_batch is not None:
                newest[instruction.micro_batch] = updates
        in_update = (micro_batches or len(newest)) if rule.per_batch else 1
        needs = {m: rule.version(m // in_update, stage, len(stages)) for m in newest if rule.delay}
        found.append(_most_versions(program, {m: min(newest[m], version) for m, version in needs.items()}))
    return tuple(found)


def _most_versions(program: Sequence[Instruction], needs: Mapping[int | None, int]) -> int:
    waiting = Counter(needs.values())  # micro-batches that still need a version, by version
    newest, needed, most = 0, int(waiting[0] > 0), 1
    for instruction in program:
        if instruction.op is Op.U:
            newest += 1
            needed += waiting[newest] > 0
        elif instruction.op in (Op.B, Op.W) and instruction.micro_batch in needs:
            version = needs[instruction.micro_batch]
            waiting[version] -= 1
            needed -= waiting[version] == 0
        most = max(most, needed + (waiting[newest] == 0))
    return most
