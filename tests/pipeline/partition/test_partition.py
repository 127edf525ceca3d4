"""Plans that are as good as brute force, ranks divided over stages, and what cannot be planned."""

import collections
import contextlib
import dataclasses
import itertools
import math
import random
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from profiles import MS, NET, layer_of, profile_of, profiles, value_of

from penstock.compression.errors import CodecError, PlanError, ScheduleError
from penstock.pipeline.partition import divide
from penstock.pipeline.partition.choose import TooSmall
from penstock.pipeline.partition.costs import with_margin
from penstock.pipeline.partition.partition import partition
from penstock.pipeline.partition.refine import LOOKS
from penstock.pipeline.partition.split import split
from penstock.pipeline.schedules import SCHEDULES
from penstock.pipeline.schedules.replicated import live_micro_batches
from penstock.pipeline.schedules.simulate import EXCHANGE_RATE, exchange_seconds, simulate_plan, simulate_step


def crossed(profile, position):
    """The values that pass a cut in front of a layer; the output, which reads last, is in front of no cut."""
    last = len(profile.layers) - 1
    ends = [(v, min(max(v.users, default=-1), last)) for v in profile.values]
    return [v for v, end in ends if max(v.producer, -1) < position <= end]


def crossing(profile, position):
    """Bytes forward and backward over a cut in front of a layer, value by value."""
    values = crossed(profile, position)
    return sum(v.num_bytes for v in values), sum(v.num_bytes for v in values if v.requires_grad)


def over_a_link(profile, cut, bytes_per_ms):
    """Milliseconds of what crosses on the link, the slower of both ways, and of packing and unpacking it."""
    ways, packing = [0.0, 0.0], 0
    for v in crossed(profile, cut):
        known = [v.costs or {"raw": (v.num_bytes, 0, 0)}]
        known += [v.gradient_costs or {"raw": (v.num_bytes * v.requires_grad, 0, 0)}]
        for way, one in enumerate(known):
            found = [(n / bytes_per_ms, round(a / MS) + round(b / MS)) for n, a, b in one.values()]
            least = min(found, key=sum)
            ways[way] += least[0]
            packing += least[1]
    return max(ways), packing


def costliest(profile, cuts, parts, bytes_per_ms):
    """Milliseconds of the costliest rank or link; both ends of a link take half of the packing."""
    over = [(0, 0) if bytes_per_ms is None else over_a_link(profile, cut, bytes_per_ms) for cut in cuts]
    packing = [0, *(packs / 2 for _, packs in over), 0]
    ranks = [milliseconds(part) + sum(ends) for part, ends in zip(parts, pairwise(packing), strict=True)]
    return max([*ranks, *(link for link, _ in over)])


def weight(profile, cuts):
    """Tie-breakers: bytes, bytes that are not zero, cuts before their values are finished."""
    return (
        sum(sum(crossing(profile, cut)) for cut in cuts),
        sum(round(v.num_bytes * (1 - v.zero_fraction)) for cut in cuts for v in crossed(profile, cut)),
        sum(crossed(profile, cut) == crossed(profile, cut + 1) for cut in cuts),
    )


def milliseconds(layers):
    return round(sum(layer.forward_seconds + layer.backward_seconds for layer in layers) / MS)


def best_of(profile, all_cuts, cost):
    """Weight and cost of the cuts that the planner's words mean: of those within 5 % of the cheapest the
    lightest, then the cheapest; None where none has a cost."""
    costs = {cuts: found for cuts in all_cuts if (found := cost(cuts)) is not None}
    least = min(costs.values(), default=0)
    near = [cuts for cuts, found in costs.items() if 100 * found <= 105 * least]
    return min(((*weight(profile, cuts), costs[cuts]) for cuts in near), default=None)


def legal_cuts(profile, parts):
    places = [p for p in range(1, len(profile.layers)) if p - 1 not in profile.refused]
    return itertools.combinations(places, parts - 1)


def parts_between(profile, cuts):
    return [profile.layers[a:b] for a, b in pairwise((0, *cuts, len(profile.layers)))]


