"""Facts that ranks on several kinds of device have alike, and those that may differ."""

import pytest
import torch
from torch import nn

from penstock import trace
from penstock.compression.errors import Disagreement
from penstock.pipeline.runtime import fingerprints
from penstock.pipeline.runtime.agreement import Agreement
from penstock.pipeline.runtime.fingerprints import Fact


class Rows:
    """A world whose other ranks have told their facts."""

    def __init__(self, *rows):
        self.size, self.rank, self.rows = len(rows), 0, rows

    def all_gather_json(self, item, at=""):
        if len(item) == 3 and item[0] == "here":  # a place, a digest, no refusal: all digests differ
            return [["here", f"digest {rank}", ""] for rank in range(self.size)]
        return [[[fact.what, fact.value, fact.remedy, fact.among] for fact in row] for row in self.rows]


def agree(*rows):
    agreement = Agreement(Rows(*rows))  # pyright: ignore[reportArgumentType] (it has what is asked of it)
    agreement.agree("here", lambda: rows[0])


def of(kind, variant, **more):
    alike = [Fact(f"the {name}", value, "do it") for name, value in more.items()]
    return [*alike[:1], Fact("the variant", variant, "install it", among=kind), *alike[1:]]


def test_ranks_on_other_kinds_of_device_may_differ_in_what_goes_with_it():
    agree(of("cpu", "", seed="1"), of("cuda", "cu132", seed="1"), of("cuda", "cu132", seed="1"))


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([("cpu", ""), ("cuda", "cu132"), ("cuda", "cu126")], "variant is cu132 on rank 1 and cu126"),
        ([("cpu", ""), ("cuda", "cu132", {"seed": "2"})], "the seed is 1 on rank 0 and 2 on rank 1; do it"),
        ([("cpu", ""), ("cuda", "", {"more": "2"})], "rank 0 has no more where rank 1 has the more; do it"),
    ],
)
def test_what_must_be_alike_still_is(rows, told):
    with pytest.raises(Disagreement, match=told):
        agree(*(of(kind, variant, **{"seed": "1", **dict(*more)}) for kind, variant, *more in rows))


def test_the_variant_of_a_build_goes_with_the_device(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.15.0+cu132")
    told = {fact.what: (fact.value, fact.among) for fact in fingerprints.of_process(torch.device("cuda", 1))}
    assert told["the variant of the build of torch"] == ("cu132", "cuda")
    value, among = told["the build of torch"]
    assert value.startswith("2.15.0 (")
    assert not among
    assert [f.among for f in fingerprints.of_process() if f.among] == ["cpu", "cpu"]


class Makes(nn.Module):
    """Makes tensors where its input is."""

    def forward(self, x):
        return x + torch.ones(4, device=x.device)


def test_where_a_layer_makes_tensors_is_told_alike_on_every_rank():
    graph = trace(nn.Sequential(nn.Linear(4, 4), Makes(), nn.Linear(4, 4)), (torch.randn(2, 4),))
    told = [fact.value for fact in fingerprints.of_layers(graph) if "ones" in fact.what]
    assert told
    assert all("where ranks compute" in text and "cpu" not in text for text in told)


def test_a_parameter_under_a_further_name_is_told_with_its_first():
    def told(other):
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in "abc"})
        model["c"].weight = model[other].weight
        return {fact.what: fact.value for fact in fingerprints._of_model(model)}["the parameter c.weight"]

    assert [told("a"), told("b")] == ["that of a.weight", "that of b.weight"]


def test_an_optimizer_that_cannot_be_made_of_all_parameters_is_told_and_not_raised():
    def optimizer(named):
        raise ValueError(f"found {len([*named])}")

    told = fingerprints._of_updates(nn.Linear(2, 2), optimizer, None)
    assert told["optimizer"] == "one that cannot be made of all parameters (ValueError: found 2)"


def test_a_tensor_that_a_kind_of_device_computed_is_compared_among_its_ranks():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.table = nn.Linear(4, 4), torch.arange(4.0).sin()

        def forward(self, x):
            return self.linear(x) * self.table

    graph = trace(Table(), (torch.randn(2, 4),))
    assert {f.among for f in fingerprints.of_layers(graph) if f.what.startswith("the tensor")} == {"cpu"}
