"""How a device that works while the host goes on is measured: by its own marks, waited for once."""

import torch
from devices import Noting, Reads
from torch import nn

from penstock import trace
from penstock.stages.planner import measure as module
from penstock.stages.planner.zeros import zero_count


def test_seconds_come_from_the_marks_of_the_device_which_is_waited_for_once_a_run(monkeypatch):
    device = Noting(is_gpu=True)
    monkeypatch.setattr(module, "device_of", lambda found: device)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(3, 4)
    graph = trace(model, (x,))
    profile = module.measure(graph, (x,), repeats=1)
    a_run = len(device.asked) // 2
    first, second = device.asked[:a_run], device.asked[a_run:]
    assert first == second == ["now"] * 12 + ["synchronize"] + ["seconds"] * 6
    # Of the second run, whose marks are 2 ** 12 and on: forward between 0 and 1, backward between 2 and 3.
    begun = [2.0 ** (12 + 4 * i) for i in range(3)]
    assert [layer.forward_seconds for layer in profile.layers] == begun
    assert [layer.backward_seconds for layer in profile.layers] == [4 * mark for mark in begun]


def test_zeros_are_counted_without_a_wait_until_they_are_asked_for():
    with Reads() as reads:
        counted = zero_count(torch.tensor([0.0, 1.0, 0.0, 2.0]))
        assert reads.count == 0
        assert counted() == 0.5
        assert reads.count == 1
    assert zero_count(torch.zeros(0))() == zero_count(torch.ones(2).to_sparse())() == 0.0