def brute_force(profile, ranks, *, flights, bytes_per_ms=None, budget=None):
    """Weight, and cost of the costliest rank in ms, of the best of all legal cuts, or None."""

    def cost(cuts):
        parts = parts_between(profile, cuts)
        passing = [0, *(crossing(profile, cut)[0] for cut in cuts), 0]
        needed = [
            sum(3 * x.parameter_bytes + flight * x.saved_bytes for x in part)
            + (flight + 4) * (entering + leaving)
            for part, flight, (entering, leaving) in zip(parts, flights, pairwise(passing), strict=True)
        ]  # fmt: skip
        if budget is not None and 1.05 * max(needed) > budget + 1e-9:
            return None
        return costliest(profile, cuts, parts, bytes_per_ms)

    return best_of(profile, legal_cuts(profile, ranks), cost)


def with_a_budget(profile, budget, **options):
    """The plan within a budget, or within the one that a refusal names; and which one that is."""
    try:
        return partition(profile, memory=budget, **options), budget
    except TooSmall as error:
        return partition(profile, memory=error.needed, **options), error.needed


def held_by_rank(plan):
    return [sum(plan.stages[stage].held_bytes for stage in stages) for stages in plan.stages_of_rank]


def cuts_of(plan):
    return [*itertools.accumulate(len(stage.layers) for stage in plan.stages)][:-1]


def value_of_plan(profile, cuts, bytes_per_ms=None):
    """The numbers that ``brute_force`` minimises, of the cuts of a plan."""
    return *weight(profile, cuts), costliest(profile, cuts, parts_between(profile, cuts), bytes_per_ms)


@given(
    profiles(),
    st.integers(1, 5),
    st.sampled_from([None, 1, 2]),
    st.none() | st.integers(1, 60),
    st.sampled_from(["1f1b", "gpipe"]),
    st.integers(1, 4),
    st.integers(0, 2),
)
def test_the_plan_is_as_good_as_brute_force(
    profile, stages, bytes_per_ms, budget, schedule, micro_batches, extra
):
    num_legal = len([p for p in range(1, len(profile.layers)) if p - 1 not in profile.refused])
    extra = extra if schedule == "1f1b" else 0
    alone = [[stage] for stage in range(stages)]
    flights = live_micro_batches(SCHEDULES[schedule](alone, micro_batches, extra_in_flight=extra))
    best = brute_force(profile, stages, flights=flights, bytes_per_ms=bytes_per_ms, budget=budget)
    arguments = {
        "stages": stages, "schedule": schedule, "micro_batches": micro_batches, "extra_in_flight": extra,
        "link": None if bytes_per_ms is None else 8000 * bytes_per_ms, "looks": 0,
    }  # fmt: skip
    if best is None:
        with pytest.raises(PlanError) as error:
            partition(profile, **arguments, memory=budget)
        if stages - 1 <= num_legal:  # then only memory is short, and the error names what would do
            needed = int(str(error.value).split("is memory=")[1].split()[0])
            assert brute_force(profile, stages, flights=flights, budget=needed - 1) is None
            assert partition(profile, **arguments, memory=needed).num_stages == stages
        return
    plan = partition(profile, **arguments, memory=budget)
    assert value_of_plan(profile, cuts_of(plan), bytes_per_ms) == best
    names = [layer.name for layer in profile.layers]
    assert [name for stage in plan.stages for name in stage.layers] == names


