"""What only a GPU proves: the bits of the plain loop there, its random layers, its clock and memory."""

import copy

import pytest
import torch
from cases import OPTIMIZERS, Case, plan_of
from reference import plain_loop, same_bits
from zoo import build, cross_entropy

import penstock
from penstock.conf.schema import PlanConfig
from penstock.pipeline.run import exactness
from penstock.stages.device import device_of, memory_on

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def exact():
    """What ``penstock train device=cuda`` sets, for good: all tests on a GPU want it."""
    exactness.begin(PlanConfig(device="cuda"))


def trained(name, *, far_batches=False, optimizer="sgd", clip=1.0, **options):
    """A pipeline of three stages on the GPU and the plain loop there, as (report, state) and its own."""
    model, batches = build(name)
    plain, there = copy.deepcopy(model).to(GPU), [(x.to(GPU), y.to(GPU)) for x, y in batches]
    example = (batches[0][0].tensor_split(3)[0].clone(),)
    graph = penstock.trace(model.to(GPU), example)
    plan = penstock.partition(
        penstock.measure(graph, example, repeats=1), stages=3, micro_batches=3, **options
    )
    pipe = penstock.Pipeline(
        model, plan, loss=cross_entropy, optimizer=OPTIMIZERS[optimizer], clip=clip, device="cuda:0"
    )
    expected = plain_loop(
        plain,
        there,
        loss=cross_entropy,
        optimizer=OPTIMIZERS[optimizer],
        micro_batches=3,
        clip=clip,
        random=graph.train_probe.random,
    )
    for batch, theirs in zip(there if far_batches else batches, expected, strict=True):
        yield pipe.step(*batch), pipe.state_dict()["model"], theirs, plain


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("name", ["mlp", "residual", "gpt_gelu_dropout", "gpt_tied"])
def test_a_pipeline_on_a_gpu_has_the_bits_of_the_plain_loop_there(name, schedule):
    for report, state, theirs, plain in trained(name, schedule=schedule):
        assert report.loss == theirs["loss"]
        expected = plain.state_dict()
        assert [key for key in expected if not same_bits(expected[key].cpu(), state[key])] == []


@pytest.mark.parametrize("name", ["resnet18", "densenet"])
def test_large_networks_too(name):
    for report, _, theirs, _ in trained(name):
        assert report.loss == theirs["loss"]


def test_batches_may_be_on_the_gpu_and_states_come_to_the_cpu():
    for report, state, theirs, _ in trained("mlp", far_batches=True, optimizer="adam"):
        assert report.loss == theirs["loss"]
        assert {tensor.device.type for tensor in state.values()} == {"cpu"}
        assert all(stage.device_bytes > 0 for stage in report.stages)


def test_tracing_and_measuring_leave_the_gpus_random_state_and_tell_its_seconds():
    model, batches = build("gpt_gelu_dropout")
    example = (batches[0][0][:4].clone(),)
    torch.cuda.manual_seed(11)
    before = torch.cuda.get_rng_state(GPU)
    graph = penstock.trace(model.to(GPU), example)
    profile = penstock.measure(graph, example, repeats=1)
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
