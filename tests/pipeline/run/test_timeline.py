"""The picture of a step, a box for each span, and the trace that other programs open."""

import itertools
import json
from collections import defaultdict

import pytest
from matplotlib.patches import Rectangle
from programs import on_paper

from penstock.pipeline.run.timeline import Panel, draw, figure, perfetto_trace
from penstock.pipeline.schedules import schedule_named
from penstock.pipeline.schedules.instruction import show


def one(spans, **window):
    return figure([Panel(title="measured", spans=spans, **window)], title="one step of a net")


def boxes(made, panel=0):
    return [patch for patch in made.axes[panel].patches if isinstance(patch, Rectangle) and patch.get_gid()]


def named(made):
    return [str(box.get_gid()) for box in boxes(made)]


@pytest.mark.parametrize("stages_of_rank", [[[0]], [[0], [1]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]])
def test_one_box_per_span_at_its_place_in_the_lane_of_its_stage(stages_of_rank):
    spans = step(stages_of_rank, 5)
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
    assert named(made) == [one_span.name for one_span in spans]


def test_waiting_is_drawn_in_front_of_the_box_and_only_there():
    spans = step([[0], [1]])
    waited = [one_span for one_span in spans if one_span.waiting]
    assert waited
    drawn = [p for p in one(spans).axes[0].patches if isinstance(p, Rectangle) and p.get_hatch()]
    assert [patch.get_x() for patch in drawn] == pytest.approx([1e3 * s.start for s in waited])
    assert [patch.get_width() for patch in drawn] == pytest.approx([1e3 * s.waiting for s in waited])


def test_a_part_of_a_stream_is_cut_at_both_ends():
    # stage 0   F0 F1 .. .. B0 B0 F2 B1 B1
    # stage 1   .. F0 B0 B0 F1 B1 B1
    made = one(step([[0], [1]], transfer=0.0), begin=3.5, end=8.5)
    assert min(box.get_x() for box in boxes(made)) == 0.0
    assert max(box.get_x() + box.get_width() for box in boxes(made)) == pytest.approx(5000.0)
    assert [name for name in named(made) if name[0] == "0"] == ["0B0", "0F2", "0B1"]
    assert "90 % busy" in made.axes[0].get_yticklabels()[0].get_text()  # B0 begins after half a second


def test_a_bubble_is_what_is_left_of_the_step():
    first = step()[0]._replace(start=0.0, waiting=1.0, end=4.0)
    second = first._replace(rank=1, waiting=8.0, end=10.0)
    third = first._replace(rank=2, start=0.0, waiting=10.0, end=10.0)
    assert Panel(title="", spans=[first, second, third]).bubble == [0.7, 0.8, 1.0]
    assert Panel(title="", spans=[]).bubble == [1.0]


def test_draw_writes_a_wide_png(tmp_path):
    path = tmp_path / "timeline.png"
    draw([Panel(title="measured", spans=step()), Panel(title="nothing", spans=[])], path, title="")
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    assert width >= 1600
    assert height < width


MICROSECONDS = 1e6
LAST_DIGIT = 1e-3  # times are rounded to the nanosecond


def step(stages_of_rank=((0,), (1,), (2,)), number=4, schedule="1f1b", transfer=0.7):
    """A simulated step in seconds, in which every F and B but those at the ends sends something."""
    programs = schedule_named(schedule)(stages_of_rank, number)
    updates = [" ".join(f"{stage}U" for stage in stages) for stages in stages_of_rank]
    lines = [f"{show(program)} {update}" for program, update in zip(programs, updates, strict=True)]
    last = max(stage for stages in stages_of_rank for stage in stages)

    def with_bytes(span):
        sends = (span.op == "F" and span.stage < last) or (span.op == "B" and span.stage > 0)
        sent = {"bytes_raw": 1000, "bytes_sent": 250, "codec": "zero_value", "packing": 0.125}
        return span._replace(**sent) if sends else span

    return [with_bytes(span) for span in on_paper(*lines, transfer=transfer, U=0.25).spans]


def events_of(spans):
    """The events with a length, and the arrows that start and end, by their names."""
    made = perfetto_trace(spans, title="")["traceEvents"]
    arrows = [{e["id"]: e for e in made if e["ph"] == kind} for kind in "sf"]
    return [e for e in made if e["ph"] == "X"], *arrows


STEPS = [
    step(),
    step(schedule="gpipe", transfer=5.0),
    step(((0, 1), (2, 3)), number=3),
    step(((0,),), number=2),
    [],
]


