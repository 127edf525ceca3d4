"""Memory that is counted, and memory that the system reports."""

import mmap
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devices import Noting
from profiles import layer_of, profile_of
from programs import on_paper

from penstock import Pipeline, measure, partition, trace
from penstock.pipeline.run.schedule_comparison import ASYNCHRONOUS, SYNCHRONOUS, candidate
from penstock.pipeline.runtime.meter import STATUS, ResidentMemory, Usage, state_bytes
from penstock.pipeline.runtime.report import StageReport
from penstock.stages.device import Device

MIB = 2**20
THREE = "0F0 0F1 0F2 0B0 0B1 0B2"


def usage(device=None, **options):
    profile = profile_of([layer_of("a", size=400, saved=1000), layer_of("b", size=40, saved=100)])
    plan = partition(profile, cuts=["a"], ranks=2, **options)
    devices: dict[int, Device] = dict.fromkeys((0, 1), device or Device())
    tensors: dict[int, list[torch.Tensor]] = {0: [torch.zeros(100)], 1: [torch.zeros(10)]}
    still: Any = SimpleNamespace(begin=lambda: None, most=lambda: 77)  # a process that does not grow
    return Usage(plan, tensors, {}, resident=still, devices=devices, mirrors={})


def test_parameters_gradients_and_state_of_the_optimizer_count():
    weight, bias = torch.nn.Parameter(torch.zeros(100)), torch.nn.Parameter(torch.zeros(10))
    adam = torch.optim.Adam([weight, bias])
    bias.requires_grad_(False)
    assert state_bytes([weight, bias], None) == state_bytes([weight, bias], adam) == 2 * 400 + 40
    weight.grad = torch.zeros(100)
    adam.step()
    assert state_bytes([weight, bias], adam) == 840 + 2 * 400 + 4  # two moments, the number of steps


def test_a_stage_holds_what_its_micro_batches_in_flight_saved():
    reports = {0: StageReport(), 1: StageReport()}
    filled = usage().fill(reports, on_paper("0F0 0F1 1F0 1B0 0B0 1F1 1B1 0B1").spans, rank=0)
    assert (filled[0].live_micro_batches, filled[1].live_micro_batches) == (2, 1)
    assert (filled[0].peak_bytes, filled[1].peak_bytes) == (400 + 2 * 1000, 40 + 100)
    assert filled[0].resident_bytes == 77


def test_the_allocator_of_a_device_is_asked_for_the_most_since_the_start():
    device = Noting()
    counted = usage(device)
    assert device.asked == ["reset_peak"]  # once, though both stages are there
    filled = counted.fill({0: StageReport(), 1: StageReport()}, on_paper("0F0 0B0").spans, rank=0)
    assert (filled[0].device_bytes, filled[1].device_bytes) == (7000, 7000)
    assert usage().fill({0: StageReport()}, on_paper("0F0 0B0").spans, rank=0)[0].device_bytes == 0


def test_what_a_gpu_sends_to_the_host_does_not_count_there():
    for name, here in (("cpu", 3 * 300), ("meta", 0)):  # any kind but the CPU
        report = StageReport(saved_raw=3000, saved_kept=900)
        usage(Noting(torch.device(name)), tier="host").fill({0: report}, on_paper(THREE).spans, rank=0)
        assert report.peak_bytes == 400 + 2000 + here


def test_a_half_backward_lets_nothing_go_and_the_end_of_a_step_neither():
    def live(held, text):
        return held.fill({0: StageReport()}, on_paper(text).spans, rank=0)[0].live_micro_batches

    assert live(usage(), "0F0 0I0 0F1 0W0 0I1 0W1") == 2
    held = usage()
    assert live(held, "0F0 0F1 0F2") == 3
    assert live(held, "0B0 0F3 0F4") == 4
    held.restart()
    assert live(held, "0F0 0B0") == 1


def test_old_versions_count_and_a_store_keeps_less():
    # Of three in flight all are packed, and of two what is near is there as it is: in a small net all of it.
    report = StageReport(versions_bytes=800, saved_raw=3000, saved_kept=900)
    usage(tier="packed").fill({0: report}, on_paper(THREE).spans, rank=1)
    assert report.peak_bytes == 400 + 800 + 2 * 1000 + 3 * 300
    assert report.rank == 1


@pytest.mark.skipif(not STATUS.exists(), reason="only Linux tells it: /proc/self/status")
def test_the_process_has_grown_by_what_was_allocated():
    resident = ResidentMemory(model_bytes=0)
    resident.begin()
    before = resident.most()
    with mmap.mmap(-1, 256 * MIB) as block:  # not of the heap, which may have room that others have left
        for _ in range(256):
            block.write(bytes(MIB))
        after = resident.most()
    assert before + 192 * MIB < after < before + 320 * MIB
    assert resident.most() >= after  # the most, not what is left
    resident.begin()
    assert resident.most() < after - 192 * MIB


def test_memory_of_the_model_is_not_the_start():
    assert ResidentMemory(model_bytes=2**62).base == 0


ALL = [*((name, "latest") for name in SYNCHRONOUS), ("async_1f1b", "vertical_sync"), *ASYNCHRONOUS]
QUICK = {"1f1b", "zbv", "async_1f1b"}


@pytest.mark.parametrize(
    ("schedule", "weights", "feedback"),
    [
        *(pytest.param(*one, False, marks=() if one[0] in QUICK else pytest.mark.slow) for one in ALL),
        ("1f1b", "double_buffered", True),
    ],
)
def test_what_a_run_keeps_is_what_was_predicted_from_the_programs(schedule, weights, feedback):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4)))
    inputs, targets = torch.randn(12, 6), torch.randn(12, 6)
    profile = measure(trace(model, (inputs[:2],)), (inputs[:2],))
    asked = {"schedule": schedule, "weights": weights, "codec": "raw", "error_feedback": feedback}
    plan = partition(profile, stages=4, ranks=2, micro_batches=6, extra_in_flight=0, **asked)
    predicted = candidate(profile, plan)
    settings = {"loss": torch.nn.functional.mse_loss, "optimizer": torch.optim.SGD}
    pipe = Pipeline(model, plan, **settings)
    stages = [pipe.step(inputs, targets).stages for _ in range(4)][-1]
    assert tuple(stage.live_micro_batches for stage in stages) == predicted.live_micro_batches
    assert tuple(stage.live_versions for stage in stages) == predicted.live_versions
    for stage, planned in zip(stages, plan.stages, strict=True):
        parameters = 4 * planned.num_parameters
        assert stage.versions_bytes == (stage.live_versions - 1) * parameters
        saved = stage.live_micro_batches * planned.saved_bytes
        # weights, gradients, and the previous step of error feedback
        assert stage.peak_bytes == (2 + feedback) * parameters + stage.versions_bytes + saved
