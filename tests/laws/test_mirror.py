"""Law L1 where parameters are in a mirror, that few of them are resident, and what is refused."""

import copy
from typing import Any

import pytest
import torch
from cases import OPTIMIZERS
from far import FarStore, small_pieces
from law import beside, everything_leaves, state_differences
from reference import plain_loop, same_bits
from small_pipelines import pipeline_of
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import mse_loss
from zoo import build, cross_entropy

from penstock import PlanError, StageError
from penstock.pipeline.optimizer.separability import BY_ELEMENT
from penstock.pipeline.runtime import ownership


@pytest.fixture(autouse=True)
def everything_moves(monkeypatch):
    """Else little of these small models leaves."""
    monkeypatch.setattr(ownership, "LEAST_MIRRORED", 1)
    small_pieces(monkeypatch)


@pytest.fixture
def far(monkeypatch):
    """Stores that keep nothing of what they are given but its bytes, in a file."""
    made = []

    def open_store(tier, options):
        made.append(FarStore())
        return made[-1]

    monkeypatch.setattr(ownership, "open_store", open_store)
    return made


def deep(layers: int = 12, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(m for _ in range(layers) for m in (nn.Linear(width, width, bias=False), nn.Tanh()))
    )


BATCH = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))


def made(model: nn.Module, *, batch: Tensor = BATCH, **options: Any) -> Any:
    options = {"stages": 1, "micro_batches": 4, "parameters_tier": "packed", "loss": mse_loss, **options}
    return pipeline_of(model, example=(batch[:2],), **{"optimizer": torch.optim.AdamW, **options})


