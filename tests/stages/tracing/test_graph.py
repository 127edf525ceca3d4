"""trace: layers and values of a network, what it leaves untouched, and what it refuses."""

import gc
import re

import pytest
import torch
from reference import same_bits
from small_pipelines import model_of, pipeline_of
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import build

import penstock
from penstock.stages.tracing.tracer import trace


def snapshot(model):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", ["residual", "gpt_gelu_dropout", "dag1"])
def test_trace_and_measure_leave_the_model_and_the_generators_of_others_untouched(name, monkeypatch):
    model, batches = build(name)
    x, _ = batches[0]
    model(x).sum().backward()
    model.zero_grad(set_to_none=False)
    before, modes = snapshot(model), [m.training for m in model.modules()]
    attributes = {k for m in model.modules() for k in vars(m)}
    state, example = torch.get_rng_state(), (x[:4].clone(),)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "manual_seed", lambda seed: pytest.fail("seeds the GPUs of the process, too"))
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
    model, batches = build("residual")
    graph = trace(model, (batches[0][0][:4],))
    names = [
        n.name for n in torch.fx.symbolic_trace(model).graph.nodes if n.op not in ("placeholder", "output")
    ]
    assert list(graph.layers) == names
    assert graph.layers[:4] == ("_0", "_1", "_2", "_3_conv1")


def test_one_object_under_two_names_is_one_value():
    def twice(self, x):
        y = self.linear(x)
        return self.identity(y).contiguous() + y

    model = model_of(twice, linear=nn.Linear(4, 4), identity=nn.Identity())
    record = trace(model, (torch.randn(3, 4),)).train_probe
    by_layer = {node.name: outputs.values for node, outputs in record.outputs.items()}
    assert by_layer["linear"] == by_layer["identity"] == by_layer["contiguous"]


def test_random_layers_are_found_by_what_they_do():
    model, batches = build("gpt_gelu_dropout")
    random = trace(model, (batches[0][0][:4],)).train_probe.random
    assert {"dropout", "blocks_0_dropout_1", "blocks_0_dropout_2", "scaled_dot_product_attention"} <= random
    assert all("norm" not in name for name in random)


def test_a_branch_on_a_value_of_the_model_is_held_to_what_the_trace_saw():
    model = model_of(
        lambda self, x: self.linear(x if (x * self.scale).sum() > 0 else -x),
        linear=nn.Linear(4, 4),
        scale=nn.Parameter(torch.ones(())),
    )
    pipe = pipeline_of(model, cuts=[], example=(torch.ones(3, 4),), loss=F.mse_loss)
    pipe.step(torch.ones(3, 4), torch.zeros(3, 4))
    said = r"layer guard_bool: .*read True from guard_bool .*test_graph.py:\d+\).*, and now it is False"
    with pytest.raises(penstock.StageError, match=said):
        pipe.step(-torch.ones(3, 4), torch.zeros(3, 4))


def test_a_model_that_goes_another_way_with_other_data_of_the_example_is_refused():
    example = (torch.tensor([[1.0] * 4, [-1.0] * 4, [-1.0] * 4]),)
    branch = model_of(lambda _, x: 2 * x if (x[0] > 0).all() else -x, name="Branch")
    with pytest.raises(penstock.PenstockError, match=r"forward of Branch .*test_graph.py.*module of its own"):
        trace(branch, example)


def test_arguments_with_defaults_stay_at_them():
    def forward(self, x, mask=None, scale=2.0):
        y = self.linear(x) * scale
        return y if mask is None else y * mask

    assert trace(model_of(forward, linear=nn.Linear(4, 4)), (torch.randn(3, 4),)).layers == ("linear", "mul")


def test_a_pipeline_keeps_no_copy_of_the_model():
    model, example = nn.Sequential(nn.Linear(37, 41), nn.ReLU(), nn.Linear(41, 37)), (torch.randn(4, 37),)
    pipe = pipeline_of(model, cuts=["_0"], example=example, loss=F.mse_loss)
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) is nn.Parameter and not item.is_meta]
    assert sum(tuple(t.shape) == (41, 37) for t in tensors) == 1
    pipe.close()


def view():
    def forward(self, x):
        y = self.linear(x)
        z = y.view(-1, 4, 5).mul_(2.0)
        return torch.tanh(y) + z.sum((1, 2)).unsqueeze(1)

    return model_of(forward, linear=nn.Linear(20, 20))


def buffer_under_two_names():
    one, other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    other.num_batches_tracked = one.num_batches_tracked
    return nn.Sequential(one, nn.Linear(4, 4), other)


def norm_twice():
    def forward(self, x):
        return self.norm(self.linear(self.norm(x)))

    return model_of(forward, norm=nn.BatchNorm1d(4), linear=nn.Linear(4, 4))


def windows():
    return model_of(lambda self, x: self.linear(x.unfold(1, 3, 1)), linear=nn.Linear(3, 3))


CUTS = [
    (view, (3, 20), "view", "share one memory"),
    (buffer_under_two_names, (3, 4), "_1", "num_batches_tracked"),
    (norm_twice, (3, 4), "norm", r"buffer norm\."),
    (norm_twice, (3, 4), "linear", r"buffer norm\."),
    (windows, (3, 8), "unfold", "overlap"),
]


@pytest.mark.parametrize(("make", "shape", "layer", "reason"), CUTS)
def test_a_cut_that_would_part_what_is_written_to_is_refused(make, shape, layer, reason):
    graph = trace(make(), (torch.randn(shape),))
    assert re.search(reason, graph.train_probe.refused[graph.layers.index(layer)])
    if make is view:
        assert graph.layers.index("linear") not in graph.train_probe.refused


class Rows(TorchDispatchMode):
    """Counts the rows that matrix products with a bias take, which only forwards have."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.rows += args[1].shape[0] if func is torch.ops.aten.addmm.default else 0
        return func(*args, **kwargs or {})


def test_a_trace_costs_fewer_than_ten_steps_of_training():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.ReLU())
    with Rows() as counted:
        penstock.trace(model, (torch.randn(2, 4),))
    assert counted.rows <= 13 * 2  # with four backwards of a batch, twice as dear: seven steps


def mean_in_eval(self, x):
    """Reads its number of samples in both modes, and divides by it in one."""
    y = self.a(x).view(x.shape[0], 4)
    return self.b(y * (0.5 if self.training else 1.0 / x.shape[0]))


def test_a_number_that_follows_the_size_in_eval_mode_alone_is_seen_there():
    model, batch = model_of(mean_in_eval, a=nn.Linear(4, 4), b=nn.Linear(4, 2)), torch.randn(8, 4)
    with pipeline_of(model, example=(batch[:4],), stages=2, micro_batches=2) as pipe:
        for size in (4, 5, 8):
            with torch.no_grad():
                assert same_bits(pipe.evaluate(batch[:size]), model.eval()(batch[:size]))
