"""trace: layers and values of a network, what it leaves untouched, and what it refuses."""

import copy
import gc

import pytest
import torch
from cases import marked
from reference import plain_loop, same_bits
from torch import nn
from torch.nn import functional as F
from zoo import ZOO, build

import penstock
from penstock.stages.tracing.graph import trace
from penstock.stages.tracing.layers import parts_of, run_all


def snapshot(model):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", ["resnet18", "gpt_gelu_dropout", "dag1"])
def test_trace_and_measure_leave_the_model_untouched(name):
    model, batches = build(name)
    x, _ = batches[0]
    model(x).sum().backward()
    model.zero_grad(set_to_none=False)
    before, modes = snapshot(model), [m.training for m in model.modules()]
    attributes = {k for m in model.modules() for k in vars(m)}
    state, example = torch.get_rng_state(), (x[:4].clone(),)
    penstock.measure(trace(model, example), example, repeats=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes
    assert {k for m in model.modules() for k in vars(m)} == attributes
    assert same_bits(example[0], x[:4])
    for key, tensor in snapshot(model).items():
        assert same_bits(tensor, before[key]), key
    for parameter in model.parameters():
        assert parameter.grad is None or not parameter.grad.any()


def test_a_layer_has_the_name_of_its_node_under_a_default_tracer():
    model, batches = build("resnet18")
    graph = trace(model, (batches[0][0][:4],))
    names = [
        n.name for n in torch.fx.symbolic_trace(model).graph.nodes if n.op not in ("placeholder", "output")
    ]
    assert list(graph.layers) == names
    assert graph.layers[:4] == ("conv1", "bn1", "relu", "maxpool")


def test_values_know_their_users_and_liveness():
    model, batches = build("resnet18")
    graph = trace(model, (batches[0][0][:4],))
    record = graph.train_probe
    alive = {record.values[i].name for i in record.crossing(graph.layers.index("layer1_0_conv2"))}
    assert alive == {"maxpool", "layer1_0_conv2"}  # the block's input is still needed by its addition
    assert [record.values[i].name for i in record.crossing(graph.layers.index("layer1_0_relu_1"))] == [
        "layer1_0_bn2"
    ]  # an addition and a relu in place


def test_one_object_under_two_names_is_one_value():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.identity = nn.Linear(4, 4), nn.Identity()

        def forward(self, x):
            y = self.linear(x)
            return self.identity(y).contiguous() + y

    record = trace(Twice(), (torch.randn(3, 4),)).train_probe
    by_layer = {node.name: outputs.values for node, outputs in record.outputs.items()}
    assert by_layer["linear"] == by_layer["identity"] == by_layer["contiguous"]


def test_random_layers_are_found_by_what_they_do():
    model, batches = build("gpt_gelu_dropout")
    random = trace(model, (batches[0][0][:4],)).train_probe.random
    attention = {f"blocks_{i}_attention_{what}" for i in range(3) for what in ("dropout",)}
    assert "dropout" in random
    assert {"blocks_0_dropout_1", "blocks_2_dropout_2", "scaled_dot_product_attention"} <= random | attention
    assert all("norm" not in name for name in random)


class Lost:
    """What a trace by proxies loses without a word: the plain loop is the judge."""

    class NoGrad(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.end = nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 3)

        def forward(self, x):
            with torch.no_grad():
                y = F.linear(x, self.weight)
            return self.end(y + F.linear(x, self.weight))

    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.end = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.end(self.linear(x) + torch.linspace(0, 1, 6) * torch.tensor([2.0]))

    class Counter(nn.Module):
        calls: torch.Tensor

        def __init__(self):
            super().__init__()
            self.linear, self.end = nn.Linear(6, 6), nn.Linear(6, 3)
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            self.calls += 1
            y = self.linear(x)
            torch.Tensor.copy_(self.calls, self.calls * 0.9 + y.detach().mean())
            return self.end(y)

    class Autocast(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.end = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                y = self.linear(x)
            return self.end(y.float())


@pytest.mark.parametrize("kind", ["NoGrad", "Constant", "Counter", "Autocast"])
def test_what_a_trace_by_proxies_loses_trains_as_the_plain_loop(kind):
    torch.manual_seed(0)
    model = getattr(Lost, kind)()
    plain, example = copy.deepcopy(model), (torch.randn(3, 6),)
    profile = penstock.measure(trace(model, example), example, repeats=1)
    cuts = [layer.name for i, layer in enumerate(profile.layers[:-1]) if i not in profile.refused]
    plan = penstock.partition(profile, cuts=cuts, micro_batches=3)
    settings = {"loss": F.cross_entropy, "optimizer": lambda named: torch.optim.SGD(named, lr=0.1)}
    pipe = penstock.Pipeline(model, plan, **settings)
    batches = [(torch.randn(9, 6), torch.randint(3, (9,))) for _ in range(2)]
    for batch, expected in zip(batches, plain_loop(plain, batches, micro_batches=3, **settings), strict=True):
        assert pipe.step(*batch).loss == expected["loss"]
        state = pipe.state_dict()["model"]
        assert all(same_bits(tensor, state[name]) for name, tensor in plain.state_dict().items())


class Branch(nn.Module):
    def __init__(self, reads):
        super().__init__()
        self.linear, self.reads = nn.Linear(4, 4), reads

    def forward(self, x):
        return self.linear(x if self.reads(x) else -x)


def test_a_branch_on_a_value_is_held_to_what_the_trace_saw():
    model, example = Branch(lambda x: x.sum() > 0), (torch.ones(3, 4),)
    profile = penstock.measure(trace(model, example), example, repeats=1)
    pipe = penstock.Pipeline(
        model,
        penstock.partition(profile, stages=1, micro_batches=1),
        loss=F.mse_loss,
        optimizer=torch.optim.SGD,
    )
    pipe.step(torch.ones(3, 4), torch.zeros(3, 4))
    said = r"layer guard_bool: .*read True from guard_bool .*test_graph.py:\d+\).*, and now it is False"
    with pytest.raises(penstock.StageError, match=said):
        pipe.step(-torch.ones(3, 4), torch.zeros(3, 4))


def test_a_model_that_goes_another_way_with_other_data_of_the_example_is_refused():
    example = (torch.tensor([[1.0] * 4, [-1.0] * 4, [-1.0] * 4]),)
    with pytest.raises(penstock.PenstockError, match=r"forward of Branch .*test_graph.py.*module of its own"):
        trace(Branch(lambda x: (x[0] > 0).all()), example)


def test_inputs_are_a_tuple_with_one_tensor_each():
    with pytest.raises(penstock.PenstockError, match="example_inputs is a tuple"):
        trace(nn.Linear(4, 4), torch.randn(3, 4))  # type: ignore[arg-type]
    with pytest.raises(penstock.PenstockError, match=r"does not run on inputs of shape \(3, 4\): .*missing"):
        trace(nn.Bilinear(4, 4, 4), (torch.randn(3, 4),))


def test_arguments_with_defaults_stay_at_them():
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, mask=None, scale=2.0):
            y = self.linear(x) * scale
            return y if mask is None else y * mask

    graph = trace(Optional(), (torch.randn(3, 4),))
    assert graph.layers == ("linear", "mul")


def test_a_pipeline_keeps_no_copy_of_the_model():
    model, example = nn.Sequential(nn.Linear(37, 41), nn.ReLU(), nn.Linear(41, 37)), (torch.randn(4, 37),)
    profile = penstock.measure(trace(model, example), example, repeats=1)
    plan = penstock.partition(profile, stages=2, micro_batches=2)
    pipe = penstock.Pipeline(model, plan, loss=F.mse_loss, optimizer=torch.optim.SGD)
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) is nn.Parameter and not item.is_meta]
    assert sum(tuple(t.shape) == (41, 37) for t in tensors) == 1
    pipe.close()


