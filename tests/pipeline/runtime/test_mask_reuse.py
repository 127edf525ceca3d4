"""Mask reuse: gradients without what a ReLU upstream would zero anyway, where the graph proves it."""

import pytest
import torch
from cases import Case, pipeline_with_batches
from reference import same_bits
from saving import wait
from small_pipelines import model_of
from torch import nn
from torch.nn import functional as F

import penstock
from penstock.compression.frame import MASKED, read_header
from penstock.stages.memory.activations import SavedActivations

SPECIAL = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-42, -1e-42, 6.0, 7.0, 1.0, -1.0])


def special(num_elements, seed, *, share=0.5, mean=0.0):
    """Every bit pattern that a mask could get wrong, among random ones."""
    source = torch.Generator().manual_seed(seed)
    values = torch.randn(num_elements, generator=source) + mean
    chosen = torch.randint(len(SPECIAL), (num_elements,), generator=source)
    return torch.where(torch.rand(num_elements, generator=source) < share, SPECIAL[chosen], values)


STOPPING = {
    "relu": F.relu,
    "in place": lambda x: F.relu_(x * 1),
    "relu6": F.relu6,
    "relu6 in place": lambda x: F.relu6(x * 1, inplace=True),
    "pooled": lambda x: F.max_pool2d(F.relu(x), 3, 2, 1),
    "pooled, dilated": lambda x: F.max_pool2d(F.relu(x), 2, 1, dilation=2),
}


@pytest.mark.parametrize("layer", STOPPING.values(), ids=STOPPING)
def test_the_rest_of_a_gradient_changes_no_bit_behind_a_relu(layer):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = special(2 * 3 * 40 * 40, 1, share=0.1, mean=-1.5).view(2, 3, 40, 40).to(dtype).requires_grad_()
        value = layer(x)
        gradient = special(value.numel(), 2).view(value.shape).to(dtype)
        mask = penstock.encode(value)
        frame = penstock.encode(gradient, mask=mask)
        assert read_header(frame).flags == MASKED
        (expected,) = torch.autograd.grad(value, x, gradient, retain_graph=True)
        (found,) = torch.autograd.grad(value, x, penstock.decode(frame, mask=mask))
        assert same_bits(expected, found)


def test_a_mask_that_does_not_fit_is_not_used():
    gradient = special(6000, 5).view(2, 30, 100)
    value = F.relu(gradient)
    for mask in (value.transpose(1, 2).contiguous(), value.double(), value[:, :29]):
        frame = penstock.encode(gradient, mask=penstock.encode(mask))
        assert same_bits(penstock.decode(frame), gradient)


class Own(nn.ReLU):
    def forward(self, input):
        return super().forward(input)


@torch.fx.wrap
def watched(x):
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient / (gradient.norm() + 1))
    return x


HOOKED, PATCHED = nn.ReLU(), nn.ReLU()
HOOKED.register_full_backward_hook(lambda *_: None)
PATCHED.forward = lambda input: F.relu(input) - 1

PROVEN = {
    "relu": ([nn.ReLU()], True),
    "relu in place": ([nn.ReLU(inplace=True)], True),
    "relu6": ([nn.ReLU6()], True),
    "pool of one": ([nn.ReLU(), nn.MaxPool2d(2)], True),
    "pool of a pool": ([nn.ReLU(), nn.MaxPool2d(2), nn.MaxPool2d(2)], True),
    "a subclass": ([Own()], True),
    "pool alone": ([nn.BatchNorm2d(3), nn.MaxPool2d(2)], False),
    "average pool": ([nn.ReLU(), nn.AvgPool2d(2)], False),
    "dropout": ([nn.ReLU(), nn.Dropout()], False),
    "leaky": ([nn.LeakyReLU()], False),
    "gelu": ([nn.GELU()], False),
    "hardtanh": ([nn.Hardtanh(-1.0, 1.0)], False),
    "watched by a hook": ([HOOKED], False),
    "watched by a hook on its output": ([model_of(lambda self, x: watched(F.relu(x)))], False),
    "patched": ([PATCHED], False),
    "a view of one": ([nn.ReLU(), nn.Flatten()], False),
    "written to afterwards": ([nn.ReLU6(), nn.Dropout(inplace=True)], False),
}


