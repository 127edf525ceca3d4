"""Laws of ranks that only GPUs prove: two on one of them over gloo, one each over NCCL, and one with a
CPU.
"""

import copy

import pytest
import torch
from cases import OPTIMIZERS, Case, plan_of
from commands import SMALL, losses, trained
from reference import plain_loop, same_bits
from zoo import build, cross_entropy

import penstock
from penstock.conf.schema import PlanConfig
from penstock.pipeline.run import determinism

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CASES = [
    Case(model="mlp", cuts=2),
    Case(model="mlp", cuts=4, ranks=2, schedule="interleaved", codec="raw"),
    Case(model="PoolOfRelu", cuts=["relu"], codec="zero_value+exponent"),
    Case(model="gpt_relu", cuts=2, schedule="zb_h1", tier="host"),
    Case(model="gpt_tied", cuts=2, codec="auto", steps=2),
    Case(model="resnet18", cuts=2, steps=2),
]


def on_gpus(case, plan, random_layers, devices):
    """The differences that this rank finds to the plain loop on its own device."""
    import torch.distributed as dist

    determinism.begin(PlanConfig(device="cuda"))
    device = torch.device(devices[dist.get_rank()])
    model, batches = build(case.model, case.dtype, case.steps)
    plain = copy.deepcopy(model).to(device)
    settings = {"loss": cross_entropy, "optimizer": OPTIMIZERS[case.optimizer]}
    pipe = penstock.Pipeline(model, plan, device=str(device), deadline=60, **settings)
    there = [(x.to(device), y.to(device)) for x, y in batches]
    loop = plain_loop(plain, there, micro_batches=case.micro_batches, random=random_layers, **settings)
    mine, found = pipe.update.named, []
    del model
    for batch, expected in zip(batches, loop, strict=True):
        report = pipe.step(*batch)
        found += [] if len(set(devices)) > 1 or report.loss == expected["loss"] else ["the loss"]
        found += [name for name, p in mine.items() if not same_bits(expected["gradients"][name], p.grad)]
    return found


def differences(ranks, case, devices):
    plan, random_layers = plan_of(case)
    return ranks.run(on_gpus, case, plan, random_layers, devices, ranks=plan.num_ranks, deadline=60)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_on_one_gpu_have_the_bits_of_the_plain_loop_there(case, ranks):
    assert differences(ranks, case, ["cuda:0", "cuda:0"]) == [[], []]


def test_a_training_of_two_ranks_on_one_gpu_has_the_losses_of_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = f"{SMALL} device=cuda batch_size=200 micro_batches=4 max_steps=4"
    trained(f"{job} ranks=1 stages=2 hydra.run.dir=one")
    trained(f"{job} ranks=2 hydra.run.dir=two")
    assert losses("one") == losses("two")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_with_a_gpu_each_have_the_bits_of_the_plain_loop(case, ranks):
    assert differences(ranks, case, ["cuda:0", "cuda:1"]) == [[], []]
