"""Live data of a stage: micro-batches between forward and backward, and the weights that they still need.

Both follow from the order of a program alone, so memory is known before anything runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from ...stages.weight_versions.policies import rule_named
from .instruction import Instruction, Op

Programs = Sequence[Sequence[Instruction]]


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
    """The most bytes on every rank at once, if a stage with so many micro-batches live has
    ``held(stage, number)``."""
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

    A version is kept from the update that made it to the last backward that needs it. ``weights`` is a policy
    of a plan; ``micro_batches`` are those of one update where a batch makes one. Programs start at a drain.
    """
    stages = stages_of(programs)
    rule, found = rule_named(weights), []
    for stage, program in stages.items():
        newest = _versions(program)
        in_update = (micro_batches or len(newest)) if rule.per_batch else 1
        needs = {m: rule.version(m // in_update, stage, len(stages)) for m in newest if rule.delay}
        found.append(_most_versions(program, {m: min(newest[m], version) for m, version in needs.items()}))
    return tuple(found)


def _versions(program: Sequence[Instruction]) -> dict[int, int]:
    """The version that is the newest when each micro-batch goes forward."""
    found: dict[int, int] = {}
    updates = 0
    for instruction in program:
        updates += instruction.op is Op.U
        if instruction.op is Op.F and instruction.micro_batch is not None:
            found[instruction.micro_batch] = updates
    return found


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
