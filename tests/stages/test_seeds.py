"""Random layers are seeded on every generator that they may draw from, and leave none of them moved."""

import pytest
import torch
from devices import Noting
from torch import nn

from penstock import trace
from penstock.stages.seeds import drew, generators_of, layer_seed, seeded, states_of
from penstock.stages.stage.stage import Stage
from penstock.stages.stage.value_routing import routes


@pytest.mark.parametrize("number", [0, 1])
def test_all_generators_are_seeded_and_put_back_even_behind_an_error(number):
    generators = (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2))
    before, drawn = states_of(generators), []

    def draw():
        with seeded(7, generators):
            drawn.append(torch.rand(3, generator=generators[number]))
            assert drew(generators, before)
            raise RuntimeError("in between")

    assert generators_of([torch.zeros(1), torch.zeros(1, device="meta")]) == (torch.default_generator,)
    with pytest.raises(RuntimeError, match="in between"):
        draw()
    assert not drew(generators, before)
    assert torch.equal(drawn[0], torch.rand(3, generator=torch.Generator().manual_seed(7)))
    torch.rand(1, generator=generators[number])
    assert drew(generators, before)


def test_a_stage_seeds_a_layer_that_draws_from_its_devices_generator():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.randn(3, 4)
    graph, device = trace(model, (x,)), Noting(is_gpu=True)
    stage = Stage(
        0,
        model=model,
        train=(graph.train, graph.train.layers),
        evaluation=(graph.eval, graph.eval.layers),
        last=True,
        device=device,
    )
    (route,) = routes(graph.train, graph.train_probe, [0] * len(graph.train.layers), num_stages=1)
    drawn, forward = [], nn.Dropout.forward

    def noting(module, given):
        drawn.append(torch.rand(2, generator=device.own))
        return forward(module, given)

    before = states_of(device.generators)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Dropout, "forward", noting)
        for micro_batch in (0, 1, 0):
            stage.forward(
                micro_batch, {0: x}, route=route, seed=lambda name, m=micro_batch: layer_seed(0, 0, m, name)
            )
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])
    assert not drew(device.generators, before)
