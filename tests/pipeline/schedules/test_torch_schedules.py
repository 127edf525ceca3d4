"""torch.distributed.pipelining as an oracle of order: its own programs, its validator, its CSV files.

What is asked of torch is private there: a version that lacks it skips these tests and says why.
"""

from typing import Any
from unittest import mock

import pytest
from programs import halved, laid, most_in_flight, neighbours, on_paper

from penstock.pipeline.schedules import SCHEDULES, schedule_named
from penstock.pipeline.schedules.custom import load_program, parse_csv
from penstock.pipeline.schedules.instruction import Instruction, Op, show
from penstock.pipeline.schedules.verify import verify

theirs = pytest.importorskip("torch.distributed.pipelining.schedules", reason="this torch has no pipelines")
stage_type = pytest.importorskip("torch.distributed.pipelining.stage").PipelineStage

CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb_h1": "ScheduleInterleavedZeroBubble",  # with one stage a rank
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
SIZES = [*((ranks, number) for ranks in (1, 2, 3, 4) for number in (1, 3, 4, 7, 8, 11)), (8, 11), (8, 17)]


def private(owner, name):
    if not hasattr(owner, name):
        pytest.skip(f"this torch has no {name}")
    return getattr(owner, name)


def torch_schedule(name, num_ranks, num_micro_batches, per_rank):
    """A schedule of torch without a process group, as torch's tests make it; None: it refuses the sizes."""
    schedule = private(theirs, CLASSES[name])
    stage = mock.create_autospec(stage_type, instance=True)
    stage.group_rank, stage.group_size = 0, num_ranks
    stage.num_stages, stage.submod = num_ranks * per_rank, None
    single = issubclass(schedule, theirs.PipelineScheduleSingle)
    try:
        return schedule(stage if single else [stage] * per_rank, num_micro_batches)
    except ValueError:
        return None


def as_programs(actions):
    """Through the text of a CSV file, as torch writes it."""
    rows = (",".join("" if action is None else str(action) for action in actions[rank]) for rank in actions)
    return parse_csv("\n".join(rows))


def torch_program(name, num_ranks, num_micro_batches, per_rank=None):
    schedule = torch_schedule(name, num_ranks, num_micro_batches, per_rank or len(laid(name, 1)[0]))
    return None if schedule is None else as_programs(private(schedule, "pipeline_order"))


def our_program(name, num_ranks, num_micro_batches, per_rank=None):
    return SCHEDULES[name](laid(name, num_ranks, per_rank), num_micro_batches)


def from_zero(program):
    """The program with its forwards numbered from 0: torch 2.15 draws those of 1F1B's last rank from 1."""
    first = min(each.micro_batch for each in program if each.op is Op.F)
    return [
        Instruction(each.stage, each.op, each.micro_batch - first) if each.op is Op.F else each
        for each in program
    ]


@pytest.mark.parametrize(
    ("name", "per_rank"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("interleaved", 4)],
)
def test_schedules_have_torchs_order(name, per_rank):
    compared = 0
    for num_ranks, number in SIZES:
        if name == "1f1b" and number < num_ranks:
            continue  # torch draws micro-batches there that the step does not have
        wanted = torch_program(name, num_ranks, number, per_rank)
        if wanted is not None:
            assert our_program(name, num_ranks, number, per_rank) == [from_zero(own) for own in wanted]
            compared += 1
    assert compared > len(SIZES) // 2


@pytest.mark.parametrize("name", ["zb_h1", "zbv", "dualpipev"])
def test_zero_bubble_has_torchs_order_and_no_longer_a_step(name):
    compared = 0
    for num_ranks, number in SIZES:
        wanted = torch_program(name, num_ranks, number)
        ours = our_program(name, num_ranks, number)
        if wanted is not None:
            assert halved(ours) == halved(wanted)
            taken, theirs_takes = (on_paper(*map(show, each)).seconds for each in (ours, wanted))
            assert taken <= theirs_takes
            for rank, stages in enumerate(laid(name, num_ranks)):
                assert most_in_flight(ours[rank], stages) <= most_in_flight(wanted[rank], stages)
            compared += 1
    assert compared >= len(SIZES) // 3


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize(
    ("name", "num_ranks", "per_rank", "number"),
    [("zb_h1", 2, 2, 4), ("dualpipev", 4, 2, 10), ("interleaved", 4, 2, 8), ("zbv", 3, 2, 6)],
)
def test_a_file_of_torch_runs_as_a_custom_schedule(tmp_path, name, num_ranks, per_rank, number, form):
    schedule: Any = torch_schedule(name, num_ranks, number, per_rank)
    private(schedule, "_dump_csv")(str(tmp_path / "theirs.csv"), form)
    written = (tmp_path / "theirs.csv").read_text()
    assert ("SEND_F" in written) == (form == "compute_comms")
    assert ("OVERLAP_F_B" in written) == (name == "dualpipev")
    lines = load_program(tmp_path / "theirs.csv")
    assert list(lines) == [show(program) for program in as_programs(schedule.pipeline_order)]
    layout = "interleaved" if name == "zb_h1" else name  # with several stages a rank it is laid in a loop
    stages_of_rank = laid(layout, num_ranks, per_rank)
    programs = schedule_named("custom", lines)(stages_of_rank, number)
    verify(programs, num_micro_batches=number, edges=neighbours(num_ranks * per_rank), window=4)


@pytest.mark.parametrize("name", ["interleaved", "zbv"])
def test_torch_reads_the_file_that_we_write(tmp_path, name):
    runtime: Any = torch_schedule(name, 2, 4, 2)
    ours = our_program(name, 2, 4)
    (tmp_path / "ours.csv").write_text("\n".join(",".join(map(str, program)) for program in ours))
    private(runtime, "_load_csv")(str(tmp_path / "ours.csv"))
    assert as_programs(runtime.pipeline_order) == ours
