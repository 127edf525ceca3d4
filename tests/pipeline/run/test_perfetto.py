"""A trace that others open: the rules of the format, and the numbers of the spans it was made from."""

import itertools
import json
from collections import defaultdict

import pytest
from programs import on_paper

from penstock.pipeline.run.timeline import perfetto_trace
from penstock.pipeline.schedules import schedule_named
from penstock.pipeline.schedules.instruction import show

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
