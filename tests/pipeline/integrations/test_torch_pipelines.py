"""Schedules of torch.distributed.pipelining whose transfers are frames: the bits of the same run without."""

import contextlib
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkout import ON_RANKS, ROOT, run_script
from reference import same_bits
from torch import nn
from torch.distributed import pipelining

import penstock
from penstock.pipeline.integrations.torch_pipelines import _is_gated

LAYOUTS = {  # the stages of each rank
    "one": lambda size: [[rank] for rank in range(size)],
    "looped": lambda size: [[rank, rank + size] for rank in range(size)],
    "v": lambda size: [[rank, 2 * size - 1 - rank] for rank in range(size)],
}
SCHEDULES = {
    "1f1b": (pipelining.Schedule1F1B, "one"),
    "gpipe": (pipelining.ScheduleGPipe, "one"),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, "looped"),
    "looped": (pipelining.ScheduleLoopedBFS, "looped"),
    "zero_bubble": (pipelining.ScheduleInterleavedZeroBubble, "looped"),
    "zbv": (pipelining.ScheduleZBVZeroBubble, "v"),
    "dualpipev": (pipelining.ScheduleDualPipeV, "v"),
}


class Two(nn.Module):
    """Hands on a ReLU's output, and one that is none."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x):
        y = self.conv(x)
        return y.relu(), y.tanh()


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, stride=2)

    def forward(self, a, b):
        return self.conv(a + b).relu()


class Scale(nn.Module):
    """Has outputs of zero whose gradients count: factors that begin at zero."""

    def __init__(self):
        super().__init__()
        self.factors = nn.Parameter(torch.arange(32.0) % 2)

    def forward(self, x):
        return self.factors * x


class Dense(nn.Module):
    def forward(self, x):
        return x.flatten(1).bfloat16()


class Chain(nn.Module):
    """Runs modules that may hand on several values."""

    def __init__(self, *modules):
        super().__init__()
        self.chain = nn.ModuleList(modules)

    def forward(self, *given: Any) -> Any:
        values: Any = given
        for module in self.chain:
            made = module(*values)
            values = made if isinstance(made, tuple) else (made,)
        return values if len(values) > 1 else values[0]


def parts(model):
    """Six parts, between which go a ReLU's output, one of several values, and some that are no ReLU's."""
    torch.manual_seed(0)
    if model == "bfloat16":
        sizes = zip([192, 48, 48, 48, 32, 32], [48, 48, 48, 32, 32, 10], strict=True)
        made = [Chain(nn.LayerNorm(a), nn.Linear(a, b), nn.GELU()).bfloat16() for a, b in sizes]
        return [Chain(Dense(), made[0]), *made[1:]]
    return [
        Two(),
        Join(),
        nn.Sequential(nn.Flatten(), nn.Linear(8 * 9, 32), nn.Tanh()),
        Scale(),
        nn.Sequential(nn.Linear(32, 32), nn.ReLU()),
        nn.Linear(32, 10),
    ]


def schedule_of(name, rank, model="conv"):
    """The schedule of this rank, and its stages' modules."""
    (kind, layout), size = SCHEDULES[name], dist.get_world_size()
    stages_of_rank, of_model = LAYOUTS[layout](size), parts(model)
    several = len(stages_of_rank[0]) > 1
    number = size * len(stages_of_rank[0])
    ends = {2: [0, 2, 6], 3: [0, 2, 4, 6], 4: [0, 1, 2, 4, 6], 6: range(7)}[number]
    modules = [Chain(*of_model[a:b]) for a, b in pairwise(ends)]
    mine = stages_of_rank[rank]
    stages = [
        pipelining.PipelineStage(modules[i], i, len(modules), torch.device("cpu"))  # type: ignore[arg-type]
        for i in mine
    ]
    made = kind(stages if several else stages[0], 2 * size, loss_fn=nn.functional.cross_entropy)
    return made, [modules[i] for i in mine], stages


def gradients(name, codec, model="conv", tier=None):
    """Losses and gradients of three steps on this rank; ``codec``: None sends as torch does; ``tier``: where
    saved tensors are until they are read."""
    schedule, modules, stages = schedule_of(name, dist.get_rank(), model)
    saved = [penstock.offload_stage(stage, tier, min_bytes=1) for stage in stages if tier]
    transfers: Any = penstock.pack_transfers(schedule, codec) if codec else None
    draw = torch.Generator().manual_seed(1)
    found = []
    for _ in range(3):
        x = torch.randn(24, 3, 8, 8, generator=draw)
        y, losses = torch.randint(10, (24,), generator=draw), []
        first, last = any(s.is_first for s in stages), any(s.is_last for s in stages)
        schedule.step(*([x] if first else []), **({"target": y, "losses": losses} if last else {}))
        found += [p.grad.clone() for module in modules for p in module.parameters()]
        found += losses
    assert not saved or any(one.bytes_raw > 0 for one in saved)  # of a last layer alone, nothing leaves
    return found, transfers


def compare(name, codecs, model):
    plain, _ = gradients(name, None, model)
    counted = {}
    for codec, tier in codecs.items():
        packed, transfers = gradients(name, codec, model, tier)
        assert len(packed) == len(plain)
        assert all(map(same_bits, plain, packed)), (name, codec)
        assert transfers.bytes_raw > 0
        counted[codec] = (transfers.bytes_raw, transfers.bytes_sent)
    return counted


