"""A model on the meta device trains with the bits of the model that was loaded whole, and no rank has more of
it than its own stages."""

from typing import Any

import pytest
import torch
from ranks import Ranks
from reference import same_bits
from valueless import deep, pipeline_of, plain_losses, plan_of, positions, rank_peak, rank_trains, saved
from valueless import without_values as bare
from zoo import build

import penstock


def differences(name, tmp_path, *, dtype=None, **options):
    """What differs between the plain loop and a pipeline over the same model, given values from a file."""
    whole, batches = build(name, dtype)
    file = saved(whole, tmp_path / "model.safetensors")
    model = bare(whole)
    plan, random = plan_of(model, batches, **options)
    pipe = pipeline_of(model, plan, load_weights=file, init_weights=positions)
    found = [pipe.step(*batch).loss for batch in batches]
    state = pipe.state_dict()["model"]
    expected = plain_losses(whole, batches, random)
    outputs = pipe.evaluate(batches[0][0])
    pipe.close()
    told = whole.state_dict()
    assert list(state) == list(told)
    wrong = [key for key, tensor in told.items() if not same_bits(tensor, state[key])]
    with torch.no_grad():
        plain = whole.eval()(batches[0][0])
    pairs = zip(
        *([item] if isinstance(item, torch.Tensor) else item for item in (outputs, plain)), strict=True
    )
    wrong += ["outputs" for ours, theirs in pairs if not same_bits(ours, theirs)]
    return wrong + (["losses"] if found != expected else [])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlp", {}),
        ("mlp", {"dtype": torch.bfloat16}),
        ("mlp", {"stages": 1}),
        ("mlp", {"stages": 4, "ranks": 2, "schedule": "interleaved"}),
        ("mlp", {"parameters_tier": "host", "tier": "packed"}),
        ("mlp", {"recompute": True, "schedule": "zb_h1"}),
        ("tied", {"stages": 4}),
        ("penalized", {}),
        ("residual", {"stages": 4}),
        ("residual_channels_last", {}),
        ("gpt_tied", {}),
        ("dag0", {"stages": 5}),
        pytest.param("resnet18", {}, marks=pytest.mark.slow),
        pytest.param("gpt_gelu_dropout", {"parameters_tier": "disk"}, marks=pytest.mark.slow),
        *(pytest.param(f"dag{i}", {"stages": 6}, marks=pytest.mark.slow) for i in range(1, 6)),
    ],
    ids=str,
)
def test_values_from_a_file_have_the_bits_of_the_plain_loop(name, options, tmp_path):
    assert differences(name, tmp_path, **options) == []


def test_without_a_flush_it_is_the_pipeline_of_the_model_that_was_loaded_whole(tmp_path):
    whole, batches = build("mlp")
    file = saved(whole, tmp_path / "model.safetensors")
    plan, _ = plan_of(bare(whole), batches, schedule="async_1f1b", weights="stashed")
    told = []
    for model, options in ((bare(whole), {"load_weights": file}), (whole, {})):
        pipe = pipeline_of(model, plan, clip=None, **options)
        losses = [pipe.step(*batch).loss for batch in batches]
        told.append((losses, pipe.state_dict()["model"]))
        pipe.close()
    assert told[0][0] == told[1][0]
    assert all(same_bits(told[0][1][key], tensor) for key, tensor in told[1][1].items())


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
    assert [pipe.step(*batch).loss for batch in batches] == plain_losses(whole, batches, ())
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


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name",
    ["mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("residual", "gpt_tied", "dag0"))],
)
def test_ranks_give_values_to_their_own_stages_alone(name, ranks, tmp_path):
    whole, batches = build(name)
    file = saved(whole, tmp_path / "model.safetensors")
    plan, random = plan_of(bare(whole), batches, 3, ranks=3)
    plan.save(tmp_path / "plan.json")
    found = ranks.run(rank_trains, name, str(tmp_path / "plan.json"), str(file), random, ranks=3)
    assert [differs for differs, _ in found] == [[], [], []]
    parameters = {name for name, _ in whole.named_parameters()}
    assert [here & parameters for _, here in found] == [set(stage.parameters) for stage in plan.stages]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("from_a_file", [True, False])
def test_the_peak_of_a_rank_is_that_of_its_own_stages(from_a_file, tmp_path):
    width, layers = 2048, 24  # 16 MiB each
    plans = []
    for size in (8, width):
        with torch.device("meta"):
            model = deep(size, layers)
        example = (torch.ones(2, size),)
        profile = penstock.measure(penstock.trace(model, example), example, repeats=1)
        middle = profile.layers[layers // 2 - 1].name
        plans.append(tmp_path / f"plan_{size}.json")
        penstock.partition(profile, cuts=[middle], micro_batches=2).save(plans[-1])
    file = None
    if from_a_file:
        file = str(saved(deep(width, layers), tmp_path / "model.safetensors"))
    warm, plan = map(str, plans)
    ranks: Any = Ranks()  # new processes, with nothing freed in them that could be used again
    try:
        found = ranks.run(rank_peak, width, layers, plan, warm, file, ranks=2)
    finally:
        ranks.close()
    for most, own, whole in found:
        assert whole == layers * width * width * 4
        assert own == whole // 2
        state = 2 * own  # with gradients
        print(f"peak {most / 2**20:.0f} MiB, own stages {state / 2**20:.0f} MiB, {most / state - 1:+.1%}")
        assert state < most <= 1.2 * state


@pytest.mark.parametrize("name", [pytest.param("gpt_tied", marks=pytest.mark.slow), "residual"])
def test_a_checkpoint_goes_on_with_other_values_and_cuts(name, tmp_path):
    whole, batches = build(name)
    file = saved(whole, tmp_path / "model.safetensors")
    plans = [plan_of(bare(whole), batches, stages) for stages in (3, 2)]
    random, pipes = plans[0][1], []
    for plan, _ in plans:
        pipes.append(pipeline_of(bare(whole), plan, load_weights=file, init_weights=positions))
    expected = plain_losses(whole, batches, random)
    assert pipes[0].step(*batches[0]).loss == expected[0]
    penstock.save(pipes[0], tmp_path / "saved")
    for parameter in pipes[1].state.held.values():
        parameter.detach().zero_()
    penstock.load(pipes[1], tmp_path / "saved")
    assert [pipes[1].step(*batch).loss for batch in batches[1:]] == expected[1:]
    for pipe in pipes:
        pipe.close()
