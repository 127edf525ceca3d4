"""The picture of a step: a box for each span at its place, waiting in front of it, and how busy a rank is."""

from itertools import pairwise

import pytest
from matplotlib.patches import Rectangle

from penstock.pipeline.run.timeline import COLOURS, NAMES, Panel, draw, figure
from penstock.pipeline.schedules.instruction import Op, Span, bubbles, show
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


def test_numbers_titles_and_how_busy_a_rank_is_are_there():
    made = one(spans_of([[0], [1]], 3))
    axes = made.axes[0]
    assert [text.get_text() for text in axes.texts].count("2") == 4  # F and B of micro-batch 2 on both ranks
    assert made.get_suptitle() == "one step of a net"
    assert axes.get_title(loc="left") == "measured"
    assert "milliseconds" in axes.get_xlabel()
    legend = axes.get_legend()
    assert legend is not None
    assert len(legend.get_texts()) == 4  # forward, backward, update, waiting
    assert ["84 % busy" in label for label in busy(made)] == [True, True]
    many = [span(0, 0, "F", i, 0.01 * i, 0.01 * i + 0.01) for i in range(500)]
    assert not one(many).axes[0].texts  # a number that does not fit is left out


def test_the_colours_differ_in_grey():
    def grey(colour):
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    greys = sorted(map(grey, COLOURS.values()))
    assert all(lighter - darker > 25 for darker, lighter in pairwise(greys))
    assert COLOURS.keys() == NAMES.keys() == {op.value for op in Op}


def test_panels_share_one_axis_and_each_says_how_busy_its_ranks_are():
    short, long = spans_of([[0], [1]], 2), spans_of([[0], [1]], 6)
    made = figure([Panel(title="short", spans=short), Panel(title="long", spans=long)], title="both")
    assert [axes.get_title(loc="left") for axes in made.axes] == ["short", "long"]
    assert made.axes[0].get_xlim() == made.axes[1].get_xlim()
    assert [len(boxes(made, panel)) for panel in (0, 1)] == [len(short), len(long)]
    assert "77 % busy" in busy(made)[0]


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


@pytest.mark.parametrize("spans", [spans_of([[0], [1]], 8), []], ids=["a step", "nothing"])
def test_draw_writes_a_wide_png(tmp_path, spans):
    path = tmp_path / "timeline.png"
    draw([Panel(title="measured", spans=spans)], path, title="a step")
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    assert width >= 1600
    assert height < width / 2
