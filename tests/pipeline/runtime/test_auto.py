"""codec=auto chooses the best by price and by measurement; a stage runs with what its plan decided."""

import dataclasses
import functools
import json
import time
import types
from itertools import product
from typing import Any

import law
import pytest
import streams
import torch
from cases import Case, pipeline_of, plan_of
from hypothesis import given
from hypothesis import strategies as st
from law import differences
from programs import two_ranks
from streams import StreamCase
from zoo import build

import penstock
from penstock.compression.buffers import Pool
from penstock.compression.codec_cost import Cost, candidates, sample, trial
from penstock.pipeline.distributed.process_group import World
from penstock.pipeline.runtime.auto_codec import (
    MASKED,
    ROUNDS,
    START,
    TRIALS,
    Policy,
    Prices,
    Setting,
    choose,
    predict,
)
from penstock.pipeline.schedules.instruction import Flow

DOWN, UP = Flow("v", "F", 0, 1), Flow("v", "B", 1, 0)
AMONG: Any = types.SimpleNamespace(is_alone=False)  # a world of which nothing else is known
WORK = {(stage, op): seconds for stage in (0, 1) for op, seconds in (("F", 1.0), ("B", 2.0))}


def prices(rate, *, masked=None, **costs):
    """The same costs for the value and its gradient: bytes, seconds to pack and to unpack."""
    table = {"raw": Cost(100.0, 0.0, 0.0)} | {name: Cost(*cost) for name, cost in costs.items()}
    rates = {(0, 1): rate, (1, 0): rate}
    masked = {MASKED + name: Cost(*cost) for name, cost in (masked or {}).items()}
    return Prices(costs={DOWN: table, UP: table | masked}, work=WORK, rates=rates)


@pytest.mark.parametrize(
    ("rate", "costs", "best"),
    [
        (1e9, {"zero_value": (50.0, 0.1, 0.1)}, "raw"),  # a fast link
        (10.0, {"zero_value": (50.0, 0.1, 0.1), "byte_plane": (40.0, 0.5, 0.5)}, "byte_plane"),
        (20.0, {"zero_value": (50.0, 0.1, 0.1), "byte_plane": (48.0, 3.0, 3.0)}, "zero_value"),
    ],
)
def test_a_slow_link_wants_the_fewest_bytes_unless_they_cost_more_than_they_save(rate, costs, best):
    assert set(choose(two_ranks(8), prices(rate, **costs), start={}).values()) == {best}


def test_a_bitmap_that_the_gradient_can_use_is_worth_more_than_a_smaller_value():
    table = {"zero_value": (60.0, 0.1, 0.1), "exponent": (55.0, 0.1, 0.1)}
    masked = {"zero_value": (50.0, 0.1, 0.1)}
    slow_up = dataclasses.replace(prices(10.0, masked=masked, **table), rates={(0, 1): 12.0, (1, 0): 10.0})
    chosen = choose(two_ranks(8), slow_up, start={})
    assert chosen == {DOWN: "zero_value", UP: MASKED + "zero_value"}
    assert slow_up.cost(UP, chosen).num_bytes == 50.0
    assert slow_up.cost(UP, chosen | {DOWN: "raw"}).num_bytes == 60.0


def test_a_gradient_with_zeros_of_its_own_does_without_the_bitmap():
    masked = {"zero_value": (50.0, 0.1, 0.1)}
    slow = prices(10.0, masked=masked, zero_value=(25.0, 0.1, 0.1))
    assert choose(two_ranks(8), slow, start={}) == {DOWN: "zero_value", UP: "zero_value"}


@given(rate=st.floats(2.0, 2000.0), extra=st.sampled_from([0, 1]))
def test_the_choice_is_the_best_of_all(rate, extra):
    made = two_ranks(8, extra_in_flight=extra)
    table = prices(rate, zero_value=(60, 0.02, 0.03), exponent=(80, 0.05, 0.05), byte_plane=(45, 0.8, 0.5))
    every = [dict(zip((DOWN, UP), codecs, strict=True)) for codecs in product(table.costs[DOWN], repeat=2)]
    best = min(predict(made, table, choice) for choice in every)
    assert predict(made, table, choose(made, table, start={})) <= best * 1.01


def test_in_one_process_nothing_overlaps_and_nothing_pays():
    alone = dataclasses.replace(prices(1.0, zero_value=(10, 0.1, 0.1)), parallel=False, rates={})
    chosen = choose(two_ranks(8), alone, start={DOWN: "zero_value", UP: "zero_value"})
    assert chosen == {DOWN: "raw", UP: "raw"}
    assert predict(two_ranks(8), alone, chosen) == 8 * 6.0


