"""Calls of a model: by position, by name, with flags between its tensors, on ranks that never saw it."""

import copy
import dataclasses
import json
from typing import Any

import pytest
import torch
from reference import same_bits
from small_pipelines import model_of
from torch import nn

import penstock
from penstock import PlanError
from penstock.pipeline.runtime.batches import micro_batches
from penstock.stages.profiling.examples import example_of, signature_of
from penstock.stages.tracing.capture.call_spec import Call

pytestmark = pytest.mark.filterwarnings("ignore:the model returns cache")


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None
    cache: object = None


class Cache:
    def __init__(self, held):
        self.held = held


class Masked(nn.Module):
    """Called by name, with an optional mask, a flag, a table without samples, and a loss of its own."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, ids, mask=None, table=None, labels=None, double=False):
        x = self.embed(ids)
        if table is not None:
            x = x + table
        x = torch.relu(self.mix(x))
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        logits = self.head(x) * (2 if double else 1)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Output(logits, loss, Cache(x))


def batch(samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(9, (samples, 4), generator=generator),
        "mask": torch.randint(2, (samples, 4), generator=generator).float(),
        "table": torch.randn(4, 8, generator=torch.Generator().manual_seed(3)),
        "labels": torch.randint(5, (samples, 4), generator=generator),
        "double": True,
    }


def example(samples=2):
    given = batch(samples)
    return given | {"table": penstock.Constant(given["table"])}


def planned(model, given, **wishes):
    profile = penstock.measure(penstock.trace(model, given), given, repeats=1)
    return penstock.partition(profile, stages=3, **wishes)


def pipeline(model, plan):
    return penstock.Pipeline(
        model,
        plan,
        loss=lambda outputs, targets: outputs.loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


@pytest.mark.parametrize("saved", [False, True], ids=["here", "from JSON"])
def test_a_model_called_by_name_with_its_own_loss_has_the_bits_of_the_plain_loop(saved):
    torch.manual_seed(0)
    model = Masked()
    plain = copy.deepcopy(model)
    plan = planned(model, example(), micro_batches=3)
    if saved:  # what another rank gets
        plan = penstock.Plan.of_json(json.loads(json.dumps(plan.to_json())), "here")
    pipe, optimizer = pipeline(model, plan), torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        given = batch(7, step)
        report = pipe.step(given)
        optimizer.zero_grad()
        total = 0.0
        for part in torch.arange(7).tensor_split(3):
            one = {name: x[part].clone() for name, x in given.items() if name not in ("table", "double")}
            share = plain(**given | one).loss * (len(part) / 7)
            share.backward()
            total = total + share.detach()
        optimizer.step()
        assert report.loss == float(total)
        assert all(map(same_bits, (p.grad for p in plain.parameters()), (p.grad for p in model.parameters())))
    found, expected = pipe.evaluate(batch(5)), plain.eval()(**batch(5))
    assert isinstance(found, Output)
    assert found.cache is None
    assert same_bits(found.logits, expected.logits)
    assert same_bits(found.loss, expected.loss)


def test_a_cache_is_left_out_with_a_sentence():
    with pytest.warns(UserWarning, match=r"returns cache \(Cache\), .* left out; .* \(use_cache=False\)"):
        graph = penstock.trace(Masked(), example())
    assert "left out    cache (Cache)" in str(graph)


def test_what_stands_beside_the_tensors_is_as_in_the_example():
    pipe = pipeline(model := Masked(), planned(model, example()))
    with pytest.raises(PlanError, match=r"True there, found False; trace with an example that has it"):
        pipe.step(batch(6) | {"double": False})
    few = {name: x for name, x in batch(6).items() if name != "mask"}
    with pytest.raises(PlanError, match=r"takes the inputs ids, mask, .* double, .* found ids, table"):
        pipe.step(few)
    assert pipe.step(batch(6)).loss > 0


CALLS = [
    ({"ids": [1, 2]}, "at least one tensor of samples"),
    ({"ids": torch.zeros(2, 4).long(), "mask": object()}, "found a object for mask; make it inside"),
    ({"table": penstock.Constant(torch.zeros(4, 8))}, "at least one tensor of samples, found none"),
]


def test_what_no_model_can_be_called_with_is_refused():
    for given, said in CALLS:
        with pytest.raises(PlanError, match=said):
            penstock.trace(Masked(), given)
    with pytest.raises(PlanError, match=r"penstock.Constant holds a tensor, found 3"):
        penstock.Constant(3)  # type: ignore[arg-type]


def test_tensors_come_alone_by_position_by_name_or_nested():
    nested = model_of(lambda self, pair, scale=None: pair[0] + pair[1]["y"])
    x, y = torch.zeros(2), torch.ones(2)
    call, tensors = Call.of(nested, ((x, {"y": y}), None))
    assert call.names == ("pair_0", "pair_1")
    assert tensors[0] is x
    assert call.tensors(((y, {"y": x}), None))[0] is y
    assert call.tensors((y, x)) == (y, x)
    assert call.tensors({"pair_0": y, "pair_1": x})[1] is x
    with pytest.raises(PlanError, match=r"takes 2 tensors \(pair_0, pair_1\), found 1 \(Tensor\)"):
        call.tensors(x)
    with pytest.raises(PlanError, match=r"None there, found 3"):
        call.tensors(((y, {"y": x}), 3))


def test_an_example_from_a_plan_is_as_the_one_that_was_seen():
    call, tensors = Call.of(Masked(), example(3))
    known = signature_of(call, tensors)
    plan = dataclasses.replace(planned(Masked(), example(3)), signature=known)
    made: Any = example_of(plan)
    assert list(made) == ["ids", "mask", "table", "labels", "double"]
    assert isinstance(made["table"], penstock.Constant)
    assert made["double"] is True
    assert made["ids"].shape == (3, 4)
    assert set(made["ids"].flatten().tolist()) <= set(tensors[0].flatten().tolist())
    assert micro_batches(tensors, None, 3, None, whole=call.whole)[2].inputs[0].shape == (1, 4)


DAMAGED = [
    ({"form": "[1"}, "the form of a signature is that of a call"),
    ({"form": '[{"tuple": [{"tensor": 9}]}, {"dict": {}}]'}, "the form of a signature"),
    ({"form": '[{"tuple": []}, {"dict": {}}]'}, "the form of a signature"),
    ({"names": ["a"]}, "a name, flag and values"),
    ({"values": [[2**63], [], [], []]}, "64 bits, found 9223372036854775808"),
]


def test_a_damaged_signature_is_refused():
    plan = json.dumps(planned(Masked(), example()).to_json())
    for change, said in DAMAGED:
        data = json.loads(plan)
        data["signature"] |= change
        with pytest.raises(PlanError, match=said):
            penstock.Plan.of_json(data, "here")
