"""A model on the meta device: values that are drawn, kept and tied, and no rank has more of it than its own
stages."""

from typing import Any

import pytest
import torch
from law import beside
from ranks import Ranks
from reference import same_bits
from small_pipelines import profile_of
from valueless import SETTINGS, deep, pipeline_of, plan_of, rank_peak, rank_values, saved
from valueless import without_values as bare
from zoo import build

import penstock


def drawn(name, tensor):
    torch.nn.init.normal_(tensor)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_drawn_values_are_the_same_however_it_is_cut(stages):
    whole, batches = build("mlp")
    model = bare(whole)
    for name, parameter in whole.named_parameters():
        torch.manual_seed(penstock.layer_seed(5, -1, 0, name))
        torch.nn.init.normal_(parameter)
    state = torch.get_rng_state()
    pipe = pipeline_of(model, plan_of(model, batches, stages)[0], init_weights=drawn, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(
        same_bits(ours, theirs) for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True)
    )
    assert beside(pipe, whole, batches, micro_batches=3, **SETTINGS) == []
    pipe.close()


def test_what_has_values_keeps_them_and_what_is_tied_stays_tied(tmp_path):
    whole, batches = build("gpt_tied")
    model = bare(whole)
    model.positions = whole.positions.clone()
    kept, note = model.positions, object()
    model.norm.bias.note = note
    file = saved(whole, tmp_path / "model.safetensors")
    pipe = pipeline_of(model, plan_of(model, batches, 2)[0], load_weights=file)
    assert model.positions is kept
    assert model.head.weight is model.token.weight
    assert model.norm.bias.note is note
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert all(p.is_leaf and p.requires_grad and type(p) is torch.nn.Parameter for p in model.parameters())
    pipe.close()


@pytest.mark.parametrize("name", ["mlp", pytest.param("gpt_tied", marks=pytest.mark.slow)])
def test_ranks_give_values_to_their_own_stages_alone(name, ranks, tmp_path):
    whole, batches = build(name)
    file = saved(whole, tmp_path / "model.safetensors")
    plan, _ = plan_of(bare(whole), batches, 3, ranks=3)
    found = ranks.run(rank_values, name, plan, str(file), ranks=3)
    parameters = {name for name, _ in whole.named_parameters()}
    assert [here & parameters for here in found] == [set(stage.parameters) for stage in plan.stages]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("from_a_file", [True, False])
def test_the_peak_of_a_rank_is_that_of_its_own_stages(from_a_file, tmp_path):
    width, layers = 2048, 24  # 16 MiB each
    plans = []
    for size in (8, width):
        with torch.device("meta"):
            model = deep(size, layers)
        profile = profile_of(model, (torch.ones(2, size),))
        middle = profile.layers[layers // 2 - 1].name
        plans.append(penstock.partition(profile, cuts=[middle], micro_batches=2))
    file = str(saved(deep(width, layers), tmp_path / "model.safetensors")) if from_a_file else None
    ranks: Any = Ranks()  # new processes, with nothing freed in them that could be used again
    try:
        found = ranks.run(rank_peak, width, layers, *plans, file, ranks=2)
    finally:
        ranks.close()
    for most, own, whole in found:
        assert whole == layers * width * width * 4
        assert own == whole // 2
        state = 2 * own  # with gradients
        print(f"peak {most / 2**20:.0f} MiB, own stages {state / 2**20:.0f} MiB, {most / state - 1:+.1%}")
        assert state < most <= 1.2 * state
