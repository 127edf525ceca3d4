"""What a person reads, letter by letter where it matters."""

from __future__ import annotations

import io

import pytest
from reports import PLAN, report
from rich.console import Console

from penstock import PlanError
from penstock.pipeline.run import closing, console
from penstock.pipeline.run.metrics import Totals, summarise


def log(width: int = console.WIDTH_OF_A_LOG) -> Console:
    return Console(file=io.StringIO(), width=width)


def written(to: Console) -> list[str]:
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue().splitlines()


def summary(**more):
    totals = Totals(num_stages=2)
    for step in range(2):
        totals.add(report(step))
    sizes = {"a.weight": 1500, "b.weight": 6, "c.weight": 7}
    test = {"accuracy": 0.9653, "loss": 0.1234}
    return (
        summarise(totals, PLAN, sizes=sizes, test=test, ranks=2, threads=1, codec="raw", turns=[], flows=[])
        | more
    )


def test_the_closing_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    screen = log()
    console.close(
        summary(), [tmp_path / "run" / "timeline.png", tmp_path.parent / "plan.png"], console=screen
    )
    assert [line.split() for line in written(screen)] == [
        "stage rank compute bubble counted resident activations raw -> sent gradients raw -> sent".split(),
        "0 0 0.8 s 20% 5 KiB 9 KiB 200 B -> 80 B (2.50x) -".split(),
        "1 1 0.4 s 60% 3 KiB 8 KiB - 160 B -> 120 B (1.33x)".split(),
        *[line.split() for line in closing.KEY],
        "sent between stages: 360 B -> 200 B (1.80x)".split(),
        "2 steps, 16 samples in 0:01: 16 samples/s, ranks=2 threads=1, last loss 1.5000".split(),
        "test accuracy 96.53%, test loss 0.1234".split(),
        ["run/timeline.png", str(tmp_path.parent / "plan.png")],
    ]


@pytest.mark.parametrize("columns", [80, 110])
def test_the_table_fits_a_terminal_of_80_columns_and_a_log(columns):
    screen = log(columns)
    big = summary()
    for stage in big["stages"]:
        stage |= dict.fromkeys((name for name in stage if name.startswith("bytes_")), 99 * 2**29)
        stage |= {
            "compute_seconds": 34567.8,
            "bubble": 1.0,
            "peak_bytes": 99 * 2**29,
            "resident_bytes": 2**39,
        }
    console.close(big, [], console=screen)
    table = written(screen)[:3]
    assert all(len(line) <= columns for line in table)
    assert not any("…" in line for line in table)
    assert table[1].endswith("49.5 GiB (1.00x)")
    assert all(len(line) <= 110 for line in closing.KEY)


def test_the_most_memory_of_a_gpu_stands_beside_the_rest_in_a_log():
    screen, far = log(110), summary()
    for stage in far["stages"]:
        stage |= {"resident_bytes": 2**39, "peak_bytes": 99 * 2**29, "device_bytes": 99 * 2**29}
    console.close(far, [], console=screen)
    heading, first, _ = written(screen)[:3]
    assert heading.endswith(" GPU")
    assert first.endswith(" 49.5 GiB")
    assert "…" not in heading + first


def test_what_the_stages_of_a_rank_share_is_told_once():
    shared = summary()
    for stage in shared["stages"]:
        stage |= {"rank": 0, "bubble": 0.25, "resident_bytes": 2048}
    screen = log()
    console.close(shared, [], console=screen)
    first, last = (line.split() for line in written(screen)[1:3])
    assert first[:8] == "0 0 0.8 s 25% 5 KiB 2".split()
    assert last[:7] == "1 0 0.4 s 3 KiB -".split()


def test_what_nobody_counted_is_a_dash():
    uncounted = summary()
    for stage in uncounted["stages"]:
        stage |= {"peak_bytes": 0, "resident_bytes": 0}
    screen = log()
    console.close(uncounted, [], console=screen)
    assert written(screen)[1].split()[5:7] == ["-", "-"]