@pytest.mark.parametrize("spans", STEPS)
def test_events_follow_the_format_and_do_not_overlap_in_a_row(spans):
    made = json.loads(json.dumps(perfetto_trace(spans, title="a step"), allow_nan=False))
    assert made["displayTimeUnit"] == "ms"
    rows = defaultdict(list)
    for event in made["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] in {"X", "M", "s", "f"}
        if event["ph"] != "M":
            assert event["ts"] >= 0
            assert isinstance(event["cat"], str)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            rows[event["pid"], event["tid"]].append(event)
    named = {(e["pid"], e["tid"]) for e in made["traceEvents"] if e["name"] == "thread_name"}
    assert named == rows.keys()
    for row in rows.values():
        for before, event in itertools.pairwise(row):
            assert event["ts"] >= before["ts"] + before["dur"] - LAST_DIGIT / 2


@pytest.mark.parametrize("spans", STEPS)
def test_sums_of_the_events_are_those_of_the_spans(spans):
    def close_to(seconds):
        return pytest.approx(MICROSECONDS * sum(seconds), abs=LAST_DIGIT * len(spans))

    events, _, _ = events_of(spans)
    work = [e for e in events if e["cat"] not in ("waiting", "frame")]
    assert sorted(e["name"] for e in work) == sorted(span.name for span in spans)
    assert sum(e["dur"] for e in work) == close_to(span.computing for span in spans)
    waited = sum(e["dur"] for e in events if e["cat"] == "waiting")
    assert waited == close_to(span.waiting for span in spans)
    assert sum(e["args"].get("bytes_sent", 0) for e in work) == sum(span.bytes_sent for span in spans)
    packing = sum(e["args"]["packing_seconds"] for e in work)
    assert packing == pytest.approx(sum(span.packing for span in spans))


def test_an_instruction_says_what_it_sent():
    (event,) = [e for e in perfetto_trace(step(), title="")["traceEvents"] if e["name"] == "1B2"]
    assert event["args"].pop("waiting_seconds") >= 0
    sent = {"bytes_raw": 1000, "bytes_sent": 250, "ratio": 4.0, "codec": "zero_value"}
    assert event["args"] == {"packing_seconds": 0.125, "micro_batch": 2} | sent


def test_a_frame_is_on_its_way_from_its_sender_to_its_reader_on_another_rank():
    frames = [e for e in events_of(step(number=1, transfer=0.5))[0] if e["cat"] == "frame"]
    assert [(e["name"], e["pid"], e["ts"] / MICROSECONDS, e["dur"] / MICROSECONDS) for e in frames] == [
        ("0F0 to stage 1", 0, 1.0, 0.5),
        ("1F0 to stage 2", 1, 2.5, 0.5),
        ("2B0 to stage 1", 2, 6.0, 0.5),
        ("1B0 to stage 0", 1, 8.5, 0.5),
    ]
    events, _, _ = events_of(step(((0, 1), (2, 3)), number=2))
    crossing = {e["name"] for e in events if e["cat"] == "frame"}
    assert crossing == {"1F0 to stage 2", "1F1 to stage 2", "2B0 to stage 1", "2B1 to stage 1"}


def test_an_arrow_begins_and_ends_inside_the_events_it_connects():
    found, starts, ends = events_of(step())
    events = {e["name"]: e for e in found if e["cat"] != "frame"}
    assert len(starts) == len(ends) == 2 * 2 * 4  # two cuts, both ways, four micro-batches
    for name, start in starts.items():
        sender, stage = name.split(">")
        reader = f"{stage}{sender[1:]}"
        for event, arrow in ((events[sender], start), (events[reader], ends[name])):
            assert (event["pid"], event["tid"]) == (arrow["pid"], arrow["tid"])
            assert event["ts"] < arrow["ts"] < event["ts"] + event["dur"]
        sent = events[sender]["ts"] + events[sender]["dur"]
        assert sent - start["ts"] <= 1.0 + LAST_DIGIT  # at its end, where it is sent
        assert ends[name]["ts"] - events[reader]["ts"] <= 1.0 + LAST_DIGIT


def test_rows_are_named_and_stand_in_their_order():
    made = perfetto_trace(step(number=1), title="resnet18")
    assert made["otherData"] == {"title": "resnet18"}
    named = [e["args"]["name"] for e in made["traceEvents"] if e["name"].endswith("_name")]
    assert named == [
        "rank 0", "rank 1", "rank 2",
        "stage 0", "sent down", "stage 1", "sent down", "sent up", "stage 2", "sent up",
    ]  # fmt: skip


def test_clocks_that_differ_make_no_arrow_backwards_and_no_negative_time():
    spans = [s._replace(start=s.start + 100, end=s.end + 100) if s.rank == 0 else s for s in step(number=2)]
    events, starts, ends = events_of(spans)
    assert all(e["dur"] >= 0 for e in events)
    assert all(end["ts"] >= starts[name]["ts"] for name, end in ends.items())
    assert not any(name.startswith("0F") for name in starts)
