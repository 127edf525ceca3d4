"""Pipeline: what a person who writes Python sees, in one process."""

import copy
import dataclasses
from itertools import pairwise

import pytest
import torch
from cases import OPTIMIZERS, Case, pipeline_of, plan_of
from reference import plain_loop, same_bits
from small_pipelines import model_of
from torch import nn
from zoo import build, cross_entropy

import penstock
from penstock.pipeline.runtime.report import Report, StageReport


def made(name="mlp", **settings):
    case = Case(model=name, **settings)
    plan, _ = plan_of(case)
    model, batches = build(name, case.dtype)
    return pipeline_of(case, plan, model), model, batches


def small(model=None, example=None, *, cuts=None, **settings):
    """A pipeline of any small model, two stages unless it is cut otherwise."""
    model = model or nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    settings |= {"cuts": cuts} if cuts else {"stages": 2}
    settings |= {"micro_batches": 3, "loss": cross_entropy, "optimizer": OPTIMIZERS["sgd"]}
    return penstock.Pipeline.of(model, example or (torch.randn(4, 6),), **settings)


def same_step(pipe, model, plain, batch, **settings):
    """A step of the pipeline has the loss and the weights of the plain loop."""
    settings = {"loss": cross_entropy, "optimizer": OPTIMIZERS["sgd"], "micro_batches": 3, **settings}
    expected = next(plain_loop(plain, [batch], **settings))
    assert pipe.step(*batch).loss == expected["loss"]
    assert all(same_bits(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_one_call_gives_each_of_the_four_its_settings():
    pipe = small(memory="1MiB", replicas=[2, 1], exact=True, shares=[2, 1, 1])
    assert (pipe.plan.memory, pipe.plan.shares) == (2**20, ((2, 1), (1,)))
    pipe = small(memory=penstock.MemoryOptions(prefetch_layers=3), autocast=torch.bfloat16)
    assert (pipe.plan.memory, pipe.memory.turns_ahead) == (None, 3)
    assert pipe.steps.shapes.autocast is torch.bfloat16
    with pytest.raises(TypeError, match="'stage'"):
        small(stage=2)


def test_a_loss_that_draws_has_the_numbers_of_its_micro_batch():
    def noisy(outputs, targets):
        return cross_entropy(nn.functional.dropout(outputs, 0.5), targets)

    model, x, y = nn.Linear(6, 3), torch.randn(12, 6), torch.randint(3, (12,))
    plain = copy.deepcopy(model)
    settings = {"micro_batches": 3, "loss": noisy, "optimizer": OPTIMIZERS["sgd"], "seed": 7}
    pipe = penstock.Pipeline.of(model, (x[:4],), stages=1, **settings)
    for step in range(2):
        torch.rand(5)  # what others draw between steps changes nothing
        report, losses = pipe.step(x, y), []
        plain.zero_grad()
        for number, (some, targets) in enumerate(zip(x.split(4), y.split(4), strict=True)):
            torch.manual_seed(penstock.layer_seed(7, step, number, "loss"))
            losses.append(noisy(plain(some), targets))
            (losses[-1] / 3).backward()
        assert report.loss == pytest.approx(sum(one.item() for one in losses) / 3, rel=1e-6)
        with torch.no_grad():
            plain.weight.copy_(model.weight)
            plain.bias.copy_(model.bias)


class Skips(nn.Module):
    """A value of the first layer is read by the last one, and by none between."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        first = torch.relu(self.a(x))
        return self.d(torch.relu(self.c(torch.relu(self.b(first)))) + first)


def test_the_codecs_of_a_plan_for_links_are_those_of_what_its_stages_pack():
    model, x, y = Skips(), torch.randn(12, 6), torch.randint(6, (12,))
    plain = copy.deepcopy(model)
    pipe = small(model, (x[:4],), cuts=["a", "b", "c"], link="8Mbit")
    named = [(stage.codecs, stage.gradient_codecs) for stage in pipe.plan.stages]
    assert all(codecs for codecs, _ in named[:-1])
    assert all(codecs for _, codecs in named[1:])
    assert "a" in named[0][0]
    assert "a" not in named[2][1]
    same_step(pipe, model, plain, (x, y))
    moved = dataclasses.replace(pipe.plan.stages[0], codecs={"gone": "zero_value"})
    edited = dataclasses.replace(pipe.plan, stages=(moved, *pipe.plan.stages[1:]))
    again = penstock.Pipeline(Skips(), edited, loss=cross_entropy, optimizer=OPTIMIZERS["sgd"])
    assert again.step(x, y).loss > 0


def test_one_call_on_ranks_has_the_plan_of_the_first_and_its_refusal():
    def train(world=None):
        with pytest.raises(penstock.PlanError, match="nowhere"):
            small(world=world, cuts=["nowhere"])
        pipe = small(models[-1 if world is None else world.rank], world=world, deadline=20)
        return pipe.step(torch.ones(4, 6), torch.zeros(4, dtype=torch.long)).loss

    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    models = [copy.deepcopy(model) for _ in range(3)]
    assert penstock.in_threads(train, ranks=2, deadline=20) == [train()] * 2


def test_a_rank_that_has_joined_no_others_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(penstock.ConfigError, match=r"rank 1 of WORLD_SIZE=2.*penstock\.init\(\) first"):
        made()


def test_bytes_are_counted_with_headers_and_unpacked():
    pipe, _, batches = made("mlp", cuts=["_2"], micro_batches=1, codec="raw")
    report = pipe.step(*batches[0])
    assert report.bytes_raw == 2 * 11 * 33 * 4
    assert report.bytes_sent == 2 * (11 * 33 * 4 + penstock.header_bytes(2))
    assert (report.num_samples, report.step) == (11, 0)


def test_a_batch_smaller_than_the_micro_batches_runs_one_sample_each():
    pipe, model, _ = made("mlp", cuts=3, micro_batches=8)
    batch = torch.randn(3, 3, 8, 8), torch.randint(10, (3,))
    same_step(pipe, model, copy.deepcopy(model), batch, clip=1.0)


def test_one_sample_micro_batches_change_identities_and_not_the_bits():
    """Tensors may be one object or two, and a tied value may come from elsewhere."""

    def turned(self, x):
        y = self.a(x).view(-1, 2, 3).transpose(0, 1)
        z = y.contiguous()  # does nothing for one sample
        rows = self.b(torch.tanh(z).transpose(0, 1).reshape(-1, 6))  # tied: its value gets another number
        return self.c(rows + self.b(y.transpose(0, 1).reshape(-1, 6)))

    torch.manual_seed(1)
    model = model_of(turned, a=nn.Linear(6, 6), b=nn.Linear(6, 6), c=nn.Linear(6, 3))
    plain = copy.deepcopy(model)
    pipe = small(model=model, example=(torch.randn(2, 6),), cuts=["contiguous", "tanh", "b"])
    same_step(pipe, model, plain, (torch.randn(4, 6), torch.randint(3, (4,))))  # 2, 1, 1


def test_what_a_pipeline_does_not_take_is_refused_before_anything_runs():
    plan, _ = plan_of(Case(model="mlp"))
    mlp, _ = build("mlp")

    def needs_all_at_once(named):
        return torch.optim.LBFGS([p for _, p in named])

    for model, given, optimizer, told in (
        (nn.Linear(192, 10), plan, OPTIMIZERS["sgd"], "a plan belongs to the model it was made for"),
        (mlp, dataclasses.replace(plan, schedule="2f2b"), OPTIMIZERS["sgd"], "2f2b"),
        (mlp, plan, needs_all_at_once, "LBFGS needs all at once; use SGD or Adam"),
    ):
        with pytest.raises(penstock.PenstockError, match=told):
            penstock.Pipeline(model, given, loss=cross_entropy, optimizer=optimizer)


def test_a_micro_batch_that_batchnorm_cannot_take_is_refused_by_name():
    pipe = small(model=nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))
    with pytest.raises(
        penstock.PenstockError, match=r"in 1 \(BatchNorm1d\): Expected more .* pad or cut the"
    ):
        pipe.step(torch.randn(4, 6), torch.randint(3, (4,)))  # 2, 1, 1


class Leaf(nn.ReLU):
    """Reads a number of its input; a leaf of the trace, as those of torch are."""

    __module__ = "torch.nn.modules.made_up"

    def forward(self, input):
        assert input.max() < 100, "too large"
        return input.relu()


class Squares(nn.Module):
    def forward(self, x):
        return x + torch.ones(len(x) ** 2).sum()


@pytest.mark.filterwarnings("ignore:the model was recorded anew:UserWarning")
def test_sizes_that_cannot_be_told_without_running_are_recorded():
    model = nn.Sequential(nn.Linear(6, 6), Leaf(), nn.Linear(6, 3), Squares())
    pipe = small(model=model)
    for samples in (12, 18, 9):
        x, y = torch.randn(samples, 6), torch.randint(3, (samples,))
        assert torch.equal(pipe.evaluate(x), model.eval()(x).detach())
        assert pipe.step(x, y).num_samples == samples


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()


def test_metrics_are_means_over_samples_on_every_rank():
    def tests(world=None):
        pipe = small(models[-1 if world is None else world.rank], world=world)
        return pipe.evaluate(iter(batches), metrics={"loss": cross_entropy, "accuracy": accuracy})

    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    models = [copy.deepcopy(model) for _ in range(3)]
    batches = [(torch.randn(n, 6), torch.randint(3, (n,))) for n in (5, 2, 1)]
    x, y = map(torch.cat, zip(*batches, strict=True))
    outputs = model.eval()(x).detach()
    for found in (tests(), *penstock.in_threads(tests, ranks=2)):
        assert found["loss"] == pytest.approx(float(cross_entropy(outputs, y)), rel=1e-6)
        assert found["accuracy"] == pytest.approx(float(accuracy(outputs, y)))


def test_what_is_wrong_with_metrics_is_said_on_every_rank():
    x, y = torch.randn(4, 6), torch.randint(3, (4,))
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    for given, metrics, said in [
        ([(x, y)], {}, "functions of outputs and targets, by name"),
        ([(x, y)], {"own": 1}, "functions of outputs and targets, by name"),
        ([x], {"own": accuracy}, r"\(inputs, targets\), found a Tensor"),
        ([(x, y, y)], {"own": accuracy}, "found a tuple of 3"),
        ([], {"own": accuracy}, "found none"),
        ([(x, y), (x, y)], {"own": max}, r"metrics\['own'\]"),
    ]:
        models = [copy.deepcopy(model) for _ in range(2)]

        def tests(world, models=models, given=given, metrics=metrics, said=said):
            pipe = small(models[world.rank], world=world, deadline=20)
            with pytest.raises(penstock.PenstockError, match=said):
                pipe.evaluate(given, metrics=metrics)
            return pipe.evaluate(x) is None

        assert penstock.in_threads(tests, ranks=2) == [True, False]


def test_the_timeline_has_every_instruction_in_order():
    pipe, _, batches = made("mlp", cuts=2)
    pipe.step(*batches[0])
    pipe.evaluate(batches[0][0])  # is no step
    spans = pipe.timeline()
    assert [(span.stage, span.op) for span in spans[-2:]] == [(0, "U"), (1, "U")]
    assert len(spans) == 2 * (3 + 3 + 1)
    assert all(0 <= s.start <= s.end and 0 <= s.waiting <= s.end - s.start for s in spans)
    assert all(a.end <= b.start + 1e-9 for a, b in pairwise(spans))


def test_old_names_are_refused_or_warn_with_the_new_one():
    with pytest.raises(penstock.PlanError, match=r"guard=True; give detect_anomaly=True"):
        small(guard=True)
    pipe, _, _ = made("mlp")
    with pytest.warns(DeprecationWarning, match="parameters_resident"), pipe.near():
        pass


def test_layer_seed_is_the_documented_number():
    assert penstock.layer_seed(0, 0, 0, "dropout") == 12995183463595033382


def test_plans_of_steps_are_forgotten_in_the_end(monkeypatch):
    monkeypatch.setattr("penstock.pipeline.runtime.step_planner.KEPT", 2)
    monkeypatch.setattr("penstock.stages.tracing.shape_inference.KEPT", 2)
    pipe, _, _ = made("mlp", cuts=2)
    for samples in (6, 7, 8, 9, 6):
        pipe.step(torch.randn(samples, 3, 8, 8), torch.randint(10, (samples,)))
    assert (len(pipe.steps.known), pipe.steps.shapes._of_other.cache_info().currsize) == (2, 2)


def test_a_report_says_what_a_step_did_stage_by_stage():
    busy = StageReport(
        rank=0, forward_raw=2048, forward_sent=1024, saved_raw=4096, saved_kept=1024, peak_bytes=8192,
        compute_seconds=0.25, waiting_seconds=0.125,
    )  # fmt: skip
    other = StageReport(rank=1, backward_raw=2048, backward_sent=1024, peak_bytes=512, compute_seconds=0.5)
    report = Report(step=3, loss=0.25, seconds=1.5, num_samples=64, stages=(busy, other))
    first, sent, saved, *stages = str(report).splitlines()
    assert all(part in first for part in ("step 3", "0.2500", "64 samples", "1.500 s"))
    assert all(part in sent for part in ("4 KiB", "2 KiB", "2.00x"))
    assert all(part in saved for part in ("4 KiB", "1 KiB", "4.00x"))
    assert all(part in stages[0] for part in ("stage 0 on rank 0", "0.250 s", "0.125 s", "8 KiB"))
    assert all(part in stages[1] for part in ("stage 1 on rank 1", "0.500 s", "0.000 s", "512 B"))
    assert "step 3" in repr(report)
    alone = dataclasses.replace(report, stages=(StageReport(),))
    assert "nothing was sent" in str(alone)


def test_a_pipeline_says_its_stages_and_where_they_are():
    pipe = small(cuts=["_1"], codec="raw")
    pipe.step(torch.ones(4, 6), torch.arange(4) % 3)
    first, *stages, steps = str(pipe).splitlines()
    assert all(part in first for part in ("2 stages on 2 ranks", "1f1b", "3 micro-batches", "raw"))
    assert stages[0] == "stage 0 on rank 0, here: 2 layers (_0 .. _1), 56 parameters"
    assert steps == "1 step taken"


def test_an_offload_says_what_left_and_came_back():
    weight = torch.ones(1, requires_grad=True)
    with penstock.offload(codec="zero_value", min_bytes=1) as saved:
        assert "nothing has left yet" in str(saved)
        loss = (torch.zeros(1 << 20) * weight).sum()
    loss.backward()
    assert all(part in str(saved) for part in ("4 MiB", "130 KiB", "31.49x", "1 packed, 1 brought back"))
