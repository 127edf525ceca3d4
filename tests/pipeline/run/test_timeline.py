"""The picture of a step: a box for each span at its place, waiting in front of it, and how busy a rank is."""

import pytest
from matplotlib.patches import Rectangle

from penstock.pipeline.run.timeline import Panel, draw, figure
from penstock.pipeline.schedules.instruction import Span, bubbles, show
from penstock.pipeline.schedules.synchronous import one_f_one_b


def span(rank, stage, op, micro_batch, start, end, *, waiting=0.0):
    return Span(rank=rank, stage=stage, op=op, micro_batch=micro_batch, start=start, waiting=waiting, end=end)


def spans_of(stages_of_rank, num_micro_batches):
    """Made-up spans: 10 ms each, the first half of every third one waiting; one U per stage at the end."""
    spans = []
    for rank, program in enumerate(one_f_one_b(stages_of_rank, num_micro_batches)):
        for place, step in enumerate(program):
            waiting = 0.005 if place % 3 == 0 else 0.0
            start, op = 0.01 * place, step.op.value
            spans.append(span(rank, step.stage, op, step.micro_batch, start, start + 0.01, waiting=waiting))
        end = 0.01 * len(program)
        for stage in stages_of_rank[rank]:
            spans.append(span(rank, stage, "U", None, end, end + 0.004))
            end += 0.004
    return spans


def one(spans, **window):
    return figure([Panel(title="measured", spans=spans, **window)], title="one step of a net")


def boxes(made, panel=0):
    return [patch for patch in made.axes[panel].patches if isinstance(patch, Rectangle) and patch.get_gid()]


def named(made):
    return [str(box.get_gid()) for box in boxes(made)]


def busy(made):
    return [label.get_text() for label in made.axes[0].get_yticklabels()]


@pytest.mark.parametrize("stages_of_rank", [[[0]], [[0], [1]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]])
def test_one_box_per_span_at_its_place_in_the_lane_of_its_stage(stages_of_rank):
    spans = spans_of(stages_of_rank, 5)
    made = one(spans)
    assert len(boxes(made)) == len(spans)
    lanes = {}
    for one_span, box in zip(spans, boxes(made), strict=True):
        low, high = box.get_y(), box.get_y() + box.get_height()
        assert box.get_x() == pytest.approx(1e3 * (one_span.start + one_span.waiting))
        assert box.get_x() + box.get_width() == pytest.approx(1e3 * one_span.end)
        assert one_span.rank - 0.5 < low < high < one_span.rank + 0.5
        assert lanes.setdefault(one_span.stage, (low, high)) == (low, high)
    ends = [end for stage in sorted(lanes) for end in lanes[stage]]
    assert ends == sorted(ends)  # the first stage of a rank on top
    programs = one_f_one_b(stages_of_rank, 5)
    shown = zip(map(show, programs), stages_of_rank, strict=True)
    names = [f"{text} {' '.join(f'{stage}U' for stage in stages)}" for text, stages in shown]
    assert " ".join(named(made)) == " ".join(names)


def test_waiting_is_drawn_in_front_of_the_box_and_only_there():
    spans = spans_of([[0], [1]], 4)
    waited = [one_span for one_span in spans if one_span.waiting]
    drawn = [p for p in one(spans).axes[0].patches if isinstance(p, Rectangle) and p.get_hatch()]
    assert [patch.get_x() for patch in drawn] == pytest.approx([1e3 * s.start for s in waited])
    assert [patch.get_width() for patch in drawn] == pytest.approx([1e3 * s.waiting for s in waited])


def test_a_part_of_a_stream_is_cut_at_both_ends():
    made = one(spans_of([[0], [1]], 8), begin=0.022, end=0.058)
    assert min(box.get_x() for box in boxes(made)) == 0.0
    assert max(box.get_x() + box.get_width() for box in boxes(made)) == pytest.approx(36.0)
    assert [name for name in named(made) if name[0] == "0"] == ["0B0", "0F2", "0B1", "0F3"]
    waited = 0.005  # of the fourth
    assert f"{100 * (0.036 - waited) / 0.036:.0f} % busy" in busy(made)[0]


def test_a_bubble_is_what_is_left_of_the_step():
    first, second = span(0, 0, "F", 0, 0.0, 4.0, waiting=1.0), span(1, 1, "F", 0, 0.0, 10.0, waiting=8.0)
    assert bubbles([first, second], num_ranks=3) == (0.7, 0.8, 1.0)
    assert bubbles([], num_ranks=1) == (0.0,)


def test_draw_writes_a_wide_png(tmp_path):
    path = tmp_path / "timeline.png"
    draw(
        [Panel(title="measured", spans=spans_of([[0], [1]], 8)), Panel(title="nothing", spans=[])],
        path,
        title="",
    )
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    assert width >= 1600
    assert height < width
