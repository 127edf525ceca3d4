"""The next use of everything a program reads, against walking the expanded program."""

import pytest
from programs import laid

from penstock.compression.errors import ScheduleError
from penstock.pipeline.schedules import SCHEDULES
from penstock.pipeline.schedules.instruction import Op, parse_program, show
from penstock.pipeline.schedules.next_use import Datum, NextUse, Point, seen_versions

pytestmark = pytest.mark.slow
LAYERS = 3  # of a stage
# The layers that read each saved tensor, by their places in a stage.
READERS = ((0,), (0, 1), (0, 2), (2,), (1,), ())

PROGRAM = "0F0 0F1 0B0 0F2 0B1 0B2 0U"


def saved_of(stages):
    return {s: [[s * LAYERS + layer for layer in layers] for layers in READERS] for s in stages}


def expanded(program, saved, *, version_at):
    """Every point of a program with what is used there, in order: the slow twin."""
    updates, at_forward, points = {}, {}, []
    for index, (stage, op, micro_batch) in enumerate(program):
        newest = updates.get(stage, 0)
        version = newest
        if micro_batch is not None:
            version = version_at(
                stage, micro_batch, at_forward.setdefault((stage, micro_batch), newest), newest
            )
        layers = range(stage * LAYERS, (stage + 1) * LAYERS)
        for layer in layers if op in (Op.F, Op.U) else reversed(layers):
            used = {Datum("version", stage, layer, version)}
            if version == newest:
                used.add(Datum("parameter", stage, layer))
            if op not in (Op.F, Op.U):
                read = [k for k, readers in enumerate(saved[stage]) if layer in readers]
                used |= {Datum("saved", stage, k, micro_batch) for k in read}  # pyright: ignore[reportArgumentType]
            if op not in (Op.F, Op.I):
                used.add(Datum("gradient", stage, layer))
            if op is Op.U:
                used.add(Datum("optimizer", stage, layer))
            points.append((Point(index, layer), used))
        if op is Op.U:
            updates[stage] = newest + 1
    return points


def check(program, *, version_at=lambda stage, m, forward, newest: newest, **options):
    """All data at all points."""
    saved = saved_of({i.stage for i in program})
    points = expanded(program, saved, version_at=version_at)
    found = NextUse(program, saved, **options)
    everything = sorted(set().union(*(used for _, used in points)))
    for what in everything:
        upcoming = None
        for point, used in reversed(points):
            assert found.of(what, point) == upcoming, (what, point)
            upcoming = point if what in used else upcoming
        assert found.of(what) == upcoming, what
    return len(everything) * len(points)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ("async_1f1b", "custom")])
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_schedule_agrees_with_walking_its_program(name, ranks):
    num_micro_batches = 6 * ranks
    for program in SCHEDULES[name](laid(name, ranks), num_micro_batches):
        updates = " ".join(f"{stage}U" for stage in sorted({i.stage for i in program}))
        program = parse_program(f"{show(program)} {updates}")
        assert check(program) > 1000


def stashed(stage, m, forward, newest):
    return forward


@pytest.mark.parametrize(
    ("weights", "version_at"),
    [
        ("latest", lambda stage, m, forward, newest: newest),
        ("stashed", stashed),
        ("vertical_sync", lambda stage, m, forward, newest: max(0, m - 3)),
    ],
)
def test_versions_of_the_asynchronous_schedule(weights, version_at):
    for program in SCHEDULES["async_1f1b"](laid("async_1f1b", 4), 7):
        check(program, version_at=version_at, num_stages=4, weights=weights)


def test_two_versions_of_batches_that_follow_without_a_flush():
    # Batches of two micro-batches; the third is forward before the update of the first has come.
    program = parse_program("0F0 0F1 0F2 0B0 0F3 0B1 0U 0F4 0B2 0F5 0B3 0U 0B4 0B5 0U")
    seen = seen_versions(program, num_stages=2, weights="double_buffered", micro_batches=2)
    assert seen == [0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 1, 1, 1, 2]
    options = {"num_stages": 2, "weights": "double_buffered", "micro_batches": 2}
    check(program, version_at=lambda stage, m, forward, newest: max(0, m // 2 - 1), **options)


def test_a_custom_program_and_one_that_waits_with_its_weight_gradients():
    (program,) = SCHEDULES["custom"]([[0]], 2, program=("0F0 0F1 0I0 0I1 0W0 0W1",))
    check([*program, *parse_program("0U")])


def test_literals():
    found = NextUse(parse_program(PROGRAM), {0: [(0,), (0, 2)]})
    assert found.of(Datum("saved", 0, 0, 1)) == Point(4, 0)
    assert found.of(Datum("saved", 0, 1, 1), Point(0, 2)) == Point(4, 2)
    assert found.of(Datum("saved", 0, 1, 1), Point(4, 2)) == Point(4, 0)
    assert found.of(Datum("saved", 0, 1, 1), Point(4, 0)) is None
    assert found.of(Datum("version", 0, 2, 1)) is None
    with pytest.raises(ScheduleError, match="one of saved, parameter"):
        found.of(Datum("weights", 0, 0))