def bytes_near(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of parameters, gradients and state of the optimizer in memory of their own."""
    found = [t for p in model.parameters() for t in (p, p.grad, *optimizer.state.get(p, {}).values())]
    return sum(t.untyped_storage().nbytes() for t in found if isinstance(t, Tensor) and t.dim())


@pytest.mark.parametrize("tier", ["packed", "host"])
@pytest.mark.parametrize("recompute", [False, True])
def test_few_of_twelve_layers_are_near_at_a_time(tier, recompute, far):
    model, most = deep(), 0
    pipe = made(model, parameters_tier=tier, recompute=recompute)
    optimizer, one = pipe.update.optimizers[0], 64 * 64 * 4

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, bytes_near(model, optimizer))

    for module in model:
        module.register_forward_hook(look)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    step = optimizer.step
    optimizer.step = lambda: (look(), step(), look())
    for _ in range(3):
        pipe.step(BATCH, BATCH)
        assert bytes_near(model, optimizer) == 0
    assert one <= most <= 4 * one  # of 48: a parameter, its gradient, and what Adam keeps of it
    assert most <= pipe.stages[0].mirror.peak_bytes <= 5 * one + 64  # and one that is brought ahead


def test_without_prefetching_one_layer_is_near_at_a_time(far):
    told: Any = {"loss": mse_loss, "optimizer": torch.optim.AdamW, "micro_batches": 4}
    pipe, one = made(deep(), prefetches=False, **told), 64 * 64 * 4
    assert beside(pipe, deep(), [(BATCH, BATCH)] * 3, **told) == []
    pipe.step(BATCH, BATCH)
    assert one <= pipe.stages[0].mirror.peak_bytes <= 2 * one + 64  # a parameter, and its gradient


def test_nothing_keeps_the_memory_of_a_parameter_that_left(far):
    model = deep()
    linear = [module for module in model if isinstance(module, nn.Linear)]
    alive = [StorageWeakRef(module.weight.untyped_storage()) for module in linear]
    pipe = made(model)
    assert all(reference.expired() for reference in alive)
    alive.clear()

    def note(module: nn.Linear, *_: Any) -> None:
        alive.append(StorageWeakRef(module.weight.untyped_storage()))
        assert sum(not reference.expired() for reference in alive) <= 1

    for module in linear:
        module.register_forward_hook(note)
    pipe.step(BATCH, BATCH)
    assert len(alive) == 48
    assert all(reference.expired() for reference in alive)


def test_close_gives_the_model_all_that_it_had():
    model = deep(3)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    pipe = made(model)
    assert [parameter.numel() for parameter in model.parameters()] == [0, 0, 0]
    pipe.close()
    assert all(map(same_bits, before, model.parameters()))
    model(BATCH).sum().backward()  # no hook of the mirror is left
    assert all(p.grad is not None and p.numel() for p in model.parameters())


def test_while_parameters_are_resident_people_read_and_write():
    model = deep(3)
    pipe = made(model)
    pipe.step(BATCH, BATCH)
    with pipe.parameters_resident(), torch.no_grad():
        with pipe.parameters_resident():
            pass
        assert all(p.grad is not None for p in model.parameters())
        assert {len(state) for state in pipe.update.optimizers[0].state.values()} == {3}
        for parameter in model.parameters():
            parameter.fill_(0.5)
    assert [parameter.numel() for parameter in model.parameters()] == [0, 0, 0]
    assert all((tensor == 0.5).all() for tensor in pipe.state_dict()["model"].values())


def test_a_write_to_what_is_away_is_refused():
    model = deep(3)
    pipe = made(model)
    with torch.no_grad():
        next(model[2].parameters()).mul_(2)
    with pytest.raises(
        StageError, match=r"written to while it is resident, .*inside of Pipeline.parameters_resident"
    ):
        pipe.step(BATCH, BATCH)


KINDS: dict[str, Any] = {  # whose states are of other shapes than their parameters, or of two groups
    "adafactor": torch.optim.Adafactor,
    "groups": lambda named: torch.optim.AdamW(
        [{"params": [p for n, p in named if ("2" in n) == one], "lr": 0.1 + one} for one in (False, True)]
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_that_treat_each_parameter_by_itself_keep_their_bits(kind, far):
    told: Any = {"loss": mse_loss, "optimizer": KINDS[kind], "micro_batches": 4, "clip": 0.01}
    assert beside(made(deep(3), **told), deep(3), [(BATCH, BATCH)] * 3, **told) == []


@pytest.mark.parametrize("kind", [*sorted(kind.__name__ for kind in BY_ELEMENT), "Muon", "fused"])
def test_an_optimizer_of_single_elements_takes_a_piece_at_a_time(kind, far):
    if kind == "fused":
        optimizer: Any = lambda named: torch.optim.AdamW(named, fused=True)  # noqa: E731
    else:
        optimizer = getattr(torch.optim, kind)
    told: Any = {"loss": mse_loss, "optimizer": optimizer, "micro_batches": 4, "clip": 0.01}
    pipe, sizes = made(deep(3), **told), []
    of_stage = pipe.update.optimizers[0]
    step = of_stage.step

    def watched() -> None:
        sizes.extend(p.numel() for group in of_stage.param_groups for p in group["params"])
        step()

    of_stage.step = watched
    assert beside(pipe, deep(3), [(BATCH, BATCH)] * 3, **told) == []
    assert (max(sizes) < 64 * 64) == (kind not in ("Muon", "fused"))


@pytest.mark.parametrize("behind", [True, False])
def test_a_hook_sees_the_sum_of_micro_batches(far, behind):
    def watched(model: nn.Module) -> list[Tensor]:
        seen: list[Tensor] = []
        for parameter in model.parameters():

            def look(given: Tensor, parameter: nn.Parameter = parameter) -> Tensor | None:
                sum_so_far = parameter.grad
                seen.append(torch.zeros(()) if sum_so_far is None else sum_so_far.clone())
                return None if behind or sum_so_far is None else given - 0.1 * sum_so_far

            if behind:
                parameter.register_post_accumulate_grad_hook(look)  # type: ignore[arg-type]
            else:
                parameter.register_hook(look)
        return seen

    model, plain = deep(3), deep(3)
    pipe, told = made(model), {"loss": mse_loss, "optimizer": torch.optim.AdamW, "micro_batches": 4}
    ours, expected = watched(model), watched(plain)
    assert beside(pipe, plain, [(BATCH, BATCH)] * 2, **told) == []
    assert len(ours) == len(expected) == 2 * 4 * 3
    assert all(map(same_bits, ours, expected))


def test_one_with_hooks_on_its_steps_is_refused_where_parameters_leave_alone():
    def hooked(named: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(named, lr=0.1)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    with pytest.raises(PlanError, match="SGD has hooks on its steps; remove them"):
        made(deep(3), optimizer=hooked)
    made(deep(3), optimizer=hooked, parameters_tier="device").close()


def test_what_forwards_save_is_counted_beside_a_mirror(monkeypatch):
    everything_leaves(monkeypatch)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)))
    pipe = made(model, tier="packed")
    (stage,) = pipe.step(BATCH, BATCH).stages
    saved, waited = pipe.stages[0].saved.counts, pipe.stages[0].mirror.frames.exposed_seconds
    assert (stage.saved_raw, stage.saved_kept) == (saved.bytes_raw, saved.bytes_kept)
    assert min(saved.bytes_raw, saved.bytes_kept, saved.num_packs, saved.num_unpacks) > 0
    assert stage.exposed_seconds == saved.exposed_seconds + waited
    kept = made(deep())
    kept.step(BATCH, BATCH)
    assert kept.stages[0].saved.counts.bytes_raw == 0


def test_small_parameters_stay(monkeypatch):
    monkeypatch.setattr(ownership, "LEAST_MIRRORED", 64 * 64 * 4)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    pipe = made(model)
    pipe.step(BATCH, BATCH)
    assert [parameter.numel() for parameter in model.parameters()] == [0, 64, 0, 64]


def test_parameters_in_one_memory_and_sparse_gradients_stay():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False))
    both = torch.randn(2, 64, 64)
    model[0].weight.data, model[2].weight.data = both[0], both[1]
    pipe = made(model, optimizer=torch.optim.SGD)
    assert pipe.stages[0].mirror.turns == []
    assert pipe.step(BATCH, BATCH).loss > 0
    table = nn.Sequential(nn.Embedding(20, 64, sparse=True), nn.Linear(64, 64, bias=False))
    pipe = made(table, optimizer=torch.optim.SGD, batch=torch.randint(20, (8,)))
    assert [[tuple(memory) for memory in turn] for turn in pipe.stages[0].mirror.turns] == [[()]]
    pipe.step(torch.randint(20, (8,)), BATCH)
    assert table[0].weight.shape == (20, 64)


def test_frozen_layers_come_and_go_and_may_be_unfrozen(far):
    model, plain = deep(4), deep(4)
    batches = [(BATCH, BATCH)] * 4
    for each in (model, plain):
        each[2].weight.requires_grad_(False)
    pipe = made(model, clip=1.0)
    loop = plain_loop(plain, batches, loss=mse_loss, optimizer=torch.optim.AdamW, micro_batches=4, clip=1.0)
    for number, (x, y) in enumerate(batches):
        if number == 2:
            for each in (model, plain):
                each[2].weight.requires_grad_(True)
        expected = next(loop)
        pipe.step(x, y)
        assert state_differences(pipe.state_dict(), plain, expected["optimizer"]) == []
        assert [parameter.numel() for parameter in model.parameters()] == [0] * 4


def test_in_a_backward_few_frozen_layers_are_near(far):
    model, near = deep(12), []
    for parameter in [*model.parameters()][1:]:
        parameter.requires_grad_(False)
    pipe = made(model, optimizer=lambda named: torch.optim.SGD([p for n, p in named if n == "0.weight"], 0.1))
    first = next(model.parameters())
    first.register_post_accumulate_grad_hook(
        lambda _: near.append(bytes_near(model, pipe.update.optimizers[0]))
    )
    pipe.step(BATCH, BATCH)
    assert len(near) == 4
    assert max(near) <= 3 * 64 * 64 * 4


class ByNorm(torch.autograd.Function):
    """x * |w|, whose backward reads w itself, not what autograd saved of it."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.w = w
        return x * w.norm()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return gradient * ctx.w.detach().norm(), None


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(192))

    def forward(self, x):
        return ByNorm.apply(x * 2, self.w)