def test_one_stage_sends_nothing_and_a_lost_loss_is_said():
    lines = closing.totals(summary(bytes_raw=0, bytes_sent=0, loss=None))
    assert len(lines) == 2
    assert "last loss no number" in lines[0]


def test_a_log_gets_a_line_for_the_first_and_the_last_step():
    screen = log()
    with console.Training(3, console=screen) as progress:
        for step in range(3):
            progress.step(report(step))
        progress.note("epoch 1/1")
    assert written(screen) == [
        "step 1/3  loss 1.5000  16 samples/s  180 B -> 100 B (1.80x)  ETA 0:01",
        "step 3/3  loss 1.5000  16 samples/s  540 B -> 300 B (1.80x)  ETA 0:00",
        "epoch 1/1",
    ]


def test_the_slow_first_step_is_forgotten():
    screen = log()
    with console.Training(2, console=screen) as progress:
        progress.step(report(0, seconds=10.0))
        progress.step(report(1, seconds=0.5))
    assert "  1 samples/s" in written(screen)[0]
    assert "16 samples/s" in written(screen)[1]


def test_a_terminal_gets_a_bar_with_the_same_facts():
    screen = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    with console.Training(2, console=screen) as progress:
        progress.step(report(0))
        progress.step(report(1))
    assert "2/2 loss 1.5000  16 samples/s  360 B -> 200 B (1.80x) 0:00:00" in " ".join(written(screen))


def test_ranks_that_are_not_shown_print_nothing():
    screen = log()
    with console.Training(1, shown=False, console=screen) as progress:
        progress.step(report(0))
        progress.note("epoch")
    assert written(screen) == []


def test_an_error_is_one_line_on_standard_error(capsys):
    console.refuse(PlanError("two\nlines  here"))
    assert capsys.readouterr() == ("", "penstock: two lines here\n")


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0:00"), (59.6, "1:00"), (65, "1:05"), (3605, "1:00:05")]
)
def test_clock(seconds, shown):
    assert closing.clock(seconds) == shown


def test_a_run_too_short_for_a_choice_says_so():
    said = "codec=auto: the run ended before a choice was made"
    assert said in closing.totals(summary(codec="auto"))
    assert said not in closing.totals(summary(codec="auto", bytes_raw=0, bytes_sent=0))
    assert said not in closing.totals(summary())


def test_a_lossy_codec_is_called_lossy():
    lines = closing.totals(summary(codec="int8"))
    assert any(line.startswith("sent between stages by int8 (lossy), so not with the bits") for line in lines)
    assert not any("lossy" in line for line in closing.totals(summary(codec="auto")))


def test_the_codecs_that_were_chosen_and_those_switched_off_are_said():
    flow = {"value": "relu", "way": "F", "source": 0, "target": 1, "bytes_raw": 9, "bytes_sent": 5}
    turn = {"name": "by price", "extra": 0, "predicted": 0.5, "measured": 0.512, "stayed": True}
    lines = closing.totals(
        summary(
            codec="auto",
            flows=[flow | {"codec": "exponent"}, flow | {"way": "B", "codec": "raw", "bytes_raw": 8}],
            turns=[turn, turn | {"name": "raw", "measured": 0.75, "stayed": False}],
            bytes_saved_raw=2048,
            bytes_saved_kept=1024,
        )
    )
    assert "saved for the backward: 2 KiB -> 1 KiB (2.00x)" in lines
    assert "codec=auto: relu down exponent; relu up raw" in lines
    assert (
        "codec=auto: by price 0.512 s a step (predicted 0.500); raw 0.750 s a step (predicted 0.500), "
        "switched off" in lines
    )


def test_what_flies_besides_is_said_for_a_codec_that_was_asked_for():
    turn = {"name": "by price", "extra": 1, "predicted": 0.5, "measured": 0.512, "stayed": True}
    lines = closing.totals(summary(codec="raw", turns=[turn]))
    assert "extra_in_flight=auto: by price, +1 in flight: 0.512 s a step (predicted 0.500)" in lines
