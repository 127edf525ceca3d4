"""The halves of a backward leave the bits of the whole: gradients of what came in, and of the weights."""

import pytest
import torch
from law import OPTIMIZERS, Case, plan_of
from reference import same_bits
from zoo import build, cross_entropy

import penstock
from penstock.stages import stage as stages


class Whole:
    """Every backward at once; ``seen`` gets all gradients of received values as they are sent."""

    def __init__(self, stage, seen):
        self.stage, self.seen = stage, seen
        stage.backward = self.backward

    def __call__(self, micro_batch, gradients):
        return type(self.stage).backward(self.stage, micro_batch, gradients)

    def backward(self, micro_batch, gradients):
        found = self(micro_batch, gradients)
        self.seen += [(f"stage {self.stage.index} {micro_batch} value {n}", g) for n, g in found.items()]
        return found

    def end(self):
        """The last backward of a step has run."""


class Halves(Whole):
    """The first half when the backward is due, the second one micro-batch later: zero-bubble order."""

    late = 1

    def __init__(self, stage, seen):
        super().__init__(stage, seen)
        self.waiting = []

    def __call__(self, micro_batch, gradients):
        found = self.stage.backward_inputs(micro_batch, gradients)
        self.waiting.append(micro_batch)
        self.end(self.late)
        return found

    def end(self, num_left=0):
        while len(self.waiting) > num_left:
            self.stage.backward_weights(self.waiting.pop(0))


class HalvesAtOnce(Halves):
    """Both halves when the backward is due."""

    late = 0


def trained(case, kind, autocast=None):
    """Everything that training leaves behind, by name, when every stage runs ``kind`` of backward."""
    plan, _ = plan_of(case)
    model, batches = build(case.model, case.dtype, case.steps)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "LEAST_SAVED", 1)
        pipe = penstock.Pipeline(
            model,
            plan,
            loss=cross_entropy,
            optimizer=OPTIMIZERS[case.optimizer],
            clip=case.clip,
            autocast=autocast,
        )
        runs = [kind(stage, seen) for stage in pipe.engine.stages.values()]
        update = pipe.engine.update.step
        pipe.engine.update.step = lambda stage: ([run.end() for run in runs], update(stage))
        for x, y in batches:
            report = pipe.step(x, y)
            seen.append(("loss", torch.tensor(report.loss)))
            seen += [(name, p.grad) for name, p in model.named_parameters()]
            seen += list(pipe.state_dict()["model"].items())
    assert not any(stage.running for stage in pipe.engine.stages.values())
    return seen


def differences(case, kind, autocast=None):
    """The names of what differs from whole backwards in a bit or a stride."""
    expected, found = trained(case, Whole, autocast), trained(case, kind, autocast)
    assert len(expected) == len(found)
    order = [(name, tensor) for name, tensor in found]
    return [
        name
        for (name, a), (other, b) in zip(expected, order, strict=True)
        if name != other or not same_bits(a, b) or (a is not None and a.stride() != b.stride())
    ]


CASES = [
    Case(model="mlp", cuts="every", schedule="gpipe"),
    Case(model="tied", cuts=3),
    Case(model="gpt_tied", cuts=4, steps=2),
    Case(model="resnet18", cuts=3, steps=1, micro_batches=2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kind", [Halves, HalvesAtOnce])
def test_two_halves_have_the_bits_of_the_whole(case, kind):
    assert differences(case, kind) == []