def value_behind(place, *layers):
    """The value behind layer ``place`` of these (from the end: below 0), and the number of that layer."""
    model = nn.Sequential(nn.Conv2d(3, 3, 1), *layers, nn.Flatten())
    record = penstock.trace(model, (torch.randn(2, 3, 8, 8),)).train_probe
    place = place if place >= 0 else len(record.outputs) - 1 + place
    (value,) = (v for v in record.values if v.producer <= place < max(v.users, default=-1))
    return value, place


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize(("layers", "proven"), PROVEN.values(), ids=PROVEN)
def test_only_what_the_graph_proves_is_left_out(layers, proven):
    value, before_flatten = value_behind(-2, *layers)
    assert value.stops(before_flatten) is proven


def test_a_value_before_its_relu_in_place_proves_nothing():
    value, place = value_behind(0, nn.ReLU(inplace=True))
    assert not value.stops(place)
    assert value.stops(place + 1)


class Listening:
    """Wraps a transport and notes every frame that passes."""

    def __init__(self, inner):
        self.inner, self.pool, self.seen = inner, inner.pool, []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def send(self, message, frame, messages):
        header = read_header(frame.bytes)
        self.seen.append((message, frame.buffer.data_ptr(), frame.num_bytes, header))
        self.inner.send(message, frame, messages)


def seen_in_a_step(case):
    """Frames that a step of ``case`` sends in one process, and the number of packings."""
    pipe, batches = pipeline_with_batches(case)
    frames = pipe.engine.frames
    listening = Listening(frames.transport)
    packs, pack = [], frames._pack
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "transport", listening)
        patch.setattr(frames, "_pack", lambda m, *rest, **how: packs.append(m) or pack(m, *rest, **how))
        pipe.step(*batches[0])
    assert not frames.arrived, "frames that nobody let go"
    assert not frames.sent, "frames that nobody let go"
    return listening.seen, packs


def test_gradients_behind_a_relu_of_a_small_model_travel_without_zeros():
    seen, _ = seen_in_a_step(Case(model="mlp", cuts=["_2"]))
    back = [bool(header.flags & MASKED) for message, _, _, header in seen if message.op.value == "B"]
    assert back == [True] * 3


def test_a_tensor_is_packed_once_and_sent_on_in_the_same_storage():
    seen, packs = seen_in_a_step(Case(model="gated", cuts="every", micro_batches=2))
    assert len(packs) == len(set(packs))
    by_value = {}
    for message, address, _, _ in seen:
        if message.op.value == "F":
            by_value.setdefault((message.micro_batch, message.value), []).append(address)
    chains = [addresses for addresses in by_value.values() if len(addresses) > 1]
    assert chains, "no value passes a stage"
    assert all(len(set(addresses)) == 1 for addresses in chains)
    forward = [message for message in packs if message.op.value == "F"]
    assert len(forward) == len(by_value)


@pytest.mark.slow
def test_the_store_holds_the_frames_of_the_wire_and_packs_nothing_twice():
    cuts = ["relu", "layer1_0_relu_1"]
    case = Case(model="resnet18", cuts=cuts, tier="packed", micro_batches=2, schedule="gpipe")
    pipe, batches = pipeline_with_batches(case)
    middle = pipe.stages[1].saved
    assert isinstance(middle, SavedActivations)
    kept, put, offload = [], middle._packer.store.put, middle.offload
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(middle._packer.store, "put", lambda key, frame: kept.append(frame) or put(key, frame))
        patch.setattr(middle, "offload", lambda *args: (offload(*args), wait(middle)))
        listening = Listening(pipe.engine.frames.transport)
        patch.setattr(pipe.engine.frames, "transport", listening)
        pipe.step(*batches[0])
    down = {address for message, address, _, _ in listening.seen if message.op.value == "F"}
    shared = [frame for frame in kept if frame.buffer.data_ptr() in down]
    assert len(shared) == case.micro_batches, "what goes out, of which the pool reads nothing"
    assert middle.counts.num_packs == len(kept) - len(shared)
    pipe.close()