@pytest.mark.parametrize("leaves", [(), (Normed,)])
def test_what_a_backward_of_a_person_s_keeps_stays(leaves, far):
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Flatten(), nn.Linear(192, 192), Normed(), nn.Linear(192, 10)) for _ in "12"]
    model, plain = models
    plain.load_state_dict(model.state_dict())
    _, batches = build("mlp")
    pipe = made(model, batch=batches[0][0], leaves=leaves, parameters_tier="host", **OF_MLP)
    assert beside(pipe, plain, batches, **OF_MLP) == []
    assert model.get_parameter("2.w").numel() == 192
    assert model.get_parameter("1.weight").numel() == 0
    pipe.close()


OF_MLP: Any = {"loss": cross_entropy, "optimizer": OPTIMIZERS["sgd"], "micro_batches": 3}


def hang_hooks(model):
    """Hooks that read the parameter whose gradient comes, and change that."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient, p=parameter: gradient + 0.1 * p.detach().norm())
        parameter.register_post_accumulate_grad_hook(_shrink)


def _shrink(parameter):
    if parameter.grad is not None:
        parameter.grad.mul_(0.9).add_(0.1 * parameter.detach().norm())


@pytest.mark.parametrize("when", ["ahead of the pipeline", "behind it"])
def test_hooks_on_parameters_find_them_and_their_gradients_near(when, far):
    (model, batches), (plain, _) = build("mlp"), build("mlp")
    hang_hooks(plain)
    if when == "ahead of the pipeline":
        hang_hooks(model)
    pipe = made(model, batch=batches[0][0], stages=2, parameters_tier="host", **OF_MLP)
    if when == "behind it":
        hang_hooks(model)
    assert beside(pipe, plain, batches, **OF_MLP) == []
    pipe.close()


@pytest.mark.parametrize("clip", [None, 1.0])
def test_an_overflow_in_one_layer_skips_the_update_of_all(clip, far):
    model, plain = deep(3), deep(3)
    for each in (model, plain):  # only the gradient of the first weight is too large
        with torch.no_grad():
            next(each.parameters()).mul_(1e-20)
    batches = [(BATCH * 1e20, BATCH)] * 2
    scaler = torch.amp.GradScaler("cpu", init_scale=1e25)
    scaler.set_backoff_factor(1.0)
    pipe = made(model, optimizer=torch.optim.SGD, clip=clip, scaler=1e25)
    options: Any = {"loss": mse_loss, "optimizer": torch.optim.SGD, "micro_batches": 4}
    loop = plain_loop(plain, batches, clip=clip, scaler=scaler, **options)
    for (x, y), expected in zip(batches, loop, strict=True):
        pipe.step(x, y)
        assert state_differences(pipe.state_dict(), plain, expected["optimizer"]) == []
        with pipe.parameters_resident():
            for name, parameter in model.named_parameters():
                assert same_bits(parameter.grad, expected["gradients"][name]), name
        finite = [bool(gradient.isfinite().all()) for gradient in expected["gradients"].values()]
        assert finite == [False, clip is None, clip is None]  # the norm of all is no number


def test_a_failed_step_leaves_a_mirror_that_gives_all_back():
    model = deep(3)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    pipe = made(model)
    model[2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(StageError, match="ZeroDivisionError"):
        pipe.step(BATCH, BATCH)
    pipe.close()
    assert all(map(same_bits, before, model.parameters()))


def test_weights_first_fetches_no_parameter_once_more():
    def fetched(weights_first: bool) -> int:
        pipe = made(deep(), parameters_tier="host", weights_first=weights_first)
        pipe.step(BATCH, BATCH)
        return pipe.stages[0].mirror.frames.bytes_in

    assert fetched(True) == fetched(False)


def test_versions_of_offloaded_parameters_wait_where_they_do_and_leave_nothing_behind():
    weights: dict[str, Any] = {"schedule": "async_1f1b", "weights": "stashed", "clip_scope": "stage"}
    pipe = made(deep(), stages=2, parameters_tier="host", **weights)
    first, one = pipe.stages[0], 64 * 64 * 4
    count = len(first.mirror.memories)
    for _ in range(2):
        pipe.step(BATCH, BATCH)
        assert first.mirror.resident_bytes == 0
        assert first.weights.num_live == 2
        assert first.mirror.frames.store.num_bytes // one == 4 * count  # Adam keeps two
    pipe.drain()
    assert first.mirror.frames.store.num_bytes // one == 3 * count


class OneGradient(nn.Module):
    """Two parameters, to which autograd gives one tensor as their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(4, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.first.view(64) + self.second.view(64))


