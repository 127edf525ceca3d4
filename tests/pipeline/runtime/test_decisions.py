"""Decisions of a stage, edited by hand into plan.json: every stage runs with its own, with the same bits."""

import dataclasses
import functools
import json

import law
import pytest
import streams
from cases import Case, pipeline_of, plan_of
from law import differences
from streams import StreamCase
from zoo import build

import penstock
from penstock.pipeline.runtime.auto_codec import MASKED, START, TRIALS, Auto

CASE = Case(model="mlp", cuts=("_1", "_3"))  # before their ReLUs
STREAM = StreamCase(model="mlp", cuts=3, steps=4)


def edited(plan, path, *decisions):
    """The plan with these decisions of its first stages, by way of its file."""
    plan.save(path)
    data = json.loads(path.read_text())
    for stage, decided in zip(data["stages"], decisions, strict=False):
        stage |= decided
    path.write_text(json.dumps(data))
    return penstock.Plan.load(path)


@pytest.fixture
def edit(tmp_path, monkeypatch):
    """Edits every plan that the laws make."""

    def to(*decisions):
        def made(case):
            plan, random_layers = plan_of(case)
            return edited(plan, tmp_path / "plan.json", *decisions), random_layers

        for module in (law, streams):
            monkeypatch.setattr(module, "plan_of", made)

    return to


def trained(plan, *, case=CASE, steps=1):
    """A pipeline after some steps, and behind each the codecs by value, way and stage."""
    model, batches = build(case.model, case.dtype, steps)
    pipe, seen = pipeline_of(case, plan, model), []
    for x, y in batches:
        pipe.step(x, y)
        seen.append({(flow["value"], flow["way"], flow["source"]): flow["codec"] for flow in pipe.flows()})
    return pipe, seen


@functools.cache
def names_of(case=CASE):
    """The values that the first two stages send."""
    _, (flows,) = trained(plan_of(case)[0], case=case)
    down = {source: name for name, way, source in flows if way == "F"}
    return down[0], down[1]


def test_stages_with_tiers_and_codecs_of_their_own_have_the_bits_of_the_plain_loop(edit):
    first, second = names_of()
    edit(
        {"tier": "packed", "codecs": {first: "exponent"}},
        {"tier": "host", "codecs": {second: "raw"}, "gradient_codecs": {first: "byte_plane"}},
        {"gradient_codecs": {second: "narrow"}},
    )
    assert differences(CASE) == []
    assert differences(dataclasses.replace(CASE, codec="auto", steps=TRIALS[-1] + 2)) == []


def test_stages_whose_old_weights_wait_elsewhere_equal_the_replay(edit):
    edit({"weights_tier": "packed", "tier": "host"}, {"weights_tier": "host"}, {"tier": "packed"})
    assert streams.differences(STREAM) == []


def test_every_stage_keeps_what_it_saved_and_old_weights_in_its_own_tier(tmp_path, monkeypatch):
    law.everything_leaves(monkeypatch)
    decided = {"weights_tier": "packed"}, {"weights_tier": "host", "tier": "packed"}
    plan = edited(plan_of(STREAM)[0], tmp_path / "plan.json", *decided)
    model, batches = build(STREAM.model, STREAM.dtype, 1)
    pipe = pipeline_of(dataclasses.replace(STREAM, near=0, clip_scope="stage"), plan, model)
    pipe.step(*batches[0])
    stages = pipe.stages.values()
    assert [stage.saved.counts.bytes_raw > 0 for stage in stages] == [False, True, False]
    stores = [getattr(stage.weights, "store", None) for stage in stages]
    assert [type(store).__name__ for store in stores] == ["Store", "HostStore", "NoneType"]


@pytest.mark.parametrize("codec", ["raw", "exponent", "int8"])
def test_a_fixed_codec_leaves_out_what_has_its_own(tmp_path, codec):
    first, second = names_of()
    decided = {"codecs": {first: codec}}, {"gradient_codecs": {first: codec}}
    _, (flows,) = trained(edited(plan_of(CASE)[0], tmp_path / "plan.json", *decided))
    assert flows[first, "F", 0] == codec
    assert flows[first, "B", 1].removeprefix(MASKED) == codec
    assert flows[second, "F", 1] == "zero_value"
    assert flows[second, "B", 2] == f"{MASKED}zero_value"


def test_auto_begins_with_what_is_named_and_tries_it_there_alone(tmp_path):
    case = dataclasses.replace(CASE, codec="auto")
    first, second = names_of(case)
    plan = edited(plan_of(case)[0], tmp_path / "plan.json", {"codecs": {first: "bf16"}})
    pipe, seen = trained(plan, case=case, steps=TRIALS[0] + 1)
    assert isinstance(pipe.policy, Auto)
    assert [flows[first, "F", 0] for flows in seen] == ["bf16"] * len(seen)
    assert seen[0][second, "F", 1] == START
    assert seen[0][first, "B", 1] == f"{MASKED}{START}"
    tried = {flow[:2] for flow, costs in pipe.policy.costs.items() if "bf16" in costs}
    assert tried == {(first, "F")}


@pytest.mark.parametrize(("decided", "what"), [("codecs", "values"), ("gradient_codecs", "gradients")])
def test_a_codec_for_what_a_stage_does_not_pack_is_refused(tmp_path, decided, what):
    _, second = names_of()
    name = "nothing" if what == "values" else second  # which this stage sends down, and not up
    plan = edited(plan_of(CASE)[0], tmp_path / "plan.json", {}, {decided: {name: "raw"}})
    with pytest.raises(penstock.PlanError, match=f"the {what} that it packs, found {name}=raw for stage 1"):
        trained(plan)
