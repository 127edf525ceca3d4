"""An update of weights on a GPU, on CPU tensors that are taken for a GPU's."""

import pytest
import torch
from devices import Reads
from torch import nn

from penstock.pipeline.distributed.process_group import World
from penstock.pipeline.optimizer import clip
from penstock.pipeline.optimizer.scale import _unscale
from penstock.pipeline.optimizer.update import Update, _own
from penstock.stages.device import CPU
from penstock.stages.weight_versions.versions import WeightVersions

META = torch.device("meta")


@pytest.fixture
def gradients():
    found = {}
    for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64, torch.float32)):
        found[f"p{i}"] = nn.Parameter(torch.zeros(33, 5, dtype=dtype))
        found[f"p{i}"].grad = torch.randn(33, 5, dtype=torch.float64).to(dtype)
    found["none"] = nn.Parameter(torch.zeros(3))
    return found


def test_norms_that_are_asked_together_are_those_that_are_asked_one_by_one(gradients, monkeypatch):
    gradients = {name: p.grad for name, p in gradients.items() if p.grad is not None}
    one_by_one = clip.norms(gradients)
    monkeypatch.setattr(clip, "is_gpu", lambda device: True)
    with Reads() as reads:
        together = clip.norms(gradients)
    assert together == one_by_one
    assert reads.count == 0  # one copy of all norms of a dtype, none of each


def test_an_overflow_is_asked_once_for_all_gradients_of_a_device(gradients):
    tensors = [p.grad for p in gradients.values() if p.grad is not None]
    expected = [t.double().mul(1 / 8).to(t.dtype) for t in tensors]
    scale = torch.tensor(8.0)
    with Reads() as reads:
        assert not _unscale(tensors, scale)
    assert reads.count == 2  # the scale, which the host has, and the verdict
    assert all(map(torch.equal, tensors, expected))
    tensors[2][0, 0] = float("inf")
    assert _unscale(tensors, scale)
    assert not _unscale([], scale)


def test_what_an_optimizer_keeps_is_loaded_to_where_it_is_asked_for():
    moment = torch.randn(3, 5).t()
    there = _own(moment, META)
    assert (there.is_meta, there.stride()) == (True, moment.stride())
    here = _own(moment, CPU)
    assert torch.equal(here, moment)
    assert here.data_ptr() != moment.data_ptr()
    assert _own([1, 2], META) == [1, 2]


@pytest.mark.parametrize(("options", "step"), [({}, "cpu"), ({"capturable": True}, "meta")])
def test_a_number_of_steps_stays_with_the_host_unless_kernels_count_them(options, step):
    weight = nn.Parameter(torch.zeros(3, device=META))
    update = Update(
        world=World.alone(),
        parameters={0: [("w", weight)]},
        owner={"w": 0},
        weights={0: WeightVersions()},
        optimizer=lambda named: torch.optim.Adam(named, lr=0.1),
        scheduler=None,
        every=[("w", weight)],
        clip=None,
    )
    group = {**update.state()["w"]["group"], **options}
    kept = {"step": torch.tensor(4.0), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.tensor(1.0)}
    update.load_kept({"w": {"state": kept, "group": group}}, has=lambda _: True)
    (made,) = update.optimizers.values()
    found = {name: item.device.type for name, item in made.state[weight].items()}
    assert found == {"step": step, "exp_avg": "meta", "exp_avg_sq": "meta"}