def deciding(contenders):
    auto = Policy(World(), deadline=1.0)
    auto.number = 10
    auto.contenders = {str(i): Setting(choice) for i, choice in enumerate(contenders)}
    auto.predictions = [1.0] * len(contenders)
    auto.seconds = [[] for _ in contenders]
    return auto


@pytest.mark.parametrize(("other", "stays"), [(1.0, 0), (0.98, 0), (0.9, 1), (2.0, 0)])
def test_the_first_contender_stays_unless_another_is_clearly_faster(other, stays):
    contenders = [{DOWN: "exponent"}, {DOWN: "raw"}]
    auto = deciding(contenders)
    for _ in range(ROUNDS):
        for seconds, codec in ((1.0, "exponent"), (other, "raw")):
            assert auto.codec(DOWN) == codec, "they take turns"
            auto.end(lambda extra: two_ranks(8), [], seconds)
    assert auto.chosen == Setting(contenders[stays])
    assert [turn.stayed for turn in auto.turns] == [i == stays for i in range(2)]
    assert [turn.measured for turn in auto.turns] == [1.0, other]


def test_one_slow_step_of_the_first_does_not_make_another_clearly_faster():
    """Two of three steps beside a busy neighbour: the median alone would let the first go."""
    auto = deciding([{DOWN: "exponent"}, {DOWN: "raw"}])
    for first, other in ((1.0, 0.99), (1.5, 0.99), (1.5, 0.99)):
        for seconds in (first, other):
            auto.end(lambda extra: two_ranks(8), [], seconds)
    assert auto.chosen == Setting({DOWN: "exponent"})


@pytest.mark.parametrize(("bytes_left", "packs"), [(98.0, False), (60.0, True)])
def test_what_hardly_pays_is_left(bytes_left, packs):
    """On a link that takes as long as a forward; a step is much longer than what a frame saves of it."""
    packed = {"zero_value": (bytes_left, 0.0, 0.0)}
    found = contending(prices(40.0, masked=packed, **packed), codec="auto", parallel_extra=(0, 0))
    assert (set(found["by price"].codecs.values()) != {"raw"}) == packs


def test_names_become_policies():
    policy = functools.partial(Policy, World(), deadline=1.0)
    with pytest.raises(penstock.CodecError, match="auto, raw"):
        policy(codec="zip")
    # More in flight are found only among ranks; a plan without a most flies as many as it begins with.
    assert policy(codec="raw", extra=(0, 2)).settled
    assert policy(extra=(1, 2)).extra == 1
    among = [Policy(AMONG, codec=codec, extra=(5, 0), deadline=1.0) for codec in ("zero_value", "auto")]
    assert [policy.extra for policy in among] == [5, 5]
    assert among[0].settled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_trial_tells_the_bytes_of_the_whole_tensor(dtype):
    tensor = (torch.randn(64, 3000) > 0.5).to(dtype)
    for codec in candidates(dtype):
        cost = trial(sample(tensor), codec, Pool(), num_bytes=tensor.nbytes)
        whole = penstock.encode(tensor, codec).numel()
        assert abs(cost.num_bytes - whole) < 0.05 * whole + 200, codec
        assert min(cost[1:]) > 0


def trained(case, steps, plan=None):
    """A pipeline whose codecs are chosen while it trains, after some steps."""
    pipe, _ = run_plan(plan or plan_of(case)[0], case=case, steps=steps)
    assert pipe.policy.decides
    return pipe


def test_auto_decides_in_a_training_run_and_says_so():
    case = Case(model="mlp", cuts=3, codec="auto")
    pipe = trained(case, TRIALS[-1] + 1 + 3 * ROUNDS + 1)
    assert sum(turn.stayed for turn in pipe.policy.turns) == 1
    assert min(min(turn.predicted, turn.measured) for turn in pipe.policy.turns) > 0
    flows = pipe.flows()
    assert {flow["way"] for flow in flows} == {"F", "B"}
    assert all(flow["codec"].removeprefix(MASKED) in penstock.CODECS for flow in flows)
    assert sum(flow["bytes_sent"] for flow in flows) > 0


def test_seconds_of_trials_are_those_of_packing(monkeypatch):
    """The seconds of a stage without packing are a price: a trial in it would make packing look free."""
    for name in ("leaving", "arriving"):
        monkeypatch.setattr(Policy, name, lambda *_: time.sleep(0.02))
    case = Case(model="mlp", cuts=3, codec="auto")
    pipe = trained(case, TRIALS[0] + 1)
    tried = [span for span in pipe.timeline() if span.op == "F" and span.micro_batch == 0]
    assert len(tried) == 3
    assert min(span.packing for span in tried) >= 0.02


