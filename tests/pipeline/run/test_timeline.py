from itertools import pairwise

import pytest
from matplotlib.patches import Rectangle

from penstock.pipeline.run.timeline import COLOURS, NAMES, Panel, draw, figure
from penstock.pipeline.schedules.instruction import Op, show
from penstock.pipeline.schedules.one_f_one_b import one_f_one_b
from penstock.pipeline.schedules.span import Span, bubbles


def spans_of(stages_of_rank, num_micro_batches):
    """Made-up spans: 10 ms each, the first half of every third one waiting; one U per stage at the end."""
    spans = []
    for rank, program in enumerate(one_f_one_b(stages_of_rank, num_micro_batches)):
        for place, step in enumerate(program):
            start, waiting = 0.01 * place, 0.005 if place % 3 == 0 else 0.0
            spans.append(
                Span(
                    rank=rank, stage=step.stage, op=step.op.value, micro_batch=step.micro_batch,
                    start=start, waiting=waiting, end=start + 0.01,
                )
            )  # fmt: skip
        end = 0.01 * len(program)
        for stage in stages_of_rank[rank]:
            spans.append(
                Span(
                    rank=rank, stage=stage, op="U", micro_batch=None, start=end, waiting=0.0, end=end + 0.004
                )
            )
            end += 0.004
    return spans


def one(spans, **window):
    return figure([Panel(title="measured", spans=spans, **window)], title="one step of a net")


def boxes(made, panel=0):
    return [patch for patch in made.axes[panel].patches if isinstance(patch, Rectangle) and patch.get_gid()]


def waits(made):
    return [patch for patch in made.axes[0].patches if isinstance(patch, Rectangle) and patch.get_hatch()]


@pytest.mark.parametrize("stages_of_rank", [[[0]], [[0], [1]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]])
def test_one_box_per_span_at_its_place(stages_of_rank):
    spans = spans_of(stages_of_rank, 5)
    made = one(spans)
    assert len(boxes(made)) == len(spans)
    for span, box in zip(spans, boxes(made), strict=True):
        assert box.get_x() == pytest.approx(1e3 * (span.start + span.waiting))
        assert box.get_x() + box.get_width() == pytest.approx(1e3 * span.end)
        assert span.rank - 0.5 < box.get_y() < box.get_y() + box.get_height() < span.rank + 0.5
    assert len({(box.get_gid(), round(box.get_y())) for box in boxes(made)}) == len(spans)


def test_each_stage_of_a_rank_has_its_own_lane_the_first_on_top():
    made = one(spans_of([[0, 1], [2, 3]], 2))
    lanes = {str(box.get_gid())[0]: (box.get_y(), box.get_y() + box.get_height()) for box in boxes(made)}
    ends = [end for stage in "0123" for end in lanes[stage]]
    assert ends == sorted(ends)


def test_a_box_is_named_after_its_instruction():
    programs = one_f_one_b([[0], [1]], 3)
    names = [str(box.get_gid()) for box in boxes(one(spans_of([[0], [1]], 3)))]
    assert " ".join(names) == f"{show(programs[0])} 0U {show(programs[1])} 1U"


def test_waiting_is_drawn_in_front_of_the_box_and_only_there():
    spans = spans_of([[0], [1]], 4)
    waited = [span for span in spans if span.waiting]
    drawn = waits(one(spans))
    assert [patch.get_x() for patch in drawn] == pytest.approx([1e3 * span.start for span in waited])
    assert [patch.get_width() for patch in drawn] == pytest.approx([1e3 * span.waiting for span in waited])


def test_numbers_title_legend_and_axis_are_there():
    made = one(spans_of([[0], [1]], 3))
    axes = made.axes[0]
    assert [text.get_text() for text in axes.texts].count("2") == 4  # F and B of micro-batch 2 on both ranks
    assert made.get_suptitle() == "one step of a net"
    assert axes.get_title(loc="left") == "measured"
    assert "milliseconds" in axes.get_xlabel()
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "forward",
        "backward",
        "update",
        "waiting for a frame",
    ]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "rank 0, stage 0\n84 % busy",
        "rank 1, stage 1\n84 % busy",
    ]


def test_a_number_that_does_not_fit_is_left_out():
    spans = [
        Span(rank=0, stage=0, op="F", micro_batch=i, start=0.01 * i, waiting=0.0, end=0.01 * i + 0.01)
        for i in range(500)
    ]
    assert not one(spans).axes[0].texts


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
    assert "77 % busy" in made.axes[0].get_yticklabels()[0].get_text()


def test_a_part_of_a_stream_is_cut_at_both_ends():
    spans = spans_of([[0], [1]], 8)
    made = one(spans, begin=0.022, end=0.058)
    assert min(box.get_x() for box in boxes(made)) == 0.0
    assert max(box.get_x() + box.get_width() for box in boxes(made)) == pytest.approx(36.0)
    names = [str(box.get_gid()) for box in boxes(made) if "0" == str(box.get_gid())[0]]
    assert names == ["0B0", "0F2", "0B1", "0F3"]
    waited = 0.005  # of the fourth
    assert f"{100 * (0.036 - waited) / 0.036:.0f} % busy" in made.axes[0].get_yticklabels()[0].get_text()


def test_a_bubble_is_what_is_left_of_the_step():
    first = Span(rank=0, stage=0, op="F", micro_batch=0, start=0.0, waiting=1.0, end=4.0)
    second = Span(rank=1, stage=1, op="F", micro_batch=0, start=0.0, waiting=8.0, end=10.0)
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
