"""A step on paper: instructions and messages take the seconds they are given, and nothing else does."""

from penstock.pipeline.instruction import Instruction, Op
from penstock.pipeline.messages import Itinerary, Message
from penstock.pipeline.schedules import schedule_named
from penstock.pipeline.simulate import simulate


def two_ranks(num_micro_batches, schedule="1f1b", extra_in_flight=0):
    """Two stages that pass one value per micro-batch down and its gradient up."""
    programs = schedule_named(schedule)([[0], [1]], num_micro_batches, extra_in_flight=extra_in_flight)
    receives, sends = {}, {}
    for m in range(num_micro_batches):
        down, up = Message(Op.F, m, 0, 0, 1), Message(Op.B, m, 0, 1, 0)
        sends[Instruction(0, Op.F, m)] = receives[Instruction(1, Op.F, m)] = (down,)
        sends[Instruction(1, Op.B, m)] = receives[Instruction(0, Op.B, m)] = (up,)
    return Itinerary(
        programs=tuple(map(tuple, programs)),
        rank_of=(0, 1),
        records=(),
        routes=(),
        receives=receives,
        sends=sends,
        passes={},
        window=2,
    )


def seconds(itinerary, transfer=0.0, work=None):
    table = work or {Op.F: 1.0, Op.B: 2.0}
    return simulate(itinerary, work=lambda i: table[i.op], transfer=lambda message: transfer)


# stage 0   F0 F1 .. .. B0 B0 F2 B1 B1 .. B2 B2         at F = 1, B = 2
# stage 1   .. F0 B0 B0 F1 B1 B1 F2 B2 B2
def test_1f1b_by_hand():
    assert seconds(two_ranks(3)) == 12.0


# stage 0   F0 F1 F2 .. B0 B0 B1 B1 B2 B2 (B0 arrives at 6)
# stage 1   .. F0 F1 F2 B0 B0 B1 B1 B2 B2
def test_gpipe_by_hand():
    assert seconds(two_ranks(3, "gpipe")) == 12.0


def test_one_micro_batch_pays_for_everything_in_turn():
    assert seconds(two_ranks(1), transfer=0.5) == 1 + 0.5 + 1 + 2 + 0.5 + 2


def test_a_slow_link_is_the_bottleneck_and_carries_one_message_at_a_time():
    made = two_ranks(8, "gpipe")
    down, up = 1 + 8 * 10, 8 * 10
    assert seconds(made, transfer=10.0) == down + 1 + 2 + up + 2


def test_one_more_in_flight_hides_a_transfer():
    plain, extra = (seconds(two_ranks(16, extra_in_flight=n), transfer=2.0) for n in (0, 1))
    bound = 16 * 3.0
    assert extra < 0.8 * plain
    assert extra >= bound


def test_stages_of_one_rank_have_no_link_between_them():
    programs = schedule_named("1f1b")([[0, 1]], 2, extra_in_flight=0)
    made = two_ranks(2)
    alone = Itinerary(
        programs=tuple(map(tuple, programs)),
        rank_of=(0, 0),
        records=(),
        routes=(),
        receives=made.receives,
        sends=made.sends,
        passes={},
        window=2,
    )
    assert seconds(alone, transfer=100.0) == 12.0