@pytest.mark.ranks
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    ("size", "model"),
    [(2, "conv"), (3, "conv"), (2, "bfloat16"), pytest.param(3, "bfloat16", marks=pytest.mark.slow)],
)
def test_every_schedule_of_torch_has_its_own_bits(ranks, size, model, name):
    codecs = {"auto": "disk", "zero_value": None, "zero_value+exponent": "packed"}
    counted = ranks.run(compare, name, codecs, model, ranks=size)
    for of_rank in counted:
        raw, sent = of_rank["zero_value+exponent"]
        assert sent < raw or (size, model) != (2, "conv")  # tensors of the others are smaller than headers


class EndsInRelu(nn.Module):
    """Ends in a ReLU in eval mode only."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 512)

    def forward(self, x):
        found = self.linear(x).relu()
        return found.sub(0.5) if self.training else found


def after_a_test(packed):
    """Gradients of a step that comes after the outputs of a test."""
    torch.manual_seed(0)
    rank, first = dist.get_rank(), dist.get_rank() == 0
    module = EndsInRelu() if first else nn.Linear(512, 5)
    stage = pipelining.PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, 4, loss_fn=nn.functional.cross_entropy)
    if packed:
        penstock.pack_transfers(schedule, "zero_value")
    for run, training in ((schedule.eval, False), (schedule.step, True)):
        module.train(training)
        x, y = torch.randn(64, 8), torch.randint(5, (64,))
        run(*([x] if first else []), **({} if first else {"target": y, "losses": []}))
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def compare_after_a_test():
    plain, packed = after_a_test(packed=False), after_a_test(packed=True)
    return len(plain), all(map(same_bits, plain, packed))


@pytest.mark.ranks
def test_a_test_leaves_no_places_of_zeros_to_the_next_step(ranks):
    assert ranks.run(compare_after_a_test, ranks=2) == [(2, True), (2, True)]


def masked_bytes():
    """Bytes sent up by rank 1 with and without the places of the ReLU."""
    _, with_mask = gradients("gpipe", "zero_value")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.pipeline.integrations.torch_pipelines.GATES", ())
        _, without = gradients("gpipe", "zero_value")
    return with_mask.bytes_sent, without.bytes_sent


@pytest.mark.ranks
def test_the_gradient_of_a_relu_travels_where_its_output_was_not_zero(ranks):
    _, (masked, whole) = ranks.run(masked_bytes, ranks=2)
    assert masked < 0.8 * whole


def test_a_gradient_that_somebody_reads_is_sent_whole():
    x = torch.randn(4, requires_grad=True)
    assert _is_gated(x.relu())
    assert not _is_gated(x.tanh())
    assert not _is_gated(x.detach().relu())
    watched, kept = x.relu(), x.relu()
    watched.register_hook(lambda grad: None)
    kept.retain_grad()
    assert not _is_gated(watched)
    assert not _is_gated(kept)


def mistakes():
    schedule, _, (stage,) = schedule_of("1f1b", dist.get_rank())
    rule = "of torch.distributed.pipelining, found"
    for call, given, option, told in (
        (penstock.pack_transfers, nn.Linear(1, 1), "raw", f"takes a schedule {rule} Linear"),
        (penstock.pack_transfers, schedule, "zip", "codec is one of"),
        (penstock.pack_transfers, schedule, "bf16", "loses nothing, found bf16"),
        (penstock.pack_transfers, schedule, "raw", None),
        (penstock.pack_transfers, schedule, "raw", r"stage \d packs its transfers already"),
        (penstock.offload_stage, schedule, "packed", f"takes a stage {rule} Schedule1F1B"),
        (penstock.offload_stage, stage, "moon", "moon"),
        (penstock.offload_stage, stage, "packed", None),
        (penstock.offload_stage, stage, "disk", r"stage \d keeps what it saves elsewhere already"),
    ):
        with pytest.raises(penstock.PenstockError, match=told) if told else contextlib.nullcontext():
            call(given, option)


@pytest.mark.ranks
def test_mistakes_are_one_sentence(ranks):
    ranks.run(mistakes, ranks=2)


def without_the_other():
    group: Any = dist.new_group([0, 1], backend="gloo")
    stage = pipelining.PipelineStage(nn.Linear(1, 1), dist.get_rank(), 2, torch.device("cpu"), group=group)
    schedule = pipelining.ScheduleGPipe(stage, 1, loss_fn=nn.functional.mse_loss)
    if dist.get_rank() == 0:
        penstock.pack_transfers(schedule, "raw", deadline=1)


@pytest.mark.ranks
def test_a_rank_that_does_not_make_the_call_ends_the_wait(ranks):
    (text, _), _ = ranks.try_run(without_the_other, ranks=2, deadline=3)
    assert "TransportError: all ranks of a group make this call at the same place" in text
    assert "found some missing after 1 s" in text


def lies():
    """Rank 0 sends another shape than torch agreed on."""
    schedule, _, (stage,) = schedule_of("gpipe", dist.get_rank())
    penstock.pack_transfers(schedule, "raw")
    if dist.get_rank() == 0:
        packing: Any = vars(stage)["packed_transfers"].packing
        plain = packing.pack
        packing.pack = lambda tensor, flow, mask=None: plain(tensor[:1], flow, mask=mask)
        schedule.step(torch.randn(16, 3, 8, 8))
    schedule.step(target=torch.zeros(16, dtype=torch.long), losses=[])


@pytest.mark.ranks
def test_a_tensor_of_another_shape_is_refused_by_stage_and_micro_batch(ranks):
    _, (text, _) = ranks.try_run(lies, ranks=2, deadline=5)
    assert "stage 1, input 0 of micro-batch 0" in text
    assert "sizes (4, 8, 3, 3), found (1, 8, 3, 3)" in text


@pytest.mark.slow
def test_the_example_runs_under_torchrun():
    shown = run_script(*ON_RANKS, "scripts/examples/torch_pipelines.py", cwd=ROOT)
    assert shown.count("all gradients have the same bits") == 2