def contending(made_prices, *, codec, parallel_extra=(0, 2)):
    """The settings that these prices let run."""
    auto = Policy(AMONG, codec=codec, extra=parallel_extra, deadline=1.0)
    auto._prices = lambda messages: made_prices
    auto._contend(lambda extra: two_ranks(8, extra_in_flight=extra))
    return auto.contenders


@pytest.mark.parametrize("codec", ["raw", "auto"])
def test_more_fly_where_the_link_asks_for_it_and_only_there(codec):
    """A frame takes as long as a forward: with one more in flight the second rank never waits for it."""
    packed = {"zero_value": (100.0, 0.1, 0.1)}
    found = contending(prices(100.0, masked=packed, **packed), codec=codec)
    assert found["by price"].extra > 0
    assert set(found["by price"].codecs.values()) == {"raw"}
    assert found["as planned"].extra == 0
    by_hand = {extra: predict(two_ranks(8, extra_in_flight=extra), prices(100.0), {}) for extra in range(3)}
    assert by_hand[found["by price"].extra] < 0.97 * by_hand[0]
    assert {setting.extra for setting in contending(prices(1e9), codec=codec).values()} == {0}


def test_a_codec_that_was_asked_for_is_the_only_one():
    table = {"zero_value": (50.0, 0.1, 0.1), "byte_plane": (40.0, 0.0, 0.0)}
    found = contending(prices(100.0, **table), codec="zero_value")
    codecs = [codec for one in found.values() for codec in one.codecs.values()]
    assert {codec.removeprefix(MASKED) for codec in codecs} == {"zero_value"}


def flown(case, plan):
    """Micro-batches in flight on each of two ranks, step by step: asked for and counted; settled or not, and
    the weights."""
    built = [build(case.model, case.dtype, 3) for _ in range(2)]

    def on_a_slow_link(measured):
        """A value takes as long as the first stage computes, whatever it is packed with."""

        def prices(messages):
            found = measured(messages)
            costs = {flow: dict.fromkeys(table, Cost(100.0, 0.0, 0.0)) for flow, table in found.costs.items()}
            return dataclasses.replace(found, costs=costs, work=WORK, rates={(0, 1): 100.0, (1, 0): 100.0})

        return prices

    def train(world):
        model, batches = built[world.rank]
        pipe, flew, live = pipeline_of(case, plan, model, world=world), [], []
        pipe.policy._prices = on_a_slow_link(pipe.policy._prices)
        for step in range(TRIALS[-1] + 2 + 3 * ROUNDS):
            flew.append(pipe.policy.extra)
            live.append(pipe.step(*batches[step % 3]).stages[0].live_micro_batches)
        return flew, live, pipe.policy.settled, pipe.state_dict()["model"]

    return penstock.in_threads(train, ranks=2)


@pytest.mark.parametrize("codec", [pytest.param("zero_value", marks=pytest.mark.slow), "auto"])
def test_what_flies_changes_while_it_trains_and_no_bit_does(codec):
    case = Case(model="mlp", cuts=["_1"], codec=codec, micro_batches=4, extra_in_flight="auto")
    plan, _ = plan_of(case)
    assert (plan.extra_in_flight, plan.most_extra_in_flight) == (0, 2)
    fixed = dataclasses.replace(plan, most_extra_in_flight=0, codec="zero_value")
    (_, still, _, expected), _ = flown(case, fixed)
    (flew, live, settled, found), (other, *_) = flown(case, plan)
    assert flew == other, "all ranks run the same programs"
    assert set(still) == {2}
    assert flew[0] == 0
    assert max(flew) > 0, "a link that takes as long as the layers asks for more"
    assert live == [2 + extra for extra in flew]
    assert settled
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


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


def run_plan(plan, *, case=CASE, steps=1):
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
    _, (flows,) = run_plan(plan_of(case)[0], case=case)
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
    _, (flows,) = run_plan(edited(plan_of(CASE)[0], tmp_path / "plan.json", *decided))
    assert flows[first, "F", 0] == codec
    assert flows[first, "B", 1].removeprefix(MASKED) == codec
    assert flows[second, "F", 1] == "zero_value"
    assert flows[second, "B", 2] == f"{MASKED}zero_value"


def test_auto_begins_with_what_is_named_and_tries_it_there_alone(tmp_path):
    case = dataclasses.replace(CASE, codec="auto")
    first, second = names_of(case)
    plan = edited(plan_of(case)[0], tmp_path / "plan.json", {"codecs": {first: "bf16"}})
    pipe, seen = run_plan(plan, case=case, steps=TRIALS[0] + 1)
    assert pipe.policy.decides
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
        run_plan(plan)