def test_one_gradient_of_two_parameters_is_refused():
    pipe = made(nn.Sequential(nn.Linear(64, 64), OneGradient(), nn.Linear(64, 64)), parameters_tier="disk")
    with pytest.raises(StageError, match=r"one tensor to two, of shapes .*4, 16.*clone"):
        pipe.step(BATCH, BATCH)


@pytest.mark.parametrize("weights", ["stashed", "latest"])
def test_an_update_that_breaks_off_between_versions_leaves_a_mirror_that_gives_all_back(weights):
    options: dict[str, Any] = {"schedule": "async_1f1b", "weights": weights, "clip_scope": "stage"}
    model = deep(4)
    pipe = made(model, parameters_tier="host", **options)
    state, optimizer = pipe.state_dict(), pipe.update.optimizers[0]
    step, calls = optimizer.step, []

    def broken() -> None:
        calls.append(step())
        if len(calls) == 2:
            raise RuntimeError("no second layer")

    optimizer.step = broken
    with pytest.raises(StageError, match="no second layer"):
        pipe.step(BATCH, BATCH)
    optimizer.step = step
    pipe.load_state_dict(state)
    pipe.close()
    assert all(same_bits(value, state["model"][name]) for name, value in model.state_dict().items())


class Conjugate(nn.Module):
    """A complex weight, whose gradient autograd leaves as a conjugate view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight.conj()).real


def test_gradients_of_complex_parameters_wait_with_their_values():
    torch.manual_seed(0)
    model, states = nn.Sequential(nn.Linear(64, 64), Conjugate()), []
    for tier in ("device", "host"):
        weights = {"schedule": "1f1b", "weights": "double_buffered", "optimizer": torch.optim.SGD}
        pipe = made(copy.deepcopy(model), parameters_tier=tier, **weights)
        for _ in range(3):
            pipe.step(BATCH, BATCH)
        states.append(pipe.state_dict()["model"])
    assert all(same_bits(states[0][name], states[1][name]) for name in states[0])
