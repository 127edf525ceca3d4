"""Laws that only a GPU proves: the bits of the plain loop there, its random layers, its clock and memory."""

import copy
import warnings

import pytest
import torch
from cases import OPTIMIZERS, Case, plan_of
from gpus import told_of_waits
from profiles import measured
from reference import plain_loop, same_bits
from zoo import build, cross_entropy

import penstock
from penstock.conf.schema import PlanConfig
from penstock.pipeline.run import determinism
from penstock.stages.device import device_of, memory_on
from penstock.stages.stage import stage

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def exact():
    """Set torch as ``penstock train device=cuda`` does, for good: all tests on a GPU want it."""
    determinism.begin(PlanConfig(device="cuda"))


SCHEDULES = {
    **{name: {"stages": 3} for name in ("gpipe", "1f1b", "zb_h1")},
    **{name: {"stages": 4, "ranks": 2} for name in ("interleaved", "zbv", "dualpipev")},
}


def trained(name, *, far_batches=False, optimizer="sgd", clip=1.0, stages=3, **options):
    """A pipeline of some stages on the GPU and the plain loop there, as (report, state) and its own."""
    model, batches = build(name)
    plain, there = copy.deepcopy(model).to(GPU), [(x.to(GPU), y.to(GPU)) for x, y in batches]
    graph, profile = measured(model.to(GPU), batches[0][0].tensor_split(3)[0].clone())
    plan = penstock.partition(profile, stages=stages, micro_batches=3, **options)
    settings = {"loss": cross_entropy, "optimizer": OPTIMIZERS[optimizer], "clip": clip}
    pipe = penstock.Pipeline(model, plan, device="cuda:0", **settings)
    expected = plain_loop(plain, there, micro_batches=3, random=graph.train_probe.random, **settings)
    for batch, theirs in zip(there if far_batches else batches, expected, strict=True):
        yield pipe.step(*batch), pipe.state_dict()["model"], theirs, plain


def hold(name, **options):
    """Every step has the loss and the weights of the plain loop."""
    for report, state, theirs, plain in trained(name, **options):
        assert report.loss == theirs["loss"]
        expected = plain.state_dict()
        assert [key for key in expected if not same_bits(expected[key].cpu(), state[key])] == []


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["mlp", "residual", "gpt_gelu_dropout", "gpt_tied", "resnet18", "densenet"])
def test_a_pipeline_on_a_gpu_has_the_bits_of_the_plain_loop_there(name, schedule):
    hold(name, schedule=schedule, **SCHEDULES[schedule])


CODECS = ("raw", "exponent", "zero_value+exponent", "zero_value+lz4", "auto")
OTHERS = [("gpt_relu", {"codec": codec}) for codec in CODECS]
OTHERS += [(name, {"tier": tier}) for name in ("mlp", "gpt_relu", "resnet18") for tier in ("packed", "host")]


@pytest.mark.parametrize(("name", "options"), OTHERS, ids=str)
def test_whatever_packs_it_and_wherever_saved_tensors_wait(name, options, monkeypatch):
    monkeypatch.setattr(stage, "LEAST_SAVED", 1)  # else little of these small models leaves
    hold(name, **options)


def test_the_host_waits_for_the_device_only_at_the_end_of_a_step():
    steps = trained("mlp", codec="raw")
    next(steps)
    with told_of_waits("warn"), warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        next(steps)  # with the state that is gathered behind it, and the plain loop
    places = [f"{wait.filename}:{wait.lineno}" for wait in waits if "synchroniz" in str(wait.message)]
    inside = [place for place in places if "/stages/" in place or place.split(":")[0].endswith("engine.py")]
    assert inside == [], places


def test_batches_may_be_on_the_gpu_and_states_come_to_the_cpu():
    for report, state, theirs, _ in trained("mlp", far_batches=True, optimizer="adam"):
        assert report.loss == theirs["loss"]
        assert {tensor.device.type for tensor in state.values()} == {"cpu"}
        assert all(stage.device_bytes > 0 for stage in report.stages)


def test_tracing_and_measuring_leave_the_gpus_random_state_and_tell_its_seconds():
    model, batches = build("gpt_gelu_dropout")
    torch.cuda.manual_seed(11)
    before = torch.cuda.get_rng_state(GPU)
    graph, profile = measured(model.to(GPU), batches[0][0][:4].clone())
    assert torch.equal(torch.cuda.get_rng_state(GPU), before)
    assert graph.train_probe.random
    assert profile.device == "cuda"
    assert all(0 < layer.forward_seconds < 1 for layer in profile.layers)


def test_a_state_of_the_cpu_goes_on_on_a_gpu():
    case = Case(model="mlp", cuts=2, optimizer="adam")
    plan, _ = plan_of(case)
    options = {"loss": cross_entropy, "optimizer": OPTIMIZERS["adam"]}
    model, batches = build("mlp")
    here = penstock.Pipeline(model, plan, **options)
    here.step(*batches[0])
    there = penstock.Pipeline(build("mlp")[0], plan, device="cuda:0", **options)
    there.load_state_dict(here.state_dict())
    for name, tensor in here.state_dict()["model"].items():
        assert same_bits(there.state_dict()["model"][name], tensor)
    here.step(*batches[1])
    there.step(*batches[1])
    for name, tensor in here.state_dict()["model"].items():
        assert torch.allclose(there.state_dict()["model"][name], tensor, atol=1e-4)


def test_a_gpus_memory_is_told_alike_and_what_is_ours_counts():
    which, free, ours = memory_on(GPU)
    kept = torch.empty(64 << 20, dtype=torch.uint8, device=GPU)
    again = memory_on(GPU)
    assert which == again[0]
    assert again[1] + again[2] >= free + ours - (256 << 20)
    assert again[2] >= kept.nbytes
    assert (device_of(GPU).peak_bytes or 0) >= kept.nbytes