@given(
    profiles(),
    st.integers(2, 4),
    st.sampled_from([None, 8000, 800]),
    st.none() | st.integers(20, 90),
    st.sampled_from(["1f1b", "zb_h1", "gpipe", "zbv"]),
    st.integers(1, 6),
)
def test_of_few_cuts_none_has_a_step_shorter_by_five_per_cent(
    profile, stages, link, budget, schedule, micro_batches
):
    places = len([p for p in range(1, len(profile.layers)) if p - 1 not in profile.refused])
    stages = 4 if schedule == "zbv" else stages
    options: Any = {"schedule": schedule, "micro_batches": micro_batches, "link": link, "memory": budget}
    options |= {"ranks": stages // 2 if schedule == "zbv" else stages, "stages": stages, "codec": "raw"}
    assume(places >= stages - 1)
    try:
        exact = partition(profile, **options, looks=0)
    except TooSmall:
        return
    plan = partition(profile, **options)
    least = seconds_of(exact)
    for cuts in legal_cuts(profile, stages) if math.comb(places, stages - 1) <= LOOKS else ():
        with contextlib.suppress(TooSmall):
            least = min(least, seconds_of(partition(profile, cuts=[f"l{p - 1}" for p in cuts], **options)))
    assert seconds_of(plan) <= 1.05 * least * (1 + 1e-9)
    assert cuts_of(plan) == cuts_of(exact) or seconds_of(plan) < seconds_of(exact) / 1.05


def test_a_step_with_many_cuts_is_shorter_than_that_of_the_exact_one():
    # one layer is as slow as any stage may be, and the cuts that send least give its rank another slow stage
    layers = [layer_of("l0", forward=13, backward=26)]
    layers += [layer_of(f"l{i}", forward=1, backward=0) for i in range(1, 61)]
    values = [value_of(i, [i + 1], num_bytes=900 if i in (0, 10, 20) else 1000) for i in range(60)]
    asks: Any = {"ranks": 2, "stages": 4, "schedule": "zbv", "codec": "raw"}
    exact, plan = (partition(profile_of(layers, values), **asks, looks=looks) for looks in (0, LOOKS))
    assert cuts_of(exact) == [1, 11, 21]
    assert seconds_of(plan) < seconds_of(exact) / 1.2


def test_a_looser_start_that_holds_no_budget_is_left_out():
    sizes = [(10, 4, 12, 17), (1, 1, 0, 2), (1, 1, 4, 17), (1, 4, 8, 19), (10, 4, 8, 10), (2, 1, 8, 7)]
    layers = [layer_of(f"l{number}", "", *of_layer) for number, of_layer in enumerate(sizes)]
    values = [value_of(i, [i + 1], num_bytes=size) for i, size in enumerate([40, 40, 5, 1, 40])]
    asks: Any = {"ranks": 2, "stages": 4, "schedule": "zb_h1", "micro_batches": 1, "codec": "raw"}
    asks["memory"] = 278
    exact, plan = (partition(profile_of(layers, values), **asks, looks=looks) for looks in (0, LOOKS))
    assert seconds_of(plan) <= seconds_of(exact)


BUDGETS = st.none() | st.integers(5, 60)


@given(profiles(), st.integers(1, 5), st.integers(1, 3), st.sampled_from([None, 1]), BUDGETS)
def test_several_stages_a_rank_are_as_good_as_brute_force_twice(profile, stages, ranks, bytes_per_ms, budget):
    legal = [p for p in range(1, len(profile.layers)) if p - 1 not in profile.refused]
    if not ranks <= stages <= len(legal) + 1:
        return
    flights = [min(3, ranks - rank) for rank in range(ranks)]
    best = brute_force(profile, ranks, flights=flights, bytes_per_ms=bytes_per_ms, budget=budget)
    if best is None:
        return
    link = None if bytes_per_ms is None else 8000
    options = {"stages": stages, "ranks": ranks, "micro_batches": 3, "link": link, "looks": 0}
    plan, needed = with_a_budget(profile, budget, **options)
    if needed != budget:  # for frames between the stages of a rank, which ``brute_force`` does not count
        assert stages > ranks
        assert budget < with_margin(max(held_by_rank(plan))) <= needed
        return
    assert (plan.num_stages, plan.num_ranks) == (stages, ranks)
    if budget is not None and stages > ranks:  # for the same reason other cuts may be the best
        assert with_margin(max(held_by_rank(plan))) <= budget
        return
    cuts = cuts_of(plan)
    rank_cuts = [cut for cut, (one, other) in zip(cuts, pairwise(plan.ranks), strict=True) if one != other]
    assert value_of_plan(profile, rank_cuts, bytes_per_ms) == best
    inner = [cut for cut in legal_cuts(profile, stages) if set(rank_cuts) <= set(cut)]
    slowest = best_of(profile, inner, lambda cut: max(map(milliseconds, parts_between(profile, cut))))
    assert value_of_plan(profile, cuts) == slowest


def test_the_stages_of_a_rank_are_cut_where_their_frames_fit():
    layers = [
        layer_of(f"l{number}", backward=milliseconds) for number, milliseconds in enumerate((0, 0, 1, 1, 0))
    ]
    net = profile_of(layers, [value_of(0, [3], 100)])
    free = partition(net, stages=2, ranks=1, micro_batches=3)
    assert cuts_of(free) == [3]
    assert cuts_of(partition(net, stages=2, ranks=1, micro_batches=3, memory=50)) == [4]


def test_a_slow_link_moves_the_cut_to_where_less_passes():
    sizes = 10, 100_000, 10
    net = profile_of(
        [layer_of(f"l{i}") for i in range(4)], [value_of(i, [i + 1], size) for i, size in enumerate(sizes)]
    )
    assert cuts_of(partition(net, stages=2)) == [2]
    assert cuts_of(partition(net, stages=2, link="8Mbit")) == [1]


def test_a_slow_link_moves_the_cut_to_where_less_passes_packed():
    packs = {"raw": (10_000, 0, 0), "zero_value": (100, 0.001, 0.001), "exponent": (90, 1, 1)}
    values = [value_of(0, [1], 9_000), value_of(1, [2], 10_000, costs=packs, gradient_costs=packs)]
    net = profile_of([layer_of(f"l{i}") for i in range(3)], values)
    plan = partition(net, stages=2, link="8Mbit")
    assert cuts_of(plan) == [2]
    first, second = plan.stages
    assert (first.codecs, second.gradient_codecs) == ({"v1": "zero_value"}, {"v1": "zero_value"})
    assert (first.packed_forward, first.packed_backward) == (100, 100)
    assert first.transfer_seconds("forward", 8e6) == pytest.approx(0.0001)
    assert first.packing_forward == pytest.approx(0.002)
    assert second.packed_forward is None
    raw = partition(net, stages=2, link="8Mbit", codec="raw")
    assert cuts_of(raw) == [1]
    assert raw.stages[0].codecs == {}
    assert "codec auto from zero_value" in str(plan)
    assert "KiB -> 100 B" in str(plan)
    step = simulate_plan(plan, SCHEDULES["1f1b"]([[0], [1]], 1)).seconds
    assert step == pytest.approx(9 * MS + 2 * 0.0021)  # packing and unpacking, too


def test_predictions_of_a_stage():
    plan = partition(NET, cuts=["layer1.0"], micro_batches=8)
    first, second = plan.stages
    assert first.layers == ("conv1", "layer1_0_conv", "layer1_0_relu")
    assert first.parameters == ("conv1.weight", "layer1_0_conv.weight")
    assert (first.forward_seconds, first.backward_seconds) == pytest.approx((3 * MS, 6 * MS))
    assert first.memory_bytes == first.weight_bytes == 3 * 1200
    assert (first.bytes_forward, first.bytes_backward) == (1000, 1000)
    assert (second.bytes_forward, second.bytes_backward) == (0, 0)
    assert (plan.fingerprint, plan.input_shapes, plan.codec) == ("ab12", ((16, 8),), "auto")


def test_a_value_that_skips_over_a_stage_passes_every_cut_between():
    net = profile_of(
        [layer_of(f"l{i}") for i in range(4)],
        [value_of(0, [1, 3], 10), value_of(1, [2], 1, requires_grad=False)],
    )
    assert [(s.bytes_forward, s.bytes_backward) for s in partition(net, stages=4).stages] == [
        (10, 10), (11, 10), (10, 10), (0, 0),
    ]  # fmt: skip


def test_cuts_are_layers_or_modules():
    assert partition(NET, cuts=["layer1"]).cuts == ("add",)
    assert partition(NET, cuts=["layer1.0", "layer10"]).cuts == ("layer1_0_relu", "layer10_conv")
    assert partition(NET, cuts=("conv1", "add", "flatten"), ranks=2).ranks == (0, 0, 1, 1)


def test_ranks_and_stages_stand_for_each_other():
    assert partition(NET, ranks=3).num_stages == 3
    assert partition(NET, stages=3).num_ranks == 3
    assert partition(NET, stages=2, cuts=["conv1"]).num_stages == 2
    assert partition(NET, stages=1).cuts == ()


def test_a_number_of_replicas_is_that_of_every_stage_and_a_list_has_one_for_each():
    plan = partition(NET, ranks=4, replicas=2, codec="raw")
    assert [stage.ranks for stage in plan.stages] == [(0, 1), (2, 3)]
    assert plan == partition(NET, stages=2, replicas=2, codec="raw")
    assert (plan.replicas, plan.num_ranks, plan.exact) == ((2, 2), 4, False)
    assert [plan.rank_of(stage, m) for stage in range(2) for m in range(4)] == [0, 1, 0, 1, 2, 3, 2, 3]
    plan = partition(NET, replicas=[2, 1], exact=True, codec="raw")
    assert [stage.ranks for stage in plan.stages] == [(0, 1), (2,)]
    assert "replicas [2, 1] that add as one" in str(plan)
    plan = partition(NET, replicas=[3, 1], codec="raw")
    assert [len(stage.layers) for stage in plan.stages] == [6, 2]  # evenly loaded


def test_memory_has_the_buffers_of_the_exchange():
    def parameters(**options):  # what the budget counts without what micro-batches save: NET saves nothing
        return partition(NET, stages=1, codec="raw", micro_batches=8, **options).stages[0].memory_bytes

    alone = parameters() // 3
    assert parameters(replicas=2) == 4 * alone
    assert parameters(replicas=2, exact=True) == (3 + 4 + 1) * alone


def test_memory_has_the_previous_step_of_error_feedback():
    options = {"stages": 1, "codec": "raw", "micro_batches": 8, "weights": "double_buffered"}
    plain, fed = (partition(NET, **options, error_feedback=feedback) for feedback in (False, True))
    alone = partition(NET, stages=1, codec="raw", micro_batches=8).stages[0].memory_bytes // 3
    assert fed.stages[0].memory_bytes == plain.stages[0].memory_bytes + alone
    assert "error feedback" in str(fed)
    assert "error feedback" not in str(plain)


@pytest.mark.parametrize(
    ("options", "subject"),
    [
        ({"stages": 1000}, "1000 stages .* has 8; lower stages or ranks"),
        ({"stages": 8}, r"8 stages need 7 cuts, the model allows 6 \(two tensors of one"),
        ({"stages": 0}, "stages=0"),
        ({"ranks": 0}, "ranks=0"),
        ({"stages": 2, "micro_batches": 0}, "micro_batches=0"),
        ({"stages": 2, "extra_in_flight": -1}, "extra_in_flight=-1"),
        ({"stages": 2, "extra_in_flight": None}, '"auto", found None'),
        ({"stages": 2, "ranks": 99}, "ranks=99 for 2 stages"),
        ({"cuts": ["conv1"], "ranks": 3}, "ranks=3 for 2 stages"),
        ({}, "say stages=2"),
        ({"stages": 4, "cuts": ["conv1"]}, "1 cuts make 2 stages, found stages=4"),
        ({"cuts": "conv1"}, r"found 'conv1'; write \['conv1'\]"),
        ({"cuts": ["layer1_0_rleu"]}, "layer1_0_rleu; close ones are layer1_0_relu"),
        ({"cuts": ["layer1.7"]}, "layer1.7; close ones are"),
        ({"cuts": ["zzz"]}, "zzz; the layers run from conv1 to fc"),
        ({"cuts": [""]}, "the layers run from conv1 to fc"),
        ({"cuts": ["layer1_1_conv"]}, "layer1_1_conv .*two tensors .*nearest: layer1_0_relu or add"),
        ({"cuts": ["add", "conv1"]}, "conv1 behind add"),
        ({"cuts": ["layer1", "add"]}, "cuts layer1 and add are one place"),
        ({"cuts": ["fc"]}, "ends with the last layer fc"),
        ({"stages": 2, "memory": "1kB"}, "memory=1kB on each of 2 .* is memory=10080 "),
        ({"stages": 3, "replicas": [2, 1]}, "2 stages, found 3 stages"),
        ({"cuts": ["conv1"], "replicas": [2]}, "1 stages, found 2 stages"),
        ({"replicas": []}, "found 0 stages|has a number for each"),
        ({"ranks": 3, "replicas": 2}, "multiple of 2 ranks, found ranks=3"),
        ({"stages": 2, "ranks": 2, "replicas": 2}, r"ranks=2 for replicas \[2, 2\]; take ranks=4"),
        ({"stages": 2, "replicas": 0}, '"auto", found 0'),
        ({"stages": 1, "replicas": 3, "micro_batches": 2}, "3 replicas and micro_batches=2"),
        ({"stages": 2, "replicas": 2, "schedule": "async_1f1b"}, "no moment at which they could"),
        ({"stages": 2, "replicas": 2, "weights": "double_buffered"}, "weights=double_buffered"),
        ({"stages": 2, "error_feedback": True}, "found schedule=1f1b weights=latest; take schedule=1f1b and"),
        ({"stages": 2, "replicas": [2, 1], "schedule": "interleaved"}, "have the same replicas"),
        ({"stages": 2, "replicas": 2, "owner": "first"}, "owner=first says which replica"),
        ({"stages": 2, "replicas": "auto"}, "found none; say ranks=4"),
        ({"replicas": "auto"}, "found none; say ranks=4"),
        ({"replicas": "auto", "ranks": 2, "stages": 3}, "ranks=2 for 3 stages; raise ranks to 3"),
        ({"replicas": "auto", "ranks": 1, "cuts": ["conv1"]}, "ranks=1 for 2 stages"),
        ({"replicas": "auto", "ranks": 4, "cuts": ["conv1"], "stages": 3}, "2 stages, found stages=3"),
        ({"replicas": "auto", "ranks": 4, "schedule": "zbv"}, "found schedule=zbv"),
        ({"replicas": "auto", "ranks": 4, "schedule": "async_1f1b"}, "replicas=auto; take schedule=1f1b"),
        ({"replicas": 2, "ranks": 4, "idle": True}, "idle=True leaves out ranks"),
        ({"looks": -1}, "looks"),
    ],
)
def test_what_cannot_be_planned_is_refused(options, subject):
    raw = {"codec": "raw"} if "replicas" in options else {}
    with pytest.raises((PlanError, CodecError, ScheduleError), match=subject):
        partition(NET, **raw | options)


def by_brute_force(points, *, parts, span, edge, weight):
    """The cuts of the definition in ``split``."""

    def costs(ends):
        return [
            max(span(start, end, part), edge[part - 1][start] if part else 0, edge[part][end])
            for part, (start, end) in enumerate(itertools.pairwise(ends))
        ]

    def key(ends):
        return sum(weight[end] for end in ends[1:]), max(costs(ends)), ends[::-1]

    inner = itertools.combinations(points[1:-1], parts - 1)
    found = [[points[0], *cuts, points[-1]] for cuts in inner]
    smallest = min((max(costs(ends)) for ends in found), default=math.inf)
    near = [ends for ends in found if max(costs(ends)) <= smallest * 105 // 100]
    return min(near, key=key) if smallest < math.inf else None


@pytest.mark.parametrize("seed", range(60))
def test_it_is_the_split_that_brute_force_finds(seed):
    draw = random.Random(seed)
    points = sorted(draw.sample(range(15), draw.randint(3, 9)))
    sizes = [draw.choice([1, 2, 5, 20, 60]) for _ in range(15)]
    entering = [draw.choice([0, 0, 50]) if seed % 2 else 0 for _ in range(15)]

    def least(start, end, part):
        return math.inf if end - start > 11 else sum(sizes[start:end])

    edge = [[0, *(draw.choice([0, 3, 30, 100, math.inf]) for _ in range(14))] for _ in range(4)]
    case = {
        "parts": draw.randint(1, 4),
        "span": lambda start, end, part: least(start, end, part) + entering[start],
        "edge": edge if seed % 3 else edge[:1] * 4,
        "weight": [draw.randint(0, 9) for _ in range(15)],
    }
    for one in edge:
        one[points[0]] = one[points[-1]] = 0
    assert split(points, **case, least=least) == by_brute_force(points, **case)


@pytest.mark.parametrize("entering", [0, 7], ids=["of layers", "of layers and of what enters"])
def test_twice_the_layers_are_twice_the_work(entering):
    calls = collections.Counter()

    def work(num_points):
        sizes = random.Random(num_points).choices(range(1, 50), k=num_points)
        sums = [0, *itertools.accumulate(sizes)]

        def least(start, end, part):
            calls[num_points] += 1
            return sums[end] - sums[start]

        def span(start, end, part):
            return least(start, end, part) + entering * (sizes[start] % 3)

        free = [0] * (num_points + 1)
        assert split(range(num_points), parts=4, span=span, least=least, edge=[free] * 4, weight=free)

    work(1_000)
    work(2_000)
    assert calls[2_000] < 2.6 * calls[1_000], calls


FIRST_SLOW = profile_of(
    [layer_of("a", forward=20, backward=40, size=40), layer_of("b", forward=10, backward=20, size=40)],
    [value_of(i, [i + 1]) for i in range(-1, 2)],
)


def seconds_of(plan):
    return simulate_step(plan)[1].seconds


def divided_by_brute_force(profile, ranks, stages=None, **options):
    """The shortest step of all plans with replicas that add up to ``ranks``."""
    found = []
    for number in [stages] if stages else range(1, ranks + 1):
        for counts in product(range(1, ranks + 1), repeat=number):
            if sum(counts) == ranks:
                try:
                    found.append(seconds_of(partition(profile, codec="raw", replicas=counts, **options)))
                except PlanError:
                    continue
    return min(found, default=None)


@given(
    profiles(), st.integers(1, 5), st.integers(1, 6), st.sampled_from([None, "8kbit", "1Mbit"]), st.booleans()
)
def test_the_division_is_the_one_that_brute_force_finds(profile, ranks, micro_batches, link, exact):
    options = {"micro_batches": micro_batches, "link": link, "exact": exact, "looks": 0}
    least = divided_by_brute_force(profile, ranks, **options)
    if least is None:
        with pytest.raises(PlanError):
            partition(profile, codec="raw", ranks=ranks, replicas="auto", **options)
        return
    plan = partition(profile, codec="raw", ranks=ranks, replicas="auto", **options)
    assert plan.num_ranks == ranks
    assert seconds_of(plan) == pytest.approx(least)


def test_what_gradients_take_to_exchange_counts():
    heavy = [dataclasses.replace(layer, num_parameters=10**8) for layer in FIRST_SLOW.layers]
    profile = dataclasses.replace(FIRST_SLOW, layers=tuple(heavy))
    plan = partition(profile, codec="raw", ranks=2, replicas="auto")
    assert plan.replicas == (1, 1)
    two = partition(FIRST_SLOW, codec="raw", replicas=[2], micro_batches=4)
    size = 4 * two.stages[0].num_parameters
    there_back_and_a_round, exact = 3 * size / EXCHANGE_RATE, dataclasses.replace(two, exact=True)
    assert exchange_seconds(two, 0) == pytest.approx(there_back_and_a_round)
    assert exchange_seconds(exact, 0) == pytest.approx(1.5 * there_back_and_a_round)
    assert exchange_seconds(dataclasses.replace(two, link=8e3), 0) == pytest.approx(size / 1e3, rel=1e-3)
    assert exchange_seconds(partition(FIRST_SLOW, codec="raw", stages=1), 0) == 0.0
    one = partition(FIRST_SLOW, codec="raw", replicas=[1], micro_batches=4)
    assert seconds_of(two) == pytest.approx(seconds_of(one) / 2 + exchange_seconds(two, 0))


def test_ranks_stay_idle_only_where_that_is_allowed():
    options = {"codec": "raw", "stages": 1, "micro_batches": 4, "replicas": "auto"}
    assert partition(FIRST_SLOW, ranks=3, **options).replicas == (3,)
    two_turns = partition(FIRST_SLOW, ranks=3, idle=True, **options)
    assert two_turns.replicas == (2,)
    plan = partition(FIRST_SLOW, ranks=9, idle=True, **options)
    assert (plan.replicas, str(plan.asked)) == ((4,), "stages=1 ranks=9 replicas=auto, idle")
    with pytest.raises(PlanError, match="ranks=9 for 1 stages and micro_batches=4"):
        partition(FIRST_SLOW, ranks=9, **options)


def test_walking_gives_the_slowest_stage_the_next_rank():
    def walked(**options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(divide, "MOST", 0)
            return partition(FIRST_SLOW, codec="raw", replicas="auto", **options)

    for ranks in (2, 3, 5):
        plan = partition(FIRST_SLOW, codec="raw", cuts=["a"], ranks=ranks, replicas="auto")
        assert walked(cuts=["a"], ranks=ranks) == plan
    assert walked(cuts=["a"], ranks=4).replicas == (3, 1)  # and not (2, 2), which is a little shorter
    assert walked(cuts=["a"], ranks=4, micro_batches=2).replicas == (2, 2)  # no replica without a micro-batch
    assert walked(stages=2, ranks=30, micro_batches=40).replicas == (20, 10)
    assert walked(stages=1, ranks=3, micro_batches=4, idle=True).replicas == (2,)


def test_a_budget_that_nothing_fits_is_refused_with_the_least_one():
    with pytest.raises(TooSmall) as refused:
        partition(NET, codec="raw", ranks=2, replicas="auto", memory=100)
    least = min(needed([2]), needed([1, 1]))
    assert refused.value.needed == least
    plan = partition(NET, codec="raw", ranks=2, replicas="auto", memory=least)
    assert plan.replicas == (1, 1)  # the layers of both stages do not fit one rank


def needed(replicas):
    with pytest.raises(TooSmall) as refused:
        partition(NET, codec="raw", replicas=replicas, memory=100)
    return refused.value.needed