def cut_reason(model, layer, example):
    graph = trace(model, (example,))
    return graph.train_probe.refused.get(graph.layers.index(layer), "")


def test_a_cut_between_two_tensors_of_a_mutated_storage_is_refused():
    class View(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(20, 20)

        def forward(self, x):
            y = self.linear(x)
            z = y.view(-1, 4, 5).mul_(2.0)
            return torch.tanh(y) + z.sum((1, 2)).unsqueeze(1)

    assert "share one memory" in cut_reason(View(), "view", torch.randn(3, 20))
    assert not cut_reason(View(), "linear", torch.randn(3, 20))


def test_a_buffer_that_two_modules_share_is_a_buffer_under_both_names():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.one, self.other = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)
            self.other.num_batches_tracked = self.one.num_batches_tracked

        def forward(self, x):
            return self.other(self.linear(self.one(x)))

    assert "num_batches_tracked" in cut_reason(Shared(), "linear", torch.randn(3, 4))


def test_a_cut_through_a_batchnorm_that_is_called_twice_is_refused():
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x):
            return self.norm(self.linear(self.norm(x)))

    assert "buffer norm." in cut_reason(Again(), "norm", torch.randn(3, 4))
    assert "buffer norm." in cut_reason(Again(), "linear", torch.randn(3, 4))


TOLD = {2: "tanh"}


@torch.fx.wrap
def best(x):
    return TOLD[x.dim()]


@torch.fx.wrap
def apply(x, name):
    return getattr(torch, name)(x)


class Chooses(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        name = best(x)
        return apply(self.linear(x), name)


def test_another_python_value_that_a_function_tells_is_held_to_what_it_was(monkeypatch):
    graph = trace(Chooses(), (torch.randn(3, 4),))
    parts = parts_of(graph.model_copy, graph.train)
    run_all(graph.train, parts, (torch.randn(3, 4),))
    monkeypatch.setitem(TOLD, 2, "relu")
    with pytest.raises(penstock.PlanError, match=r"read tanh from best .* and now it is relu"):
        run_all(graph.train, parts, (torch.randn(3, 4),))


def test_overlapping_tensors_are_never_on_a_cut():
    class Windows(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return self.linear(x.unfold(1, 3, 1))

    assert "overlap" in cut_reason(Windows(), "unfold", torch.randn(3, 8))


@pytest.mark.parametrize("name", [marked(name, name) for name in sorted(ZOO)])
def test_a_second_trace_gives_the_same_names_and_fingerprint(name):
    model, batches = build(name)
    example = (batches[0][0][:4].clone(),)
    first, second = trace(model, example), trace(copy.deepcopy(model), example)
    assert first.layers == second.layers
    assert first.fingerprint == second.fingerprint
